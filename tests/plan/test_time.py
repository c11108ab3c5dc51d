"""Expected times against arithmetic done by hand; test_expected_times.py has what others measured."""

import math
from typing import Any

import pytest

from portable_fsdp.plan.fake_step import operations_of as gpu_operations
from portable_fsdp.plan.hlo import operations_of as tpu_operations
from portable_fsdp.plan.memory_trace import Block, Collective, CollectiveRun, KernelPart, KernelRun, fused
from portable_fsdp.plan.result import Expected
from portable_fsdp.plan.target import parse_target
from portable_fsdp.plan.time import GPU_KERNEL_S, Compute, Rates, compare, expected_time, over_links, rates_of
from portable_fsdp.runtime.errors import UsageError

TRAFFIC: dict[tuple[str, int | None, int, bool], dict[str, float]] = {  # target, members, stride, is all-to-all
    ("h100:8", None, 1, False): {"nvlink": 7 / 8},
    ("h100:64", None, 1, False): {"nvlink": 7 / 8, "network": 7 / 8 / 8},  # a part crosses the network once a host
    ("h100:64", 16, 1, False): {"nvlink": 7 / 8, "network": 1 / 2 / 8},
    ("h100:64", 4, 1, False): {"nvlink": 3 / 4},
    ("h100:64", 8, 8, False): {"network": 7 / 8},  # the same device of each host
    ("h100:64", 16, 4, False): {"nvlink": 1 / 2, "network": 7 / 8 / 2},
    ("h100:6", None, 1, False): {"nvlink": 5 / 6},
    ("v6e-16", None, 1, False): {"ici": 15 / 16},
    ("tpu7x:2x2x2", None, 1, False): {"ici": 7 / 8 / 2},  # a chip's two devices share what reaches it
    ("2*v6e-16", None, 1, False): {"ici": 15 / 16, "network": 1 / 2 / 16},
    ("2*v6e-16", 2, 16, False): {"network": 1 / 2},
    **{("h100", None, 1, False): {}, ("cpu:2", None, 1, False): {}},
    # An all-to-all sends a piece to each device.
    ("h100:8", None, 1, True): {"nvlink": 7 / 8},
    ("h100:64", 4, 2, True): {"nvlink": 3 / 4},
    ("h100:64", 16, 1, True): {"nvlink": 7 / 16, "network": 8 / 16},  # eight of sixteen pieces leave the host
    ("h100:64", 8, 8, True): {"network": 7 / 8},  # one device of each host
    ("h100:64", 32, 2, True): {"nvlink": 3 / 32, "network": 28 / 32},  # four of each host
}


def test_traffic_is_divided_over_links() -> None:
    for (text, members, stride, exchanges), sent in TRAFFIC.items():
        links = over_links(parse_target(text).levels, 1.0, members=members, stride=stride, exchanges=exchanges)
        assert links == pytest.approx(sent), (text, members, stride, exchanges)


def test_a_run_is_compared_by_its_median_without_the_first_steps() -> None:
    for times, mfu, expected in (
        ([90.0, 9.0, 9.0, 9.0, 9.0, 2.0, 30.0, 2.5], 0.4, (3, 2.5, 131_072 / 2.5, 0.4)),
        ([9.0, 2.0], None, (1, 2.0, 65_536.0, None)),
    ):
        rows = [{"seconds": seconds, "tokens": 131_072, "mfu": mfu} for seconds in times]
        assert tuple(compare(rows, 131_072).model_dump().values()) == expected


def test_what_cannot_be_compared_is_refused() -> None:
    row = {"step": 1, "seconds": 1.0, "tokens": 131_072, "mfu": 0.4}
    wrong = [{"mfu": "x"}, {"tokens": [1]}, *({"seconds": seconds} for seconds in (True, math.nan, 0.0))]
    others = [([row | change], "found 1 rows, some of them invalid") for change in wrong]
    for rows, message in [([], "found 0 rows"), ([row | {"tokens": 64}], "as planned, found 64"), *others]:
        with pytest.raises(UsageError, match=message):
            compare(rows, 131_072)


RATES = Rates({"bfloat16": 2e9}, 0.5, attention=0.25, memory=1e6, links={"nvlink": 1e3, "ici": 1e3, "network": 1e2})
"""1e9 FLOP/s of products, 1e6 bytes/s of memory."""
GPU_RATES = RATES._replace(kernel_s=GPU_KERNEL_S)
GATHER = Collective("all_gather", "bfloat16", 0, (0, 1), "a")  # 3,000 bytes: 3 s
REDUCE = Collective("reduce_scatter", "bfloat16", 0, (0, 1), "a")  # 2,000: 2 s
SENT = {GATHER: {"nvlink": 3e3}, REDUCE: {"nvlink": 2e3}}


def block(freed: float = float("inf")) -> Block:
    return Block(0, 0, "activations", "", "", freed)


def kernel(flops: float = 0.0, *, part: KernelPart = "products", reads: Any = (), writes: Any = ()) -> KernelRun:
    return KernelRun(part, "bfloat16", flops, list(reads), list(writes))


