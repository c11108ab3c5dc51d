"""How many bytes a tensor takes on a TPU, where memory is laid out in tiles."""

import math
from collections.abc import Sequence
from itertools import permutations

_LANES = 128  # of a tile's row
_ROWS = 8  # of a tile, at most
_WORD_BYTES = 4  # narrower elements of neighbouring rows share one
_FLAT_ELEMENTS = 1024  # of a tile of a vector


def tiled_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Bytes of a tensor with elements of `itemsize` bytes, as libtpu lays out a program's arguments and results.

    libtpu puts those two dimensions last that pad least. The last is padded to 128, the one before to 8 or, if it is
    smaller, to a power of two. A vector is padded to 1024, a short one to a power of two from 128 on. Elements of less
    than 4 bytes fill words: 2 or 4 rows at least. Source: sizes of arguments in programs that libtpu 0.0.21 compiles
    (tests/plan/test_tpu_layout.py compares them); 0.0.52 has the same layouts on v6e and tpu7x. 8-bit tensors may take
    more: some have tiles of 32 rows.
    """
    elements = math.prod(shape)
    packed = max(1, _WORD_BYTES // itemsize)
    if elements == 0:
        return 0
    if len(shape) < 2:
        return itemsize * _up(elements, min(_FLAT_ELEMENTS, max(_LANES * packed, _power(elements))))
    return itemsize * min(
        _up(shape[last], _LANES)
        * _up(shape[before], min(_ROWS, max(packed, _power(shape[before]))))
        * (elements // (shape[last] * shape[before]))
        for last, before in permutations(range(len(shape)), 2)
    )


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _power(size: int) -> int:
    """The least power of two that isn't below."""
    return 1 << (size - 1).bit_length()
