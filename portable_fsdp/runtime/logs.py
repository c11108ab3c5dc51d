"""RUN/logs: the log of process 0 (`run.log`), and what each process writes to stderr (`stderr-<process>.log`).

Both are appended to, and begin with the run's folder: a refused run leaves no file. A log that can't be written is
dropped with one line, and the run continues.
"""

import io
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, cast

from portable_fsdp.runtime.command import LogLines, to_stderr

log = logging.getLogger("portable_fsdp")

_TIME = "%Y-%m-%dT%H:%M:%S%z"
_LAST_LINES_S = 0.5


def stderr_file(run: Path, process: int) -> Path:
    return run / "logs" / f"stderr-{process}.log"


class RunLog(logging.Handler):
    """Holds lines until `open`, then appends them to run.log, each with its time (ISO 8601, seconds)."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(LogLines("%(asctime)s %(levelname)s %(message)s", _TIME))
        self.path: Path | None = None
        self._held: list[str] = []

    def open(self, run: Path) -> None:
        self.path = run / "logs" / "run.log"
        self._write(self.path)

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(Exception):  # arguments that don't fit the message: the terminal's handler says so
            self._held.append(f"{self.format(record)}\n")
        if self.path:
            self._write(self.path)

    def _write(self, path: Path) -> None:
        try:
            path.parent.mkdir(exist_ok=True)
            with path.open("a", encoding="utf-8", errors="replace") as file:
                file.writelines(self._held)
        except OSError as error:
            self.setLevel(logging.CRITICAL + 1)  # not again
            to_stderr(_dropped(path, error))
        self._held.clear()


def _dropped(path: Path, error: OSError) -> str:
    return f"{path}: {error.strerror}; the run continues without this log"


@contextmanager
def run_log(process: int) -> Generator[RunLog]:
    """The log `portable_fsdp`, and the warnings of transformers instead of on the terminal; of process 0 alone."""
    from transformers.utils import logging as transformers_log

    handler = RunLog()
    if process != 0:
        handler.setLevel(logging.CRITICAL + 1)
    log.addHandler(handler)
    transformers_log.disable_default_handler()
    transformers_log.add_handler(handler)
    try:
        yield handler
    finally:
        log.removeHandler(handler)
        transformers_log.remove_handler(handler)
        transformers_log.enable_default_handler()


class KeptOutput:
    """A context manager: what this process writes to file descriptors 1 and 2, the writes of C code included.

    `hold_stdout` keeps what C code writes to stdout (gloo: which ranks are connected) off the terminal; Python's own
    stdout stays there. `begin` puts that into the process's log, and from then on has `tee` copy stderr there, so that
    the last words of a crash arrive at both. Does nothing where Python's streams are replaced, as in a notebook.
    """

    def __init__(self) -> None:
        self._undo = ExitStack()
        self._held: IO[bytes] = io.BytesIO()
        self._release: Callable[[], object] = lambda: None
        self._is_ours = sys.stdout is not None and sys.stdout is sys.__stdout__ and sys.stderr is sys.__stderr__

    def __enter__(self) -> "KeptOutput":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # else a traceback follows, which belongs into the log
            self._undo.close()

    def hold_stdout(self) -> None:
        """Until `begin`."""
        if not self._is_ours:
            return
        stdout = sys.stdout
        with suppress(OSError):  # no room for temporary files
            stdout.flush()
            self._held = self._undo.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
            terminal = os.fdopen(os.dup(1), "w", 1 if stdout.isatty() else -1, stdout.encoding, stdout.errors)
            self._undo.callback(setattr, sys, "stdout", stdout)
            sys.stdout = self._undo.enter_context(terminal)
            self._release = _redirect(1, self._held.fileno())
            self._undo.callback(self._release)

    def begin(self, run: Path, process: int) -> None:
        """Append to this process's log; the run's folder must be there."""
        if not self._is_ours:
            return
        self._release()
        self._held.seek(0)
        path = stderr_file(run, process)
        try:
            path.parent.mkdir(exist_ok=True)
            with path.open("ab") as file:
                file.write(f"--- {time.strftime(_TIME)}\n".encode() + self._held.read())
            # In another session: Ctrl-C at the terminal reaches the run alone.
            tee = subprocess.Popen(["tee", "-a", path], stdin=subprocess.PIPE, stdout=2, start_new_session=True)
        except OSError as error:
            to_stderr(_dropped(path, error))
            return
        self._undo.callback(_wait, tee)
        with cast(IO[bytes], tee.stdin) as pipe:
            self._undo.callback(_redirect(2, pipe.fileno()))


@contextmanager
def stderr_into(path: Path) -> Generator[None]:
    """What C code writes to stderr meanwhile is appended to this file alone, if it can be opened."""
    with ExitStack() as undo:
        with suppress(OSError):
            undo.callback(_redirect(2, undo.enter_context(path.open("ab")).fileno()))
        yield


def _redirect(descriptor: int, to: int) -> Callable[[], object]:
    """Returns what undoes it."""
    before = os.dup(descriptor)
    os.dup2(to, descriptor)
    return lambda: os.dup2(before, descriptor)


def _wait(tee: "subprocess.Popen[bytes]") -> None:
    with suppress(subprocess.TimeoutExpired):  # a child process that holds our stderr open keeps it
        tee.wait(_LAST_LINES_S)
