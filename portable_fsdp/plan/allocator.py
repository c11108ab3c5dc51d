"""What torch's caching allocator takes from the driver for a sequence of allocations, by its own rules.

`torch.cuda.max_memory_reserved` isn't the sum of what lives: sizes are rounded, memory is taken in segments, each
stream has a pool of its own, and a free piece serves only what fits into it. All of that is deterministic.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

MEBIBYTE = 2**20
# c10/cuda/CUDACachingAllocator.h (torch 2.9): kMinBlockSize, kSmallSize, kSmallBuffer, kMinLargeAlloc, kLargeBuffer and
# kRoundLarge, by their values; the environment variable PYTORCH_CUDA_ALLOC_CONF changes none of it by default.
ROUND_BYTES = 512
SMALL_BYTES = MEBIBYTE
SMALL_SEGMENT_BYTES = 2 * MEBIBYTE
LARGE_BYTES = 10 * MEBIBYTE
LARGE_SEGMENT_BYTES = 20 * MEBIBYTE
SEGMENT_ROUND_BYTES = 2 * MEBIBYTE

_PoolKey = tuple[Hashable, bool]  # stream, and whether it has small pieces


@dataclass(eq=False)
class _Piece:
    """A part of a segment, free or in use; neighbours in address order."""

    pool: _PoolKey
    address: int
    bytes: int
    is_free: bool = False
    before: "_Piece | None" = None
    after: "_Piece | None" = None


def _by_fit(piece: _Piece) -> tuple[int, int]:
    return piece.bytes, piece.address


class CachingAllocator:
    """Follows `malloc` and `free`; `reserved` and `allocated` are in bytes, as torch.cuda.memory_stats has them.

    `capacity`: bytes that the driver can give. Where they run out, it first gives back all segments without a piece in
    use, as torch does; then it takes the missing bytes all the same, for the caller to see.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = capacity
        self._pools: defaultdict[_PoolKey, list[_Piece]] = defaultdict(list)  # free pieces, sorted `_by_fit`
        self._in_use: dict[Hashable, _Piece] = {}
        self._next_address = 0
        self.reserved = self.allocated = self.peak_reserved = self.peak_allocated = 0

    def malloc(self, key: Hashable, bytes: int, stream: Hashable) -> None:
        """Allocate a storage, of which `free` is given the same key; it goes back to the stream's pool."""
        size = max(ROUND_BYTES, -(-bytes // ROUND_BYTES) * ROUND_BYTES)
        pool = (stream, size <= SMALL_BYTES)
        at = bisect_left(self._pools[pool], (size, 0), key=_by_fit)
        piece = self._pools[pool].pop(at) if at < len(self._pools[pool]) else self._segment(pool, size)
        self._split(piece, size)
        piece.is_free = False
        self._in_use[key] = piece
        self.allocated += piece.bytes
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, key: Hashable) -> None:
        piece = self._in_use.pop(key)
        self.allocated -= piece.bytes
        if piece.before is not None and piece.before.is_free:
            piece = self._join(piece.before, piece)
        if piece.after is not None and piece.after.is_free:
            self._join(piece, piece.after)
        self._put(piece)

    def _put(self, piece: _Piece) -> None:
        piece.is_free = True
        insort(self._pools[piece.pool], piece, key=_by_fit)

    def _take(self, piece: _Piece) -> None:
        piece.is_free = False
        free = self._pools[piece.pool]
        del free[bisect_left(free, _by_fit(piece), key=_by_fit)]

    def _segment(self, pool: _PoolKey, size: int) -> _Piece:
        if size <= SMALL_BYTES:
            taken = SMALL_SEGMENT_BYTES
        elif size < LARGE_BYTES:
            taken = LARGE_SEGMENT_BYTES
        else:
            taken = -(-size // SEGMENT_ROUND_BYTES) * SEGMENT_ROUND_BYTES
        if self._capacity is not None and self.reserved + taken > self._capacity:
            self._give_back()
        self.reserved += taken
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        address = self._next_address
        self._next_address += taken + SEGMENT_ROUND_BYTES  # never next to another segment
        return _Piece(pool, address, taken)

    def _give_back(self) -> None:
        for free in self._pools.values():
            for piece in [piece for piece in free if piece.before is None and piece.after is None]:
                self._take(piece)
                self.reserved -= piece.bytes

    def _split(self, piece: _Piece, size: int) -> None:
        """Leave the rest of it free, from 512 bytes in the small pool and over 1 MiB in the large."""
        over = piece.bytes - size
        if over < ROUND_BYTES if size <= SMALL_BYTES else over <= SMALL_BYTES:
            return
        rest = _Piece(piece.pool, piece.address + size, over, before=piece, after=piece.after)
        if piece.after is not None:
            piece.after.before = rest
        piece.after, piece.bytes = rest, size
        self._put(rest)

    def _join(self, first: _Piece, second: _Piece) -> _Piece:
        """The two as one, in use until `_put`."""
        for piece in (first, second):
            if piece.is_free:
                self._take(piece)
        first.bytes += second.bytes
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        return first
