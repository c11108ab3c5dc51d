"""End a process that hangs: a small process beside it reads what it does, and since when, from shared memory.

So an interpreter that is stuck in C code, or stopped, is noticed too. `faulthandler` writes the stacks of all threads
from a signal handler in C, which needs no Python.
"""

import faulthandler
import json
import logging
import mmap
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from portable_fsdp.runtime.command import to_stderr
from portable_fsdp.runtime.errors import Closing
from portable_fsdp.runtime.failures import record_failure
from portable_fsdp.runtime.signals import STOP_SIGNALS, end_with_parent

log = logging.getLogger("portable_fsdp")

LEAST_S, TIMES = 60.0, 10
"""Automatic limit of a step: TIMES the median, at least LEAST_S."""
LONG_S, TIMES_LONGEST = 1800.0, 3
"""Automatic limit of anything else, and of steps until ENOUGH are known: at least LONG_S, or TIMES_LONGEST the longest
before."""
ENOUGH = 5

_BYTES = 4096
_HUNG = 1
"""The last byte of the shared memory, once the process is to be killed."""
_POLL_S = 0.5
_WAITERS_S = 2.0
"""Added to the limit of a process that waits for others, so that a hung one is recorded first. Processes other than the
first count as waiting until a heartbeat says that they are behind."""
_STACKS_S = 3.0  # for the stacks to be written
_FIRST_S, _OTHERS_S = 2.0, 6.0
"""Until process 0, and then the others, are killed: all have written their stacks, and only process 0 knows who is
behind."""


