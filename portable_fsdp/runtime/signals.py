"""The end of a process: with its parent, or on request by SIGTERM, SIGINT or SIGUSR1."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from portable_fsdp.runtime.errors import EXIT_FAILED

if TYPE_CHECKING:  # Python 3.10 has none, and the doctor reports that version
    from typing import Self

from portable_fsdp.runtime.launchers import OUR_RUNS

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that request a stop. Schedulers send SIGUSR1 (`--signal`) a while before SIGTERM."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # from linux/prctl.h


def end_with_agent(environ: Mapping[str, str]) -> None:
    """Have the kernel kill a worker of torch's elastic agent (torchrun's, or our own) when the agent ends.

    Otherwise workers survive a SIGKILL of the agent, and a restart of the same command races them. Linux only. Does
    nothing without an agent: then the parent may end earlier.
    """
    run = environ.get("TORCHELASTIC_RUN_ID")
    if run:
        end_with_parent(int(run.removeprefix(OUR_RUNS)) if run.startswith(OUR_RUNS) else os.getppid())


def end_agent(environ: Mapping[str, str]) -> None:
    """Ask torchrun on this host to end, after a stop that its processes learnt of by themselves.

    Otherwise it takes their exit code for a failure: it restarts them, and on several hosts waits for the others. Does
    nothing without restarts.
    """
    if environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0" and environ.get("LOCAL_RANK") == "0":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun passes it on
        os.kill(os.getppid(), signal.SIGTERM)


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent, process `parent`, ends. Does nothing except on Linux."""
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL)) != 0:
        print("prctl failed: if the launcher is killed, this process will survive it", file=sys.stderr)
    if os.getppid() != parent:  # the parent ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def exit_on_signals() -> None:
    """End on SIGTERM and SIGHUP as on Ctrl-C, by an exception: leave no child and no file."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))


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


@contextmanager
def starts_without(*numbers: signal.Signals) -> Generator[None]:
    """Block signals in this thread, and for good in the processes that it starts meanwhile: they inherit the mask."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
    """Make SIGTERM and SIGUSR1 raise Stopped before there is a StopRequest.

    Otherwise SIGTERM gives the exit code 143, which means saved.
    """
    numbers = (signal.SIGTERM, signal.SIGUSR1)

    def stop(number: int, frame: FrameType | None) -> None:
        for each in numbers:  # once
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(signal.Signals(number).name)

    previous = [(number, signal.signal(number, stop)) for number in numbers]
    try:
        yield
    finally:
        _restore(previous)


def _restore(handlers: Iterable[tuple[signal.Signals, Any]]) -> None:
    for number, handler in handlers:
        # None: the handler was installed by C code, which Python can't restore.
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


class Presses:
    """Tell a second request from a copy of the first, and from the SIGTERM that a scheduler's SIGUSR1 announces.

    torch's elastic launcher forwards a signal to processes that already got it from the terminal or a scheduler, so one
    request can arrive twice within milliseconds.
    """

    def __init__(self, same_press_s: float = 1.0) -> None:
        self._same_press_s = same_press_s
        self.first_at: float | None = None  # time.monotonic() of the first SIGTERM or SIGINT

    def is_second(self, number: int) -> bool:
        if number == signal.SIGUSR1:
            return False
        now = time.monotonic()
        self.first_at = self.first_at or now
        return now - self.first_at > self._same_press_s


class StopRequest:
    """Context manager in which SIGTERM, SIGINT and SIGUSR1 request a stop.

        with StopRequest() as stop:
            ...                       # before the first step: a request raises Stopped here
            stop.begin_steps()        # from now on it only sets a flag and prints one line
            while not stop.requested: ...

    A second SIGTERM or SIGINT raises Interrupted, which ends the run immediately, without waiting for the step and its
    save. SIGUSR1 doesn't count: it announces that SIGTERM will follow.
    Enter it in the main thread: Python handles signals only there, between two Python instructions, and a compiler may
    run for minutes. So before the first step a thread ends the process if the main thread hasn't within `grace_s`.
    """

    def __init__(self, same_press_s: float = 1.0, grace_s: float = 2.0) -> None:
        self._presses, self._grace_s = Presses(same_press_s), grace_s
        self.requested_at: float | None = None  # time.monotonic()
        self._previous: dict[signal.Signals, Any] = {}
        self._ends_at_once, self._is_ending, self._over = True, False, threading.Event()
        self.reason: str | None = None
        self.last_step = "the current step"  # of a request that comes now

    @property
    def requested(self) -> bool:
        return self.reason is not None

    @property
    def is_by_signal(self) -> bool:
        """Whether this process got SIGTERM or SIGINT, which launchers send to all their processes."""
        return self._presses.first_at is not None

    def begin_steps(self) -> None:
        """From now on a stop request waits for the current step and its save."""
        self._ends_at_once = False

    def __enter__(self) -> "Self":
        self._signals, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        self._previous_wakeup = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._guard, name="portable_fsdp stop", daemon=True)
        self._thread.start()
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        _restore(self._previous.items())
        signal.set_wakeup_fd(self._previous_wakeup)
        self._over.set()
        os.close(self._wakeup)  # ends the thread
        self._thread.join()
        os.close(self._signals)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if self._presses.is_second(number):
            self._write(f"second {name}: ending now, without waiting for {self.last_step} and its save")
            raise Interrupted
        is_new = self.reason is None
        if is_new:
            self.requested_at, self.reason = time.monotonic(), name
        if self._ends_at_once and not self._is_ending:
            self._is_ending = True
            raise Stopped(name)
        if is_new:
            self._write(f"{name}: ending after {self.last_step} at the latest and its save")

    def _guard(self) -> None:
        while numbers := os.read(self._signals, 1):
            number = numbers[0]
            if self._ends_at_once and number in self._previous and not self._over.wait(self._grace_s):
                self._write(f"stopped before the first step on request ({signal.Signals(number).name})")
                os._exit(EXIT_FAILED)

    def _write(self, sentence: str) -> None:
        if os.environ.get("RANK", "0") == "0":  # not log or print: the signal may have interrupted either of them
            os.write(2, f"{sentence}\n".encode())
