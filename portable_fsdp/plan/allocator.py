"""What torch's caching allocator takes from the driver for a sequence of allocations, by its own rules.

`torch.cuda.max_memory_reserved` isn't the sum of what lives: sizes are rounded, each stream has its own pools for small
and for large pieces, and a free piece serves only what fits into it. A pool has one expandable segment, which grows by
pages at its end (expandable_segments:True, the default of a run). All of this is deterministic.
"""

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

MEBIBYTE = 2**20
# c10/cuda/CUDACachingAllocator.h (torch 2.9): kMinBlockSize, kSmallSize, kSmallBuffer, kLargeBuffer, by their values.
ROUND_BYTES = 512
SMALL_BYTES = MEBIBYTE
SMALL_PAGE_BYTES = 2 * MEBIBYTE
LARGE_PAGE_BYTES = 20 * MEBIBYTE

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


def _page(pool: _PoolKey) -> int:
    return SMALL_PAGE_BYTES if pool[1] else LARGE_PAGE_BYTES


def _by_fit(piece: _Piece) -> tuple[int, int]:
    return piece.bytes, piece.address


class CachingAllocator:
    """Follows `malloc` and `free`; `reserved` is in bytes, as torch.cuda.memory_stats has it.

    `capacity`: bytes that the driver can give. Where they run out, the allocator first gives back the free pages at the
    end of each segment (torch also those in the middle); then it takes the missing bytes all the same, for the caller
    to see.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = capacity
        self._ends: dict[_PoolKey, _Piece] = {}  # the last piece of each pool's segment
        self._pools: defaultdict[_PoolKey, list[_Piece]] = defaultdict(list)  # free pieces, sorted `_by_fit`
        self._in_use: dict[Hashable, _Piece] = {}
        self.reserved = self.peak_reserved = 0

    def malloc(self, key: Hashable, bytes: int, stream: Hashable) -> None:
        """Allocate a storage, of which `free` is given the same key; it goes back to the stream's pool."""
        size = max(ROUND_BYTES, -(-bytes // ROUND_BYTES) * ROUND_BYTES)
        pool = (stream, size <= SMALL_BYTES)
        at = bisect_left(self._pools[pool], (size, 0), key=_by_fit)
        piece = self._pools[pool].pop(at) if at < len(self._pools[pool]) else self._grown(pool, size)
        self._split(piece, size)
        piece.is_free = False
        self._in_use[key] = piece

    def free(self, key: Hashable) -> None:
        piece = self._in_use.pop(key)
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

    def _grown(self, pool: _PoolKey, size: int) -> _Piece:
        """`try_allocate_expandable_block`: pages are mapped behind the last piece, and join it where it is free."""
        if self._capacity is not None and self.reserved + self._missing(pool, size) > self._capacity:
            self._shorten()
        taken = self._missing(pool, size)  # the end may be shorter now
        self.reserved += taken
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        last = self._ends.get(pool)
        if last is not None and last.is_free:
            self._take(last)
            last.bytes += taken
            return last
        address = (len(self._ends) + 1) << 50 if last is None else last.address + last.bytes
        piece = self._ends[pool] = _Piece(pool, address, taken, before=last)
        if last is not None:
            last.after = piece
        return piece

    def _missing(self, pool: _PoolKey, size: int) -> int:
        last = self._ends.get(pool)
        free = last.bytes if last is not None and last.is_free else 0
        return -(-(size - free) // _page(pool)) * _page(pool)

    def _shorten(self) -> None:
        for pool, last in list(self._ends.items()):
            if not last.is_free:
                continue
            self._take(last)
            unmapped = last.bytes // _page(pool) * _page(pool)
            self.reserved -= unmapped
            last.bytes -= unmapped
            if last.bytes:
                self._put(last)
            elif last.before is not None:
                last.before.after = None
                self._ends[pool] = last.before
            else:
                del self._ends[pool]

    def _split(self, piece: _Piece, size: int) -> None:
        """Leave the rest of it free, from 512 bytes on."""
        over = piece.bytes - size
        if over < ROUND_BYTES:
            return
        rest = _Piece(piece.pool, piece.address + size, over, before=piece, after=piece.after)
        if piece.after is not None:
            piece.after.before = rest
        piece.after, piece.bytes = rest, size
        if self._ends.get(piece.pool) is piece:
            self._ends[piece.pool] = rest
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
        else:
            self._ends[first.pool] = first
        return first
