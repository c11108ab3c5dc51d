"""Bounds against arithmetic done by hand, and runs beside them; test_time_bounds.py has what others measured."""

from typing import Any

import pytest

from portable_fsdp.plan.result import Time, Work
from portable_fsdp.plan.target import parse_target
from portable_fsdp.plan.time import MeasuredStep, bound, compare, measured_steps, over_links
from portable_fsdp.runtime.errors import UsageError


def bound_of(
    text: str, flops: dict[str, float], memory: float = 1, tokens: int = 8, model: float = 1, **sent: float
) -> Time:
    work = Work(matmul_flops=flops, memory_bytes=memory, collectives={}, sent_bytes=sent)
    return bound(work, parse_target(text), tokens_per_step=tokens, model_flops_per_device=model)


def test_the_greatest_bound_binds() -> None:
    flops = {"bfloat16": 989e12, "float32": 67e12}
    sent = {"nvlink": 900e9, "network": 50e9, "ici": 1.0}
    time = bound_of("h100:16", flops, 3 * 3.35e12, tokens=3200, model=2 * 989e12, **sent)
    assert time.bounds == pytest.approx({"compute": 2, "memory": 3, "nvlink": 1, "network": 0.5})  # halved in switches
    assert (time.seconds, time.binds) == (pytest.approx(3), "memory")
    assert time.tokens_per_second == pytest.approx(3200 / 3)
    assert time.tokens_per_second_per_device == pytest.approx(200 / 3)
    assert time.mfu == pytest.approx(2 / 3)


def test_links_without_switches_that_reduce_take_the_whole_and_unknown_ones_are_left_out() -> None:
    assert bound_of("a100-80gb:8", {}, nvlink=300e9, ici=350e9).links_s == pytest.approx({"nvlink": 1})
    assert bound_of("v5p:2x2x4", {}, nvlink=300e9, ici=350e9).links_s == pytest.approx({"ici": 1})  # 3.5 links
    assert bound_of("2*v4-32", {}, network=1e9).links_s == {}
    time = bound_of("cpu:2", {"bfloat16": 1e12}, 1e9, network=1e9)
    assert time.bounds == {}
    assert (time.seconds, time.binds, time.tokens_per_second, time.mfu) == (None, None, None, None)


@pytest.mark.parametrize(
    ("text", "dtype", "seconds"),
    [
        ("v5p:2x2x1", "float32", 1 / 459),  # no figure: no product is faster than bfloat16's
        ("h100", "float32", 1 / 67),
        ("h100", "tf32", 1 / 494.5),
        ("a100-40gb", "float16", 1 / 312),
        ("v100-16gb", "float16", 1 / 125),
        ("v100-16gb", "bfloat16", None),
    ],
)
def test_dtypes(text: str, dtype: str, seconds: float | None) -> None:
    expected = None if seconds is None else pytest.approx(seconds)
    assert bound_of(text, {dtype: 1e12}).compute_s == expected
    with pytest.raises(ValueError, match="'bf16'"):
        bound_of(text, {"bf16": 1e12})


@pytest.mark.parametrize(
    ("text", "members", "stride", "sent"),
    [
        ("h100:8", None, 1, {"nvlink": 7 / 8}),
        ("h100:64", None, 1, {"nvlink": 7 / 8, "network": 7 / 8 / 8}),  # a part crosses the network once a host
        ("h100:64", 16, 1, {"nvlink": 7 / 8, "network": 1 / 2 / 8}),
        ("h100:64", 4, 1, {"nvlink": 3 / 4}),
        ("h100:64", 8, 8, {"network": 7 / 8}),  # the same device of each host
        ("h100:64", 16, 4, {"nvlink": 1 / 2, "network": 7 / 8 / 2}),
        ("h100:6", None, 1, {"nvlink": 5 / 6}),
        ("h100", None, 1, {}),
        ("v6e-16", None, 1, {"ici": 15 / 16}),
        ("tpu7x:2x2x2", None, 1, {"ici": 7 / 8 / 2}),  # a chip's two devices share what reaches it
        ("2*v6e-16", None, 1, {"ici": 15 / 16, "network": 1 / 2 / 16}),
        ("2*v6e-16", 2, 16, {"network": 1 / 2}),
        ("cpu:2", None, 1, {}),
    ],
)
def test_traffic_is_divided_over_links(text: str, members: int | None, stride: int, sent: dict[str, float]) -> None:
    assert over_links(parse_target(text).levels, 1.0, members=members, stride=stride) == pytest.approx(sent)


def test_groups_that_do_not_fit_are_refused() -> None:
    for members, stride in ((3, 1), (8, 3)):
        with pytest.raises(ValueError, match="no groups of"):
            over_links(parse_target("h100:64").levels, 1.0, members=members, stride=stride)


# ------------------------------------------------------------------------------------------------------- comparison


def planned(text: str) -> Time:
    """16 rows of 8192 tokens, 0.86 s of an H100's products."""
    return bound_of(text, {"bfloat16": 850e12}, 1e9, tokens=131_072, model=900e12)


def rows_of(times: list[float], tokens: int = 131_072, mfu: float | None = 0.4) -> list[dict[str, Any]]:
    return [{"step": n, "seconds": seconds, "tokens": tokens, "mfu": mfu} for n, seconds in enumerate(times, start=1)]


def steps_of(times: list[float], mfu: float | None = 0.4) -> list[MeasuredStep]:
    return measured_steps(rows_of(times, mfu=mfu), 131_072)


def test_a_run_is_compared_by_its_median_without_the_first_steps() -> None:
    time = planned("h100:8")
    comparison = compare(time, steps_of([90.0, 9.0, 9.0, 9.0, 9.0, 2.0, 30.0, 2.5]))
    assert (comparison.steps, comparison.seconds, comparison.mfu) == (3, 2.5, 0.4)
    assert comparison.tokens_per_second == pytest.approx(131_072 / 2.5)
    assert time.seconds is not None
    assert comparison.ratio == pytest.approx(2.5 / time.seconds)
    short = compare(time, steps_of([9.0, 2.0], mfu=None))
    assert (short.steps, short.seconds, short.tokens_per_second, short.mfu) == (1, 2.0, 65_536.0, None)
    assert compare(planned("cpu:2"), steps_of([9.0])).ratio is None


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "found 0 rows"),
        ([{"step": 1}], "found 1 rows of which some are something else"),
        (rows_of([0.0]), "of which some are something else"),
        (rows_of([1.0], tokens=64), "131,072 tokens a step, as planned, found 64"),
    ],
)
def test_what_cannot_be_compared_is_refused(rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        measured_steps(rows, 131_072)
