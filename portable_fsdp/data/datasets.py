"""`data.factory`: rows of a torch Dataset of the user's own, map-style or a stream.

The factory is called with a split and returns the dataset, or that and a collate function. An item is a dict of tensors
(or numbers and arrays, as torch's default_collate takes them). A map-style dataset comes in the same order as every
corpus. Before an item is read, the generators of torch, NumPy and Python are seeded by its row and epoch, so random
augmentation is the same on any number of devices, and after a resume.
"""

import logging
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, cast

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from portable_fsdp.config import data as keys
from portable_fsdp.data.order import sample_indices, seed_of, share_of_numbers
from portable_fsdp.data.packing import ENDLESS, Rows
from portable_fsdp.runtime.errors import DataError
from portable_fsdp.runtime.factory import call_factory, described

log = logging.getLogger("portable_fsdp")

Collate = Callable[[list[Any]], Any]

RESERVED = frozenset({"tokens", "votes", "stop"})
"""Keys of a batch that belong to the run."""

_END = "the end of a stream"
_COMPARED = 16  # rows that a fingerprint reads


class _Items:
    """Makes batches of items, and checks them."""

    def __init__(self, name: str, collate: Collate) -> None:
        self._name, self._collate = name, collate

    def batch(self, items: list[Any]) -> dict[str, Tensor]:
        try:
            batch: object = self._collate(items)
        except Exception as error:
            raise DataError(f"data.factory: {self._name}: the rows don't make a batch: {described(error)}") from error
        if not isinstance(batch, Mapping) or not batch:
            raise DataError(
                f"data.factory: {self._name}: expected items that are dicts of tensors, found a batch of type "
                f"{type(batch).__name__}.\n  Return a dict from __getitem__, as {{'x': x, 'labels': y}}."
            )
        tensors = dict(cast("Mapping[str, object]", batch))
        for key, value in tensors.items():
            if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != len(items) or key in RESERVED:
                actual = f"{list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                raise DataError(
                    f"data.factory: {self._name}: expected tensors whose first dimension has the {len(items)} rows of "
                    f"a batch, and other names than {', '.join(sorted(RESERVED))}; found {key}: {actual}."
                )
        return {key: _narrow(cast(Tensor, value)) for key, value in tensors.items()}


def _narrow(value: Tensor) -> Tensor:
    """float32 where NumPy and Python give float64, which TPUs lack."""
    return value.float() if value.dtype == torch.float64 else value


