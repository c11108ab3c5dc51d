"""A step's rows for one process, built ahead in a thread while the device works."""

import queue
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from portable_fsdp.data.order import sample_indices

IGNORED = -100
AHEAD = 2  # steps
_WAIT_S = 0.1

MicroBatches = list[dict[str, Tensor]]


class Rows(Protocol):
    """What batches are made of; `PackedRows`, or rows of the caller's own."""

    def __len__(self) -> int: ...

    def rows(self, indices: NDArray[Any]) -> dict[str, Tensor]:
        """`input_ids` and `labels`, int64 `[len(indices), seq_len]`."""
        ...


class Part(Protocol):
    """This process's share of each global batch."""

    @property
    def index(self) -> int: ...

    @property
    def count(self) -> int: ...


class Batches(Iterator[MicroBatches]):
    """The micro batches of one step after the other, from `start` samples on, without end.

    Global batch k holds the same rows whatever the number of processes. Shard i of n feeds the i-th n-th of it, cut
    into `accumulation` micro batches. Each is `input_ids` and `labels` `[rows, seq_len]`, and `tokens` float32
    `[rows]`: the counted labels of row r, summed over all micro batches of the step. Close it, or use it as a context manager.
    """

    def __init__(self, rows: Rows, *, seed: int, global_batch: int, shard: Part, accumulation: int, start: int) -> None:
        self._rows = rows
        self._seed = seed
        self._global_batch = global_batch
        self._first = shard.index * (global_batch // shard.count)
        self._micro = global_batch // shard.count // accumulation
        self._accumulation = accumulation
        self._queue: queue.Queue[MicroBatches | BaseException] = queue.Queue(maxsize=AHEAD)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._build_ahead, args=(start,), name="batches", daemon=True)
        self.consumed = start
        """Samples consumed with the last step that was handed out: the position that a checkpoint keeps."""
        self._thread.start()

    def __next__(self) -> MicroBatches:
        built = self._queue.get()
        if isinstance(built, BaseException):
            raise built
        self.consumed += self._global_batch
        return built

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the thread. Steps built and not handed out are dropped."""
        self._closed.set()
        self._thread.join()

    def _build_ahead(self, position: int) -> None:
        while not self._closed.is_set():
            try:
                built: MicroBatches | BaseException = self._build(position)
            except BaseException as error:  # raised where the step is asked for
                built = error
            self._put(built)
            position += self._global_batch

    def _put(self, built: MicroBatches | BaseException) -> None:
        while not self._closed.is_set():
            try:
                return self._queue.put(built, timeout=_WAIT_S)
            except queue.Full:
                continue

    def _build(self, position: int) -> MicroBatches:
        mine = position + self._first + np.arange(self._micro * self._accumulation)
        rows = self._rows.rows(sample_indices(self._seed, mine, len(self._rows)))
        counted = (rows["labels"] != IGNORED).sum(dim=1).float()
        tokens = counted.view(self._accumulation, self._micro).sum(dim=0)
        cut = [rows[name].split(self._micro) for name in ("input_ids", "labels")]
        return [{"input_ids": ids, "labels": labels, "tokens": tokens} for ids, labels in zip(*cut, strict=True)]
