"""The end of a process: with its parent, or on request by SIGTERM or SIGINT."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from portable_fsdp.runtime.errors import EXIT_FAILED

if TYPE_CHECKING:  # Python 3.10 has none, and the doctor reports that version
    from typing import Self

from portable_fsdp.runtime.launchers import OUR_RUNS

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # from linux/prctl.h


def end_with_agent(environ: Mapping[str, str]) -> None:
    """Have the kernel kill a worker of torch's elastic agent (torchrun's, or our own) when the agent ends.

    Otherwise workers survive a SIGKILL of the agent, and a restart of the same command races them. Linux only. Does
    nothing without an agent: then the parent may end earlier.
    """
    run = environ.get("TORCHELASTIC_RUN_ID")
    if run:
        end_with_parent(int(run.removeprefix(OUR_RUNS)) if run.startswith(OUR_RUNS) else os.getppid())


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent, process `parent`, ends. Does nothing except on Linux."""
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL)) != 0:
        print("prctl failed: if the launcher is killed, this process will survive it", file=sys.stderr)
    if os.getppid() != parent:  # the parent ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Make this process the parent of all descendants whose own parent ends. Does nothing except on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))


def kill_descendants(grace_s: float = 0.0) -> None:
    """Kill what this process has started, and what that has started, after `grace_s`; wait for the end of all."""
    import psutil

    this = psutil.Process()
    psutil.wait_procs(this.children(recursive=True), timeout=grace_s)
    for process in (left := this.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left)


class Stopped(BaseException):
    """A stop was requested before the first step, when there is nothing to save. Not an Exception, so that no handler
    takes it for an error of a file."""


class Interrupted(KeyboardInterrupt):
    """A second stop request: end now, without waiting for the step and its save."""


def is_signal(error: BaseException) -> bool:
    """Return whether a signal raised it: a stop request, or Ctrl-C with Python's own handler."""
    if not isinstance(error, KeyboardInterrupt):
        return isinstance(error, Stopped)
    is_main = threading.current_thread() is threading.main_thread()  # other threads don't handle signals
    return isinstance(error, Interrupted) or (is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler)


@contextmanager
def early_stop() -> Generator[None]:
    """Make SIGTERM raise Stopped before there is a StopRequest. Otherwise the exit code is 143, which means saved."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # once
        raise Stopped(signal.Signals(number).name)

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)


class StopRequest:
    """Context manager in which SIGTERM and SIGINT request a stop.

        with StopRequest() as stop:
            ...                       # before the first step: a request raises Stopped here
            stop.begin_steps()        # from now on it only sets a flag and prints one line
            while not stop.requested: ...

    A second request raises Interrupted, which ends the run immediately, without waiting for the step and its save.
    Enter it in the main thread: Python handles signals only there, between two Python instructions, and a compiler may
    run for minutes. So before the first step a thread ends the process if the main thread hasn't within `grace_s`.
    """

    def __init__(self, same_press_s: float = 1.0, grace_s: float = 2.0) -> None:
        # torch's elastic launcher forwards a signal to processes that already got it from the terminal or a scheduler,
        # so one request can arrive twice within milliseconds.
        self._same_press_s, self._grace_s = same_press_s, grace_s
        self._requested_at: float | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._ends_at_once, self._over = True, threading.Event()
        self.reason: str | None = None

    @property
    def requested(self) -> bool:
        return self.reason is not None

    def begin_steps(self) -> None:
        """From now on a stop request waits for the current step and its save."""
        self._ends_at_once = False

    def __enter__(self) -> "Self":
        self._signals, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        self._previous_wakeup = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._guard, name="portable_fsdp stop", daemon=True)
        self._thread.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            # None: the handler was installed by C code, which Python can't restore.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        self._over.set()
        os.close(self._wakeup)  # ends the thread
        self._thread.join()
        os.close(self._signals)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._requested_at is not None:
            if now - self._requested_at > self._same_press_s:
                raise Interrupted
            return
        self._requested_at, self.reason = now, signal.Signals(number).name
        if self._ends_at_once:
            raise Stopped(self.reason)
        self._write(f"{self.reason}: ending after the current step and its save")

    def _guard(self) -> None:
        while numbers := os.read(self._signals, 1):
            number = numbers[0]
            if self._ends_at_once and number in self._previous and not self._over.wait(self._grace_s):
                self._write(f"stopped before the first step on request ({signal.Signals(number).name})")
                os._exit(EXIT_FAILED)

    def _write(self, sentence: str) -> None:
        if os.environ.get("RANK", "0") == "0":  # not log or print: the signal may have interrupted either of them
            os.write(2, f"{sentence}\n".encode())
