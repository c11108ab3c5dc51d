"""The accounts of wall time, on hand-made files whose parts are known."""

import math
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any

import pytest

from portable_fsdp.observe.goodput import PARTS, StragglerWatch, goodput

DAY = 1_700_000_000.0


def at(seconds: float) -> str:
    return datetime.fromtimestamp(DAY + seconds, UTC).isoformat(timespec="milliseconds")


def start(began: float, ready: float, step: int = 0, **more: Any) -> dict[str, Any]:
    return {"event": "start", "began": at(began), "time": at(ready), "step": step, **more}


def steps(first: int, seconds: list[float], ready: float, data: float = 0.0) -> list[dict[str, Any]]:
    """Rows of steps one after the other, the first of which begins at `ready`."""
    ends = [at(ready + end) for end in accumulate(seconds)]
    durations = enumerate(zip(seconds, ends, strict=True), start=first)
    return [{"step": step, "seconds": each, "data_seconds": data, "time": end} for step, (each, end) in durations]


def stopped(reason: str) -> list[dict[str, Any]]:
    return [start(0, 1), {"event": "stop", "time": at(2), "step": 1, "reason": reason}, start(102, 103, step=1)]


ONE_START = [
    start(0, 10),
    {"event": "evaluation", "time": at(24), "seconds": 3.0},
    {"event": "samples", "time": at(24.25), "seconds": 0.25},
    {"event": "save", "time": at(25.25), "blocked_seconds": 1.0, "seconds": 4.0},
    {"event": "profile", "time": at(27.25), "seconds": 2.0},
    {"event": "finish", "time": at(27.75), "step": 4},
]
OF_ONE_START = {"start": 10, "steps": 6, "compile": 3, "data": 2, "evaluation": 3.25, "save": 1, "profile": 2}
KILLED_TWICE = [
    start(0, 0),
    start(10, 10, step=1, lost={"steps": 1, "seconds": 1.0, "until": at(2)}),
    start(20, 20, step=1, lost={"steps": 1, "seconds": 1.0, "until": at(11)}),
    {"event": "finish", "time": at(22), "step": 3},
]
OLDER = [{"event": "start", "time": at(0), "step": 0}, {"event": "save", "time": at(2), "blocked_seconds": None}]
TWO_STEPS = steps(1, [1.0], ready=1) + steps(2, [1.0], ready=103)
RUNS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, float]]] = {  # events, rows, parts
    "one start": (ONE_START, steps(1, [5.0, 2.0, 2.0, 2.0], ready=10, data=0.5), {**OF_ONE_START, "other": 0.5}),
    "time after a requested end is not waiting": (
        stopped("SIGTERM"),
        TWO_STEPS,
        {"start": 2, "steps": 2, "stopped": 100},
    ),
    "after another end it is": (stopped("not finite"), TWO_STEPS, {"start": 2, "steps": 2, "waiting": 100}),
    # Two kills; each start resumes from step 1, and only the last one's steps count.
    "steps repeated twice count once": (
        KILLED_TWICE,
        steps(1, [1.0], ready=0) + steps(2, [1.0, 1.0], ready=20),
        {"steps": 3, "lost": 2, "waiting": 17},
    ),
    "older files lack began, lost and times": (OLDER, [{"step": 1, "seconds": 1.0}], {"steps": 1, "other": 1}),
}


@pytest.mark.parametrize("what", RUNS)
def test_the_parts_of_wall_time(what: str) -> None:
    events, rows, expected = RUNS[what]
    accounts = goodput(events, rows)
    assert accounts is not None
    assert accounts.wall_seconds == pytest.approx(sum(accounts.parts.values()))
    assert {name: spent for name, spent in accounts.parts.items() if abs(spent) > 1e-6} == pytest.approx(expected)


def test_each_part_has_its_description_and_without_a_start_there_is_none() -> None:
    assert goodput([{"event": "save", "time": at(0)}], steps(1, [1.0], 0)) is None
    accounts = goodput([start(0, 1)], [])
    assert accounts is not None
    assert accounts.parts.keys() == PARTS.keys()
    assert accounts.share == 0


EVEN, SLOW = (1.0, 1.1, 1.0, 0.9), (1.0, 1.1, 1.8, 0.9)


def test_a_process_is_named_once_when_it_was_slow_in_9_of_10_steps() -> None:
    watch = StragglerWatch(["host1", "host1", "host2", "host2"])
    steps = [SLOW] * 5 + [EVEN] * 2 + [SLOW] * 9 + [SLOW] * 20
    named = [(number, *watch.add(own, 4.0)) for number, own in enumerate(steps, start=1)]
    ((number, straggler),) = [line for line in named if len(line) == 2]
    assert number == 16  # the last ten hold one even step
    assert str(straggler) == "process 2 on host2 is 1.8x slower than the median in 9 of the last 10 steps"


def test_who_is_slow() -> None:
    for own, seconds, processes in (
        ((1.0, 1.4), 2.0, [1]),  # of two the faster one counts as the median
        ((1.0, 1.29, 1.0), 2.0, []),
        ((1.0, 1.8, 1.0), 100.0, []),  # 0.8 s more of 100 s
        ((2.0, 2.0, 1.0), 2.0, []),  # one that is fast makes no other slow
        ((1.0, 1.0, 1.0, 5.0, 3.0), 6.0, [3, 4]),
        ((1.0, math.nan, 9.0), 9.0, []),
        ((5.0,), 5.0, []),
    ):
        watch = StragglerWatch([f"host{index}" for index in range(len(own))])
        assert [straggler.process for _ in range(9) for straggler in watch.add(own, seconds)] == processes, own
