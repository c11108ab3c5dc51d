"""Child processes with a time limit: they may hang or crash, keep their last lines, and never outlive the parent.

`Child` runs a module once. `Worker` runs functions in one child, one after the other.
"""

import gc
import io
import math
import os
import pickle
import pkgutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

from portable_fsdp.runtime.errors import Closing, PortableFSDPError
from portable_fsdp.runtime.signals import end_with_parent


@dataclass(frozen=True)
class Ended:
    """The end of a child process; `enough`: it was stopped because its output was sufficient."""

    how: Literal["finished", "enough", "failed", "late"]
    code: int  # as in subprocess: negative for a signal
    cpu_s: float  # processor time
    output: str  # its stdout
    log: str  # its stderr

    @property
    def last_lines(self) -> str:
        """The last lines of the log for a message, without empty lines."""
        lines = [line for line in self.log.splitlines() if line.strip()]
        return "\n".join(f"    {line[:300]}" for line in lines[-12:]) or "    (it printed nothing)"


class Child(Closing):
    """`python -m MODULE PARENT ARGUMENTS`, started immediately, in its own process group.

    MODULE calls `runtime.signals.end_with_parent(PARENT)` first, so that it dies if this process is killed. `close`, or
    leaving the `with` block, kills it and all its children. `environment` is added to that of this process.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        stdin: int = subprocess.DEVNULL,
    ) -> None:
        self._began = time.monotonic()
        # Files instead of pipes: a child that hangs in the kernel would block a reader.
        self._files: list[Any] = [tempfile.TemporaryFile(), tempfile.TemporaryFile()]  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(os.getpid()), *arguments],
            stdin=stdin,
            stdout=self._files[0],
            stderr=self._files[1],
            # Same module search path as this process: the user's factories are beside the config.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **(environment or {})},
            start_new_session=True,
        )
        self._cpu_s = 0.0

    @property
    def code(self) -> int | None:
        """The exit code, as in subprocess; None while it runs, or if the kernel can't end it."""
        return self._process.returncode

    @property
    def stdin(self) -> IO[bytes]:
        """The pipe to a child started with `stdin=subprocess.PIPE`."""
        return cast(IO[bytes], self._process.stdin)

    def wait(self, limit_s: float, has_enough: Callable[[], bool] = lambda: False) -> Ended:
        """Wait until it ends, `has_enough()`, or `limit_s` seconds after its start; then `close` it."""
        how = self.until(limit_s, has_enough)
        self._kill()
        code = -signal.SIGKILL if self.code is None else self.code
        for file in self._files:
            file.seek(0)
        output, log = (file.read().decode(errors="replace") for file in self._files)
        self._close_files()
        return Ended("failed" if how == "finished" and code else how, code, self._cpu_s, output, log)

    def until(self, limit_s: float, has_enough: Callable[[], bool]) -> Literal["finished", "enough", "late"]:
        """Wait like `wait`, but let the child run."""
        # WNOWAIT: don't reap it, so that its PID isn't reused before the kill.
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
        for file in (*self._files, *filter(None, [self._process.stdin])):
            with suppress(BrokenPipeError):  # a request that nobody reads
                file.close()

    def _kill(self) -> None:
        if self.code is not None:
            return
        os.killpg(self._process.pid, signal.SIGKILL)
        for _ in range(100):  # not forever: a process that hangs in a driver can't be killed
            pid, status, used = os.wait4(self._process.pid, os.WNOHANG)
            if pid:
                self._process.returncode = os.waitstatus_to_exitcode(status)
                self._cpu_s = used.ru_utime + used.ru_stime
                return
            time.sleep(0.05)


class WorkerFailedError(Exception):
    """A worker crashed, raised an error other than PortableFSDPError, or timed out."""

    def __init__(self, ended: Ended) -> None:
        super().__init__(ended.last_lines)
        self.ended = ended


class Worker(Closing):
    """Calls functions in one child process, one after the other. It starts at the first call, and stays for the next.

    For functions that import torch, which takes seconds, or replace parts of it. Leaving the `with` block kills the
    process and deletes its temporary files. `limit_s`: its maximum lifetime.
    """

    def __init__(self, limit_s: float = math.inf) -> None:
        self._limit_s = limit_s
        self._folder = tempfile.TemporaryDirectory(prefix="portable_fsdp_worker")
        self._child: Child | None = None

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
        self._folder.cleanup()

    def __call__(self, work: Callable[..., Any] | str, *arguments: Any) -> Any:
        """Return `work(*arguments)`; all must be picklable. `module:name` is a function that only the child imports.

        Raises the PortableFSDPError that `work` raises; WorkerFailedError for any other error. The next call then
        starts a new process.
        """
        self.begin(work, *arguments)
        return self.result()

    def begin(self, work: Callable[..., Any] | str, *arguments: Any) -> None:
        """Start a call, whose outcome `result` waits for."""
        folder = self._folder.name
        if self._child is None:
            self._child = Child(__name__, folder, environment={"TMPDIR": folder}, stdin=subprocess.PIPE)
        with suppress(BrokenPipeError):  # the child has ended
            self._child.stdin.write(pickle.dumps((work, arguments)))
            self._child.stdin.flush()

    def result(self) -> Any:
        """Return the result of the call that `begin` started, or raise its error, as `__call__` says."""
        child, answer = cast(Child, self._child), Path(self._folder.name, "answer")
        try:
            if child.until(self._limit_s, answer.exists) != "enough":
                raise WorkerFailedError(child.wait(self._limit_s))
        except BaseException:  # nobody will read its answer
            child.close()
            self._child = None
            raise
        result, error = pickle.loads(answer.read_bytes())
        answer.unlink()
        if error is not None:
            raise error
        return result


@contextmanager
def without_garbage_collection() -> Generator[None]:
    """Collect no reference cycles inside: with torch loaded, or while it loads, that takes a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _serve(folder: Path) -> None:
    """Run in the worker's process: execute the calls from stdin until it is closed."""
    while cast(io.BufferedReader, sys.stdin.buffer).peek(1):
        work, arguments = pickle.load(sys.stdin.buffer)
        try:
            with without_garbage_collection():  # it may import torch
                function = pkgutil.resolve_name(work) if isinstance(work, str) else work
            answer = function(*arguments), None
        except PortableFSDPError as error:
            answer = None, error
        (folder / "part").write_bytes(pickle.dumps(answer))
        (folder / "part").rename(folder / "answer")


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    _serve(Path(sys.argv[2]))
