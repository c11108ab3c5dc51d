"""Goodput and pace: the share of wall time, over all starts of a run, that went into steps that count; stragglers.

All values come from the run's own files. The events of a start give its process start and the steps that it repeats;
the rows of metrics.jsonl give the time of each step that still counts.
"""

import math
import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any, NamedTuple

PARTS = {
    "steps": "steps that count",
    "compile": "first step of a start, beyond a usual one: compilation, warm-up",
    "data": "waiting for rows",
    "evaluation": "evaluation, samples",
    "save": "waiting for a save",
    "profile": "starting and writing profiles",
    "start": "from process start to the first step: imports, data, model, load",
    "lost": "steps that a restart repeated",
    "other": "between steps: callbacks, checks",
    "stopped": "between a requested end and the next start",
    "waiting": "between a failure or kill and the next start, with the steps that no file recorded",
}
"""Name of each part of the wall time -> its meaning."""


@dataclass(frozen=True)
class Goodput:
    """Seconds by part; they add up to the wall time from the first process start to the last line written."""

    wall_seconds: float
    parts: Mapping[str, float]

    @property
    def share(self) -> float:
        """Goodput, 0 to 1; 0 if no time has passed."""
        return self.parts["steps"] / self.wall_seconds if self.wall_seconds > 0 else 0.0


@dataclass(frozen=True)
class Attempt:
    """One start of the run: its events, and the rows of its steps that still count."""

    start: Mapping[str, Any]  # the event `start`
    events: Sequence[Mapping[str, Any]]  # includes `start`
    rows: Sequence[Mapping[str, Any]]

    @property
    def began(self) -> float:
        """Start of its process, in seconds since 1970."""
        return _seconds_of(self.start.get("began") or self.start["time"])

    @property
    def last_seen(self) -> float:
        """Time of its last written line, in seconds since 1970; includes steps that were repeated later."""
        times = [record["time"] for record in (*self.events, *self.rows[-1:]) if record.get("time")]
        return max(map(_seconds_of, times))

    @property
    def end(self) -> Mapping[str, Any] | None:
        """The event of its end; None while it runs, and after a kill."""
        return next((event for event in reversed(self.events) if event["event"] in ("finish", "stop", "fail")), None)


