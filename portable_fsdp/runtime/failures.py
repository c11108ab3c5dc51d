"""Failures of a run: the event `fail` in events.jsonl says why a start ended, and a supervisor restarts the run.

Each start has one such event, by the first process that failed. A broken connection follows from the failure of another
process, so it gives way to a cause of that process's own.

The supervisor is the process that was started; `launch` runs in its child. The child is forked before torch is loaded,
so that this process stays small. It ends with this process, and all that it has started is gone before the next one
begins. Linux only: elsewhere a run has no supervisor.
"""

import fcntl
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, cast

from portable_fsdp.runtime.command import to_stderr
from portable_fsdp.runtime.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_STOPPED,
    EXIT_USAGE,
    ConfigError,
    printable,
    without_passwords,
)
from portable_fsdp.runtime.launchers import RESTARTS, detect_launch, tpu_workers
from portable_fsdp.runtime.signals import STOP_SIGNALS, adopt_orphans, end_with_parent, kill_descendants

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


def parse_line(line: str | bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; None for anything else."""
    try:
        value: object = json.loads(line)
    except ValueError:
        return None
    return cast(dict[str, Any], value) if isinstance(value, dict) else None


def _rows(text: bytes, since: float) -> list[dict[str, Any]]:
    rows = (parse_line(line) for line in text.splitlines())
    return [row for row in rows if row is not None and (not since or str(row.get("time")) > utc_text(since))]


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


# ------------------------------------------------------------------------------------------------------ the supervisor

_PAUSES_S = (0, 5, 15, 30, 60)
"""Pauses before restarts that follow one another without progress; the last one repeats."""
_LAST_WORDS_S = 1.0  # for what a failed child has started, such as the copy of its stderr
_SI_KERNEL = 0x80  # asm-generic/siginfo.h: Ctrl-C at the terminal, which the child gets as well

_OWN_ENDS = {EXIT_FINISHED: {"finish", "stop"}, EXIT_STOPPED: {"stop"}, EXIT_USAGE: {"fail"}}
"""Exit code -> the last events of a run that ends with it; another end is a library's `os._exit`."""

_VARIES = re.compile(r"0x[0-9a-f]+|:\d+|pid\D{0,5}\d+|\d+ step|\d{4,}", re.IGNORECASE)
"""What differs between two failures with one cause: addresses, ports, PIDs."""

_channel: int | None = None  # in the child, until it announces its run


class _Failure(NamedTuple):
    step: int  # the last one in metrics.jsonl; 0 without that file
    cause: str

    @property
    def place(self) -> str:
        return f"after step {self.step}" if self.step else "before its first step"

    def equals(self, other: "_Failure") -> bool:
        return (self.step, _VARIES.sub("", self.cause)) == (other.step, _VARIES.sub("", other.cause))


def is_supervised(environ: Mapping[str, str]) -> bool:
    """Whether `launch` has a supervisor: this host's processes are the whole run, and no launcher restarts them."""
    with suppress(ConfigError):
        launch = detect_launch(environ)
        is_whole = launch.is_alone and not launch.by_accelerate and len(tpu_workers(environ)) <= 1
        return sys.platform == "linux" and is_whole
    return False


def announce(run_dir: str, max_restarts: int) -> None:
    """Tell the supervisor, if there is one, that a run is about to start in this folder."""
    global _channel
    if _channel is not None:
        os.write(_channel, json.dumps([os.path.abspath(run_dir), max_restarts]).encode())
        os.close(_channel)
        _channel = None


def supervise(work: Callable[[], int]) -> int:
    """Return `work()`, which calls `announce`; start it again after exit code 1 and after a signal.

    `max_restarts` times, counted anew whenever a start gets further than all before it. Two failures at one step with
    one cause end the run. SIGTERM, SIGINT and SIGUSR1 are passed on, and nothing restarts after them.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGCHLD})
    adopt_orphans()
    parent, furthest, failures = os.getpid(), -1, list[_Failure]()
    while True:
        reads, writes = os.pipe()
        began = time.time()
        child = os.fork()
        if child == 0:
            global _channel
            os.close(reads)
            end_with_parent(parent)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {*STOP_SIGNALS, signal.SIGCHLD})
            os.environ[RESTARTS] = str(len(failures))
            _channel = writes
            return work()
        os.close(writes)
        code, is_stopped = _wait(child)
        with os.fdopen(reads, "rb") as channel:
            announced = channel.read()
        folder, max_restarts = json.loads(announced or "[null, 0]")
        if folder is None or is_stopped or _is_own_end(code, Path(folder), began):
            return code if code >= 0 else EXIT_FAILED
        kill_descendants(_LAST_WORDS_S)  # stopped processes too
        failure = _failure(code, Path(folder), began)
        if failure.step > furthest:
            furthest, failures = failure.step, []
        failures.append(failure)
        if len(failures) > max_restarts or (len(failures) > 1 and failure.equals(failures[-2])):
            if max_restarts:
                causes = "".join(f"\n  {failed.place}: {failed.cause}" for failed in failures)
                to_stderr(f"the run ends: it failed {len(failures)} times without getting further:{causes}")
            return EXIT_FAILED
        pause = _PAUSES_S[min(len(failures), len(_PAUSES_S)) - 1]
        to_stderr(
            f"the run failed {failure.place}: {failure.cause}\n  Restart {len(failures)} of {max_restarts} "
            f"(run.max_restarts) from the newest checkpoint{f', in {pause} s' if pause else ''}."
        )
        if (stop := signal.sigtimedwait(STOP_SIGNALS, pause)) is not None:
            name = signal.Signals(stop.si_signo).name
            to_stderr(f"{name} before restart {len(failures)}: the run ends. Rerun the same command to resume.")
            return EXIT_FAILED


def _wait(child: int) -> tuple[int, bool]:
    """Return the exit code of `child`, negative for a signal, and whether a stop was requested. Reaps all children."""
    is_stopped = False
    while True:
        info = signal.sigwaitinfo({*STOP_SIGNALS, signal.SIGCHLD})
        if info.si_signo != signal.SIGCHLD:
            is_stopped = True
            if info.si_code != _SI_KERNEL:
                os.kill(child, info.si_signo)
            continue
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == child:
                    return os.waitstatus_to_exitcode(ended[1]), is_stopped


def _is_own_end(code: int, folder: Path, began: float) -> bool:
    """Whether the run itself ended with `code`, and not a library that it uses."""
    kinds = [str(event.get("event")) for event in last_events(folder / "events.jsonl", began)]
    is_early = code == EXIT_USAGE and "start" not in kinds
    return is_early or not _OWN_ENDS.get(code, set[str]()).isdisjoint(kinds)


def _failure(code: int, folder: Path, began: float) -> _Failure:
    """Read from the run's files how far it came, and why it failed; record the cause if no process did."""
    step = last_step(folder)
    ends = [event for event in last_events(folder / "events.jsonl", began) if event.get("event") in ENDS]
    cause = str(ends[-1].get("reason", "")) if ends else ""
    if not cause:
        in_the_middle = "" if code < 0 or code == EXIT_FAILED else " in the middle of the run"
        cause = f"its process {how_ended(code)}{in_the_middle}"
        record_failure(folder, step, cause, began)
    return _Failure(step, printable(cause))
