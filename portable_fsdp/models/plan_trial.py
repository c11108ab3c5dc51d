"""A trial of a tensor-parallel plan: its words fit weights by their sizes, which don't tell what the weights mean.

A small copy of the model runs whole, and split over devices as the plan says: outputs and gradients must be equal.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from portable_fsdp.config.schema import Config, Sharding
from portable_fsdp.models.architecture import last_line
from portable_fsdp.models.build import make_model
from portable_fsdp.models.document_masks import try_small_copies
from portable_fsdp.models.parallel import tensor_plan
from portable_fsdp.models.tasks import find_task
from portable_fsdp.models.wrap import find_layers
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.tensor_plan import PACKED, SUMMED, WHOLE, TensorPlan

_ROWS, _TOKENS, _VOCABULARY = 1, 16, 64  # one row: a classifier of several needs a token of padding
_BOUND = 1e-3  # relative to the largest value: a thousand times float32's rounding

RunParts = Callable[[Sequence[nn.Module], TensorPlan, Callable[[nn.Module], Tensor]], Tensor]
"""`run_parts(copies, plan, run)`: give each of the equal copies the parts of one device, and call `run` on all of them
at once, then sum gradients as a step does. Returns what the first one returned."""


def require_plan(model: Any, config: Config, plan: TensorPlan, run_parts: RunParts) -> None:
    """Raise ConfigError if a small copy of `model` computes other outputs or gradients when its plan splits it.

    Words that only layers beyond the copy have are tried in its layers. transformers' own plan is taken as it is where
    no copy can run.
    """
    devices = next(count for count in range(2, config.sharding.tensor + 1) if config.sharding.tensor % count == 0)
    task, own = find_task(config.train.task, eager=True), config.sharding.plan
    attention = "eager" if model.config._attn_implementation == "eager" else "auto"
    has_run = False

    def build(small: Any) -> Any:
        return make_model(small, attention, task)

    def compare(copied: Any, whole: Tensor) -> str:
        nonlocal has_run
        has_run = True
        problems = (_problem(copied, whole, build, each, devices, run_parts) for each in _configs(config, copied, plan))
        return next(filter(None, problems), "")

    problem = try_small_copies(model, build, _run, compare)
    if not problem or not (has_run or own):
        return
    hint = f"Norms of heads need {SUMMED}" if "gradient" in problem else "Correct the words"
    if PACKED in plan.words.values() and "outputs" in problem:
        hint = f"{PACKED} is for matrices one after the other; where they alternate head by head, try colwise"
    kind = "computes something else than the whole one" if has_run else "is needed to try the plan"
    raise ConfigError(
        f"sharding.{'plan' if own else 'tensor'}: {type(model).__name__}: a small copy, split over {devices} devices "
        f"by the plan, {kind}: {problem}.\n  {hint}, or set sharding.tensor=1."
    )


def _problem(
    copied: Any, whole: Tensor, build: Callable[[Any], Any], config: Config, devices: int, run_parts: RunParts
) -> str:
    """Describe how the copy in parts differs from the copy that has run, with outputs `whole`; empty: it doesn't."""
    copies = [build(copied.config).eval() for _ in range(devices)]
    for copy in copies:
        copy.load_state_dict(copied.state_dict())
    try:
        plan = tensor_plan(copied, config.model_copy(update={"sharding": _with(config, tensor=devices)}))
        outputs = run_parts(copies, plan, _run)
    except Exception as error:  # of the model's code, with parts that it doesn't expect
        return f"it fails ({type(error).__name__}: {last_line(error)})"
    if (difference := _difference(outputs, whole)) > _BOUND:
        return f"its outputs differ by {difference:.2g} of the largest"
    for fqn, weight in copied.named_parameters():
        for index, copy in enumerate(copies):
            gradient = copy.get_parameter(fqn).grad
            if weight.grad is None:
                continue
            if gradient is None or _difference(gradient, plan.part_of(fqn, weight.grad, index)) > _BOUND:
                return f"the gradient of {fqn} is another"
    return ""


def _configs(config: Config, copied: nn.Module, plan: TensorPlan) -> Iterator[Config]:
    """Yield the configs to try: with the patterns that match in the copy, then with the words of each further layer.

    `plan`: of the whole model.
    """
    names = [name for name, _ in copied.named_modules()]
    own = {at: word for at, word in config.sharding.plan.items() if any(fnmatchcase(name, at) for name in names)}
    yield config.model_copy(update={"sharding": _with(config, plan=own)})
    layers, tried = find_layers(copied, Sharding()), list[dict[str, str]]()
    for layer in plan.layers if config.sharding.plan else ():
        words = {name.removeprefix(f"{layer}."): w for name, w in plan.words.items() if name.startswith(f"{layer}.")}
        if layer in layers or words in tried:
            continue
        tried.append(words)
        alike = [each for each in layers if all(f"{each}.{name}" in names for name in words)]
        theirs = {f"{each}.{name}": word for each in alike for name, word in words.items()}
        whole = {f"{each}.*": WHOLE for each in alike}
        yield config.model_copy(update={"sharding": _with(config, plan=theirs | whole | own)})


def _with(config: Config, **values: Any) -> Sharding:
    return config.sharding.model_copy(update=values)


def _run(model: Any) -> Tensor:
    """Run rows through a model, and the backward of a sum of its outputs that weighs each differently."""
    generator = torch.Generator().manual_seed(0)
    if model.main_input_name == "pixel_values":
        size, channels = model.config.image_size, model.config.num_channels
        inputs = {"pixel_values": torch.randn(_ROWS, channels, size, size, generator=generator)}
    else:
        inputs = {"input_ids": torch.randint(1, _VOCABULARY, (_ROWS, _TOKENS), generator=generator)}
        if getattr(model.config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = inputs["input_ids"]
    with torch.enable_grad():
        outputs = model(**inputs).logits
        (outputs * torch.randn(outputs.shape, generator=generator)).sum().backward()
    return outputs.detach()


def _difference(actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape:
        return math.inf
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
