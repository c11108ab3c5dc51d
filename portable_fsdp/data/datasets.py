"""`data.factory`: rows of a user's torch Dataset, map-style or iterable (a stream).

The factory is called with a split and returns the dataset, or the dataset and a collate function. An item is a dict of
tensors (or of numbers and arrays, which torch's default_collate converts). A map-style dataset is shuffled like every
corpus. Before an item is read, the generators of torch, NumPy and Python are seeded by its row and epoch, and before a
batch is collated by its first row. So random augmentation is the same on any number of devices and after a resume. A
task that draws meanwhile would draw other numbers: one thread does both, or `data.workers` read.
"""

import logging
import random
import time
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import Any, cast

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from portable_fsdp.config import data as keys
from portable_fsdp.data.packing import ENDLESS, IGNORED, MicroBatch, Rows, sample_indices, seed_of, share_of_numbers
from portable_fsdp.runtime.errors import DataError
from portable_fsdp.runtime.factory import call_factory, user_errors

log = logging.getLogger("portable_fsdp")

Collate = Callable[[list[Any]], Any]

_END = "the end of a stream"
_READING = Lock()
_COMPARED = 16  # rows that a fingerprint reads
_MASK = "attention_mask"

Row = dict[str, Any]
"""An item of the user's dataset, with tensors for the keys that are padded."""


class Buckets:
    """The sizes of `data.buckets`, perhaps none; pads rows along dimension 0, each to the first size that holds it.

    Padding doesn't change the loss curve: padded labels are -100, and the loss of a step is a sum over its rows, in any
    order.

    If `input_ids` is listed and `attention_mask` is not, the mask has the sizes of `input_ids`; a row without a mask
    gets one: 1 for its tokens, 0 for padding.
    """

    def __init__(self, name: str, sizes: Mapping[str, Sequence[int]]) -> None:
        """`name`: name of the factory, for messages."""
        self._name, self._sizes = name, dict(sizes)
        self._adds_mask = "input_ids" in sizes and _MASK not in sizes
        if self._adds_mask:
            self._sizes[_MASK] = sizes["input_ids"]

    def __bool__(self) -> bool:
        return bool(self._sizes)

    def __len__(self) -> int:
        return len(next(iter(self._sizes.values()), ("one",)))

    def opened(self, item: Any, place: str) -> Row:
        """Convert a row's listed keys to tensors; `place` names the row in messages. Raises DataError if that fails."""
        if not self._sizes:
            return item
        if not isinstance(item, Mapping):
            raise self._error(place, f"expected a dict of tensors, found {type(item).__name__}")
        row = dict(cast("Mapping[str, Any]", item))
        if self._adds_mask and _MASK not in row and "input_ids" in row:
            row[_MASK] = torch.ones(len(row["input_ids"]), dtype=torch.int64)
        for key in self._sizes:
            if key not in row:
                raise self._error(place, f"no key {key}, which data.buckets pads; the row has {', '.join(row)}")
            row[key] = self._tensor(row[key], key, place)
        if self.number(row) is None:
            actual = ", ".join(f"{key} {len(row[key])}" for key in self._sizes)
            largest = ", ".join(f"{key} {sizes[-1]}" for key, sizes in self._sizes.items())
            raise self._error(place, f"expected at most {largest} (the last bucket), found {actual}")
        return row

    def _tensor(self, value: object, key: str, place: str) -> Tensor:
        try:
            tensor = torch.as_tensor(value)
        except Exception:
            tensor = torch.tensor(0)
        if tensor.dim() == 0 or (key == "labels" and not tensor.dtype.is_signed):
            actual = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(value, Tensor) else type(value).__name__
            expected = "a tensor with a dimension to pad" + (", of a dtype that holds -100" * (key == "labels"))
            raise self._error(place, f"{key}: expected {expected}, found {actual}")
        return tensor

    def number(self, row: Row) -> int | None:
        """Return the first bucket that holds all listed tensors of an opened row; None if none does."""
        fits = (all(len(row[key]) <= sizes[n] for key, sizes in self._sizes.items()) for n in range(len(self)))
        return next((number for number, holds in enumerate(fits) if holds), None)

    def padded(self, row: Row, number: int) -> Row:
        """Pad an opened row to the sizes of a bucket. Cuts longer tensors, but only a trial of shapes has those."""
        resized = {key: _resized(row[key], sizes[number], key) for key, sizes in self._sizes.items()}
        return {**row, **resized} if resized else row

    def _error(self, place: str, problem: str) -> DataError:
        sizes = ", ".join(f"{key}: {list(sizes)}" for key, sizes in self._sizes.items())
        return DataError(
            f"data.factory: {self._name}: {place}: {problem}.\n  Change the rows, or data.buckets ({{{sizes}}})."
        )


