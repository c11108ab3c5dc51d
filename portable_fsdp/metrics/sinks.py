"""The two files that process 0 writes line by line: metrics.jsonl and events.jsonl.

A kill can tear the last line, never more: each line goes out in one append, and whoever opens the file again cuts a
torn line off. NaN and infinities, which JSON lacks, are written as null.
"""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypedDict, cast

from portable_fsdp.runtime.errors import UsageError
from portable_fsdp.runtime.files import write_text_atomically


class MetricsFile:
    """metrics.jsonl: one row a step, in the order of the steps. One writer at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        _cut_torn_line(path)

    def write(self, row: Mapping[str, object]) -> None:
        """Append one row; it is with the operating system when this returns."""
        _append(self._path, row)

    def truncate_after(self, step: int) -> None:
        """Drop the rows of later steps, which a resumed run repeats; atomic.

        Raises UsageError for a line that is no row of metrics.
        """
        if not self._path.exists():
            return
        rows = read_jsonl(self._path)
        for number, row in enumerate(rows, start=1):
            if not isinstance(row.get("step"), int):
                raise UsageError(f"{self._path}: row {number}: expected an integer `step`, found {row.get('step')!r}.")
        kept = [row for row in rows if row["step"] <= step]
        if len(kept) < len(rows):
            write_text_atomically(self._path, "".join(_line(row) for row in kept))


class EventsFile:
    """events.jsonl: start, save, resume, compile, preemption, stop, each with its time. One writer at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        _cut_torn_line(path)

    def write(self, event: str, /, **fields: object) -> None:
        """Append one event with `time` in UTC (ISO 8601, milliseconds). Paths become text."""
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        _append(self._path, {"time": time, "event": event, **fields})


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All rows of a file that may be in the middle of being written: a torn last line is left out.

    Raises FileNotFoundError, and UsageError for any other line that is not a JSON object.
    """
    *lines, tail = path.read_text(encoding="utf-8", errors="replace").split("\n")
    rows = [_parse(line) for line in lines]
    if None in rows:
        number = rows.index(None) + 1
        raise UsageError(
            f"{path}:{number}: expected one JSON object a line, found {lines[number - 1][:60]!r}.\n"
            "  The file was changed by something else: mend that line, or move the file away."
        )
    last = _parse(tail)
    return [row for row in [*rows, last] if row is not None]


def _parse(line: str) -> dict[str, Any] | None:
    try:
        value: object = json.loads(line)
    except ValueError:
        return None
    return cast(dict[str, Any], value) if isinstance(value, dict) else None


def _cut_torn_line(path: Path) -> None:
    """Let the file end with a whole line, so that the next append starts one."""
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    if text and not text.endswith("\n"):
        lines, newline, tail = text.rpartition("\n")
        write_text_atomically(path, lines + newline + ("" if _parse(tail) is None else f"{tail}\n"))


def _append(path: Path, row: Mapping[str, object]) -> None:
    # Opened for each line: truncate_after replaces the file, and a handle would go on writing into the old one.
    with path.open("a", encoding="utf-8", newline="") as file:
        file.write(_line(row))


def _line(row: Mapping[str, object]) -> str:
    return json.dumps(_without_nan(row), default=str, allow_nan=False) + "\n"


def _without_nan(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _without_nan(inner) for key, inner in cast(Mapping[str, object], value).items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in cast(Sequence[object], value)]
    return value


class ProcessLoads(TypedDict):
    """How evenly the processes are loaded, as each saw it at the start of this step; by process index.

    All wait for the slowest process of a step, so `seconds` show a straggler only by its work outside collectives (its
    data, its host). An imbalance is the greatest value over the median; 1 is even.
    """

    seconds: list[float | None]  # wall time of the last step that had ended; None in the first
    memory_bytes: list[float | None]  # peak of its fullest device; None where the engine doesn't tell
    seconds_imbalance: float | None
    memory_imbalance: float | None


def processes_row(seconds: Sequence[float], memory_bytes: Sequence[float]) -> ProcessLoads:
    """From one value a process; NaN stands for one that is unknown."""
    return ProcessLoads(
        seconds=[value if math.isfinite(value) else None for value in seconds],
        memory_bytes=[value if math.isfinite(value) else None for value in memory_bytes],
        seconds_imbalance=_imbalance(seconds),
        memory_imbalance=_imbalance(memory_bytes),
    )


def _imbalance(values: Sequence[float]) -> float | None:
    if not all(math.isfinite(value) and value > 0 for value in values):
        return None
    return max(values) / statistics.median(values)
