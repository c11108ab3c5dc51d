"""The micro batches of each step that one data shard feeds.

A thread prefetches rows of text, `data.workers` processes those of a user's dataset. Without workers the caller's
thread reads these between its steps: a dataset may draw from the process's generators, and so may the task.

With global batch G, step k of a run that begins at `start` samples reads the positions [start + k * G, start + (k + 1)
* G). Shard i of n reads the i-th of n equal slices and cuts it into equal micro batches. Both cuts are contiguous; with
`data.buckets`, the rows are sorted by size before the second. If G has no such slices, the last ones go beyond it: the
first rows of the step come again there, and none of their labels counts.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import count as count_from
from multiprocessing import active_children, connection
from multiprocessing.process import BaseProcess
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from portable_fsdp.config.data import Data
from portable_fsdp.data.packing import Int64s, Rows, StepRows, count_labels, count_values, ignore_rows
from portable_fsdp.runtime.command import configure_log
from portable_fsdp.runtime.errors import Closing, ConfigError, PortableFSDPError, TrainingError
from portable_fsdp.runtime.factory import user_code
from portable_fsdp.runtime.signals import STOP_SIGNALS, end_with_parent, starts_without

STEPS_AHEAD = 3
_CLOSE_S = 5.0  # for the step that workers are reading

Check = Callable[[Mapping[str, Tensor], Callable[[int], str]], None]
"""Check (batch, row -> its name in messages). Raises DataError for rows that a step can't use."""

Count = Callable[[Mapping[str, Tensor]], int]

MakeKeys = tuple[str, Callable[[int, Int64s], Tensor]]
"""A name in the batch, and (position of the step's first row, places of rows in the step) -> a tensor of these rows."""

ReadStep = Callable[[Rows, int], StepRows]
"""Read the step that begins at this position."""


def read_step(
    rows: Rows,
    first: int,
    *,
    seed: int,
    global_batch: int,
    own: slice,
    pads: bool,
    accumulation: int,
    check: Check | None,
    count: Count | None,
    keys: MakeKeys | None,
) -> StepRows:
    """Read the rows `own` of the step whose first row has position `first`."""
    places = np.arange(own.start, own.stop)
    numbers = rows.order(seed, first + places % global_batch)
    parts = rows.micro_batches(numbers, accumulation)
    for part in parts:
        if check is not None:
            check(part.tensors, lambda row, numbers=numbers[part.places]: rows.place(int(numbers[row])))
        if pads:
            ignore_rows(part.tensors, places[part.places] >= global_batch, numbers=count is count_values)
    counted = sum(count(part.tensors) for part in parts) if count else 0
    if keys is not None:
        name, make = keys
        for part in parts:
            part.tensors[name] = make(first, places[part.places])
    return StepRows([part.tensors for part in parts], counted)


