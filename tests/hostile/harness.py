"""Reads one hostile input under watch: it must end with one clear error or a legal value, fast, small and harmless.

Watched: processor time of the thread that reads, and for the process as a whole peak resident memory and (by Python's
audit hooks) files written outside the folder of the case, processes started and hosts connected to. Linux only.
"""

import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import hostile_heartbeats
import hostile_jsonlines
import hostile_manifests
import hostile_pickles
import hostile_safetensors
import hostile_yamls

from portable_fsdp.runtime.errors import PortableFSDPError

FAMILIES: dict[str, Callable[[int, Path], Callable[[], object]]] = {
    "yamls": hostile_yamls.case,
    "pickles": hostile_pickles.case,
    "safetensors": hostile_safetensors.case,
    "heartbeats": hostile_heartbeats.case,
    "jsonlines": hostile_jsonlines.case,
    "manifests": hostile_manifests.case,
}
"""`case(seed, folder)` writes input number `seed` into `folder`, and returns the call that reads it as a command would.
The same seed gives the same input."""

MAX_SECONDS = 2.0
MAX_BYTES = 200 << 20
MAX_MESSAGE = 4_000  # characters of an error: no value is rendered whole
_HEADROOM = 4 << 30  # address space: ends what would otherwise fill the host

# Events of Python's audit hooks whose paths are written to, with the places of these paths among the arguments.
_WRITES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod", "shutil.rmtree"), (0,)),
    **{"os.rename": (0, 1), "os.link": (1,), "os.symlink": (1,)},
}
_FORBIDDEN = {
    *("os.exec", "os.fork", "os.posix_spawn", "os.system", "subprocess.Popen", "socket.connect", "ctypes.dlopen")
}

_folder: Path | None = None  # of the case that is read; a hook can't be removed, so it looks here
_harm: list[str] = []


@dataclass(frozen=True)
class Outcome:
    """The result of an input: the `message` of its refusal, None if it was accepted."""

    message: str | None
    seconds: float  # of this thread's processor time: an earlier test's threads may still be at work
    peak_bytes: int  # above what was resident before


def attempt(read: Callable[[], object], folder: Path) -> Outcome:
    """Call `read`, which may write into `folder` alone.

    Raises AssertionError for everything but a value or one of the package's errors within the bounds above.
    """
    before = _reset_peak()
    began = time.thread_time()
    message = None
    with _watched(folder), _address_space(), _alarm():
        try:
            read()
        except PortableFSDPError as error:
            message = str(error)
        except Exception as error:
            raise AssertionError(f"a traceback in place of an error: {type(error).__name__}: {error!s:.500}") from error
    outcome = Outcome(message, time.thread_time() - began, _status("VmHWM") - before)
    assert not _harm, f"harm: {_harm}"
    assert outcome.seconds < MAX_SECONDS, f"took {outcome.seconds:.1f} s"
    assert outcome.peak_bytes < MAX_BYTES, f"took {outcome.peak_bytes >> 20} MiB"
    if message is not None:
        assert message.strip(), "an error without a message"
        assert len(message) <= MAX_MESSAGE, f"a message of {len(message):,} characters: {message[:200]}"
        assert message.replace("\n", "").isprintable(), f"a message with control characters: {message[:500]!r}"
    return outcome


def _status(name: str) -> int:
    return int(re.findall(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)[0]) << 10


def _reset_peak() -> int:
    """Bytes resident now, from where the kernel counts the peak anew (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


@contextmanager
def _watched(folder: Path) -> Generator[None]:
    global _folder
    if not getattr(sys, "_hostile_hook", False):
        sys.addaudithook(_audit)
        sys._hostile_hook = True  # pyright: ignore[reportAttributeAccessIssue]
    _harm.clear()
    _folder = folder.resolve()
    try:
        yield
    finally:
        _folder = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _folder is None:
        return
    if event in _FORBIDDEN:
        _harm.append(f"{event}{arguments!r:.200}")
    elif event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND):
        _require_inside(event, arguments[0])
    else:
        for place in _WRITES.get(event, ()):
            _require_inside(event, arguments[place])


def _require_inside(event: str, path: object) -> None:
    folder = _folder
    if folder is None or not isinstance(path, str | bytes | os.PathLike):
        return
    target = os.path.realpath(os.fsdecode(path))
    if target != os.devnull and os.path.commonpath([target, folder]) != str(folder):
        _harm.append(f"{event}: {target}")


@contextmanager
def _address_space() -> Generator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + _HEADROOM, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def _alarm() -> Generator[None]:
    """Ends a read that hangs; one inside C code ends first, and is found to be slow then."""

    def give_up(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"no answer within {5 * MAX_SECONDS:.0f} s")

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, 5 * MAX_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
