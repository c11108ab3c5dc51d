"""A child process with a time limit: it may hang or crash, keeps its last lines, and never outlives its parent."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Ended:
    """How a child process ended; `enough`: it was stopped because it had given what was wanted."""

    how: Literal["finished", "enough", "failed", "late"]
    code: int  # as in subprocess: negative for a signal
    cpu_s: float  # processor time
    output: str  # its stdout
    log: str  # its stderr

    @property
    def last_lines(self) -> str:
        """For a message: the end of the log, without empty lines."""
        lines = [line for line in self.log.splitlines() if line.strip()]
        return "\n".join(f"    {line[:300]}" for line in lines[-12:]) or "    (it printed nothing)"


class Child:
    """`python -m MODULE PARENT ARGUMENTS`, started at once, in a process group of its own.

    MODULE calls `runtime.process.end_with_parent(PARENT)` first, so that no kill of this process leaves it behind.
    `close`, or leaving the `with` block, kills it and all that it started. `environment` is added to this process's.
    """

    def __init__(self, module: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self._began = time.monotonic()
        # Files instead of pipes: a child that hangs in the kernel would keep a reader waiting.
        self._files: list[Any] = [tempfile.TemporaryFile(), tempfile.TemporaryFile()]  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(os.getpid()), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._files[0],
            stderr=self._files[1],
            # It finds modules where this process does: the user's factories lie beside the config.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **(environment or {})},
            start_new_session=True,
        )
        self._cpu_s = 0.0

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def code(self) -> int | None:
        """As in subprocess; None while it runs, or where the kernel doesn't let it go."""
        return self._process.returncode

    def wait(self, limit_s: float, has_enough: Callable[[], bool] = lambda: False) -> Ended:
        """Wait until it ends, has given enough, or `limit_s` seconds have passed since its start; then `close` it."""
        how = self._wait(limit_s, has_enough)
        self._kill()
        code = -signal.SIGKILL if self.code is None else self.code
        output, log = (_text(file) for file in self._files)
        self._close_files()
        return Ended("failed" if how == "finished" and code else how, code, self._cpu_s, output, log)

    def _wait(self, limit_s: float, has_enough: Callable[[], bool]) -> Literal["finished", "enough", "late"]:
        # WNOWAIT: not reaped yet, so that its number stays its own until the kill.
        while os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if has_enough():
                return "enough"
            if time.monotonic() - self._began > limit_s:
                return "late"
            time.sleep(0.05)
        return "finished"

    def close(self) -> None:
        self._kill()
        self._close_files()

    def _close_files(self) -> None:
        for file in self._files:
            file.close()

    def _kill(self) -> None:
        if self.code is not None:
            return
        os.killpg(self._process.pid, signal.SIGKILL)
        for _ in range(100):  # not for ever: a process that hangs in a driver can't be ended
            pid, status, used = os.wait4(self._process.pid, os.WNOHANG)
            if pid:
                self._process.returncode = os.waitstatus_to_exitcode(status)
                self._cpu_s = used.ru_utime + used.ru_stime
                return
            time.sleep(0.05)


def _text(file: Any) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
