"""The operations of a GPU and their time, by hand: 1e9 FLOP/s of products, 1e6 bytes/s of memory, 1e3 over NVLink."""

from typing import Any

import pytest

from portable_fsdp.plan.fake_step import fused, operations_of
from portable_fsdp.plan.memory_trace import Block, Collective, CollectiveRun, KernelPart, KernelRun
from portable_fsdp.plan.result import Expected
from portable_fsdp.plan.time import GPU_KERNEL_S, Rates, expected_time

RATES = Rates({"bfloat16": 2e9}, products=0.5, attention=0.25, memory=1e6, links={"nvlink": 1e3}, kernel_s=GPU_KERNEL_S)
GATHER = Collective("all_gather", "bfloat16", 0, (0, 1), "a")  # 3,000 bytes: 3 s
REDUCE = Collective("reduce_scatter", "bfloat16", 0, (0, 1), "a")  # 2,000: 2 s
SENT = {GATHER: {"nvlink": 3e3}, REDUCE: {"nvlink": 2e3}}


def block(freed: float = float("inf")) -> Block:
    return Block(0, 0, "activations", "", "", freed)


def kernel(flops: float = 0.0, *, part: KernelPart = "products", reads: Any = (), writes: Any = ()) -> KernelRun:
    return KernelRun(part, "bfloat16", flops, list(reads), list(writes))


def run(*entries: KernelRun | CollectiveRun, is_compiled: bool = False) -> Expected:
    expected = expected_time(operations_of([list(entries)], SENT, is_compiled=is_compiled), RATES)
    assert sum(expected.parts.values()) == pytest.approx(expected.seconds)
    return expected


def test_a_kernel_takes_its_flops_or_its_bytes_or_its_start() -> None:
    assert run(kernel(3e9)).parts == {"products": 3.0}
    assert run(kernel(3e9, part="attention")).parts == {"attention": 6.0}
    assert run(kernel(3e9, reads=[(block(), 4_000_000)], writes=[(block(), 1_000_000)])).seconds == 5.0
    assert run(kernel(part="copies")).seconds == GPU_KERNEL_S


def test_a_gather_runs_beside_the_layer_before_and_is_waited_for_where_it_is_read() -> None:
    first, second = block(), block()
    layers = [
        *[CollectiveRun(GATHER, first), kernel(4e9, reads=[(first, 0)])],
        *[CollectiveRun(GATHER, second), kernel(4e9, reads=[(second, 0)])],
    ]
    expected = run(*layers)  # the second is asked for when the first layer begins: 3 of its 4 seconds hide it
    assert expected.parts == {"exposed communication": 3.0, "products": 8.0}
    short = run(*[entry if isinstance(entry, CollectiveRun) else kernel(1e9, reads=entry.reads) for entry in layers])
    assert short.parts == {"exposed communication": 3.0 + 2.0, "products": 2.0}


def test_gradients_are_reduced_beside_backward_and_a_program_ends_after_them() -> None:
    assert run(kernel(1e9), CollectiveRun(REDUCE, None), kernel(5e9)).parts == {"products": 6.0}
    last = run(kernel(1e9), CollectiveRun(REDUCE, None), kernel(1e9))
    assert last.parts == {"products": 2.0, "exposed communication": 1.0}
    weights = block()
    both = run(
        kernel(1e9), CollectiveRun(REDUCE, None), CollectiveRun(GATHER, weights), kernel(1e9, reads=[(weights, 0)])
    )
    assert both.seconds == 7.0  # one link: 1 to 3, then 3 to 6


def test_a_compiler_fuses_what_stands_between_products() -> None:
    given, saved = block(), block()
    first, second = block(freed=2), block(freed=3)  # entries 1 and 2 write them; the next one reads them
    chain = [
        kernel(1e9),
        kernel(part="elementwise", reads=[(given, 10)], writes=[(first, 10)]),
        kernel(part="elementwise", reads=[(first, 10), (given, 10)], writes=[(second, 10)]),
        kernel(part="copies", reads=[(second, 10)], writes=[(saved, 10)]),
        kernel(1e9, reads=[(saved, 10)]),
    ]
    _, one, _ = fused(list(chain))
    assert isinstance(one, KernelRun)
    assert (one.reads, one.writes) == ([(given, 10)], [(saved, 10)])
    second.freed = 9  # backward reads it
    assert fused(list(chain))[1].writes == [(second, 10), (saved, 10)]  # type: ignore[union-attr]
    assert run(*chain, is_compiled=True).seconds < run(*chain).seconds
