"""Low-rank adapters (LoRA, arXiv 2106.09685), by peft: which layers get them, and their initial values.

A layer `q_proj` becomes peft's own, with the weights `q_proj.base_layer.weight`, `q_proj.lora_A.default.weight` [r, in]
and `q_proj.lora_B.default.weight` [out, r]; it gives base(x) + alpha / r * B(A(x)). Only A and B train.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from portable_fsdp.config import schema
from portable_fsdp.config.patterns import matches, matching
from portable_fsdp.models.weights import Slices, seeded
from portable_fsdp.runtime.errors import ConfigError

ALL_LINEAR = "all-linear"
_BASE = ".base_layer"
_A, _B = ".lora_A.default", ".lora_B.default"
_INSIDE = "base_model.model"  # where peft's model holds ours


class AdapterNames(NamedTuple):
    """FQNs of the weights of one layer under LoRA, and of the layer itself."""

    layer: str
    base: str
    a: str
    b: str

    @classmethod
    def of(cls, layer: str) -> "AdapterNames":
        return cls(layer, f"{layer}{_BASE}.weight", f"{layer}{_A}.weight", f"{layer}{_B}.weight")


def peft_keys(names: AdapterNames) -> tuple[tuple[str, str], tuple[str, str]]:
    """The name in peft's files -> ours, of a layer's two weights; they leave out the adapter's name."""
    return ((f"{_INSIDE}.{names.layer}.lora_A.weight", names.a), (f"{_INSIDE}.{names.layer}.lora_B.weight", names.b))


def plain_name(fqn: str) -> str:
    """The FQN that a weight of the base has without adapters."""
    return fqn.replace(f"{_BASE}.", ".")


def is_adapter(fqn: str) -> bool:
    return _A in fqn or _B in fqn


def adapted_layers(names: list[str]) -> list[AdapterNames]:
    """The layers with adapters among the FQNs of a model's weights."""
    return [AdapterNames.of(name.removesuffix(f"{_A}.weight")) for name in names if name.endswith(f"{_A}.weight")]


def _takes_adapter(module: nn.Module) -> bool:
    """A linear layer, of torch or of GPT-2 (transformers' Conv1D), as peft tells them."""
    return isinstance(module, nn.Linear) or holds_inputs_first(module)


def holds_inputs_first(module: nn.Module) -> bool:
    """Whether a layer's weight is [in, out], and not [out, in]."""
    kind = type(module)
    return (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")


def add_adapters(
    model: nn.Module, lora: schema.Lora, seed: int, dtype: torch.dtype, fill: Callable[[str, Slices], Tensor]
) -> Callable[[str, Slices], Tensor]:
    """Give the layers that `lora.targets` names adapters, on meta, in `dtype`, and freeze all else.

    Returns the `fill` of the model as it is then: that of the base, and adapters drawn as peft does: A uniform as
    torch's linear layers, B zero, so that the model begins as its base. Raises ConfigError: peft isn't installed, a
    pattern that names no linear layer, a layer whose weight is tied.
    """
    targets = _targets(model, lora.targets)
    peft = _import_peft()
    inputs_first = any(holds_inputs_first(model.get_submodule(name)) for name in targets)
    settings = peft.LoraConfig(
        r=lora.r, lora_alpha=lora.alpha, target_modules=targets, fan_in_fan_out=inputs_first, task_type="CAUSAL_LM"
    )
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to", category=UserWarning)  # GPT-2's, mixed
        peft.inject_adapter_in_model(settings, model)
    for name in targets:
        layer = cast(Any, model.get_submodule(name))
        layer.cast_input_dtype_enabled = False  # each engine casts weights at use, and inputs have their dtype
    drawn: dict[str, tuple[int, ...]] = {}
    for fqn, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(fqn))
        if is_adapter(fqn):
            parameter.data = parameter.data.to(dtype)
            drawn[fqn] = tuple(parameter.shape)

    def with_adapters(fqn: str, slices: Slices) -> Tensor:
        if fqn in drawn:
            return _draw(fqn, drawn[fqn], seed)[slices].to(dtype)
        return fill(plain_name(fqn), slices)

    return with_adapters


def _draw(fqn: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """float32, whole: as `peft.tuners.lora.LoraLayer.reset_lora_parameters`, but from (seed, FQN) alone."""
    weight = torch.zeros(shape)
    if _A in fqn:
        with seeded(seed, fqn):
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
    return weight


def _targets(model: Any, patterns: tuple[str, ...]) -> list[str]:
    """FQNs of the layers that get adapters, in the model's order."""
    head = model.get_output_embeddings()
    linear = {name: module for name, module in model.named_modules() if _takes_adapter(module)}
    chosen: set[str] = set()
    for pattern in patterns:
        if pattern == ALL_LINEAR:
            chosen.update(name for name, module in linear.items() if module is not head)
            continue
        named = [name for name, _ in model.named_modules() if matches(pattern, name) or name.endswith(f".{pattern}")]
        found = [name for name in named if name in linear]
        if named and not any(layer.startswith(name) for name in named for layer in linear):
            raise ConfigError(
                f"model.lora.targets: expected linear layers, found {pattern!r}, which names {named[0]} and no linear "
                "layer.\n  Adapters of embeddings, of norms and of experts that are one tensor are not built. Nothing "
                "was started."
            )
        chosen.update(found or matching("model.lora.targets", pattern, linear))
    counts = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    for name in chosen:
        if counts.count(id(linear[name].weight)) > 1:
            raise ConfigError(
                f"model.lora.targets: expected layers with a weight of their own, found {name}, whose weight is the "
                f"embedding's too (tied).\n  Leave it out: {ALL_LINEAR} does. Nothing was started."
            )
    if not chosen:
        raise ConfigError(
            f"model.lora.targets: expected linear layers, found none in {type(model).__name__}.\n"
            "  Leave model.lora out. Nothing was started."
        )
    return [name for name in linear if name in chosen]


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            f"model.lora: expected the package peft, found none installed ({error}).\n"
            "  pip install peft, or in a checkout of portable_fsdp: pip install '.[lora]'. Nothing was started."
        ) from None
    return peft
