"""Compares the values of two checkpoints, some rows of a tensor at a time."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from portable_fsdp.backends.base import Region
from portable_fsdp.checkpoint.store import Reader

_ELEMENTS = 1 << 22


def value_differences(a: Reader, b: Reader, advance: Callable[[int], object] = lambda _: None) -> dict[str, float]:
    """Key -> largest absolute difference, for tensors of both, in one shape, with other bits or values.

    NaN where only one of them has a NaN. Holds a few MiB, or one row. Raises `CheckpointError`.
    """
    largest: dict[str, float] = {}
    for key, tensor in a.manifest.tensors.items():
        other = b.manifest.tensors.get(key)
        if other is None or other.shape != tensor.shape:
            continue
        gaps = [gap for box in _boxes(tensor.shape) if (gap := _gap(a.read(key, box), b.read(key, box))) is not None]
        if gaps:
            largest[key] = math.nan if any(map(math.isnan, gaps)) else max(gaps)
        advance(tensor.nbytes)
    return largest


def _boxes(shape: tuple[int, ...]) -> Iterator[Region]:
    if not shape:
        yield ()
        return
    rows = max(1, _ELEMENTS // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], rows):
        yield (slice(start, min(start + rows, shape[0])), *(slice(0, size) for size in shape[1:]))


def _gap(a: Tensor, b: Tensor) -> float | None:
    """None for equal bits, or for equal values of two dtypes."""
    if a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)):
        return None
    left, right = a.double(), b.double()
    same = (left == right) | (left.isnan() & right.isnan())
    if same.all():
        return None if a.dtype != b.dtype else 0.0
    return float((left - right)[~same].abs().max())
