"""A run's folder as data. The run may still be under way, or have ended in any way; damaged lines are left out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import yaml
from numpy.typing import NDArray

from portable_fsdp.config import yaml_text
from portable_fsdp.metrics.goodput import Attempt, Goodput, attempts, goodput
from portable_fsdp.metrics.sinks import parse_line
from portable_fsdp.runtime.errors import UsageError, printable

JsonObject = Mapping[str, Any]
Numbers = NDArray[np.float64]

_MOST_SAMPLES = 50
_MOST_BYTES = 20_000  # of a profile's summary


@dataclass(frozen=True)
class RunRecord:
    """What the files of one run say."""

    folder: Path
    config: Mapping[str, Any]  # by dotted key
    rows: Sequence[JsonObject]  # of metrics.jsonl, by step
    events: Sequence[JsonObject]
    samples: Sequence[JsonObject]  # the newest, of samples.jsonl
    skipped: int  # damaged lines

    @property
    def name(self) -> str:
        """`run.name` if it has one, and the folder's."""
        return name_of(self.folder, self.config)

    @cached_property
    def attempts(self) -> list[Attempt]:
        """The starts of this run."""
        return attempts(self.events, self.rows)

    @cached_property
    def goodput(self) -> Goodput | None:
        return goodput(self.events, self.rows)

    @cached_property
    def steps(self) -> Numbers:
        return self.column("step")

    def column(self, *keys: str) -> Numbers:
        """One number a row, NaN where there is none: `column("loss")`, `column("processes", "seconds_imbalance")`."""
        return np.array([_number(row, keys) for row in self.rows], dtype=np.float64)

    @cached_property
    def hours(self) -> Numbers:
        """Hours of training at the end of each row's step: what its start and the starts before it spent in steps."""
        return np.cumsum(np.nan_to_num(self.column("seconds"))) / 3600

    def of_kind(self, kind: str) -> list[JsonObject]:
        """The events of one kind."""
        return [event for event in self.events if event["event"] == kind]

    @cached_property
    def profiles(self) -> list[str]:
        """The summaries of profiled steps, by step."""
        paths = sorted(self.folder.glob("profile/step-*/summary.txt"), key=lambda path: path.stat().st_mtime)
        return [path.read_bytes()[:_MOST_BYTES].decode(errors="replace") for path in paths[-_MOST_SAMPLES:]]

    @property
    def status(self) -> str:
        """How it ended, as far as its files know."""
        end = self.attempts[-1].end if self.attempts else None
        if end is None:
            return "under way, or killed"
        if end["event"] == "finish":
            return f"finished at step {end['step']}"
        verb = "stopped" if end["event"] == "stop" else "failed"
        return f"{verb} after step {end['step']} ({end.get('reason', 'unknown')})"


def name_of(folder: Path, config: Mapping[str, Any]) -> str:
    """`run.name` if the config has one, and the folder's."""
    last, name = folder.resolve().name, config.get("run.name")
    return last if name in (None, last) else f"{name} ({last})"


def read_config(folder: Path) -> dict[str, Any]:
    """A run's config by dotted key. Raises UsageError for a folder that is no run's."""
    if not (folder / "events.jsonl").is_file():
        inside = f"; runs inside it: {names}" if (names := _runs_inside(folder)) else ""
        raise UsageError(f"{folder}: expected the folder of a run, with an events.jsonl, found none{inside}.")
    return _config(folder / "config.yaml")


def read_run(folder: Path) -> RunRecord:
    """Read the folder of a run. Raises UsageError for one that isn't."""
    config = read_config(folder)
    rows, bad_rows = _records(folder / "metrics.jsonl", "step")
    events, bad_events = _records(folder / "events.jsonl", "event")
    samples, bad_samples = _records(folder / "samples.jsonl", "step")
    whole_rows, whole_events = list(filter(_is_row, rows)), list(filter(_is_event, events))
    by_step = {row["step"]: row for row in whole_rows}
    skipped = bad_rows + bad_events + bad_samples + len(rows) - len(whole_rows) + len(events) - len(whole_events)
    events, rows = whole_events, [by_step[step] for step in sorted(by_step)]
    return RunRecord(folder, config, rows, events, samples[-_MOST_SAMPLES:], skipped)


def _runs_inside(folder: Path) -> str:
    names = sorted(path.parent.name for path in folder.glob("*/events.jsonl")) if folder.is_dir() else []
    return printable(", ".join(names[:5]))


def _records(path: Path, key: str) -> tuple[list[JsonObject], int]:
    """The objects of a file of JSON lines that have `key`, and how many other lines it has; a torn last one is none."""
    if not path.is_file():
        return [], 0
    records: list[JsonObject] = []
    skipped = 0
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            record = parse_line(line)
            if record is not None and key in record:
                records.append(record)
            else:
                skipped += line.endswith("\n")
    return records, skipped


def _is_row(row: JsonObject) -> bool:
    needed = _is_step(row["step"]) and _is_number(row.get("seconds"))
    return needed and _is_number(row.get("data_seconds", 0.0)) and _is_time_or_none(row.get("time"))


def _is_event(event: JsonObject) -> bool:
    """Whether the fields that the report reads have their types."""
    lost, environment = event.get("lost") or {}, event.get("environment") or {}
    if not isinstance(lost, Mapping) or not isinstance(environment, Mapping):
        return False
    times = (event.get("time"), event.get("began"), lost.get("until"))
    numbers = (event.get("seconds"), event.get("blocked_seconds"), lost.get("seconds"))
    needs_step = event["event"] in ("start", "save", "evaluation", "straggler", "finish", "stop", "fail")
    return (
        event.get("time") is not None
        and all(map(_is_time_or_none, times))
        and all(number is None or _is_number(number) for number in numbers)
        and (not needs_step or _is_step(event.get("step")))
        and (event["event"] != "evaluation" or _is_number(event.get("loss")))
        and (event["event"] != "straggler" or (_is_step(event.get("process")) and _is_number(event.get("ratio"))))
    )


def _is_step(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e300  # NaN isn't


def _is_time_or_none(value: object) -> bool:
    if value is None:
        return True
    try:
        return isinstance(value, str) and datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        return False


def _config(path: Path) -> dict[str, Any]:
    """By dotted key; empty for a file that is missing or isn't what a run writes. Aliases and depth are bounded."""
    try:
        _, value = yaml_text.parse(path.read_text(encoding="utf-8"))
        return dict(_flat(value, ""))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return {}


def _flat(value: object, prefix: str) -> list[tuple[str, Any]]:
    if not isinstance(value, dict):
        return [(prefix, value)] if prefix else []
    inner = cast(dict[object, object], value).items()
    return [pair for key, part in inner for pair in _flat(part, f"{prefix}.{key}" if prefix else str(key))]


def _number(row: JsonObject, keys: Sequence[str]) -> float:
    value: Any = row
    for key in keys:
        value = cast(JsonObject, value).get(key) if isinstance(value, Mapping) else None
    return float(value) if _is_number(value) else float("nan")
