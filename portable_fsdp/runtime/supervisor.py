"""Restart a run that failed: `launch` runs in a child process, and this one waits for it.

The child is forked before torch is loaded, so that this process stays small. It ends with this process, and all that it
has started is gone before the next one begins. Linux only: elsewhere a run has no supervisor.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from portable_fsdp.runtime.command import to_stderr
from portable_fsdp.runtime.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, EXIT_USAGE, ConfigError, printable
from portable_fsdp.runtime.files import open_regular
from portable_fsdp.runtime.launchers import RESTARTS, detect_launch, tpu_workers
from portable_fsdp.runtime.signals import STOP_SIGNALS, adopt_orphans, end_with_parent, kill_descendants

_PAUSES_S = (0, 5, 15, 30, 60)
"""Pauses before restarts that follow one another without progress; the last one repeats."""
_LAST_WORDS_S = 1.0  # for what a failed child has started, such as the copy of its stderr
_TAIL_BYTES = 1 << 20
_SI_KERNEL = 0x80  # asm-generic/siginfo.h: Ctrl-C at the terminal, which the child gets as well

_channel: int | None = None  # in the child, until it announces its run


class _Failure(NamedTuple):
    step: int  # the last one in metrics.jsonl; 0 without that file
    cause: str

    @property
    def place(self) -> str:
        return f"after step {self.step}" if self.step else "before its first step"


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
        if not announced or is_stopped or code in (EXIT_FINISHED, EXIT_USAGE, EXIT_STOPPED):
            return code if code >= 0 else EXIT_FAILED
        kill_descendants(_LAST_WORDS_S)  # stopped processes too
        folder, max_restarts = json.loads(announced)
        failure = _failure(code, Path(folder), began)
        if failure.step > furthest:
            furthest, failures = failure.step, []
        failures.append(failure)
        if len(failures) > max_restarts or failures[-2:-1] == [failure]:
            if max_restarts:
                causes = "".join(f"\n  {failed.place}: {failed.cause}" for failed in failures)
                to_stderr(f"the run ends: it failed {len(failures)} times without getting further:{causes}")
            return EXIT_FAILED
        pause = _PAUSES_S[min(len(failures), len(_PAUSES_S)) - 1]
        to_stderr(
            f"the run failed {failure.place}: {failure.cause}\n  Restart {len(failures)} of {max_restarts} "
            f"(run.max_restarts) from the newest checkpoint{f', in {pause} s' if pause else ''}."
        )
        if signal.sigtimedwait(STOP_SIGNALS, pause) is not None:
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


def _failure(code: int, folder: Path, began: float) -> _Failure:
    """Read from the run's files how far it came, and why it failed."""
    step, end = _last_row(folder / "metrics.jsonl").get("step"), _last_row(folder / "events.jsonl", began)
    reason = str(end["reason"]) if end.get("event") in ("fail", "stop") and "reason" in end else ""
    cause = reason or (f"exit code {code}" if code > 0 else f"its process ended by {signal.Signals(-code).name}")
    return _Failure(step if isinstance(step, int) else 0, printable(cause))


def _last_row(path: Path, since: float = 0.0) -> dict[str, Any]:
    """Return the last whole line of a file of JSON objects; empty without one, or if the file is older than `since`."""
    with suppress(OSError, ValueError, IndexError), open_regular(path) as file:
        if os.fstat(file.fileno()).st_mtime >= since:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            row = json.loads(file.read().rpartition(b"\n")[0].rpartition(b"\n")[2])
            return row if isinstance(row, dict) else {}
    return {}
