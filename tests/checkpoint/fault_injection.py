"""Processes that die, or meet an error, at a chosen operation on the file system or the object store.

Patched below the store. A process is a thread with a number, and the threads that it starts. A dead one does nothing
more: whatever it would do to a file raises `Killed`, which no code of ours catches.
"""

import functools
import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem
from plain_backend import PlainBackend, in_processes


class Killed(BaseException):
    """The process is dead."""


class ProcessThread(threading.Thread):
    """A thread of the process that started it; None for the test's own."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.process = current_process()
        self.killed = False

    def run(self) -> None:
        try:
            super().run()
        except Killed:
            self.killed = True

    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)
        if self.killed and current_process() is not None:
            raise Killed


def current_process() -> int | None:
    return cast(int | None, getattr(threading.current_thread(), "process", None))


class Operation(NamedTuple):
    """The `point`-th operation of one process. An open file is its name here."""

    process: int
    point: int
    name: str
    arguments: tuple[Any, ...]


class Flaw(NamedTuple):
    """A replacement for the operations of these names."""

    operations: Collection[str]
    instead: Callable[..., Any]


IN_FOLDERS = ("open", "write", "mkdir", "replace", "rename", "unlink", "remove", "rmdir", "fsync")
IN_STORES = ("upload", "rm_file", "cp_file")
READS = ("preadv", "cat_file")  # of a folder, of a store


class Injection:
    """The `point`-th operation of `process` goes wrong by `flaw`, or (`lasting`) each that fits from there on.

    A flaw that kills ends all processes. `alone`: the others live on, and learn of it as they do from a process group:
    their next collective fails.
    """

    def __init__(
        self, flaw: Flaw | None = None, process: int = 0, point: int = 0, *, lasting: bool = False, alone: bool = False
    ) -> None:
        self.flaw, self.process, self.point, self.lasting, self.alone = flaw, process, point, lasting, alone
        self.tried: list[Operation] = []
        self.done: list[Operation] = []  # without those that failed: a folder to make that is there
        self.hits, self.has_killed = 0, False
        self.at_death: list[Callable[[], object]] = []  # ends what waits for the dead
        self._counts = Counter[int]()
        self._lock = threading.RLock()

    def in_processes(self, count: int, work: Callable[[PlainBackend], Any]) -> list[Any]:
        """What `plain_backend.in_processes` returns; each thread counts as its process, and goes through this."""

        def run(backend: PlainBackend) -> Any:
            cast(ProcessThread, threading.current_thread()).process = backend.process.index
            self.at_death.append(backend.meeting.barrier.abort)
            return work(backend)

        with patched(self):
            return in_processes(count, run)

    def call(self, name: str, real: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        process = current_process()
        if process is None:
            return real(*arguments, **named)
        with self._lock:
            if self.has_killed and (process == self.process or not self.alone):
                raise Killed
            self._counts[process] += 1
            file = os.readlink(f"/proc/self/fd/{arguments[0]}") if isinstance(arguments[0], int) else arguments[0]
            operation = Operation(process, self._counts[process], name, (file, *arguments[1:]))
            self.tried.append(operation)
            past = operation.point - self.point
            is_here = process == self.process and (past == 0 or (self.lasting and past > 0))
            if is_here and self.flaw is not None and name in self.flaw.operations:
                self.hits += 1
                try:
                    return self.flaw.instead(real, *arguments, **named)
                except Killed:
                    self.has_killed = True
                    for end in self.at_death:
                        end()
                    raise
            result = real(*arguments, **named)
            self.done.append(operation)
            return result


def strikes(flaws: Collection[Flaw], work: Callable[[Injection], Any], **how: bool) -> Iterator[tuple[Any, Injection]]:
    """Each flaw at each operation of `work` that it fits: where it is, and the injection for another run of it."""
    whole = Injection()
    work(whole)
    for operation, flaw in itertools.product(whole.tried, flaws):
        if operation.name in flaw.operations:
            yield (flaw, operation), Injection(flaw, operation.process, operation.point, **how)


@contextmanager
def patched(injection: Injection) -> Generator[None]:
    """What changes something on the file system or in `memory://`, and what reads, goes through `injection`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "Thread", ProcessThread)
        for name in (*IN_FOLDERS[1:], "preadv"):
            patch.setattr(os, name, _through(injection, name, getattr(os, name)))
        patch.setattr(os, "open", _creating(injection, os.open))
        patch.setattr(MemoryFileSystem, "_open", _opened_as_by_a_store)
        patch.setattr(MemoryFile, "commit", _through(injection, "upload", MemoryFile.commit))
        for name in (*IN_STORES[1:], "cat_file"):
            patch.setattr(MemoryFileSystem, name, _through(injection, name, getattr(MemoryFileSystem, name)))
        yield


def _through(injection: Injection, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def call(*arguments: Any, **named: Any) -> Any:
        return injection.call(name, real, arguments, named)

    return call


def _creating(injection: Injection, real: Callable[..., int]) -> Callable[..., int]:
    def call(path: Any, flags: int, *arguments: Any, **named: Any) -> int:
        if flags & os.O_CREAT:
            return cast(int, injection.call("open", real, (path, flags, *arguments), named))
        return real(path, flags, *arguments, **named)

    return call


_open_in_memory = MemoryFileSystem._open


def _opened_as_by_a_store(store: MemoryFileSystem, path: str, mode: str = "rb", **named: Any) -> Any:
    """Show an upload when it ends, like a store; `memory://` shows it from the start."""
    return _open_in_memory(store, path, mode, **named) if mode != "wb" else MemoryFile(store, path)
