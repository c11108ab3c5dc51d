"""A worker with one wrong operation in one layer of one place: `python -m faulty_worker`, FAULT=ENGINE:DEVICES:NAME,...

Each fault is planted in the laid-out model before its first step, as a bug of an engine would be.
"""

import copy
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from portable_fsdp.parity.__main__ import work
from portable_fsdp.parity.record import Culprit, PlaceTask
from portable_fsdp.train.build import Training

LAYER = "model.layers.1"


class Fault(NamedTuple):
    """`plant` breaks a training; `layer` and `kind` are what the certificate must say."""

    plant: Callable[[Any, Training], None]
    layer: str
    kind: str
    parameter: str = ""

    def is_named(self, culprit: Culprit) -> bool:
        named = (culprit.layer, culprit.kind) == (self.layer, self.kind)
        return named and self.parameter in ("", culprit.parameter)


def _after(name: str, change: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Training], None]:
    """`change(input, output)` in place of the module's output."""

    def plant(model: Any, _: Training) -> None:
        module = model.get_submodule(name)
        forward = module.forward

        def wrong(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            first = args[0] if args else kwargs["hidden_states"]
            if isinstance(output, tuple):
                return (change(first, output[0]), *output[1:])
            return change(first, output)

        module.forward = wrong

    return plant


def _with(name: str, attribute: str, value: Any) -> Callable[[Any, Training], None]:
    return lambda model, _: setattr(model.get_submodule(name), attribute, value)


def _wrong_gradient(_: Tensor, output: Tensor) -> Tensor:
    output = output * 1
    output.register_hook(lambda gradient: gradient * 1.01)
    return output


def _mask(model: Any, _: Training) -> None:
    """Each token sees the one after it too."""
    from transformers import AttentionInterface

    def shifted(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
        scores = query @ key.mT * options["scaling"]
        unseen = torch.ones(scores.shape[-2:], device=scores.device).triu(2)
        scores = scores - unseen * 1e9
        return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("shifted", shifted)
    attention = model.get_submodule(f"{LAYER}.self_attn")
    attention.config = copy.deepcopy(attention.config)
    attention.config._attn_implementation = "shifted"


def _angle(model: Any, _: Training) -> None:
    rotary = model.get_submodule("model.rotary_emb")
    rotary.inv_freq = rotary.inv_freq * 1.001


def _decay(_: Any, training: Training) -> None:
    """Give weight decay to a norm, which has none by the config."""
    weight = dict(training.model.named_parameters())[f"{LAYER}.post_attention_layernorm.weight"]
    groups = cast(Any, training.optimizer).param_groups
    [home] = [group for group in groups if any(p is weight for p in group["params"])]
    home["params"] = [p for p in home["params"] if p is not weight]
    groups.append({**home, "params": [weight], "weight_decay": 0.1})


def _weight(model: Any, _: Training) -> None:
    with torch.no_grad():
        model.get_submodule(f"{LAYER}.mlp.up_proj").weight.mul_(1.001)


def _row(ids: Tensor, rows: Tensor) -> Tensor:
    return torch.where((ids == ord("e"))[..., None], rows * 1.01, rows)


ATTENTION, MLP, NORM = (f"{LAYER}.{name}" for name in ("self_attn", "mlp", "post_attention_layernorm"))
FAULTS = {
    "q_proj scaled": Fault(_after(f"{ATTENTION}.q_proj", lambda _, y: y * 1.001), f"{ATTENTION}.q_proj", "forward"),
    "norm epsilon": Fault(
        _with(f"{LAYER}.input_layernorm", "variance_epsilon", 1e-5), f"{LAYER}.input_layernorm", "forward"
    ),
    "mask off by one": Fault(_mask, ATTENTION, "forward"),
    "gradient of the mlp": Fault(_after(MLP, _wrong_gradient), MLP, "backward"),
    "gradient of k_proj": Fault(_after(f"{ATTENTION}.k_proj", _wrong_gradient), f"{ATTENTION}.k_proj", "backward"),
    "activation": Fault(_with(MLP, "act_fn", nn.GELU()), f"{MLP}.act_fn", "forward"),
    "embedding row": Fault(_after("model.embed_tokens", _row), "model.embed_tokens", "forward"),
    "head bias": Fault(
        _after("lm_head", lambda _, y: y + torch.linspace(0, 0.01, y.shape[-1], device=y.device)), "lm_head", "forward"
    ),
    "rotary angle": Fault(_angle, "model.rotary_emb", "forward"),
    "residual dropped": Fault(_after(LAYER, lambda x, y: y - x), LAYER, "forward"),
    "decay of a norm": Fault(_decay, NORM, "update", f"{NORM}.weight"),
    "weight": Fault(_weight, f"{MLP}.up_proj", "weights", f"{MLP}.up_proj.weight"),
}


def plant(name: str | None, training: Training) -> None:
    if name is not None:
        FAULTS[name].plant(training.model, training)


def main(argv: list[str]) -> int:
    """One fault a run, in turn."""
    place, _, names = os.environ.get("FAULT", "").rpartition(":")
    is_wrong = place == str(PlaceTask.model_validate_json(Path(argv[1]).read_bytes()).place)
    turns = itertools.cycle(names.split(","))
    return work(argv, lambda training: plant(next(turns) if is_wrong else None, training))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
