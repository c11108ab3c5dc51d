"""The accounts of wall time, on hand-made files whose parts are known."""

import math
from datetime import UTC, datetime
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
    rows: list[dict[str, Any]] = []
    for step, duration in enumerate(seconds, start=first):
        ready += duration
        rows.append({"step": step, "seconds": duration, "data_seconds": data, "time": at(ready)})
    return rows


def parts(events: list[dict[str, Any]], rows: list[dict[str, Any]]) -> dict[str, float]:
    accounts = goodput(events, rows)
    assert accounts is not None
    assert accounts.wall_seconds == pytest.approx(sum(accounts.parts.values()))
    return {name: seconds for name, seconds in accounts.parts.items() if abs(seconds) > 1e-6}


def test_one_start() -> None:
    rows = steps(1, [5.0, 2.0, 2.0, 2.0], ready=10, data=0.5)
    events = [
        start(0, 10),
        {"event": "evaluation", "time": at(24), "seconds": 3.0},
        {"event": "samples", "time": at(24.25), "seconds": 0.25},
        {"event": "save", "time": at(25.25), "blocked_seconds": 1.0, "seconds": 4.0},
        {"event": "profile", "time": at(27.25), "seconds": 2.0},
        {"event": "finish", "time": at(27.75), "step": 4},
    ]
    expected = {"start": 10, "steps": 6, "compile": 3, "data": 2, "evaluation": 3.25, "save": 1, "profile": 2}
    expected["other"] = 0.5
    assert parts(events, rows) == pytest.approx(expected)


@pytest.mark.parametrize(("reason", "part"), [("SIGTERM", "stopped"), ("not finite", "waiting")])
def test_time_after_a_requested_end_is_not_waiting(reason: str, part: str) -> None:
    rows = steps(1, [1.0], ready=1) + steps(2, [1.0], ready=103)
    stop = {"event": "stop", "time": at(2), "step": 1, "reason": reason}
    assert parts([start(0, 1), stop, start(102, 103, step=1)], rows) == pytest.approx(
        {"start": 2, "steps": 2, part: 100}
    )


def test_steps_repeated_twice_count_once() -> None:
    """Two kills; each start resumes from step 1, and only the last one's steps count."""
    rows = steps(1, [1.0], ready=0) + steps(2, [1.0, 1.0], ready=20)
    lost = {"steps": 1, "seconds": 1.0}
    events = [
        start(0, 0),
        start(10, 10, step=1, lost={**lost, "until": at(2)}),
        start(20, 20, step=1, lost={**lost, "until": at(11)}),
        {"event": "finish", "time": at(22), "step": 3},
    ]
    assert parts(events, rows) == pytest.approx({"steps": 3, "lost": 2, "waiting": 17})


def test_files_of_older_runs_lack_began_lost_and_row_times() -> None:
    rows = [{"step": 1, "seconds": 1.0}]
    events = [{"event": "start", "time": at(0), "step": 0}, {"event": "save", "time": at(2), "blocked_seconds": None}]
    assert parts(events, rows) == pytest.approx({"steps": 1, "other": 1})


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