def _resized(value: Tensor, size: int, key: str) -> Tensor:
    full = value.new_full((size, *value.shape[1:]), IGNORED if key == "labels" else 0)
    full[: len(value)] = value[:size]
    return full


@contextmanager
def _seeded(seed: int) -> Generator[None]:
    """Seed the generators of torch (on the host), NumPy and Python while a row is read; then restore them.

    A lock lets one row be read at a time, whichever threads of a script read.
    """
    with _READING:
        before = torch.default_generator.get_state(), np.random.get_state(), random.getstate()
        try:
            torch.default_generator.manual_seed(seed)
            np.random.seed(seed % 2**32)
            random.seed(seed)
            yield
        finally:
            torch.default_generator.set_state(before[0])
            np.random.set_state(before[1])
            random.setstate(before[2])


class _OwnRows(Rows):
    """Base of rows from a user's dataset."""

    may_draw = True

    def __init__(self, name: str, dataset: Any, collate: Collate, buckets: Buckets) -> None:
        self._name, self._dataset, self._collate, self._buckets = name, dataset, collate, buckets

    @abstractmethod
    def _read(self, indices: NDArray[np.int64]) -> list[Any]:
        """Return the items of these rows."""

    @abstractmethod
    def _seed(self, number: int) -> int:
        """Return the seed of a row."""

    def _errors(self, number: int) -> AbstractContextManager[None]:
        """Context of the dataset's code that reads a row: its errors name the row."""
        name = f"data.factory: {self._name}: {self.place(number)}"
        return user_errors(name, f"{name} can't be read", DataError)

    def _opened(self, indices: NDArray[np.int64]) -> list[Any]:
        """Return the items of these rows; with buckets, the padded keys are tensors."""
        items = zip(self._read(indices), indices, strict=True)
        return [self._buckets.opened(item, self.place(int(number))) for item, number in items]

    def rows(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        """Return the tensors of these rows, dimension 0 = rows, in the first bucket that holds all of them."""
        rows = self._opened(indices)
        return self._in_bucket(rows, max(self._buckets.number(row) or 0 for row in rows), int(indices[0]))

    def micro_batches(self, indices: NDArray[np.int64], count: int) -> list[MicroBatch]:
        """Sort rows by bucket before the cut: that saves padding, and no sum over all rows changes."""
        if not self._buckets:  # a collate function gets all rows of the step
            return super().micro_batches(indices, count)
        rows = self._opened(indices)
        numbers = [self._buckets.number(row) or 0 for row in rows]
        order, size = sorted(range(len(rows)), key=numbers.__getitem__), len(rows) // count
        chosen = [order[begin : begin + size] for begin in range(0, len(rows), size)]
        batches = [
            self._in_bucket([rows[n] for n in part], numbers[part[-1]], int(indices[part[0]])) for part in chosen
        ]
        return [MicroBatch(np.array(part), batch) for part, batch in zip(chosen, batches, strict=True)]

    def of_each_shape(self, indices: NDArray[np.int64]) -> list[dict[str, Tensor]]:
        """Return the rows padded or cut to each bucket; unchanged without buckets."""
        rows = self._opened(indices)
        return [self._in_bucket(rows, bucket, int(indices[0])) for bucket in range(len(self._buckets))]

    def _in_bucket(self, rows: list[Row], bucket: int, first: int) -> dict[str, Tensor]:
        return self._batch([self._buckets.padded(row, bucket) for row in rows], first)

    def _batch(self, items: list[Any], first: int) -> dict[str, Tensor]:
        """Collate; `first`: number of the first row."""
        name = f"data.factory: {self._name}"
        advice = "Give all rows the same keys and shapes (data.buckets pads them), or return a collate function."
        problem = f"{name}: the rows can't be collated into a batch"
        errors = user_errors(f"{name}: the collate function", problem, DataError, f"\n  {advice}")
        with errors, _seeded(seed_of(self._seed(first), 1)):  # other draws than the row's own
            batch: object = self._collate(items)
        if not isinstance(batch, Mapping) or not batch:
            raise DataError(
                f"data.factory: {self._name}: expected items that are dicts of tensors, found a batch of type "
                f"{type(batch).__name__}.\n  Return a dict from __getitem__, as {{'x': x, 'labels': y}}."
            )
        tensors = cast("Mapping[str, Tensor]", batch)
        for key, value in cast("Mapping[str, object]", batch).items():
            if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != len(items):
                actual = f"{list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise DataError(
                    f"data.factory: {self._name}: expected tensors whose first dimension has the {len(items)} rows of "
                    f"a batch, found {key}: {actual}."
                )
        # float64 is the default of NumPy and Python, but TPUs lack it.
        return {key: value.float() if value.dtype == torch.float64 else value for key, value in tensors.items()}

    def _hash(self, kind: str, numbers: Iterable[int]) -> str:
        """Hash these rows one by one without padding: bucket sizes don't change the data."""
        digest = xxhash.xxh3_128(kind.encode())
        for number in numbers:
            for key, value in sorted(self._batch(self._opened(np.array([number])), number).items()):
                digest.update(f"{key} {value.dtype} {list(value.shape)}".encode())
                digest.update(value.contiguous().view(torch.uint8).numpy().data if value.numel() else b"")
        return digest.hexdigest()


