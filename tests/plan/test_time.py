"""Bounds against arithmetic done by hand, and runs beside them; test_time_bounds.py has what others measured."""

from typing import Any

import pytest

from portable_fsdp.plan import hardware
from portable_fsdp.plan.result import Time, Work
from portable_fsdp.plan.target import parse_target
from portable_fsdp.plan.time import bound, compare, over_links
from portable_fsdp.runtime.errors import UsageError

# ------------------------------------------------------------------------------------------------------ by hand


def test_the_greatest_bound_binds() -> None:
    work = Work(
        matmul_flops={"bfloat16": 989e12, "float32": 67e12},
        memory_bytes=3 * 3.35e12,
        collectives={},
        sent_bytes={"nvlink": 900e9, "network": 50e9, "ici": 1.0},
    )
    target = parse_target("h100:16")
    time = bound(work, target, tokens_per_step=3200, model_flops_per_device=2 * 989e12)
    assert time.bounds == pytest.approx({"compute": 2, "memory": 3, "nvlink": 1, "network": 0.5})  # halved in switches
    assert (time.seconds, time.binds) == (pytest.approx(3), "memory")
    assert time.tokens_per_second == pytest.approx(3200 / 3)
    assert time.tokens_per_second_per_device == pytest.approx(200 / 3)
    assert time.mfu == pytest.approx(2 / 3)


def test_links_without_switches_that_reduce_take_the_whole() -> None:
    work = Work(matmul_flops={}, memory_bytes=0, collectives={}, sent_bytes={"nvlink": 300e9, "ici": 350e9})
    of = lambda text: bound(work, parse_target(text), tokens_per_step=1, model_flops_per_device=1)  # noqa: E731
    assert of("a100-80gb:8").links_s == pytest.approx({"nvlink": 1})
    assert of("v5p:2x2x4").links_s == pytest.approx({"ici": 1})  # 3.5 links of 100 GB/s


def test_what_is_not_known_is_left_out() -> None:
    work = Work(matmul_flops={"bfloat16": 1e12}, memory_bytes=1e9, collectives={}, sent_bytes={"network": 1e9})
    time = bound(work, parse_target("cpu:2"), tokens_per_step=8, model_flops_per_device=1e12)
    assert time.bounds == {}
    assert (time.seconds, time.binds, time.tokens_per_second, time.mfu) == (None, None, None, None)
    assert bound(work, parse_target("2*v4-32"), tokens_per_step=8, model_flops_per_device=1).links_s == {}


@pytest.mark.parametrize(
    ("text", "dtype", "seconds"),
    [
        ("v5p:2x2x1", "float32", 1 / 459),  # no figure: no product is faster than bfloat16's
        ("h100", "float32", 1 / 67),
        ("h100", "tf32", 1 / 494.5),
        ("a100-40gb", "float16", 1 / 312),
        ("v100-16gb", "float16", None),  # no figure for bfloat16 either
    ],
)
def test_dtypes(text: str, dtype: str, seconds: float | None) -> None:
    work = Work(matmul_flops={dtype: 1e12}, memory_bytes=1, collectives={}, sent_bytes={})
    found = bound(work, parse_target(text), tokens_per_step=1, model_flops_per_device=1).compute_s
    assert found == (None if seconds is None else pytest.approx(seconds))


def test_an_unknown_dtype_is_no_silence() -> None:
    work = Work(matmul_flops={"bf16": 1e12}, memory_bytes=1, collectives={}, sent_bytes={})
    with pytest.raises(ValueError, match="'bf16'"):
        bound(work, parse_target("h100"), tokens_per_step=1, model_flops_per_device=1)


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


@pytest.mark.parametrize(("members", "stride"), [(3, 1), (8, 3)])
def test_groups_that_do_not_fit_are_refused(members: int, stride: int) -> None:
    with pytest.raises(ValueError, match="no groups of"):
        over_links(parse_target("h100:64").levels, 1.0, members=members, stride=stride)


# ------------------------------------------------------------------------------------------------------- comparison


def planned(text: str) -> Time:
    """16 rows of 8192 tokens, 0.86 s of an H100's products."""
    work = Work(matmul_flops={"bfloat16": 850e12}, memory_bytes=1e9, collectives={}, sent_bytes={})
    return bound(work, parse_target(text), tokens_per_step=131_072, model_flops_per_device=900e12)


def rows_of(seconds: list[float], tokens: int = 131_072, mfu: float | None = 0.4) -> list[dict[str, Any]]:
    return [{"step": n, "seconds": one, "tokens": tokens, "mfu": mfu} for n, one in enumerate(seconds, start=1)]


def test_a_run_is_compared_by_its_median_without_the_first_steps() -> None:
    time = planned("h100:8")
    found = compare(time, rows_of([90.0, 9.0, 9.0, 9.0, 9.0, 2.0, 30.0, 2.5]))
    assert (found.steps, found.seconds, found.mfu) == (3, 2.5, 0.4)
    assert found.tokens_per_second == pytest.approx(131_072 / 2.5)
    assert time.seconds is not None
    assert found.ratio == pytest.approx(2.5 / time.seconds)


def test_a_short_run_and_unknown_hardware_are_compared_too() -> None:
    assert compare(planned("h100:8"), rows_of([9.0, 2.0], mfu=None)).model_dump() | {"ratio": 0} == {
        **{"steps": 1, "seconds": 2.0, "tokens_per_second": 65_536.0, "mfu": None, "ratio": 0},
    }
    assert compare(planned("cpu:2"), rows_of([9.0])).ratio is None


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "found 0 rows"),
        ([{"step": 1}], "found 1 rows of which some are something else"),
        (rows_of([0.0]), "of which some are something else"),
        (rows_of([1.0], tokens=64), "131,072 tokens a step, as planned, found 64"),
    ],
)
def test_what_cannot_be_compared_is_refused(rows: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        compare(planned("h100:8"), rows)


def test_hardware_imports_no_torch() -> None:
    assert "torch" not in vars(hardware)