def run_gpu(*entries: KernelRun | CollectiveRun, is_compiled: bool = False) -> Expected:
    expected = expected_time(gpu_operations([list(entries)], SENT, is_compiled=is_compiled), GPU_RATES)
    assert sum(expected.parts.values()) == pytest.approx(expected.seconds)
    return expected


def test_a_kernel_takes_its_flops_or_its_bytes_or_its_start() -> None:
    assert run_gpu(kernel(3e9)).parts == {"products": 3.0}
    assert run_gpu(kernel(3e9, part="attention")).parts == {"attention": 6.0}
    assert run_gpu(kernel(3e9, reads=[(block(), 4_000_000)], writes=[(block(), 1_000_000)])).seconds == 5.0
    assert run_gpu(kernel(part="copies")).seconds == GPU_KERNEL_S


def test_a_gather_runs_beside_the_layer_before_and_is_waited_for_where_it_is_read() -> None:
    first, second = block(), block()
    # The second is asked for when the first layer begins: 3 of 4 seconds of compute hide it, or 1 of 1.
    for seconds, exposed in ((4, 3.0), (1, 3.0 + 2.0)):
        kernels = [(weights, kernel(seconds * 1e9, reads=[(weights, 0)])) for weights in (first, second)]
        expected = run_gpu(*[entry for weights, run in kernels for entry in (CollectiveRun(GATHER, weights), run)])
        assert expected.parts == {"exposed communication": exposed, "products": 2.0 * seconds}


def test_gradients_are_reduced_beside_backward_and_a_program_ends_after_them() -> None:
    assert run_gpu(kernel(1e9), CollectiveRun(REDUCE, None), kernel(5e9)).parts == {"products": 6.0}
    last = run_gpu(kernel(1e9), CollectiveRun(REDUCE, None), kernel(1e9))
    assert last.parts == {"products": 2.0, "exposed communication": 1.0}
    weights = block()
    gather = CollectiveRun(GATHER, weights)
    both = run_gpu(kernel(1e9), CollectiveRun(REDUCE, None), gather, kernel(1e9, reads=[(weights, 0)]))
    assert both.seconds == 7.0  # one link: 1 to 3, then 3 to 6
    # Compute waits for its own collectives, which wait for no gather.
    summed = CollectiveRun(REDUCE, None, is_waited_for=True)
    expected = run_gpu(kernel(1e9), gather, summed, kernel(4e9), kernel(1e9, reads=[(weights, 0)]))
    assert expected.parts == {"products": 6.0, "exposed communication": 2.0}  # 1 to 3; the gather: 0 to 3


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
    assert run_gpu(*chain, is_compiled=True).seconds < run_gpu(*chain).seconds


