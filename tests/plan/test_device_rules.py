"""The rule for bytes of tensors on a TPU, against arguments of a program that libtpu compiles."""

import importlib.util
import os
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from portable_fsdp.plan.device_rules import CachingAllocator, tiled_bytes
from portable_fsdp.plan.tpu_compiler import ENVIRONMENT, devices_of
from portable_fsdp.runtime.child import Worker

SHAPES = [
    *[(1,), (129,), (1000,), (1025,), (5000,), (1, 1), (2, 128), (3, 128), (9, 128), (12, 100), (4096, 1), (4096, 64)],
    *[(100, 300), (3, 5, 7), (2, 2048), (2, 2048, 64), (4, 2048, 32, 64), (2, 1, 1, 64), (16, 2, 300), ()],
]
DTYPES = {"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2}


def _compiled_bytes() -> dict[tuple[str, tuple[int, ...]], int]:
    """For a child: bytes of an argument of a program, by dtype and shape."""
    os.environ.update(ENVIRONMENT)  # before jax is imported
    import jax
    from jax.sharding import SingleDeviceSharding

    sharding, sizes = SingleDeviceSharding(devices_of("v6e:2x2")[0]), dict[tuple[str, tuple[int, ...]], int]()
    for dtype, shape in product(DTYPES, SHAPES):
        argument = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        lowered: Any = jax.jit(lambda a: a + a).trace(argument).lower(lowering_platforms=("tpu",))
        sizes[dtype, shape] = lowered.compile().memory_analysis().argument_size_in_bytes
    return sizes


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu and jax")
def test_tensors_take_what_libtpu_gives_a_programs_arguments() -> None:
    with Worker() as worker:
        sizes = worker(_compiled_bytes)
    assert sizes == {(d, shape): tiled_bytes(shape, size) for d, size in DTYPES.items() for shape in SHAPES}


def test_large_tensors_are_not_padded() -> None:
    assert tiled_bytes((4096, 128256), 2) == 2 * 4096 * 128256
    assert tiled_bytes((4096, 64), 2) == 2 * 4096 * 64  # the long dimension comes last
    assert tiled_bytes((0, 5), 4) == 0


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
