"""Batches: the micro batches of each step that one data shard feeds, made ahead by a thread.

With global batch G, step k of a run that begins at `start` samples takes the positions [start + k * G, start + (k + 1)
* G). Shard i of n takes the i-th n-th of them, and cuts it into equal micro batches; both cuts are contiguous.
"""

from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count as count_from
from typing import Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from portable_fsdp.data.packing import Rows, count_labels
from portable_fsdp.runtime.closing import Closing
from portable_fsdp.runtime.errors import ConfigError

STEPS_AHEAD = 3

Check = Callable[[Mapping[str, Tensor], NDArray[np.int64]], None]
"""(batch, numbers of its rows); raises DataError for rows that a step can't take."""

RowCounts = Callable[[Mapping[str, Tensor]], Tensor]


class Batches(Closing):
    """Endless iterator over the steps of one data shard; close it, or use it as a context manager.

    Each `next()` gives `accumulation` micro batches: the tensors of their rows, and `tokens`, float32 `[rows]`: the
    losses of row r summed over all micro batches of the step, the same in each of them. Their sum over the data shards
    is the count of the global batch.
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
        check: Check = lambda batch, numbers: None,
        count_losses: RowCounts = count_labels,
    ) -> None:
        """Args:
        rows: the corpus, at least one row.
        seed: of the order.
        global_batch: rows in a step over all shards and micro batches.
        shard: (index, count): which part of the global batch this process feeds.
        accumulation: micro batches in a step.
        start: samples consumed before the first step.
        check: of each batch; the thread calls it.
        count_losses: float32 [rows]: the losses of each row of a batch.

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
        self._rows, self._check, self._count_losses = rows, check, count_losses
        self._seed = seed
        self._global_batch = global_batch
        self._shard_rows = global_batch // count
        self._firsts = count_from(start + index * self._shard_rows, global_batch)
        self._accumulation = accumulation
        self._is_closed = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="portable_fsdp batches")
        self._ahead: deque[Future[list[dict[str, Tensor]]]] = deque()
        for _ in range(STEPS_AHEAD):
            self._begin_step()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[dict[str, Tensor]]:
        """The micro batches of the next step; raises what the thread raised."""
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
        """End the thread after the step in work, and wait for it; drops the others. May be called twice."""
        self._is_closed = True
        self._pool.shutdown(cancel_futures=True)
        self._ahead.clear()

    def _begin_step(self) -> None:
        self._ahead.append(self._pool.submit(self._step, next(self._firsts)))

    def _step(self, first: int) -> list[dict[str, Tensor]]:
        """The micro batches that begin at position `first`."""
        positions = np.arange(first, first + self._shard_rows)
        numbers = self._rows.order(self._seed, positions)
        batch = self._rows.rows(numbers)
        self._check(batch, numbers)
        size = self._shard_rows // self._accumulation
        tokens = self._count_losses(batch).view(self._accumulation, size).sum(dim=0)
        return [
            {**{name: tensor[begin : begin + size] for name, tensor in batch.items()}, "tokens": tokens}
            for begin in range(0, self._shard_rows, size)
        ]