class DatasetRows(_OwnRows):
    """Rows of a map-style dataset. Row numbers continue over epochs: number % length is the row."""

    def __init__(
        self,
        name: str,
        dataset: Any,
        collate: Collate,
        buckets: Buckets,
        chosen: Sequence[int] | NDArray[np.int64] | None = None,
    ) -> None:
        """`chosen`: the rows of the dataset to use; None: all."""
        super().__init__(name, dataset, collate, buckets)
        self._chosen = range(len(dataset)) if chosen is None else chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def _read(self, indices: NDArray[np.int64]) -> list[Any]:
        return [self._item(int(number)) for number in indices]

    def place(self, number: int) -> str:
        return f"row {self._index(number)}"

    def _index(self, number: int) -> int:
        """Return the index in the dataset."""
        return int(self._chosen[number % len(self)])

    def _seed(self, number: int) -> int:
        return seed_of(number // len(self), self._index(number))

    def _item(self, number: int) -> Any:
        with self._errors(number), _seeded(self._seed(number)):
            return self._dataset[self._index(number)]

    def order(self, seed: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return sample_indices(seed, positions, len(self)) + positions // len(self) * len(self)

    def fingerprint(self) -> str:
        """Hash the number of rows and a sample of them: reading all may take hours."""
        count = len(self)
        chosen = np.unique(np.linspace(0, count - 1, min(count, _COMPARED)).astype(np.int64))
        return self._hash(f"dataset {count}", map(int, chosen))


class StreamRows(_OwnRows):
    """Rows of an iterable dataset, in its own order, which must be the same each time.

    Every process reads the whole stream and keeps its own rows. A stream that ends begins again. To resume, the run
    calls the dataset's `skip(count)` (as in `datasets`), which returns the dataset without its first items. Without
    that method, it reads and drops them.
    """

    def __init__(self, name: str, dataset: Any, collate: Collate, buckets: Buckets) -> None:
        super().__init__(name, dataset, collate, buckets)
        self._iterator: Iterator[Any] = iter(())
        self._next: int | None = None  # number of the next item

    def __len__(self) -> int:
        return ENDLESS

    def place(self, number: int) -> str:
        return f"item {number}"

    def _seed(self, number: int) -> int:
        return seed_of(0, number)

    def _read(self, indices: NDArray[np.int64]) -> list[Any]:
        if self._next is None or int(indices[0]) < self._next:
            self._seek(int(indices[0]))
        requested, items = {int(number) for number in indices}, dict[int, Any]()
        while len(items) < len(requested):
            number, item = self._take()
            if number in requested:
                items[number] = item
        return [items[int(number)] for number in indices]

    def _seek(self, first: int) -> None:
        began = time.monotonic()
        can_skip = first > 0 and hasattr(self._dataset, "skip")
        with self._errors(first), _seeded(self._seed(0)):
            self._iterator = iter(self._dataset.skip(first) if can_skip else self._dataset)
        self._next = first if can_skip else 0
        while self._next < first:
            self._take()
        if first:
            action = "skipped" if can_skip else "read and dropped (a method skip(count) of the dataset would seek)"
            log.info("data.factory: %s: %d items %s in %.1f s", self._name, first, action, time.monotonic() - began)

    def _take(self) -> tuple[int, Any]:
        assert self._next is not None
        with self._errors(self._next), _seeded(self._seed(self._next)):
            item = next(self._iterator, _END)
            if item is _END:  # begin again
                self._iterator = iter(self._dataset)
                item = next(self._iterator, _END)
        if item is _END:
            raise DataError(f"data.factory: {self._name}: the stream has no items.")
        self._next += 1
        return self._next - 1, item

    def order(self, seed: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return positions

    def fingerprint(self) -> str:
        """Hash the first items."""
        again = StreamRows(self._name, self._dataset, self._collate, self._buckets)
        return again._hash("stream", range(_COMPARED))


def open_training_rows(data: keys.Data) -> Rows:
    """Open the training rows alone. Raises as `open_datasets`."""
    has_share = data.eval_split is not None and keys.share_held_out(data.eval_split) is not None
    return open_datasets(data if has_share else data.model_copy(update={"eval_split": None}))[0]


def open_datasets(data: keys.Data) -> tuple[Rows, Rows | None]:
    """Open the training rows of `data.factory`, and the rows that `data.eval_split` holds out.

    Raises ConfigError if the factory fails; DataError for a wrong return value and for a part without rows.
    """
    name, split = str(data.factory), data.split or "train"
    buckets = Buckets(name, data.buckets)
    dataset, collate = _made(name, split)
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        if data.workers > 1:
            raise DataError(
                f"data.workers: expected at most 1 for a stream, found {data.workers}: each worker would read all of "
                "it.\n  Set data.workers=1, or give the dataset __len__ and __getitem__."
            )
        trained: Rows = StreamRows(name, dataset, collate, buckets)
    else:
        trained = DatasetRows(name, dataset, collate, buckets)
        if len(trained) == 0:
            raise DataError(f"data.factory: {name}: split {split!r} has no rows.")
    if data.eval_split is None:
        return trained, None
    share = keys.share_held_out(data.eval_split)
    if share is None:
        dataset, collate = _made(name, data.eval_split)
        if not isinstance(dataset, Sized):
            raise DataError(
                f"data.eval_split: expected a dataset with __len__, found a stream: {name}({data.eval_split!r})."
            )
        return trained, DatasetRows(name, dataset, collate, buckets)
    if isinstance(trained, StreamRows):
        raise DataError(
            f"data.eval_split: expected the name of a split, found {data.eval_split}: no share of a stream can be held "
            "out.\n  data.factory is called with that name too."
        )
    held_out = np.array([share_of_numbers(number, share) for number in range(len(trained))])
    if not held_out.any() or held_out.all():
        raise DataError(
            f"data.eval_split: a share of {data.eval_split} of {len(trained)} rows leaves no rows to train on, or none "
            "to evaluate."
        )
    parts = (np.flatnonzero(~held_out), np.flatnonzero(held_out))
    trained, evaluated = (DatasetRows(name, dataset, collate, buckets, part) for part in parts)
    return trained, evaluated


def _made(name: str, split: str) -> tuple[Any, Collate]:
    made = call_factory("data.factory", name, split)
    parts = cast("Sequence[Any]", made) if isinstance(made, tuple) else (made, default_collate)
    is_data = not isinstance(made, DataLoader) and any(hasattr(parts[0], m) for m in ("__getitem__", "__iter__"))
    if not is_data or len(parts) != 2 or not callable(parts[1]):
        raise DataError(
            f"data.factory: expected {name} to return a Dataset, or a Dataset and a collate function, found "
            f"{type(made).__name__}.\n  The run itself orders and batches the rows and starts workers (data.workers)."
        )
    return parts[0], parts[1]
