"""Restart a run that failed: `launch` runs in a child process, and this one waits for it.

The child is forked before torch is loaded, so that this process stays small. It ends with this process, and all that it
has started is gone before the next one begins. Linux only: elsewhere a run has no supervisor.
"""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from portable_fsdp.runtime.command import to_stderr
from portable_fsdp.runtime.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, EXIT_USAGE, ConfigError, printable
from portable_fsdp.runtime.failures import ENDS, how_ended, last_events, last_step, record_failure
from portable_fsdp.runtime.launchers import RESTARTS, detect_launch, tpu_workers
from portable_fsdp.runtime.signals import STOP_SIGNALS, adopt_orphans, end_with_parent, kill_descendants

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
