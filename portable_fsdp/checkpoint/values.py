"""Compares the values of two checkpoints, some rows of a tensor at a time."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from portable_fsdp.checkpoint.format import DTYPE_BYTES
from portable_fsdp.checkpoint.store import Reader

_ELEMENTS = 1 << 22


def value_differences(a: Reader, b: Reader, advance: Callable[[int], None] = lambda _: None) -> dict[str, float]:
    """Key -> largest absolute difference, of the tensors that both have, in one shape, with other bits or values.

    NaN where one of them has a NaN that the other hasn't. Holds a few MiB, or one row. Raises `CheckpointError`.
    """
    found: dict[str, float] = {}
    for key, tensor in a.manifest.tensors.items():
        other = b.manifest.tensors.get(key)
        if other is not None and other.shape == tensor.shape:
            difference = _difference(a, b, key, tensor.shape)
            if difference is not None:
                found[key] = difference
            advance(math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype])
    return found


def _difference(a: Reader, b: Reader, key: str, shape: tuple[int, ...]) -> float | None:
    """None if they are equal."""
    if not shape:
        return _largest([_gap(a.read(key, ()), b.read(key, ()))])
    rows = max(1, _ELEMENTS // max(1, math.prod(shape[1:])))
    gaps: list[float | None] = []
    for start in range(0, shape[0], rows):
        box = (slice(start, min(start + rows, shape[0])), *(slice(0, size) for size in shape[1:]))
        gaps.append(_gap(a.read(key, box), b.read(key, box)))
    return _largest(gaps)


def _largest(gaps: list[float | None]) -> float | None:
    found = [gap for gap in gaps if gap is not None]
    return None if not found else math.nan if any(math.isnan(gap) for gap in found) else max(found)


def _gap(a: Tensor, b: Tensor) -> float | None:
    if a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)):
        return None
    left, right = a.double(), b.double()
    same = (left == right) | (left.isnan() & right.isnan())
    if same.all():
        return None if a.dtype != b.dtype else 0.0
    return float((left - right)[~same].abs().max())