PRODUCT = """
%product (p0: f32[500,1000], p1: f32[1000,1000]) -> f32[500,1000] {
  %p0 = f32[500,1000]{1,0} parameter(0)
  %p1 = f32[1000,1000]{1,0} parameter(1)
  ROOT %c = f32[500,1000]{1,0} convolution(%p0, %p1), dim_labels=bf_io->bf
}
"""
"""1e9 FLOPs: a second; its 8 MB are in on-chip memory where the caller says so."""
A = "%a = f32[500,1000]{1,0:S(1)} parameter(0)"
B = "%b = f32[1000,1000]{1,0:S(1)} parameter(1)"
RUN = "%run = f32[500,1000]{1,0:S(1)} fusion(%a, %b), kind=kOutput, calls=%product"
IN_MAIN_MEMORY = [line.replace("S(1)", "T(8,128)") for line in (A, B, RUN)]
# 3,000 bytes.
TEXT_OF_GATHER = "%gather = f32[1000]{0} all-gather(%piece), channel_id=3, replica_groups={{0,1,2,3}}, dimensions={0}"
STARTED = """
%begin (p: f32[250]) -> f32[1000] {
  %p = f32[250]{0} parameter(0)
  %g = f32[1000]{0} all-gather(%p), channel_id=3, replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %s = f32[1000]{0} custom-call(%g), custom_call_target="AsyncCollectiveStart"
}
%end (p: f32[1000]) -> f32[1000] {
  %p = f32[1000]{0} parameter(0)
  %g = f32[1000]{0} all-gather(%p), channel_id=3, replica_groups={{0,1,2,3}}, dimensions={0}
  ROOT %s = f32[1000]{0} custom-call(%g), custom_call_target="AsyncCollectiveDone"
}
"""
BEGIN = "%begun = f32[1000]{0} fusion(%piece), kind=kCustom, calls=%begin"
END = "%ended = f32[1000]{0} fusion(%begun), kind=kCustom, calls=%end"
MORE = BEGIN.replace("%begun", "%more").replace("calls=%begin", "calls=%again")
AGAIN = STARTED.partition("%end")[0].replace("%begin", "%again").replace("channel_id=3", "channel_id=4")
START = TEXT_OF_GATHER.replace("f32[1000]{0} all-gather(", "(f32[250], f32[1000]) all-gather-start(")
DONE = "%d = f32[1000]{0} all-gather-done(%gather)"
LOOP = """
%condition (s: (s32[])) -> pred[] {
  %s = (s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] constant(7)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}
%body (s: (s32[])) -> (s32[]) {
  %s = (s32[]) parameter(0)
  %a = f32[500,1000]{1,0:S(1)} get-tuple-element(%s), index=1
  %b = f32[1000,1000]{1,0:S(1)} get-tuple-element(%s), index=2
  %gather = f32[1000]{0} all-gather(%a), channel_id=9, replica_groups={{0,1,2,3}}, dimensions={0}
  %run = f32[500,1000]{1,0:S(1)} fusion(%a, %b), kind=kOutput, calls=%product
}
"""
TURNING = "%loop = (s32[]) while(%init), condition=%condition, body=%body"
FUSIONS = """
%take (p0: f32[1000,1000], p1: s32[]) -> f32[1,1000] {
  %p0 = f32[1000,1000]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %slice = f32[1,1000]{1,0} dynamic-slice(%p0, %p1, %p1), dynamic_slice_sizes={1,1000}
}
%put (p0: f32[1000,1000], p1: f32[1,1000], p2: s32[]) -> f32[1000,1000] {
  %p0 = f32[1000,1000]{1,0} parameter(0)
  %p1 = f32[1,1000]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  ROOT %update = f32[1000,1000]{1,0} dynamic-update-slice(%p0, %p1, %p2, %p2)
}
"""
TABLE = "%table = f32[1000,1000]{1,0} parameter(0)"
ROW = "%row = f32[1,1000]{1,0} parameter(1)"
TAKE = "%taken = f32[1,1000]{1,0} fusion(%table, %i), kind=kLoop, calls=%take"
PUT = "%new = f32[1000,1000]{1,0} fusion(%table, %row, %i), kind=kLoop, calls=%put"
SEND = (
    "%s = (f32[100]{0}, u32[], token[]) send(%a, %t), channel_id=5, frontend_attributes={"
    '_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_transfer_type="ALL_REDUCE"}'
)
RECEIVED = "%r = (f32[100]{0}, token[]) recv-done(%recv), channel_id=6"
WALKS: dict[str, tuple[list[str], float, float, float, float]] = {  # lines, seconds of parts, synchronous bytes
    "products take their FLOPs": ([A, B, RUN], 1.0, 0.0, 0.0, 0),
    "or their bytes of main memory": (IN_MAIN_MEMORY, 8.0, 0.0, 0.0, 0),
    "a synchronous collective stops compute": ([A, B, TEXT_OF_GATHER, RUN], 1.0, 0.0, 3.0, 3000),
    "start and done of the plain form": ([A, B, START, RUN, DONE], 1.0, 0.0, 2.0, 0),
    # An asynchronous one is waited for only where its end comes too early.
    **{f"{n} beside it": ([A, B, BEGIN, *[RUN] * n, END, RUN], n + 1, 0.0, max(3.0 - n, 0.0), 0) for n in (1, 2, 3, 4)},
    "what follows on one link waits for it": ([A, B, BEGIN, MORE, RUN], 1.0, 0.0, 5.0, 0),  # two gathers of 3 s
    "a loop counts as often as it turns": ([TURNING], 7.0, 0.0, 21.0, 21000),
    "of a table only the rows that are taken": ([TABLE, ROW, TAKE], 0.0, 0.008, 0.0, 0),
    "or replaced": ([TABLE, ROW, PUT], 0.0, 0.008, 0.0, 0),
    "the network is a separate link": ([A, B, SEND, RUN, RECEIVED], 1.0, 0.0, 3.0, 0),  # 400 bytes at 100 a second
}


@pytest.mark.parametrize("what", WALKS)
def test_the_time_of_a_tpus_schedule(what: str) -> None:
    lines, products, copies, exposed, synchronous = WALKS[what]
    body = "\n".join(f"  {line}" for line in lines)
    computations = PRODUCT + STARTED + AGAIN + LOOP + FUSIONS
    text = f"HloModule step\n{computations}\nENTRY %main (a: f32[500,1000]) -> f32[] {{\n{body}\n}}\n"
    time = expected_time(tpu_operations(text, 4), RATES)
    assert sum(time.parts.values()) == pytest.approx(time.seconds)
    expected = {"products": products, "copies": copies, "exposed communication": exposed}
    assert time.parts == pytest.approx({part: seconds for part, seconds in expected.items() if seconds}, rel=0.02)
    assert time.synchronous_bytes == ({"all_gather": synchronous} if synchronous else {})


def test_shares_are_known_of_hardware_that_runs_were_published_for() -> None:
    rates = rates_of(parse_target("v6e:4x4"))
    assert rates is not None
    in_float32 = rates.seconds_of(Compute("products", 918e12, 0, "float32"))  # for which the vendor names no peak
    assert in_float32 == pytest.approx(1 / rates.products)
    assert all(0 < share < 1 for share in (rates.products, rates.attention, rates.memory / 1638e9))
    assert rates_of(parse_target("cpu:2")) is None
