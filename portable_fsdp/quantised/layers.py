"""Layers with quantised weights: they dequantise a weight at use, in forward and again in backward."""

# Parameters are replaced in a module's own table.
# pyright: reportPrivateUsage=false

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from portable_fsdp.quantised.tables import ByteTable, constants, dequantise

Dequantise = Callable[[Tensor, ByteTable, torch.dtype, Tensor | None], Tensor]
"""An engine's own way: gets the bytes, their form, the dtype, and in backward the gradient that is there."""


class AtUse(NamedTuple):
    """How a module gets its quantised weights; the attribute `quantised` of the module.

    `in_forward`: its forward dequantises them, and its backward does it again; else an engine does it.
    """

    tables: Mapping[str, ByteTable]  # by parameter
    in_forward: bool
    ways: Mapping[str, Dequantise] | None = None

    def weight(
        self, module: nn.Module, leaf: str, stored: Tensor, dtype: torch.dtype, gradient: Tensor | None = None
    ) -> Tensor:
        """Dequantise a parameter of the module, whose bytes are `stored`."""
        if self.ways is not None and (own := self.ways.get(leaf)) is not None:
            return own(stored, self.tables[leaf], dtype, gradient)
        looked_up: dict[str, Any] = {key: getattr(module, f"quantised_{key}", None) for key in ("pairs", "nested")}
        return dequantise(stored, self.tables[leaf], dtype, looked_up)


def place(model: nn.Module, tables: Mapping[str, ByteTable]) -> None:
    """Put tables, int8 on meta, in place of their weights, and let linear layers dequantise them in each forward and
    again in each backward."""
    modules: dict[str, dict[str, ByteTable]] = {}
    for fqn, table in tables.items():
        owner, _, leaf = fqn.rpartition(".")
        modules.setdefault(owner, {})[leaf] = table
    looked_up_by_all = constants(next(iter(tables.values())).scheme)
    for name, own in modules.items():
        module: Any = model.get_submodule(name)
        for leaf, table in own.items():
            stored = torch.empty(table.stored_shape, dtype=torch.int8, device="meta")
            module._parameters[leaf] = nn.Parameter(stored, requires_grad=False)
        module.quantised = AtUse(own, is_linear(module))
        for key, constant in looked_up_by_all.items():
            module.register_buffer(f"quantised_{key}", constant, persistent=False)
        if is_linear(module):
            module.forward = MethodType(linear, module)


def holds_inputs_first(module: nn.Module) -> bool:
    """Whether a layer's weight is `[in, out]` (transformers' Conv1D in GPT-2), not `[out, in]`."""
    kind = type(module)
    return (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")


def is_linear(module: nn.Module) -> bool:
    """Whether a layer is torch's linear layer or transformers' Conv1D, and no subclass, which may compute otherwise."""
    return type(module) is nn.Linear or holds_inputs_first(module)


def quantised_modules(model: nn.Module) -> dict[str, Any]:
    return {name: module for name, module in model.named_modules() if "quantised" in vars(module)}


def linear(self: Any, x: Tensor, with_bias: bool = True) -> Any:
    """The forward of a linear layer whose weight is a table."""
    return _Linear4.apply(x, self.weight, self.bias if with_bias else None, self)


class _Linear4(torch.autograd.Function):
    """x `[..., inputs]` -> `[..., outputs]`. Autograd keeps the bytes, and no dequantised weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stored: Tensor, bias: Tensor | None, module: Any) -> Tensor:
        ctx.save_for_backward(stored)
        ctx.module = module
        weight = module.quantised.weight(module, "weight", stored, x.dtype)
        return F.linear(x, weight.t() if holds_inputs_first(module) else weight, bias)

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        [gradient], [stored], module = outputs, ctx.saved_tensors, ctx.module
        weight = module.quantised.weight(module, "weight", stored, gradient.dtype, gradient)
        return gradient @ (weight.t() if holds_inputs_first(module) else weight), None, None, None
