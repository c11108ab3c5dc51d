"""`data.workers`: processes that read the steps of a run ahead, by torch's DataLoader.

A step is one item: rows, their order and their seeds are those of a run without workers. A worker opens the dataset by
the factory, so that a dataset need not pickle. It is spawned, not forked: this process has threads (of CUDA, XLA, gloo)
that a fork would lose with their locks held.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import active_children, connection
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import DataLoader, Dataset

from portable_fsdp.config.data import Data
from portable_fsdp.data.packing import Rows, StepRows
from portable_fsdp.runtime.closing import Closing
from portable_fsdp.runtime.command import configure_log
from portable_fsdp.runtime.errors import PortableFSDPError, TrainingError
from portable_fsdp.runtime.factory import user_code
from portable_fsdp.runtime.process import end_with_parent

if TYPE_CHECKING:
    from portable_fsdp.data.batches import StepRows

ReadStep = Callable[[Rows, int], "StepRows"]

_END_S = 10.0  # on a busy host

STEPS_PER_WORKER = 2
"""That a worker reads before anybody asks for them."""


class _Steps(Dataset[Any]):
    """The step at a position, or the error that the run ends with: DataLoader would put a traceback around it."""

    def __init__(self, data: Data, read: ReadStep) -> None:
        self._data, self._read = data, read
        self._rows: Rows | None = None

    def __getitem__(self, first: int) -> "StepRows | PortableFSDPError":
        from portable_fsdp.data.datasets import open_training_rows

        try:
            with user_code():
                if self._rows is None:
                    self._rows = open_training_rows(self._data)
                return self._read(self._rows, first)
        except PortableFSDPError as error:
            return error.with_traceback(None)


class _Begin:
    """A worker's first call."""

    def __init__(self, process: int) -> None:
        self._process, self._parent = process, os.getpid()

    def __call__(self, number: int) -> None:
        # Ctrl-C and a scheduler's SIGTERM reach all processes of a run, which then still reads its last step.
        for stop in (signal.SIGINT, signal.SIGTERM):
            signal.signal(stop, signal.SIG_IGN)
        end_with_parent(self._parent)
        configure_log(self._process)


class StepLoader(Closing):
    """Steps in order, read by `data.workers` processes. One thread calls `read`, which starts them."""

    def __init__(self, data: Data, read: ReadStep, firsts: Iterator[int], *, process: int) -> None:
        """`firsts`: the position of each step. `process`: of the run, for the log."""
        self._loader: DataLoader[Any] = DataLoader(
            _Steps(data, read),
            batch_size=None,
            sampler=cast(Any, firsts),
            num_workers=data.workers,
            collate_fn=_as_it_is,
            worker_init_fn=_Begin(process),
            multiprocessing_context="spawn",
            prefetch_factor=STEPS_PER_WORKER,
            generator=torch.Generator(),  # else its seed would be drawn from the run's own generator
        )
        self._steps: Iterator[Any] | None = None
        self._processes: list[BaseProcess] = []
        self._shared_event: object = None  # its name must last until the last worker has opened it

    def read(self) -> "StepRows":
        """The next step. Raises a worker's error, and TrainingError where one has ended."""
        try:
            if self._steps is None:
                # Not in the main thread, where DataLoader would have SIGCHLD raise errors between any two operations.
                self._steps = self._started()
            step = next(self._steps)
        except Exception as error:
            # A worker's pipes, its sentinel among them, close shortly before its exit code can be read.
            ready = connection.wait([process.sentinel for process in self._processes], _END_S)
            for process in self._processes:
                if process.sentinel in ready:
                    process.join()
            if ended := [process for process in self._processes if process.exitcode is not None]:
                raise _lost(ended) from error
            raise
        if isinstance(step, PortableFSDPError):
            raise step
        return step

    def _started(self) -> Iterator[Any]:
        others, name = set(active_children()), "TORCH_DEVICE_BACKEND_AUTOLOAD"
        before = os.environ.get(name)
        os.environ[name] = "0"  # else a worker's torch would load the packages that give it devices
        try:
            steps = cast(Any, iter(self._loader))
        finally:
            self._processes = [process for process in active_children() if process not in others]
            os.environ.pop(name)
            if before is not None:
                os.environ[name] = before
        # Workers test the event by which DataLoader ends them. One that is killed meanwhile leaves its lock taken, and
        # torch 2.9 to 2.13 would wait for that forever. `close` kills the workers, so they need no such event.
        self._shared_event, steps._workers_done_event = steps._workers_done_event, threading.Event()
        return steps

    def close(self) -> None:
        """Kill the processes: a dataset may hang."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _as_it_is(step: Any) -> Any:
    return step


def _lost(ended: list[BaseProcess]) -> TrainingError:
    codes = {process.pid: process.exitcode or 0 for process in ended}
    how = ", ".join(
        f"{pid} by {signal.Signals(-code).name}" if code < 0 else f"{pid} with exit code {code}"
        for pid, code in codes.items()
    )
    return TrainingError(
        f"data.workers: a process that reads data.factory ended by itself: {how}.\n  SIGKILL mostly means that the "
        "host's memory is full (each worker opens the dataset), SIGBUS that /dev/shm is. Lower data.workers, or set "
        "data.workers=0 to read in a thread."
    )
