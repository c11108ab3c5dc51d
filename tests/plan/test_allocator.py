"""The caching allocator's rules, by hand: what is reserved for each sequence of allocations."""

from collections.abc import Sequence

from portable_fsdp.plan.allocator import CachingAllocator

MIB = 2**20
Step = int | str | tuple[int, int]
"""Bytes to allocate, `free N` of the Nth allocation, or bytes and stream."""


def after(steps: Sequence[Step], capacity: int | None = None) -> CachingAllocator:
    allocator = CachingAllocator(capacity)
    count = 0
    for step in steps:
        if isinstance(step, str):
            allocator.free(int(step.removeprefix("free ")))
            continue
        size, stream = step if isinstance(step, tuple) else (step, 0)
        allocator.malloc(count, size, stream)
        count += 1
    return allocator


M5, M8, M40, M60 = (size * MIB for size in (5, 8, 40, 60))
SEQUENCES: dict[str, tuple[Sequence[Step], int]] = {
    "pages of 20 MiB": ([M5], 20),
    "and of 2 MiB for small pieces": ([512, MIB, 512, MIB], 4),
    "what is left of a page serves the next": ([30 * MIB, M8], 40),
    "a free end grows by what is missing": ([M40, M40, "free 1", M60], 100),
    "a gap doesn't serve what is larger": ([M40, M40, "free 0", M60], 140),
    "but joins its neighbours": ([M40, M40, M40, "free 0", "free 1", 80 * MIB], 120),
    "small and large pieces have pools of their own": ([M5, 512], 22),
    "a stream's own pool serves it again": ([M5, 512, (M5, 1), "free 2", M5], 42),
    "a gap serves what is smaller": ([M40, M40, "free 0", 30 * MIB], 80),
    "the smallest piece that fits is taken": ([M60, M8, M40, M8, "free 0", "free 2", M40, M60], 120),
    "free pieces of one size are told apart": ([M40, M8, M40, M8, "free 0", "free 2", M40, M40], 100),
    "a rest of 512 bytes is a piece": ([11 * MIB, 9 * MIB], 20),
    "streams have segments of their own": ([M5, (M5, 1)], 40),
}


def test_segments_grow_at_their_end_and_free_pieces_are_used_again() -> None:
    """As `try_allocate_expandable_block` and `should_split` of c10/cuda/CUDACachingAllocator.cpp (torch 2.9)."""
    for name, (steps, reserved) in SEQUENCES.items():
        assert after(steps).reserved == reserved * MIB, name
    room = after([M40, M40, "free 1", (M40, 1)], capacity=90 * MIB)
    assert (room.reserved, room.peak_reserved) == (80 * MIB, 80 * MIB)
    full = after([M40, M40, (M40, 1)], capacity=100 * MIB)  # too much
    assert full.reserved == full.peak_reserved == 120 * MIB
    none_left = after([M40, "free 0", (M40, 1)], capacity=50 * MIB)
    assert none_left.reserved == 40 * MIB
