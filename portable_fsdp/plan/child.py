"""A child process that a plan waits for: it has a time limit, leaves its last words, and never outlives its parent."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ended:
    """How a child process ended."""

    how: str  # "finished", "enough" (stopped, since it had given what it was asked for), "failed", "late"
    code: int  # as in subprocess: below 0 the signal
    cpu_s: float  # of processor time
    peak_bytes: int  # of its own memory
    log: str  # all that it said

    @property
    def last_lines(self) -> str:
        """For a message: the end of the log, without empty lines."""
        lines = [line for line in self.log.splitlines() if line.strip()]
        return "\n".join(f"    {line[:300]}" for line in lines[-12:]) or "    (it said nothing)"


def run_child(
    module: str,
    folder: Path,
    *,
    limit_s: float,
    environment: Mapping[str, str],
    has_enough: Callable[[], bool] = lambda: False,
) -> Ended:
    """Run `python -m MODULE FOLDER PARENT` until it ends, is late, or has given what was asked for.

    What the child says goes to FOLDER/log. It is to call `runtime.process.end_with_parent(PARENT)` first, so that it
    goes with this process whatever kills that; an exception here (Ctrl-C) kills it and all that it started.
    `environment` is added to this process's.
    """
    command = [sys.executable, "-m", module, str(folder), str(os.getpid())]
    with (folder / "log").open("wb") as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,  # a group of its own, so that one signal ends all of it
        )
        try:
            how = _wait(child.pid, limit_s, has_enough)
        finally:
            os.killpg(child.pid, signal.SIGKILL)  # before it is reaped, so that the number is still its own
            _, status, used = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
    if how == "finished" and child.returncode != 0:
        how = "failed"
    said = (folder / "log").read_text(errors="replace")
    return Ended(how, child.returncode, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, said)


def _wait(pid: int, limit_s: float, has_enough: Callable[[], bool]) -> str:
    began = time.monotonic()
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if has_enough():
            return "enough"
        if time.monotonic() - began > limit_s:
            return "late"
        time.sleep(0.05)
    return "finished"