class Watchdog(Closing):
    """Ends this process, with SIGKILL, when a step or another phase takes too long.

        watchdog.begin_step(57, "waiting for its rows")
        watchdog.doing("computing")                     # in the same step
        with watchdog.within("the save of step 60"):    # with its own limit
            ...

    Before that it writes the stacks of all threads into `logs/stacks-PROCESS.txt` of the run's folder, says on stderr
    what hung and who is behind, and adds the event `fail`. `record`, if it is set, returns the last
    collectives; a thread writes them into `logs/collectives-PROCESS.json`, unless the interpreter is stuck.
    """

    def __init__(
        self, folder: Path, process: int, timeout_s: float | Literal["auto"], *, prints: bool, began: float
    ) -> None:
        """`timeout_s`: limit of each phase; auto: by the constants above. `prints`: say the reason on stderr. `began`:
        time before any event of this start, the same on all processes."""
        self._timeout_s, self._steps, self._longest = timeout_s, deque[float](maxlen=50), dict[str, float]()
        self._kinds = set[Hashable]([None])
        self._began, self._apart_s, self._step, self.phase = 0.0, 0.0, 0, 0
        self.began = began
        self.what, self._behind, self._waits = "", ("", 0.0), process != 0
        self.limit_s: float = LONG_S
        self.steps = self.parts = 0  # finished since the start; parts of checkpoints
        self.record: Callable[[], bytes] = bytes
        self._child: subprocess.Popen[bytes] | None = None
        self._folder, self._process = folder, process
        self._shared, self._undo = mmap.mmap(-1, _BYTES), ExitStack()
        try:
            self._start(folder, process, prints)
        except OSError as error:  # no room for temporary files
            log.warning("nothing ends a step that hangs: %s", error)

    def _start(self, folder: Path, process: int, prints: bool) -> None:
        stacks = self._undo.enter_context(tempfile.TemporaryFile("a+"))  # noqa: SIM115
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
        self._undo.callback(faulthandler.unregister, signal.SIGUSR2)
        shared = self._undo.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        shared.truncate(_BYTES)
        self._shared = mmap.mmap(shared.fileno(), _BYTES)
        reads, writes = os.pipe()
        files = shared.fileno(), stacks.fileno(), writes
        numbers = (os.getpid(), *files, process, int(prints))
        self._child = subprocess.Popen(
            [sys.executable, "-m", __name__, *map(str, numbers), str(folder), str(self.began)],
            stdin=subprocess.DEVNULL,
            pass_fds=files,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        os.close(writes)
        path = folder / "logs" / f"collectives-{process}.json"
        self._recorder = threading.Thread(
            target=self._write_record, args=(reads, path), name="portable_fsdp record", daemon=True
        )
        self._recorder.start()

    def _write_record(self, reads: int, path: Path) -> None:
        with os.fdopen(reads, "rb") as pipe:
            has_ended = not pipe.read(1)  # the process beside
            with suppress(Exception):  # the report of the hang is more important
                if not has_ended and (record := self.record()):
                    path.parent.mkdir(exist_ok=True)
                    path.write_bytes(record)

    def begin_step(self, step: int, what: str) -> None:
        now = time.monotonic()
        if self._step:
            self.steps += 1
            self._steps.append(now - self._began - self._apart_s)
        self._began, self._apart_s, self._step = now, 0.0, step
        self.doing(what)

    def doing(self, what: str, kind: Hashable = None) -> None:
        """Begin the next phase of this step. The first phase of a `kind` has the long limit: it may compile."""
        enough = len(self._steps) >= ENOUGH and kind in self._kinds
        self._kinds.add(kind)
        median = statistics.median(self._steps) if enough else 0.0
        limit = max(LEAST_S, TIMES * median) if enough else max(LONG_S, TIMES_LONGEST * max(self._steps, default=0.0))
        self._set(f"step {self._step}: {what}", limit)

    @contextmanager
    def within(self, what: str, kind: str = "") -> Generator[None]:
        """A phase that isn't a step: a save, an evaluation, an export. `kind`: what its duration is compared with."""
        kind, began, before = kind or what, time.monotonic(), self.what
        self._set(what, max(LONG_S, TIMES_LONGEST * self._longest.get(kind, 0.0)))
        yield
        seconds = time.monotonic() - began
        self._longest[kind], self._apart_s = max(seconds, self._longest.get(kind, 0.0)), self._apart_s + seconds
        self._set(before, LONG_S)

    def note_part(self) -> None:
        """This process has written its part of a checkpoint, for which process 0 waits without a collective."""
        self.parts += 1

    def _set(self, what: str, limit_s: float) -> None:
        with suppress(ValueError):  # closed
            while self._shared[-1] == _HUNG:  # a stopped process is woken for its stacks, and takes no further step
                time.sleep(_POLL_S)
        self.phase, self.what = self.phase + 1, what
        self.limit_s = limit_s if self._timeout_s == "auto" else float(self._timeout_s)
        self.note(*self._behind, waits=self._waits)

    def note(self, behind: str, least_s: float, *, waits: bool) -> None:
        """Say which process is behind, how long this one may wait for it at least, and whether it does."""
        self._behind, self._waits = (behind, least_s), waits
        state = {"phase": self.phase, "what": self.what, "step": self._step, "behind": behind[:2000]}
        line = json.dumps({**state, "limit": max(self.limit_s, least_s), "later": _WAITERS_S * waits}).encode()
        with suppress(ValueError):  # closed
            self._shared[: len(line) + 1] = line + b"\n"

    @property
    def is_watching(self) -> bool:
        return self._child is not None

    def fail(self, reason: str) -> None:
        """Record why the run is about to end, which is a failure of another process."""
        step = max(0, self._step - 1)
        record_failure(self._folder, step, reason, self.began, is_consequence=True, process=self._process)

    def close(self) -> None:
        if self._child:
            self._child.kill()
            self._child.wait()
            self._recorder.join()  # its pipe has ended
        self._shared.close()
        self._undo.close()


# ---------------------------------------------------------------------------------------------- in the process beside


def main(
    parent: int, descriptor: int, stacks: int, record: int, process: int, prints: bool, folder: Path, started: float
) -> None:
    """Watch process `parent`, which began at `started`. Counts rounds, not clock time: a suspended host blames none."""
    end_with_parent(parent)
    for number in STOP_SIGNALS:  # sent to the whole group
        signal.signal(number, signal.SIG_IGN)
    shared = mmap.mmap(descriptor, _BYTES)
    last, waited_s, state = -1, 0.0, dict[str, Any]()
    while True:
        began = time.monotonic()
        time.sleep(_POLL_S)
        with suppress(ValueError):  # being written
            state = json.loads(shared[:].partition(b"\n")[0])
        if state and state["phase"] != last:
            last, waited_s = state["phase"], 0.0
        waited_s += min(time.monotonic() - began, 2 * _POLL_S)
        if state and waited_s >= state["limit"] + state["later"]:
            with suppress(OSError):  # the thread may have failed
                os.write(record, b"1")
            shared[-1] = _HUNG
            return _end(parent, state, stacks, folder, process, prints, started)


def _end(
    parent: int, state: dict[str, Any], stacks: int, folder: Path, process: int, prints: bool, began: float
) -> None:
    reason = (
        f"process {process} on {socket.gethostname()} hangs: {state['what']} takes more than {state['limit']:.0f} s"
    )
    if state["behind"]:
        reason += f"; {state['behind']}"
    # First: a process may die while it writes its stacks, and this one ends with it.
    record_failure(folder, max(0, state["step"] - 1), f"Hung: {reason}", began, process=process)
    for number in (signal.SIGUSR2, signal.SIGCONT):  # a stopped process writes nothing
        os.kill(parent, number)
    size, deadline = -1, time.monotonic() + _STACKS_S
    while time.monotonic() < deadline and ((now := os.fstat(stacks).st_size) != size or not now):
        size = now
        time.sleep(0.3)
    moment = datetime.now(UTC).isoformat(timespec="milliseconds")
    path = folder / "logs" / f"stacks-{process}.txt"
    with suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            file.write(f"--- {moment} {state['what']}\n{os.pread(stacks, size, 0).decode(errors='replace')}")
    if prints:
        to_stderr(f"{reason}\n  (run.step_timeout_s.) The stacks of all threads are in {path}.")
    time.sleep(_OTHERS_S if process else _FIRST_S)
    with suppress(ProcessLookupError):
        os.kill(parent, signal.SIGKILL)


if __name__ == "__main__":
    _parent, _descriptor, _stacks, _record, _process, _prints = map(int, sys.argv[1:7])
    main(_parent, _descriptor, _stacks, _record, _process, bool(_prints), Path(sys.argv[7]), float(sys.argv[8]))