class Batches(Closing):
    """Endless iterator over the steps of one data shard; close it, or use it as a context manager."""

    def __init__(
        self,
        rows: Rows,
        *,
        seed: int,
        global_batch: int,
        shard: tuple[int, int],
        accumulation: int,
        parts: int = 1,
        start: int = 0,
        check: Check | None = None,
        count_losses: Count | None = count_labels,
        keys: MakeKeys | None = None,
        data: Data | None = None,
    ) -> None:
        """Args:
        global_batch: rows in a step over all shards and micro batches.
        shard: (index, count): which part of the global batch this process feeds.
        accumulation: micro batches in a step.
        parts: devices that split the rows of a micro batch that this process feeds.
        start: samples consumed before the first step.
        check: called on each micro batch by the thread or worker that read it. With workers it must pickle.
        count_losses: `count_labels`, or `count_values` for labels that are numbers; None if only the task can count.
        keys: makes a further tensor of each micro batch. With workers it must pickle.
        data: its `data.workers` read instead, and each opens the rows itself.

        Raises ConfigError if the global batch can't be cut into equal micro batches, and the task counts by itself.
        """
        index, count = shard
        if global_batch % (count * parts * accumulation) and count_losses is None:
            raise ConfigError(
                f"train.global_batch: expected a multiple of {count * parts * accumulation} ({count * parts} row "
                f"shards * {accumulation} micro batches), found {global_batch}.\n"
                "  Change train.global_batch, train.micro_batch or the number of devices."
            )
        self.consumed = start
        """Samples consumed, including those of the last step that `next()` returned."""
        self._rows = rows
        self._global_batch = global_batch
        shard_rows = -(-global_batch // (count * parts * accumulation)) * parts * accumulation
        read = partial(
            read_step,
            seed=seed,
            global_batch=global_batch,
            own=slice(index * shard_rows, (index + 1) * shard_rows),
            pads=count * shard_rows != global_batch,
            accumulation=accumulation,
            check=check,
            count=count_losses,
            keys=keys,
        )
        firsts = count_from(start, global_batch)
        self._loader = StepLoader(data, read, firsts, process=index) if data is not None and data.workers else None
        self._read = self._loader.read if self._loader else lambda: read(rows, next(firsts))
        self._read_at = partial(read, rows) if rows.may_draw and self._loader is None else None
        self._is_closed = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="portable_fsdp batches")
        self._ahead: deque[Future[StepRows]] = deque()
        for _ in range(0 if self._read_at else STEPS_AHEAD):
            self._begin_step()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StepRows:
        """Return the next step; raises the error of the thread or worker that reads it."""
        if self._is_closed:
            raise ValueError("next() of closed batches")
        if self._read_at:
            step = self._read_at(self.consumed)
        else:
            step = self._ahead[0].result()
            self._ahead.popleft()
            self._begin_step()
        self.consumed += self._global_batch
        return step

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, samples consumed in it), as checkpoints store it."""
        return divmod(self.consumed, len(self._rows))

    def close(self) -> None:
        """Wait for the step that is being read (with workers a few seconds), drop the rest, end thread and workers."""
        self._is_closed = True
        if self._loader is not None:
            wait([step for step in self._ahead if not step.cancel()], _CLOSE_S)
            self._loader.close()
        self._pool.shutdown(cancel_futures=True)
        self._ahead.clear()

    def _begin_step(self) -> None:
        self._ahead.append(self._pool.submit(self._read))


# -------------------------------------------------------------------------------------------------------- data.workers

_END_S = 10.0  # on a busy host


class _Steps(Dataset[Any]):
    """Position -> the step there, or the error that ends the run: DataLoader would wrap a raised one in a traceback."""

    def __init__(self, data: Data, read: ReadStep) -> None:
        self._data, self._read = data, read
        self._rows: Rows | None = None

    def __getitem__(self, first: int) -> StepRows | PortableFSDPError:
        from portable_fsdp.data.datasets import open_training_rows

        try:
            with user_code():
                if self._rows is None:
                    self._rows = open_training_rows(self._data)
                return self._read(self._rows, first)
        except PortableFSDPError as error:
            return error.with_traceback(None)


def _begin_worker(process: int, parent: int, number: int) -> None:
    # Ctrl-C and a scheduler's SIGTERM reach all processes of a run, and the run still reads its last step.
    for stop in STOP_SIGNALS:
        signal.signal(stop, signal.SIG_IGN)
    end_with_parent(parent)
    configure_log(process)


class StepLoader(Closing):
    """Steps in order, read by `data.workers` processes. One thread calls `read`; its first call starts them.

    Rows, their order and their seeds are the same as without workers. Each worker opens the dataset by the factory, so
    a dataset need not pickle. Workers are spawned: a fork would lose this process's threads with their locks held.
    """

    def __init__(self, data: Data, read: ReadStep, firsts: Iterator[int], *, process: int) -> None:
        """`firsts`: the position of each step. `process`: index of this process in the run, for the log."""
        self._loader: DataLoader[Any] = DataLoader(
            _Steps(data, read),
            batch_size=None,
            sampler=cast(Any, firsts),
            num_workers=data.workers,
            worker_init_fn=partial(_begin_worker, process, os.getpid()),
            multiprocessing_context="spawn",
            prefetch_factor=2,  # steps of each worker
            generator=torch.Generator(),  # else its seed would be drawn from the run's own generator
        )
        self._steps: Iterator[Any] | None = None
        self._processes: list[BaseProcess] = []
        self._shared_event: object = None  # its name must last until the last worker has opened it

    def read(self) -> StepRows:
        """Return the next step. Raises a worker's error, and TrainingError if a worker has died."""
        try:
            if self._steps is None:
                # Not in the main thread, where DataLoader would have SIGCHLD raise errors between any two operations.
                self._steps = self._started()
            step = next(self._steps)
        except Exception as error:
            # A worker's pipes and its sentinel close shortly before its exit code can be read.
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
        os.environ[name] = "0"  # else torch in a worker would load device backend packages
        try:
            with starts_without(signal.SIGUSR1):  # else it would kill multiprocessing's resource tracker
                steps = cast(Any, iter(self._loader))
        finally:
            self._processes = [process for process in active_children() if process not in others]
            os.environ.pop(name)
            if before is not None:
                os.environ[name] = before
        # Workers poll the event by which DataLoader ends them. A worker killed meanwhile leaves its lock held, and
        # torch 2.9 to 2.13 would wait for that forever. `close` kills the workers, so they need no such event.
        self._shared_event, steps._workers_done_event = steps._workers_done_event, threading.Event()
        return steps

    def close(self) -> None:
        """Kill the processes: a dataset may hang."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _lost(ended: list[BaseProcess]) -> TrainingError:
    codes = ((process.pid, process.exitcode or 0) for process in ended)
    how = ", ".join(
        f"{pid} " + (f"by {signal.Signals(-n).name}" if n < 0 else f"with exit code {n}") for pid, n in codes
    )
    return TrainingError(
        f"data.workers: a worker that reads data.factory died: {how}.\n  SIGKILL usually means that the host ran out "
        "of memory (each worker opens the dataset), SIGBUS that /dev/shm is full. Lower data.workers, or set "
        "data.workers=0 to read between steps."
    )
