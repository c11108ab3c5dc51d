"""Batches: the micro batches of each step that one data shard feeds, made ahead by a thread, or by `data.workers`.

With global batch G, step k of a run that begins at `start` samples takes the positions [start + k * G, start + (k + 1)
* G). Shard i of n takes the i-th n-th of them, and cuts it into equal micro batches; both cuts are contiguous, the
second after a sort by size with `data.buckets`.
"""

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import count as count_from
from typing import TYPE_CHECKING, Self

import numpy as np
from torch import Tensor

from portable_fsdp.config.data import Data
from portable_fsdp.data.packing import Rows, StepRows, count_labels
from portable_fsdp.runtime.closing import Closing
from portable_fsdp.runtime.errors import ConfigError

if TYPE_CHECKING:  # a run without data.workers doesn't load it
    from portable_fsdp.data.workers import StepLoader

STEPS_AHEAD = 3
_CLOSE_S = 5.0  # for the step in work of processes

Check = Callable[[Mapping[str, Tensor], Callable[[int], str]], None]
"""(batch, the name of each of its rows for messages); raises DataError for rows that a step can't take."""

Count = Callable[[Mapping[str, Tensor]], int]


@dataclass(frozen=True)
class StepReader:
    """Makes the micro batches of a step, in a thread or in another process: it pickles."""

    seed: int
    shard_rows: int
    accumulation: int
    check: Check | None
    count: Count | None

    def __call__(self, rows: Rows, first: int) -> StepRows:
        """The rows from position `first` on."""
        numbers = rows.order(self.seed, np.arange(first, first + self.shard_rows))
        parts = rows.micro_batches(numbers, self.accumulation)
        if self.check is not None:
            for part in parts:
                self.check(part.tensors, lambda row, numbers=part.numbers: rows.place(int(numbers[row])))
        batches = [part.tensors for part in parts]
        return StepRows(batches, sum(map(self.count, batches)) if self.count else 0)


class Batches(Closing):
    """Endless iterator over the steps of one data shard; close it, or use it as a context manager.

    Each `next()` gives the rows of a step, in `accumulation` micro batches.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        seed: int,
        global_batch: int,
        shard: tuple[int, int],
        accumulation: int,
        start: int = 0,
        check: Check | None = None,
        count_losses: Count | None = count_labels,
        data: Data | None = None,
    ) -> None:
        """Args:
        rows: the corpus, at least one row.
        seed: of the order.
        global_batch: rows in a step over all shards and micro batches.
        shard: (index, count): which part of the global batch this process feeds.
        accumulation: micro batches in a step.
        start: samples consumed before the first step.
        check: of each micro batch; whoever reads it calls it. With workers it must pickle, as `count_losses`.
        count_losses: the losses of a batch; None where only the task can count.
        data: of `data.factory`, whose `data.workers` read in place of the thread; each opens the rows by itself.

        Raises ConfigError if the global batch can't be cut into equal micro batches.
        """
        index, count = shard
        if global_batch % (count * accumulation):
            raise ConfigError(
                f"train.global_batch: expected a multiple of {count * accumulation} ({count} data shards * "
                f"{accumulation} micro batches), found {global_batch}.\n"
                "  Change train.global_batch, train.micro_batch or the number of devices."
            )
        self.consumed = start
        """Samples consumed, including those of the last step that `next()` gave."""
        self._rows = rows
        self._global_batch = global_batch
        shard_rows = global_batch // count
        self._read = StepReader(seed, shard_rows, accumulation, check, count_losses)
        self._firsts = count_from(start + index * shard_rows, global_batch)
        self._loader: StepLoader | None = None
        if data is not None and data.workers:
            from portable_fsdp.data import workers

            self._loader = workers.StepLoader(data, self._read, self._firsts, process=index)
        self._is_closed = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="portable_fsdp batches")
        self._ahead: deque[Future[StepRows]] = deque()
        for _ in range(STEPS_AHEAD):
            self._begin_step()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StepRows:
        """The next step; raises what the thread raised."""
        if self._is_closed:
            raise ValueError("next() of closed batches")
        step = self._ahead[0].result()
        self._ahead.popleft()
        self._begin_step()
        self.consumed += self._global_batch
        return step

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, samples consumed in it), as checkpoints keep it."""
        return divmod(self.consumed, len(self._rows))

    def close(self) -> None:
        """End the thread after the step in work, and wait for it; drops the others. May be called twice.

        Processes that read get a few seconds for that step, and are killed.
        """
        self._is_closed = True
        if self._loader is not None:
            wait([step for step in self._ahead if not step.cancel()], _CLOSE_S)
            self._loader.close()
        self._pool.shutdown(cancel_futures=True)
        self._ahead.clear()

    def _begin_step(self) -> None:
        if self._loader is not None:
            self._ahead.append(self._pool.submit(self._loader.read))
        else:
            self._ahead.append(self._pool.submit(self._read, self._rows, next(self._firsts)))