def attempts(events: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> list[Attempt]:
    """Return all starts of a run, in order. `rows`: of metrics.jsonl, by step. Skips lines before the first start."""
    events = [event for event in events if not event.get("is_early")]  # failures before a start
    starts = [index for index, event in enumerate(events) if event["event"] == "start"]
    steps = [row["step"] for row in rows]
    result: list[Attempt] = []
    end = len(rows)  # a step that a later start repeated belongs to that start
    for first, following in reversed([*pairwise([*starts, len(events)])]):
        begin = min(bisect_right(steps, events[first]["step"]), end)
        result.insert(0, Attempt(events[first], events[first:following], rows[begin:end]))
        end = begin
    return result


def goodput(events: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> Goodput | None:
    """Return the goodput of a run from events.jsonl and metrics.jsonl; None before its first start."""
    starts = attempts(events, rows)
    if not starts:
        return None
    parts = dict.fromkeys(PARTS, 0.0)
    usual = statistics.median([row["seconds"] - _waited(row) for row in rows] or [0.0])
    for attempt, following in zip(starts, [*starts[1:], None], strict=True):
        spent = _parts_of(attempt, usual)
        lost = (following.start.get("lost") or {}) if following else {}
        spent["lost"] = float(lost.get("seconds") or 0)
        until: str | None = lost.get("until")
        ended = attempt.last_seen if until is None else max(attempt.last_seen, _seconds_of(until))
        spent["other"] = ended - attempt.began - sum(spent.values())
        if following is not None:
            end = attempt.end or {"event": "fail"}  # it was killed
            is_failure = end["event"] == "fail" or end.get("reason") == "not finite"
            spent["waiting" if is_failure else "stopped"] = following.began - ended
        for part, seconds in spent.items():
            parts[part] += seconds
    return Goodput(sum(parts.values()), parts)


def _parts_of(attempt: Attempt, usual_step: float) -> dict[str, float]:
    computing = [row["seconds"] - _waited(row) for row in attempt.rows]
    first = 0.0
    if attempt.rows and attempt.rows[0]["step"] == attempt.start["step"] + 1:
        first = max(0.0, computing[0] - statistics.median(computing[1:] or [usual_step]))

    def sum_of(kind: str, key: str = "seconds") -> float:
        return sum(float(event.get(key) or 0) for event in attempt.events if event["event"] == kind)

    return {
        "start": _seconds_of(attempt.start["time"]) - attempt.began,
        "steps": sum(computing) - first,
        "compile": first,
        "data": sum(map(_waited, attempt.rows)),
        "evaluation": sum_of("evaluation") + sum_of("samples"),
        "save": sum_of("save", "blocked_seconds"),
        "profile": sum_of("profile"),
    }


def _waited(row: Mapping[str, Any]) -> float:
    return row.get("data_seconds") or 0.0  # rows of older releases have none


def _seconds_of(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()


def duration(seconds: float) -> str:
    """Format a duration in its two largest units: `1 d 2 h`, `3 h 4 min`, `5 min 6 s`, `7.8 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    units = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))
    (size, unit), (small, small_unit) = next(pair for pair in pairwise(units) if seconds >= pair[0][0])
    return f"{int(seconds // size)} {unit} {int(seconds % size // small)} {small_unit}"


class Pace:
    """Estimates the time left, by the mean time from step to step, including evaluations and saves."""

    def __init__(self) -> None:
        self._began, self._count = 0.0, -1

    def time_left(self, now: float, steps: int) -> float | None:
        """Return the seconds of `steps` more steps after one that ended at `now`; None after the first: it compiles."""
        self._count += 1
        if self._count == 0:
            self._began = now
            return None
        return (now - self._began) / self._count * steps


WINDOW, ENOUGH, RATIO, SHARE = 10, 9, 1.3, 0.03
"""A straggler takes `RATIO` times the median or more in `ENOUGH` of the last `WINDOW` steps, and `SHARE` of a step more
than the median."""


class Straggler(NamedTuple):
    """A process that was slow in `slow` of the last `steps` steps."""

    process: int
    host: str
    ratio: float  # its own time over the median of all processes; the median of this over the slow steps
    slow: int
    steps: int

    def __str__(self) -> str:
        slower = f"{self.ratio:.1f}x slower than the median in {self.slow} of the last {self.steps} steps"
        return f"process {self.process} on {self.host} is {slower}"


class StragglerWatch:
    """Detects stragglers; reports each once."""

    def __init__(self, hosts: Sequence[str]) -> None:
        self._hosts = hosts  # name of each process's host
        self._ratios = [deque[float](maxlen=WINDOW) for _ in hosts]
        self._named = set[int]()

    def add(self, own: Sequence[float], seconds: float) -> tuple[Straggler, ...]:
        """Add a step: own seconds of each process, and seconds of the step. Returns stragglers not reported before."""
        if imbalance(own) is None:
            return ()
        median, new = statistics.median_low(own), list[Straggler]()
        for process, (value, ratios) in enumerate(zip(own, self._ratios, strict=True)):
            ratios.append(value / median if value - median >= SHARE * seconds else 1.0)
            slow = [ratio for ratio in ratios if ratio >= RATIO]
            if len(slow) >= ENOUGH and process not in self._named:
                self._named.add(process)
                new.append(Straggler(process, self._hosts[process], statistics.median(slow), len(slow), len(ratios)))
        return tuple(new)


def imbalance(
    values: Sequence[float], median: Callable[[Sequence[float]], float] = statistics.median_low
) -> float | None:
    """Return the largest value over the `median` (the smaller of two); 1 is balanced. None if some are unknown."""
    if not all(math.isfinite(value) and value > 0 for value in values):
        return None
    return max(values) / median(values)
