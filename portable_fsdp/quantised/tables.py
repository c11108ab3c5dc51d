"""The form of a quantised weight, a table of bytes, and its values.

Each row of a table has the codes of `unit` weights, then their scales. NF4 is that of QLoRA (arXiv 2305.14314, section
3); codes and scales of all schemes are those of bitsandbytes.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
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
