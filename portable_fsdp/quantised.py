"""Frozen weights in 4 or 8 bits: the form of a quantised weight, a table of bytes, its values, and layers that use it.

Each row of a table has the codes of `unit` weights, then their scales. NF4 is that of QLoRA (arXiv 2305.14314, section
3); codes and scales of all schemes are those of bitsandbytes. A table takes its weight's place under the weight's FQN;
`models/quantised.py` fills it. Layers dequantise a weight at use, in forward and again in backward.
"""

# Parameters are replaced in a module's own table.
# pyright: reportPrivateUsage=false

import math
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BLOCK, NESTED = 64, 16384
"""Weights that share a scale, and scales' scale."""
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_BY_127 = 7.874015718698502e-3  # bitsandbytes multiplies by this number


class ByteTable(NamedTuple):
    """The form in which a weight of `shape` is stored.

    Rows of bytes `[..., last / unit, row_bytes]` keep the weight's dimensions, so that devices can split each of them;
    with `is_flat` they are `[rows, row_bytes]`, of the weight's elements in order.
    """

    scheme: str  # nf4, nf4_double, int8
    shape: tuple[int, ...]
    unit: int
    is_flat: bool = False

    @property
    def code_bytes(self) -> int:
        """Bytes of a row's codes, a multiple of 4."""
        return -(-self.unit // 4) * 4 if self.scheme == "int8" else self.unit // 2

    @property
    def row_bytes(self) -> int:
        """nf4: then a float32 scale for each block; nf4_double: a code of each, their scale and offset; int8: a scale
        of the weight's row."""
        blocks = self.unit // BLOCK
        return self.code_bytes + {"nf4": 4 * blocks, "nf4_double": blocks + 8, "int8": 4}[self.scheme]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        if self.is_flat:
            return -(-math.prod(self.shape) // self.unit), self.row_bytes
        return *self.shape[:-1], self.shape[-1] // self.unit, self.row_bytes

    @property
    def nbytes(self) -> int:
        return math.prod(self.stored_shape)


def nested_levels() -> Tensor:
    """Return the 256 levels of the 8-bit codes of scales: float32, ascending (arXiv 1511.04561, as bitsandbytes)."""
    levels = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        means = (10 ** (exponent - 6)) * ((edges[:-1] + edges[1:]) / 2.0)
        levels += [*means.tolist(), *(-means).tolist()]
    return torch.tensor(sorted(levels), dtype=torch.float32)


def constants(scheme: str) -> dict[str, Tensor]:
    """Return what a device looks up: the two values of each byte, and the levels of scales."""
    pairs = torch.cartesian_prod(torch.tensor(NF4), torch.tensor(NF4))
    return {"nf4": {"pairs": pairs}, "nf4_double": {"pairs": pairs, "nested": nested_levels()}, "int8": {}}[scheme]


def dequantise(stored: Tensor, table: ByteTable, dtype: torch.dtype, looked_up: Mapping[str, Tensor]) -> Tensor:
    """Return the weight, or the part of it that `stored` is.

    Args:
        stored: `[..., row_bytes]` in int8, or the same bytes in another dtype.
        looked_up: `constants` on the device.
    """
    rows = stored.view(torch.uint8)
    codes = rows[..., : table.code_bytes]
    if table.scheme == "int8":
        values, scales = codes.view(torch.int8), rows[..., table.code_bytes :].view(torch.float32)
    else:
        values = F.embedding(codes.int(), looked_up["pairs"]).flatten(-2).unflatten(-1, (-1, BLOCK))
        scales = _scales(rows, table, looked_up)
    return scaled(values, scales, table, dtype)


def scaled(values: Tensor, scales: Tensor, table: ByteTable, dtype: torch.dtype) -> Tensor:
    """Multiply the values of codes, `[..., blocks, 64]`, or `[..., n]` in int8, by the scales of rows `[..., blocks]`:
    the weight."""
    if table.scheme == "int8":
        values = values[..., : table.unit].float() * scales * _BY_127
    else:
        values = (values * scales[..., None]).flatten(-2)
    values = values.to(dtype)
    if table.is_flat:
        return values.flatten()[: math.prod(table.shape)].view(table.shape)
    return values.flatten(-2)


def expanded(table: ByteTable) -> ByteTable:
    """Return the form for devices that can't look up codes.

    Scales are float32. The high 4 bits of a block's 32 bytes hold its first 32 weights, the low 4 bits the others:
    interleaving them on a TPU would cost more than all other work of dequantising.
    """
    return table._replace(scheme="nf4") if table.scheme == "nf4_double" else table


def expand(stored: Tensor, table: ByteTable) -> Tensor:
    """Return the rows of `expanded(table)` on the host."""
    if table.scheme == "int8":
        return stored
    rows = stored.view(torch.uint8)
    codes = rows[..., : table.code_bytes].unflatten(-1, (-1, BLOCK // 2))
    first, second = torch.stack([codes >> 4, codes & 15], dim=-1).flatten(-2).chunk(2, dim=-1)
    scales = _scales(rows, table, constants(table.scheme)).contiguous()
    return torch.cat([((first << 4) | second).flatten(-2), scales.view(torch.uint8)], dim=-1).view(torch.int8)


def _scales(rows: Tensor, table: ByteTable, looked_up: Mapping[str, Tensor]) -> Tensor:
    """Return the scale of each block: `[..., blocks]`."""
    start, blocks = table.code_bytes, table.unit // BLOCK
    if table.scheme == "nf4":
        return rows[..., start:].view(torch.float32)
    nested = F.embedding(rows[..., start : start + blocks].int(), looked_up["nested"][:, None])[..., 0]
    scale, offset = rows[..., start + blocks :].view(torch.float32).chunk(2, dim=-1)
    return nested * scale + offset


# --------------------------------------------------------------------------------------------------- layers with tables

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
