"""Adapters of experts that are one tensor, `experts.gate_up_proj` `[experts, ...]`: added to the weight at its use.

The weights are `experts.lora_of.gate_up_proj.lora_A.default.weight` `[experts * r, in]`, an expert's rows together, and
`lora_B` `[out, r * experts]`, with columns by r, then by expert. peft has the same tensors, in modules around that of
the experts (`target_parameters`). Those replace its parameters in each forward, which no engine could shard.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from portable_fsdp.config import schema
from portable_fsdp.config.describe import matches
from portable_fsdp.models.experts import expert_modules
from portable_fsdp.runtime.errors import ConfigError

EXPERTS = ".lora_of."


def stacked_weights(model: nn.Module) -> list[str]:
    """Return the FQNs of weights of experts that are one tensor."""
    names = expert_modules(model)
    return [fqn for fqn, w in model.named_parameters() if w.dim() == 3 and fqn.rpartition(".")[0] in names]


def names_weight(pattern: str, fqn: str) -> bool:
    """Whether a pattern names the weight and its module (`experts.down_proj`), not only something around them."""
    return last_two(pattern) == last_two(fqn) and (matches(pattern, fqn) or matches(f"*.{pattern}", fqn))


def last_two(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def add_to_experts(model: nn.Module, lora: schema.Lora, name: str, r: int, scaling: float) -> None:
    """Add an adapter to a weight of experts, on meta. Raises ConfigError for settings that it can't have."""
    holder, _, leaf = name.rpartition(".")
    module: Any = model.get_submodule(holder)
    reads_itself = getattr(cast(Any, model).config, "_experts_implementation", "").endswith("batched_mm")
    for key, is_set in (("lora.dropout", lora.dropout), ("lora.dora", lora.dora), ("experts", reads_itself)):
        if is_set:
            raise ConfigError(
                f"model.{key}: adapters of experts ({name}) are added to the weight, and work only without it.\n"
                "  Leave it out, or leave experts out of model.lora.targets."
            )
    if not hasattr(module, "lora_of"):
        module.lora_of = nn.ModuleDict()
    with torch.device("meta"):
        module.lora_of[leaf] = ExpertAdapter(getattr(module, leaf), r, scaling, module.is_transposed)


class ExpertAdapter(nn.Module):
    """The adapter of a weight `[experts, out, in]`, or `[experts, in, out]` if `is_transposed`."""

    def __init__(self, weight: Tensor, r: int, scaling: float, is_transposed: bool) -> None:
        super().__init__()
        experts, *sizes = weight.shape
        inputs, outputs = sizes if is_transposed else reversed(sizes)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, experts * r, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(experts * r, outputs, bias=False)})
        self.scaling, self.is_transposed = scaling, is_transposed

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weight plus its change."""
        a, b = cast(nn.Linear, self.lora_A["default"]), cast(nn.Linear, self.lora_B["default"])
        return weight + expert_products(a.weight, b.weight, len(weight), self.is_transposed) * self.scaling


def expert_products(a: Tensor, b: Tensor, experts: int, is_transposed: bool) -> Tensor:
    """Return B A of each expert in the layout of their weight."""
    equation = "ore,eri->eio" if is_transposed else "ore,eri->eoi"
    return torch.einsum(equation, b.unflatten(1, (-1, experts)), a.unflatten(0, (experts, -1)))
