"""The caching allocator's rules, by hand: what is reserved for each sequence of allocations."""

from collections.abc import Sequence

import pytest

from portable_fsdp.plan.allocator import CachingAllocator

MIB = 2**20
Step = int | str | tuple[int, int]
"""Bytes to allocate, `free N` of the Nth allocation, or bytes and stream."""


def after(steps: Sequence[Step], capacity: int | None = None, *, expandable: bool = False) -> CachingAllocator:
    allocator = CachingAllocator(capacity, expandable=expandable)
    count = 0
    for step in steps:
        if isinstance(step, str):
            allocator.free(int(step.removeprefix("free ")))
            continue
        size, stream = step if isinstance(step, tuple) else (step, 0)
        allocator.malloc(count, size, stream)
        count += 1
    return allocator


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # what is left of a large segment is no piece of its own below 1 MiB
    ],
)
def test_sizes_are_rounded_and_taken_in_segments(size: int, allocated: int, reserved: int) -> None:
    allocator = after([size])
    assert (allocator.allocated, allocator.reserved) == (allocated, reserved)


M5, M8, M20, M30, M40, M50, M60 = (size * MIB for size in (5, 8, 20, 30, 40, 50, 60))
SEQUENCES: dict[str, tuple[Sequence[Step], int]] = {
    "a large segment serves several": ([M5, M5, M5, M5], 20),
    "so does a small one": ([512, MIB, 512], 2),
    "small and large ones have pools of their own": ([M5, 512], 22),
    "and so have streams": ([M5, 512, (M5, 1)], 42),
    "a stream's own pool serves it again": ([M5, 512, (M5, 1), "free 2", M5], 42),
    "free neighbours become one piece": ([M8, M8, "free 0", "free 1", M20], 20),
    "a gap doesn't serve what is larger": ([M40, M40, "free 0", 42 * MIB], 122),
    "a gap serves what is smaller": ([M40, M40, "free 0", 42 * MIB, M30], 122),
    "the smallest piece that fits is taken": ([M60, M30, "free 0", "free 1", M30, M60], 90),
    # A piece in the middle of a large segment, and a smaller segment.
    "free pieces of one size are told apart": (
        [100 * MIB, "free 0", M40, M20, M40, M20, "free 2", "free 4", M20, M20],
        120,
    ),
}


def test_free_pieces_are_used_again_and_unused_segments_go_back_where_memory_runs_out() -> None:
    for name, (steps, reserved) in SEQUENCES.items():
        assert after(steps).reserved == reserved * MIB, name
    assert after([M40, M40, "free 0", M50], capacity=100 * MIB).reserved == 90 * MIB
    allocator = after([M40, M40, "free 0", M50, M50], capacity=100 * MIB)  # too much
    assert allocator.reserved == allocator.peak_reserved == 140 * MIB
    assert allocator.peak_allocated == allocator.allocated == 140 * MIB


EXPANDABLE: dict[str, tuple[Sequence[Step], int]] = {
    "pages of 20 MiB": ([M5], 20),
    "and of 2 MiB for small pieces": ([512, MIB, 512, MIB], 4),
    "what is left of a page serves the next": ([30 * MIB, M8], 40),
    "a free end grows by what is missing": ([M40, M40, "free 1", M60], 100),
    "a gap doesn't serve what is larger": ([M40, M40, "free 0", M60], 140),
    "but joins its neighbours": ([M40, M40, M40, "free 0", "free 1", 80 * MIB], 120),
    "a rest of 512 bytes is a piece": ([11 * MIB, 9 * MIB], 20),
    "streams have segments of their own": ([M5, (M5, 1)], 40),
}


def test_expandable_segments_grow_at_their_end() -> None:
    """As `try_allocate_expandable_block` and `should_split` of c10/cuda/CUDACachingAllocator.cpp (torch 2.9)."""
    for name, (steps, reserved) in EXPANDABLE.items():
        assert after(steps, expandable=True).reserved == reserved * MIB, name
    room = after([M40, M40, "free 1", (M40, 1)], capacity=90 * MIB, expandable=True)
    assert (room.reserved, room.peak_reserved) == (80 * MIB, 80 * MIB)
    none_left = after([M40, "free 0", (M40, 1)], capacity=50 * MIB, expandable=True)
    assert none_left.reserved == 40 * MIB
