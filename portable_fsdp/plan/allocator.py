"""What torch's caching allocator takes from the driver for a sequence of allocations, by its own rules.

`torch.cuda.max_memory_reserved` isn't the sum of what lives: sizes are rounded, memory is taken in segments, each
stream has a pool of its own, and a free piece serves only what fits into it. All of that is deterministic.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

MEBIBYTE = 2**20
# c10/cuda/CUDACachingAllocator.h (torch 2.9): kMinBlockSize, kSmallSize, kSmallBuffer, kMinLargeAlloc, kLargeBuffer and
# kRoundLarge, by their values; the environment variable PYTORCH_CUDA_ALLOC_CONF changes none of it by default.
ROUND_BYTES = 512
SMALL_BYTES = MEBIBYTE
SMALL_SEGMENT_BYTES = 2 * MEBIBYTE
LARGE_BYTES = 10 * MEBIBYTE
LARGE_SEGMENT_BYTES = 20 * MEBIBYTE
SEGMENT_ROUND_BYTES = 2 * MEBIBYTE


@dataclass(frozen=True)
class Allocation:
    """One tensor's storage."""

    bytes: int
    stream: Hashable  # on which it was asked for; it goes back to that stream's pool


@dataclass(eq=False)
class _Piece:
    """A part of a segment, free or in use; neighbours in address order."""

    pool: "_Pool"
    address: int
    bytes: int
    is_free: bool = True
    before: "_Piece | None" = None
    after: "_Piece | None" = None

    @property
    def is_whole_segment(self) -> bool:
        return self.before is None and self.after is None


@dataclass(eq=False)
class _Pool:
    """The free pieces of one stream, small or large ones, by size and then by address."""

    is_small: bool
    free: list[tuple[int, int]] = field(default_factory=lambda: [])
    pieces: dict[tuple[int, int], _Piece] = field(default_factory=lambda: {})

    def put(self, piece: _Piece) -> None:
        key = (piece.bytes, piece.address)
        insort(self.free, key)
        self.pieces[key] = piece

    def take(self, piece: _Piece) -> None:
        key = (piece.bytes, piece.address)
        del self.free[bisect_left(self.free, key)], self.pieces[key]

    def take_best_fit(self, size: int) -> _Piece | None:
        at = bisect_left(self.free, (size, 0))
        return self.pieces.pop(self.free.pop(at)) if at < len(self.free) else None


class CachingAllocator:
    """Follows `malloc` and `free`; `reserved` and `allocated` are in bytes, as torch.cuda.memory_stats has them.

    `capacity`: bytes that the driver can give. Where they run out, it first gives back all segments without a piece in
    use, as torch does; then it takes the missing bytes all the same, for the caller to see.
    """

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = capacity
        self._pools: dict[tuple[Hashable, bool], _Pool] = {}
        self._in_use: dict[Hashable, _Piece] = {}
        self._next_address = 0
        self.reserved = self.allocated = self.peak_reserved = self.peak_allocated = 0

    def malloc(self, key: Hashable, allocation: Allocation) -> None:
        size = max(ROUND_BYTES, -(-allocation.bytes // ROUND_BYTES) * ROUND_BYTES)
        is_small = size <= SMALL_BYTES
        pool = self._pools.setdefault((allocation.stream, is_small), _Pool(is_small))
        piece = pool.take_best_fit(size) or self._segment(pool, size)
        self._split(piece, size)
        piece.is_free = False
        self._in_use[key] = piece
        self.allocated += piece.bytes
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, key: Hashable) -> None:
        piece = self._in_use.pop(key)
        self.allocated -= piece.bytes
        piece.is_free = True
        for neighbour in (piece.before, piece.after):
            if neighbour is not None and neighbour.is_free:
                piece.pool.take(neighbour)
                piece = self._joined(*sorted((piece, neighbour), key=lambda part: part.address))
        piece.pool.put(piece)

    def _segment(self, pool: _Pool, size: int) -> _Piece:
        if pool.is_small:
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
        for pool in self._pools.values():
            for piece in [piece for piece in pool.pieces.values() if piece.is_whole_segment]:
                pool.take(piece)
                self.reserved -= piece.bytes

    def _split(self, piece: _Piece, size: int) -> None:
        """Leave the rest of it free, from 512 bytes in the small pool and over 1 MiB in the large."""
        over = piece.bytes - size
        if over < ROUND_BYTES if piece.pool.is_small else over <= SMALL_BYTES:
            return
        rest = _Piece(piece.pool, piece.address + size, over, before=piece, after=piece.after)
        if piece.after is not None:
            piece.after.before = rest
        piece.after, piece.bytes = rest, size
        piece.pool.put(rest)

    @staticmethod
    def _joined(first: _Piece, second: _Piece) -> _Piece:
        first.bytes += second.bytes
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        return first


def play(events: Iterable[tuple[Hashable, Allocation | None]], capacity: int | None = None) -> CachingAllocator:
    """The allocator after `events`: a key with what is allocated under it, or with None when that is freed."""
    allocator = CachingAllocator(capacity)
    for key, allocation in events:
        if allocation is None:
            allocator.free(key)
        else:
            allocator.malloc(key, allocation)
    return allocator
