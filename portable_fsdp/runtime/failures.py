"""The event `fail` in events.jsonl: why a start of the run ended. Each start has one, by the first process that failed.

A broken connection follows from the failure of another process, so it gives way to a cause of that process's own.
"""

import fcntl
import json
import os
import signal
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from portable_fsdp.runtime.errors import printable, without_passwords

ENDS = ("finish", "stop", "fail")
"""Events of the end of a start. A process that was killed, or that a library ended, leaves none."""

_TAIL_BYTES = 1 << 20


def utc_text(seconds: float) -> str:
    """Format seconds since 1970 in UTC (ISO 8601, milliseconds), as in the files."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def how_ended(code: int) -> str:
    """Describe an exit code as in subprocess: negative for a signal."""
    names = {int(number): number.name for number in signal.Signals}
    return f"ended by {names.get(-code, f'signal {-code}')}" if code < 0 else f"ended with exit code {code}"


def last_events(path: Path, since: float = 0.0) -> list[dict[str, Any]]:
    """Return the rows in the last MiB of a file of JSON objects, those after `since` (seconds since 1970)."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return _rows(file.read().rpartition(b"\n")[0], since)
    return []


def _rows(text: bytes, since: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for line in text.splitlines():
        with suppress(ValueError):
            row: object = json.loads(line)
            if isinstance(row, dict) and (not since or str(cast(Any, row).get("time")) > utc_text(since)):
                rows.append(cast(dict[str, Any], row))
    return rows


def last_step(folder: Path) -> int:
    """Return the last step in metrics.jsonl; 0 without one."""
    step = next((row.get("step") for row in reversed(last_events(folder / "metrics.jsonl"))), None)
    return step if isinstance(step, int) else 0


def record_failure(
    folder: Path, step: int, reason: str, since: float, *, is_consequence: bool = False, process: int = 0
) -> None:
    """Add the event `fail` of the start that began at `since`, unless it has one that stands.

    `is_consequence`: another process failed first, and may know its cause.
    """
    with suppress(OSError), (folder / "events.jsonl").open("a+b") as file:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        begin = file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        whole = file.read().rpartition(b"\n")
        text, events = whole[0] + whole[1], _rows(whole[0], since)
        if failed := [event for event in events if event.get("event") == "fail"]:
            if is_consequence or not failed[-1].get("is_consequence"):
                return
            if failed[-1] is events[-1]:
                text = text[: text[:-1].rfind(b"\n") + 1]
        is_early = not any(event.get("event") == "start" for event in events)
        more = {"process": process, "is_consequence": is_consequence, "is_early": is_early}
        event = {"time": utc_text(datetime.now(UTC).timestamp()), "event": "fail", "step": step}
        event |= {"reason": printable(reason), **{key: value for key, value in more.items() if value}}
        file.truncate(begin + len(text))  # without the line that gives way, or a torn one
        file.write(without_passwords(json.dumps(event)).encode() + b"\n")


def unfinished(folder: Path) -> str:
    """Return a sentence if the last start of a run left no event of its end; else an empty string."""
    kinds = [row["event"] for row in last_events(folder / "events.jsonl") if row.get("event") in ("start", *ENDS)]
    if kinds[-1:] != ["start"]:
        return ""
    return (
        f"{folder}: the last start didn't finish: it recorded no end after step {last_step(folder)}.\n"
        "  It was killed, or a library ended its process with exit code 0."
    )
