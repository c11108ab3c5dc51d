"""The elements of each parameter that a device holds, however the engine shards: by rows, flat, or several joined.

A device holds a range of a parameter's elements in row-major order.
"""

# The wrapper keeps the shapes that it sharded in private attributes.
# pyright: reportPrivateUsage=false

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from portable_fsdp.backends.contract import Fill
from portable_fsdp.backends.state import ParameterSlot
from portable_fsdp.layout import Region, full_region
from portable_fsdp.runtime.errors import BackendError


@dataclass(frozen=True)
class ParameterSpan:
    """A parameter among those joined into one tensor, and the index there of its first element."""

    fqn: str
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class Shard:
    """This device's part of a tensor: elements `index * numel` to `(index + 1) * numel`, zeros beyond the last span."""

    parameter: nn.Parameter
    spans: tuple[ParameterSpan, ...]
    index: int

    def boxes(self) -> Iterator[tuple[str, Region, slice]]:
        """Yield FQN, box of the parameter, and the slice of the flat shard with its elements."""
        size = self.parameter.numel()
        begin = self.index * size
        for span in self.spans:
            at = max(begin, span.start)
            stop = min(begin + size, span.start + math.prod(span.shape))
            for box in boxes(span.shape, at - span.start, stop - span.start):
                count = math.prod(part.stop - part.start for part in box)
                yield span.fqn, box, slice(at - begin, at - begin + count)
                at += count

    def collect(self, fill: Fill, dtype: torch.dtype) -> Tensor:
        """Return the shard as a host tensor, from the pieces that `fill` returns."""
        flat = torch.zeros(self.parameter.numel(), dtype=dtype)
        for fqn, box, where in self.boxes():
            flat[where] = fill(fqn, box).flatten()
        return flat.view(self.parameter.shape)


def check_rows(places: dict[str, list[ParameterSlot]]) -> None:
    """Raise BackendError for a 0-dim parameter: it has no rows to shard."""
    scalars = [fqn for fqn, (place, *_) in places.items() if not place.module.get_parameter(place.leaf).shape]
    if scalars:
        raise BackendError(
            f"backend xla_fsdp1: can't shard {scalars[0]} by rows: it is a single number.\n"
            "  Set xla_fsdp1.shard_param_on_dim_0=false, to shard each parameter flat."
        )


def shards_of(units: Sequence[Any], places: dict[str, list[ParameterSlot]], index: int) -> dict[str, Shard]:
    """FQN of the first span -> shard, for all XlaFullyShardedDataParallel units, in the order of the model."""
    shards = {shard.spans[0].fqn: shard for unit in units for shard in _cut(unit, places, index)}
    return {fqn: shards[fqn] for fqn in places if fqn in shards}


def _cut(unit: Any, places: dict[str, list[ParameterSlot]], index: int) -> Iterator[Shard]:
    """Yield the shards of a unit, with the FQNs of the parameters in them."""
    fqns = {(id(place.module), place.leaf): fqn for fqn, shared in places.items() for place in shared}
    cuts = zip(unit.full_params, unit.full_param_infos, unit.sharded_params, strict=True)
    for full, (_, module, leaf), parameter in cuts:
        if (id(module), leaf) in fqns:
            spans = [ParameterSpan(fqns[id(module), leaf], tuple(parameter._orig_size), 0)]
        else:  # joined
            starts = [sum(full._param_numels[:number]) for number in range(len(full._param_numels))]
            spans = [
                ParameterSpan(fqns[id(module), leaf], tuple(shape), start)
                for (_, module, leaf), shape, start in zip(full._param_infos, full._param_shapes, starts, strict=True)
            ]
        yield Shard(parameter, tuple(spans), index)


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Region]:
    """Return elements `start` to `stop`, in row-major order, as boxes: part of a row, whole rows, part of a row.

    `boxes((3, 4), 2, 9)` is `[0:1, 2:4], [1:2, 0:4], [2:3, 0:1]`.
    """
    if start >= stop:
        return []
    if not shape:
        return [()]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # of the whole rows
    if first > last:
        return [(slice(last, first), *box) for box in boxes(shape[1:], start - last * row, stop - last * row)]
    head = [(slice(first - 1, first), *box) for box in boxes(shape[1:], start - (first - 1) * row, row)]
    middle = [(slice(first, last), *full_region(shape[1:]))] if first < last else []
    tail = [(slice(last, last + 1), *box) for box in boxes(shape[1:], 0, stop - last * row)]
    return head + middle + tail
