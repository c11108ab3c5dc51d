"""The two files that process 0 writes line by line: metrics.jsonl and events.jsonl.

A kill can tear the last line, never more: each line goes out in one append, and whoever opens the file again cuts a
torn line off. NaN and infinities, which JSON lacks, are written as null.
"""

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, cast

from portable_fsdp.runtime.errors import UsageError, without_passwords
from portable_fsdp.runtime.files import MAX_LINE_BYTES, MAX_LOG_BYTES, lines_of, open_regular, write_text_atomically

_TAIL_BYTES = 64 << 20


class LostSteps(NamedTuple):
    """Steps that ran after the checkpoint that a run resumes from, and that it repeats."""

    steps: int
    seconds: float
    until: str | None  # when the last one ended, in UTC (ISO 8601)


class NamedSave(NamedTuple):
    """A committed save that an events.jsonl names."""

    step: int
    path: str
    events: Path  # the file


class _LinesFile:
    """A file of JSON objects, one a line. One writer at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        _cut_torn_line(path)

    def _append(self, text: str) -> None:
        # Opened for each line: truncate_after replaces the file, and a handle would write into the old one.
        with self._path.open("ab", buffering=0) as file:
            begin, line = file.tell(), memoryview(text.encode())
            try:
                while line:  # a full disk first takes a part
                    line = line[file.write(line) :]
            except OSError as error:
                error.filename = str(self._path)
                with suppress(OSError):
                    file.truncate(begin)  # else the next line would follow on a torn one
                raise


class MetricsFile(_LinesFile):
    """metrics.jsonl, one row a step, and samples.jsonl, one a text, both in the order of the steps."""

    def write(self, row: Mapping[str, object]) -> None:
        """Append one row; it is with the operating system when this returns."""
        self._append(_line(row))

    def add(self, step: int, values: Mapping[str, object]) -> None:
        """Add values to the row of a step; atomic."""
        rows = [{**row, **values} if row.get("step") == step else row for row in read_jsonl(self._path)]
        write_text_atomically(self._path, "".join(map(_line, rows)))

    def truncate_after(self, step: int) -> LostSteps | None:
        """Drop the rows of later steps, which a resumed run repeats, and return what they took; atomic.

        Raises UsageError for a line that is no row of metrics.
        """
        if not self._path.exists():
            return None
        rows = read_jsonl(self._path)
        for number, row in enumerate(rows, start=1):
            if not isinstance(row.get("step"), int):
                raise UsageError(f"{self._path}: row {number}: expected an integer `step`, found {row.get('step')!r}.")
        dropped = [row for row in rows if row["step"] > step]
        if not dropped:
            return None
        write_text_atomically(self._path, "".join(_line(row) for row in rows if row["step"] <= step))
        return LostSteps(len(dropped), sum(row.get("seconds") or 0 for row in dropped), dropped[-1].get("time"))


class EventsFile(_LinesFile):
    """events.jsonl: start, resume, collectives, evaluation, samples, save, profile, straggler, each end, by time."""

    def write(self, event: str, /, **fields: object) -> None:
        """Append one event with `time` in UTC (ISO 8601, milliseconds). Paths become text, without passwords."""
        self._append(without_passwords(_line({"time": utc_text(time.time()), "event": event, **fields})))


def last_save(path: Path) -> NamedSave | None:
    """The newest save that an events.jsonl names and that no later start went behind; None: no such save.

    Reads the last 64 MiB, and leaves out damaged lines. Raises UsageError for what is no plain file.
    """
    saves: list[NamedSave] = []
    for line in _tail(path).split(b"\n"):
        event = parse_line(line) or {}
        step, address = event.get("step"), str(event.get("path"))
        if type(step) is not int:
            continue
        if event.get("event") == "start":  # at 0 it began anew
            saves = [save for save in saves if save.step <= step]
        elif event.get("event") == "save" and address.isprintable():
            saves.append(NamedSave(step, address, path))
    return saves[-1] if saves else None


def last_event(path: Path) -> dict[str, Any]:
    """The newest event of an events.jsonl; empty without one. Raises UsageError for a file that can't be read."""
    return parse_line(_tail(path).rstrip().rpartition(b"\n")[2]) or {}


def utc_text(seconds: float) -> str:
    """Seconds since 1970 as both files write times: in UTC (ISO 8601, milliseconds)."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def read_jsonl(path: Path, folder: Path | None = None) -> list[dict[str, Any]]:
    """All rows of a file that may be in the middle of being written: a torn last line is left out.

    Raises OSError as `open_regular` with `folder`, and UsageError for any other line that is not a JSON object.
    """
    rows: list[dict[str, Any]] = []
    with open_regular(path, folder, MAX_LOG_BYTES) as file:
        for number, line in enumerate(lines_of(file), start=1):
            text = line.decode(errors="replace")
            row = parse_line(text)
            if row is not None:
                rows.append(row)
            elif line.endswith(b"\n") or len(line) == MAX_LINE_BYTES:
                raise UsageError(
                    f"{path}:{number}: expected one JSON object a line, found {text.rstrip()[:60]!r}.\n"
                    "  The file was changed by something else: fix that line, or move the file away."
                )
    return rows


def parse_line(line: str | bytes) -> dict[str, Any] | None:
    """The JSON object of a line; None for anything else."""
    try:
        value: object = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return cast(dict[str, Any], value) if isinstance(value, dict) else None


def _tail(path: Path) -> bytes:
    """The end of a file, or all of it; empty for an absent one. Raises UsageError for a file that can't be read."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            return file.read(_TAIL_BYTES)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}.\n  Move it away.") from error


def _cut_torn_line(path: Path) -> None:
    """Let the file end with a whole line, so that the next append starts one."""
    last = _tail(path).rpartition(b"\n")[2]
    if last and parse_line(last) is not None:
        with path.open("ab") as file:
            file.write(b"\n")
    elif last:
        os.truncate(path, path.stat().st_size - len(last))


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
