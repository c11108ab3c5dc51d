"""The schedules against closed forms, at their corners and between."""

import math
from itertools import pairwise
from typing import Any

import pytest

from portable_fsdp.config.schema import Optim
from portable_fsdp.optim.schedule import check_schedule, learning_rate
from portable_fsdp.runtime.errors import ConfigError

SCHEDULES = ["constant", "linear", "cosine", "wsd"]
LR = 0.5


def optim(schedule: str, **keys: Any) -> Optim:
    return Optim.model_validate({"lr": LR, "min_lr_ratio": 0.2, "schedule": schedule, **keys})


def rates(config: Optim, total: int) -> list[float]:
    return [learning_rate(config, step, total) for step in range(1, total + 1)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warmup_is_linear_and_ends_at_the_peak(schedule: str) -> None:
    actual = rates(optim(schedule, warmup_steps=4), 20)
    assert actual[:4] == pytest.approx([LR / 4, LR / 2, 3 * LR / 4, LR])
    assert max(actual) == actual[3]


@pytest.mark.parametrize(("schedule", "last"), [("constant", LR), ("linear", 0.1), ("cosine", 0.1), ("wsd", 0.1)])
@pytest.mark.parametrize("warmup", [0, 1, 7, 19])
def test_the_last_step_has_the_floor(schedule: str, last: float, warmup: int) -> None:
    config = optim(schedule, warmup_steps=warmup, decay_ratio=0.05)
    assert learning_rate(config, 20, 20) == pytest.approx(last)
    assert learning_rate(config, 25, 20) == pytest.approx(last)


def test_linear_falls_by_equal_amounts() -> None:
    assert rates(optim("linear", warmup_steps=2), 10)[1:] == pytest.approx([LR - 0.05 * i for i in range(9)])
    # Without warmup the first step has begun to decay.
    assert learning_rate(optim("linear"), 1, 10) == pytest.approx(LR - 0.04)
    assert learning_rate(optim("constant"), 1, 10) == LR


def test_cosine_is_half_a_wave() -> None:
    config = optim("cosine", warmup_steps=10)
    assert learning_rate(config, 60, 110) == pytest.approx((LR + 0.1) / 2)
    assert learning_rate(config, 35, 110) == pytest.approx(0.1 + 0.4 * (1 + math.sqrt(0.5)) / 2)
    assert learning_rate(config, 85, 110) == pytest.approx(0.1 + 0.4 * (1 - math.sqrt(0.5)) / 2)


def test_wsd_is_stable_then_falls_in_its_last_share() -> None:
    actual = rates(optim("wsd", warmup_steps=5, decay_ratio=0.25), 40)
    assert actual[4:30] == [LR] * 26
    assert actual[30:] == pytest.approx([LR - 0.04 * i for i in range(1, 11)])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_it_is_never_zero_and_never_rises_after_warmup(schedule: str) -> None:
    assert all(later <= earlier for earlier, later in pairwise(rates(optim(schedule, warmup_steps=3), 50)[2:]))
    for warmup, total in ((0, 1), (1, 1), (3, 3), (0, 7), (6, 7)):
        config = optim(schedule, warmup_steps=warmup, min_lr_ratio=1e-6)
        assert all(learning_rate(config, step, total) > 0 for step in range(1, total + 3))


def test_parts_that_do_not_fit_are_refused() -> None:
    check_schedule(optim("cosine", warmup_steps=10), 10)
    with pytest.raises(ConfigError, match=r"optim\.warmup_steps: expected at most 10 .*, found 11\.\n"):
        check_schedule(optim("cosine", warmup_steps=11), 10)
    check_schedule(optim("wsd", warmup_steps=8, decay_ratio=0.2), 10)
    check_schedule(optim("linear", warmup_steps=9, decay_ratio=0.2), 10)
    with pytest.raises(ConfigError, match=r"optim\.decay_ratio: .* 10 steps, found 9 steps of warmup and 2 of decay"):
        check_schedule(optim("wsd", warmup_steps=9, decay_ratio=0.2), 10)
