"""Batches: the micro batches of each step that one data shard feeds, made ahead by a thread.

With global batch G, step k of a run that begins at `start` samples takes the positions [start + k * G, start + (k + 1)
* G). Shard i of n takes the i-th n-th of them, and cuts it into equal micro batches; both cuts are contiguous.
"""

import queue
import threading
from typing import Self

import numpy as np
from torch import Tensor

from portable_fsdp.data.packing import IGNORED, Rows
from portable_fsdp.runtime.closing import Closing
from portable_fsdp.runtime.errors import ConfigError

STEPS_AHEAD = 2


class Batches(Closing):
    """Endless iterator over the steps of one data shard; close it, or use it as a context manager.

    Each `next()` gives `accumulation` micro batches: the tensors of their rows (int64 `[rows, seq_len]`), and `tokens`
    float32 `[rows]`: the counted labels of row r summed over all micro batches of the step, the same in each of them.
    Their sum over the data shards is the token count of the global batch.
    """

    def __init__(
        self, rows: Rows, *, seed: int, global_batch: int, shard: tuple[int, int], accumulation: int, start: int = 0
    ) -> None:
        """Args:
        rows: the corpus, at least one row.
        seed: of the order.
        global_batch: rows in a step over all shards and micro batches.
        shard: (index, count): which part of the global batch this process feeds.
        accumulation: micro batches in a step.
        start: samples consumed before the first step.

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
        self._seed = seed
        self._global_batch = global_batch
        self._shard_rows = global_batch // count
        self._first = start + index * self._shard_rows
        self._accumulation = accumulation
        self._error: BaseException | None = None
        self._closed = threading.Event()
        self._ready: queue.Queue[list[dict[str, Tensor]] | BaseException] = queue.Queue(STEPS_AHEAD)
        self._thread = threading.Thread(target=self._work, name="portable_fsdp batches", daemon=True)
        self._thread.start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[dict[str, Tensor]]:
        """The micro batches of the next step; raises what the thread raised."""
        if self._closed.is_set():
            raise ValueError("next() of closed batches")
        if self._error is None:
            item = self._ready.get()
            if not isinstance(item, BaseException):
                self.consumed += self._global_batch
                return item
            self._error = item
        raise self._error

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, samples consumed in it), as checkpoints keep it."""
        return divmod(self.consumed, len(self._rows))

    def close(self) -> None:
        """End the thread, and wait for it; drops the steps made ahead. May be called twice."""
        self._closed.set()
        while self._thread.is_alive():
            while not self._ready.empty():  # the thread may wait for room
                self._ready.get_nowait()
            self._thread.join(timeout=0.01)

    def _work(self) -> None:
        first = self._first
        try:
            while not self._closed.is_set():
                self._ready.put(self._step(first))
                first += self._global_batch
        except BaseException as error:  # the thread that trains raises it
            self._ready.put(error)

    def _step(self, first: int) -> list[dict[str, Tensor]]:
        """The micro batches that begin at position `first`."""
        positions = np.arange(first, first + self._shard_rows)
        batch = self._rows.rows(self._rows.order(self._seed, positions))
        size = self._shard_rows // self._accumulation
        counted = (batch["labels"] != IGNORED).sum(dim=1).view(self._accumulation, size)
        tokens = counted.sum(dim=0).float()
        return [
            {**{name: tensor[begin : begin + size] for name, tensor in batch.items()}, "tokens": tokens}
            for begin in range(0, self._shard_rows, size)
        ]
