"""A trial of a tensor-parallel plan: its words fit weights by their sizes, which don't tell what the weights mean.

A small copy of the model runs whole, and split over devices as the plan says: outputs and gradients must be equal.
"""

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from portable_fsdp.config.schema import Config
from portable_fsdp.models.build import make_model
from portable_fsdp.models.document_masks import try_small_copies
from portable_fsdp.models.parallel import tensor_plan
from portable_fsdp.models.tasks import find_task
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.tensor_plan import PACKED, SUMMED, TensorPlan, split_ranges

_ROWS, _TOKENS, _VOCABULARY = 2, 8, 64
_BOUND = 1e-3  # relative to the largest value: a thousand times float32's rounding

RunParts = Callable[[Sequence[nn.Module], TensorPlan, Callable[[nn.Module], Tensor]], Tensor]
"""`run_parts(copies, plan, run)`: give each of the equal copies the parts of one device, and call `run` on all of them
at once, then sum gradients as a step does. Returns what the first one returned."""


def require_plan(model: Any, config: Config, run_parts: RunParts) -> None:
    """Raise ConfigError if a small copy of `model` computes other outputs or gradients when the plan splits it."""
    devices = next(count for count in range(2, config.sharding.tensor + 1) if config.sharding.tensor % count == 0)
    task = find_task(config.train.task, eager=True)
    attention = "eager" if model.config._attn_implementation == "eager" else "auto"
    words: dict[str, str] = {}

    def build(small: Any) -> Any:
        return make_model(small, attention, task)

    def compare(copied: Any, whole: Tensor) -> str:
        copies = [build(copied.config).eval() for _ in range(devices)]
        for copy in copies:
            copy.load_state_dict(copied.state_dict())
        plan = tensor_plan(copied, _for_copy(config, copied, devices))
        words.update(plan.words)
        outputs = run_parts(copies, plan, _run)
        if (difference := _difference(outputs, whole)) > _BOUND:
            return f"its outputs differ by {difference:.2g} of the largest"
        for fqn, weight in copied.named_parameters():
            for index, copy in enumerate(copies):
                own, expected = copy.get_parameter(fqn).grad, weight.grad
                if expected is not None and fqn in plan.parts:
                    part = plan.parts[fqn]
                    ranges = split_ranges(part.sizes, index, devices)
                    expected = torch.cat(
                        [expected.narrow(part.dim, r.start, r.stop - r.start) for r in ranges], part.dim
                    )
                if expected is not None and (own is None or _difference(own, expected) > _BOUND):
                    return f"the gradient of {fqn} is another"
        return ""

    if problem := try_small_copies(model, build, _run, compare):
        hint = f"Norms of heads need {SUMMED}" if "gradient" in problem else "Correct the words"
        if PACKED in words.values() and "outputs" in problem:
            hint = f"{PACKED} is for matrices one after the other; where they alternate head by head, try colwise"
        key = "plan" if config.sharding.plan else "tensor"
        raise ConfigError(
            f"sharding.{key}: {type(model).__name__}: a small copy, split over {devices} devices by the plan, computes "
            f"something else than the whole one: {problem}.\n  {hint}, or set sharding.tensor=1."
        )


def _for_copy(config: Config, copied: nn.Module, devices: int) -> Config:
    """Return the config for the copy: without patterns of layers that it doesn't have."""
    names = [name for name, _ in copied.named_modules()]
    own = {at: word for at, word in config.sharding.plan.items() if any(fnmatchcase(name, at) for name in names)}
    sharding = config.sharding.model_copy(update={"tensor": devices, "plan": own})
    return config.model_copy(update={"sharding": sharding})


def _run(model: Any) -> Tensor:
    """Run rows through a model, and the backward of a sum of its outputs that weighs each differently."""
    generator = torch.Generator().manual_seed(0)
    if model.main_input_name == "pixel_values":
        size, channels = model.config.image_size, model.config.num_channels
        inputs = {"pixel_values": torch.randn(_ROWS, channels, size, size, generator=generator)}
    else:
        inputs = {"input_ids": torch.randint(1, _VOCABULARY, (_ROWS, _TOKENS), generator=generator), "use_cache": False}
    with torch.enable_grad():
        outputs = model(**inputs).logits
        (outputs * torch.randn(outputs.shape, generator=generator)).sum().backward()
    return outputs.detach()


def _difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