class DatasetRows(Rows):
    """Rows of a map-style dataset. Row numbers count through epochs: number % length is the row."""

    def __init__(self, name: str, dataset: Any, collate: Collate, chosen: NDArray[np.int64] | None = None) -> None:
        """`chosen`: the rows that take part; None: all."""
        self._dataset, self._chosen, self._items = dataset, chosen, _Items(name, collate)
        self._name = name

    def __len__(self) -> int:
        return len(self._dataset) if self._chosen is None else len(self._chosen)

    def rows(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        """The tensors of these rows, dimension 0 first as in `indices`."""
        return self._items.batch([self._item(int(number)) for number in indices])

    def _item(self, number: int) -> Any:
        place = number % len(self)
        index = place if self._chosen is None else int(self._chosen[place])
        seed = seed_of(number // len(self), index)
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        try:
            return self._dataset[index]
        except Exception as error:
            raise DataError(f"data.factory: {self._name}: row {index} can't be read: {described(error)}") from error

    def order(self, seed: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return sample_indices(seed, positions, len(self)) + positions // len(self) * len(self)

    def fingerprint(self) -> str:
        """Of the number of rows, and of some of them: reading all may take hours."""
        count = len(self)
        chosen = np.unique(np.linspace(0, count - 1, min(count, _COMPARED)).astype(np.int64))
        return _hash(f"dataset {count}", (self.rows(np.array([number])) for number in chosen))


class StreamRows(Rows):
    """Rows of an iterable dataset, in its own order, which must be the same each time.

    Every process reads the whole stream and keeps its rows. A stream that ends begins again. To resume, the run calls
    the dataset's `skip(count)`, as `datasets` has it, which gives the dataset without its first items; without one it
    reads and drops them.
    """

    def __init__(self, name: str, dataset: Any, collate: Collate) -> None:
        self._name, self._dataset, self._collate, self._items = name, dataset, collate, _Items(name, collate)
        self._iterator: Iterator[Any] = iter(())
        self._next: int | None = None  # the number of the item that comes next

    def __len__(self) -> int:
        return ENDLESS

    def rows(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        if self._next is None or int(indices[0]) < self._next:
            self._seek(int(indices[0]))
        wanted, items = {int(number) for number in indices}, dict[int, Any]()
        while len(items) < len(wanted):
            number, item = self._take()
            if number in wanted:
                items[number] = item
        return self._items.batch([items[int(number)] for number in indices])

    def _seek(self, first: int) -> None:
        began = time.monotonic()
        can_skip = first > 0 and hasattr(self._dataset, "skip")
        self._iterator = iter(self._dataset.skip(first) if can_skip else self._dataset)
        self._next = first if can_skip else 0
        while self._next < first:
            self._take()
        if first:
            way = "skipped" if can_skip else "read again (give the dataset a method skip(count) to seek)"
            log.info("data.factory: %s: %d items %s in %.1f s", self._name, first, way, time.monotonic() - began)

    def _take(self) -> tuple[int, Any]:
        assert self._next is not None
        try:
            item = next(self._iterator, _END)
            if item is _END:  # it begins again
                self._iterator = iter(self._dataset)
                item = next(self._iterator, _END)
        except Exception as error:
            raise DataError(
                f"data.factory: {self._name}: item {self._next} can't be read: {described(error)}"
            ) from error
        if item is _END:
            raise DataError(f"data.factory: {self._name}: expected items, found a stream without any.")
        self._next += 1
        return self._next - 1, item

    def order(self, seed: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return positions

    def fingerprint(self) -> str:
        """Of its first items."""
        again = StreamRows(self._name, self._dataset, self._collate)
        return _hash("stream", (again.rows(np.array([number])) for number in range(_COMPARED)))


def _hash(kind: str, batches: Iterable[dict[str, Tensor]]) -> str:
    digest = xxhash.xxh3_128(kind.encode())
    for batch in batches:
        for key, value in sorted(batch.items()):
            digest.update(f"{key} {value.dtype} {list(value.shape)}".encode())
            digest.update(value.contiguous().view(torch.uint8).numpy().data if value.numel() else b"")
    return digest.hexdigest()


def open_datasets(data: keys.Data) -> tuple[Rows, Rows | None]:
    """The rows of `data.factory` to train on, and those that `data.eval_split` holds out.

    Raises ConfigError where the factory fails, DataError for what it may not return and for a part without rows.
    """
    name, split = str(data.factory), data.split or "train"
    dataset, collate = _made(name, split)
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        trained: Rows = StreamRows(name, dataset, collate)
    else:
        trained = DatasetRows(name, dataset, collate)
        if len(trained) == 0:
            raise DataError(f"data.factory: {name}: expected at least one row in split {split!r}, found none.")
    if data.eval_split is None:
        return trained, None
    share = keys.share_held_out(data.eval_split)
    if share is None:
        dataset, collate = _made(name, data.eval_split)
        if not isinstance(dataset, Sized):
            raise DataError(
                f"data.eval_split: expected a dataset with a length, found a stream: {name}({data.eval_split!r})."
            )
        return trained, DatasetRows(name, dataset, collate)
    if isinstance(trained, StreamRows):
        raise DataError(
            f"data.eval_split: expected the name of a split, found {data.eval_split}: a stream has no share.\n"
            "  data.factory is then called with that name too."
        )
    numbers = np.arange(len(trained))
    held_out = np.array([share_of_numbers(number, share) for number in range(len(trained))])
    if not held_out.any() or held_out.all():
        raise DataError(
            f"data.eval_split: expected a share that leaves rows on both sides, found {data.eval_split} of "
            f"{len(trained)} rows."
        )
    return (
        DatasetRows(name, dataset, collate, numbers[~held_out]),
        DatasetRows(name, dataset, collate, numbers[held_out]),
    )


def _made(name: str, split: str) -> tuple[Any, Collate]:
    made = call_factory("data.factory", name, split)
    parts = cast("Sequence[Any]", made) if isinstance(made, tuple) else (made, default_collate)
    if (
        len(parts) != 2
        or not callable(parts[1])
        or not (hasattr(parts[0], "__getitem__") or hasattr(parts[0], "__iter__"))
    ):
        raise DataError(
            f"data.factory: expected {name} to return a Dataset, or a Dataset and a collate function, found "
            f"{type(made).__name__}."
        )
    return parts[0], parts[1]
