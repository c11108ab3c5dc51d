"""The schedule of a TPU program and its time, by hand: 1e9 FLOP/s of products, 1e6 bytes/s of memory, 1e3 over ICI."""

import math

import pytest

from portable_fsdp.plan.target import parse_target
from portable_fsdp.plan.time import Compute, Rates, expected_time, rates_of
from portable_fsdp.plan.tpu_schedule import operations_of

RATES = Rates({"bfloat16": 2e9}, products=0.5, attention=0.25, memory=1e6, links={"ici": 1e3, "network": 1e2})

PRODUCT = """
%product (p0: f32[500,1000], p1: f32[1000,1000]) -> f32[500,1000] {
  %p0 = f32[500,1000]{1,0} parameter(0)
  %p1 = f32[1000,1000]{1,0} parameter(1)
  ROOT %c = f32[500,1000]{1,0} convolution(%p0, %p1), dim_labels=bf_io->bf
}
"""
"""1e9 FLOPs: a second; its 8 MB are in on-chip memory where the caller says so."""


def walk(
    *lines: str, computations: str = PRODUCT, devices: int = 4
) -> tuple[float, dict[str, float], dict[str, float]]:
    body = "\n".join(f"  {line}" for line in lines)
    text = f"HloModule step\n{computations}\nENTRY %main (a: f32[500,1000]) -> f32[] {{\n{body}\n}}\n"
    expected = expected_time(operations_of(text, devices), RATES)
    assert sum(expected.parts.values()) == pytest.approx(expected.seconds)
    return expected.seconds, expected.parts, expected.synchronous_bytes


A = "%a = f32[500,1000]{1,0:S(1)} parameter(0)"
B = "%b = f32[1000,1000]{1,0:S(1)} parameter(1)"
RUN = "%run{} = f32[500,1000]{{1,0:S(1)}} fusion(%a, %b), kind=kOutput, calls=%product"
GATHER = (
    "%gather = f32[1000]{0} all-gather(%piece), channel_id=3, replica_groups={{0,1,2,3}}, dimensions={0}"  # 3,000 B
)


def test_products_take_their_flops_or_their_bytes_of_main_memory() -> None:
    assert walk(A, B, RUN.format(1)) == (1.0, {"products": 1.0}, {})
    in_main_memory = [line.replace("S(1)", "T(8,128)") for line in (A, B, RUN.format(1))]
    seconds, parts, _ = walk(*in_main_memory)
    assert (seconds, parts) == (8.0, {"products": 8.0})


def test_a_synchronous_collective_stops_compute() -> None:
    seconds, parts, sent = walk(A, B, GATHER, RUN.format(1))
    assert (seconds, parts) == (4.0, {"exposed communication": 3.0, "products": 1.0})
    assert sent == {"all_gather": 3000}


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


@pytest.mark.parametrize("runs", [1, 2, 3, 4])
def test_an_asynchronous_one_is_waited_for_only_where_its_end_comes_too_early(runs: int) -> None:
    between = [RUN.format(number) for number in range(runs)]
    seconds, parts, sent = walk(A, B, BEGIN, *between, END, computations=PRODUCT + STARTED)
    assert (seconds, parts["products"], sent) == (max(3.0, runs), runs, {})
    assert parts.get("exposed communication", 0.0) == max(0.0, 3.0 - runs)


def test_start_and_done_of_the_plain_form() -> None:
    start = GATHER.replace("all-gather(", "all-gather-start(").replace("f32[1000]{0} all", "(f32[250], f32[1000]) all")
    seconds, parts, sent = walk(A, B, start, RUN.format(1), "%d = f32[1000]{0} all-gather-done(%gather)")
    assert (seconds, sent) == (3.0, {})
    assert parts == {"products": 1.0, "exposed communication": 2.0}


def test_what_follows_on_one_link_waits_for_it() -> None:
    other = BEGIN.replace("%begun", "%more").replace("calls=%begin", "calls=%again")
    again = STARTED.partition("%end")[0].replace("%begin", "%again").replace("channel_id=3", "channel_id=4")
    seconds, _, _ = walk(A, B, BEGIN, other, RUN.format(1), computations=PRODUCT + STARTED + again)
    assert seconds == 6.0  # two gathers of 3 s, the product beside them


def test_a_loop_counts_as_often_as_it_turns() -> None:
    loop = """
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
    turning = "%loop = (s32[]) while(%init), condition=%condition, body=%body"
    seconds, parts, sent = walk(turning, computations=PRODUCT + loop)
    assert (seconds, sent) == (28.0, {"all_gather": 21000})
    assert parts == {"products": 7.0, "exposed communication": 21.0}


def test_of_a_table_only_the_rows_that_are_taken_or_replaced_are_moved() -> None:
    fusions = """
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
    table = "%table = f32[1000,1000]{1,0} parameter(0)"
    row = "%row = f32[1,1000]{1,0} parameter(1)"
    take = "%taken = f32[1,1000]{1,0} fusion(%table, %i), kind=kLoop, calls=%take"
    put = "%new = f32[1000,1000]{1,0} fusion(%table, %row, %i), kind=kLoop, calls=%put"
    assert walk(table, row, take, computations=fusions) == (pytest.approx(0.008), {"copies": pytest.approx(0.008)}, {})
    assert walk(table, row, put, computations=fusions)[0] == pytest.approx(0.008)


def test_between_slices_the_network_is_a_link_of_its_own() -> None:
    send = (
        "%s = (f32[100]{0}, u32[], token[]) send(%a, %t), channel_id=5, frontend_attributes={"
        '_xla_host_transfer_handler_name="xla_megascale_runtime",_xla_megascale_transfer_type="ALL_REDUCE"}'
    )
    done = "%r = (f32[100]{0}, token[]) recv-done(%recv), channel_id=6"
    seconds, parts, _ = walk(A, B, send, RUN.format(1), done)
    assert seconds == pytest.approx(4.0, rel=0.02)  # 400 bytes at 100 a second
    assert parts["exposed communication"] == pytest.approx(3.0, rel=0.02)


def test_shares_are_known_of_hardware_that_runs_were_published_for() -> None:
    rates = rates_of(parse_target("v6e:4x4"))
    assert rates is not None
    in_float32 = rates.seconds_of(Compute("products", 918e12, 0, "float32"))  # for which the vendor names no peak
    assert in_float32 == pytest.approx(1 / rates.products)
    assert all(0 < share < 1 for share in (rates.products, rates.attention))
    assert rates.memory < 1638e9
    assert all(math.isfinite(speed) for speed in rates.links.values())
    assert rates_of(parse_target("cpu:2")) is None
