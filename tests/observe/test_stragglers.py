"""Which processes a run names as stragglers."""

import math

import pytest

from portable_fsdp.observe.goodput import StragglerWatch, imbalance

EVEN = (1.0, 1.1, 1.0, 0.9)
SLOW = (1.0, 1.1, 1.8, 0.9)


def test_a_process_is_named_once_when_it_was_slow_in_9_of_10_steps() -> None:
    watch = StragglerWatch(["host1", "host1", "host2", "host2"])
    steps = [SLOW] * 5 + [EVEN] * 2 + [SLOW] * 9 + [SLOW] * 20
    named = [(number, *watch.add(own, 4.0)) for number, own in enumerate(steps, start=1)]
    ((number, straggler),) = [line for line in named if len(line) == 2]
    assert number == 16  # the last ten hold one even step
    assert str(straggler) == "process 2 on host2 is 1.8x slower than the median in 9 of the last 10 steps"


@pytest.mark.parametrize(
    ("own", "seconds", "processes"),
    [
        ((1.0, 1.4), 2.0, [1]),  # of two the faster one counts as the median
        ((1.0, 1.29, 1.0), 2.0, []),
        ((1.0, 1.8, 1.0), 100.0, []),  # 0.8 s more of 100 s
        ((2.0, 2.0, 1.0), 2.0, []),  # one that is fast makes no other slow
        ((1.0, 1.0, 1.0, 5.0, 3.0), 6.0, [3, 4]),
        ((1.0, math.nan, 9.0), 9.0, []),
        ((5.0,), 5.0, []),
    ],
)
def test_who_is_slow(own: tuple[float, ...], seconds: float, processes: list[int]) -> None:
    watch = StragglerWatch([f"host{index}" for index in range(len(own))])
    assert [straggler.process for _ in range(9) for straggler in watch.add(own, seconds)] == processes


def test_imbalance_is_over_the_median_and_unknown_where_a_value_is() -> None:
    assert imbalance((2.0, 6.0, 1.0)) == 3.0
    assert imbalance((2.0, 3.0)) == 1.5
    assert imbalance((2.0, math.nan)) is None
