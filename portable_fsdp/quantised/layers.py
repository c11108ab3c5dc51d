"""Layers with quantised weights: they dequantise a weight at use, in forward and again in backward."""

# Parameters are replaced in a module's own table.
# pyright: reportPrivateUsage=false

from collections.abc import Callable, Mapping
from types import MappingProxyType, MethodType
from typing import Any, NamedTuple, cast

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
    ways: Mapping[str, Dequantise] = MappingProxyType({})

    def weight(self, module: nn.Module, leaf: str, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Dequantise a parameter of the module, whose bytes are `stored`."""
        if (own := self.ways.get(leaf)) is not None:
            return own(stored, self.tables[leaf], dtype, None)
        return dequantise(stored, self.tables[leaf], dtype, looked_up(module))


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


def is_linear(module: nn.Module) -> bool:
    """Whether a layer is torch's linear layer or transformers' Conv1D, and no subclass, which may compute otherwise."""
    kind = type(module)
    return kind is nn.Linear or (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")


def quantised_modules(model: nn.Module) -> dict[str, Any]:
    return {
        name: module for name, module in model.named_modules() if isinstance(getattr(module, "quantised", 0), AtUse)
    }


def looked_up(module: Any) -> dict[str, Tensor]:
    buffers = {key: getattr(module, f"quantised_{key}", None) for key in ("pairs", "nested")}
    return {key: buffer for key, buffer in buffers.items() if buffer is not None}


def linear(self: Any, x: Tensor, with_bias: bool = True) -> Any:
    """The forward of a linear layer whose weight is a table."""
    at_use, bias = cast(AtUse, self.quantised), self.bias if with_bias else None
    inputs_first = type(self) is not nn.Linear
    levels = looked_up(self)
    pairs, nested = levels.get("pairs"), levels.get("nested")
    return _Linear4.apply(
        x, self.weight, bias, pairs, nested, at_use.tables["weight"], inputs_first, at_use.ways.get("weight")
    )


class _Linear4(torch.autograd.Function):
    """x `[..., inputs]` -> `[..., outputs]`. Autograd keeps the bytes, and no dequantised weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        stored: Tensor,
        bias: Tensor | None,
        pairs: Tensor | None,
        nested: Tensor | None,
        table: ByteTable,
        inputs_first: bool,
        own: Dequantise | None,
    ) -> Tensor:
        ctx.save_for_backward(stored, pairs, nested)
        ctx.table, ctx.inputs_first, ctx.own = table, inputs_first, own
        weight = _weight(stored, pairs, nested, table, x.dtype, own, None)
        return F.linear(x, weight.t() if inputs_first else weight, bias)

    @staticmethod
    def backward(ctx: Any, *outputs: Any) -> Any:
        gradient = cast(Tensor, outputs[0])
        stored, pairs, nested = ctx.saved_tensors
        weight = _weight(stored, pairs, nested, ctx.table, gradient.dtype, ctx.own, gradient)
        return gradient @ (weight.t() if ctx.inputs_first else weight), *(None,) * 7


def _weight(
    stored: Tensor, pairs: Any, nested: Any, table: ByteTable, dtype: torch.dtype, own: Any, gradient: Tensor | None
) -> Tensor:
    if own is not None:
        return own(stored, table, dtype, gradient)
    return dequantise(stored, table, dtype, {"pairs": pairs, "nested": nested})
