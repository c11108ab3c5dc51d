"""`data.buckets`: pads the rows of a dataset of the user's own, each to the first of a few sizes that holds it.

Engines that compile a program for each shape so compile one for each bucket. Padding changes no curve: what is padded
counts for nothing (labels -100), and the loss of a step is a sum over its rows, in whichever order they come.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from portable_fsdp.data.packing import IGNORED
from portable_fsdp.runtime.errors import DataError

_MASK = "attention_mask"

Row = dict[str, Any]
"""What the user's dataset gives, with tensors for the keys that are padded."""


class Buckets:
    """The sizes of `data.buckets`, and rows padded to them along dimension 0.

    Where `input_ids` is listed and `attention_mask` is not, the mask has the sizes of `input_ids`; a row without one
    gets one: 1 for its tokens, 0 for padding.
    """

    def __init__(self, name: str, sizes: Mapping[str, Sequence[int]]) -> None:
        """`name`: of the factory, for messages."""
        self._name, self._sizes = name, dict(sizes)
        self._adds_mask = "input_ids" in sizes and _MASK not in sizes
        if self._adds_mask:
            self._sizes[_MASK] = sizes["input_ids"]

    def __len__(self) -> int:
        return len(next(iter(self._sizes.values())))

    def opened(self, item: object, place: str) -> Row:
        """The row's listed keys as tensors; `place` names it in messages. Raises DataError for what can't be padded."""
        if not isinstance(item, Mapping):
            raise self._error(place, f"expected a dict of tensors, found {type(item).__name__}")
        row = dict(cast("Mapping[str, Any]", item))
        if self._adds_mask and _MASK not in row and "input_ids" in row:
            row[_MASK] = torch.ones(len(row["input_ids"]), dtype=torch.int64)
        for key in self._sizes:
            if key not in row:
                raise self._error(place, f"expected the key {key} of data.buckets, found {', '.join(row)}")
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
        """The first bucket that holds all listed tensors of an opened row; None where none does."""
        fits = (all(len(row[key]) <= sizes[n] for key, sizes in self._sizes.items()) for n in range(len(self)))
        return next((number for number, holds in enumerate(fits) if holds), None)

    def padded(self, row: Row, number: int) -> Row:
        """The opened row at the sizes of a bucket; what is longer is cut, which only a trial of shapes asks for."""
        resized = {key: _resized(row[key], sizes[number], key) for key, sizes in self._sizes.items()}
        return {**row, **resized}

    def _error(self, place: str, problem: str) -> DataError:
        sizes = ", ".join(f"{key}: {list(sizes)}" for key, sizes in self._sizes.items())
        return DataError(
            f"data.factory: {self._name}: {place}: {problem}.\n"
            f"  Change the rows, or data.buckets, which is {{{sizes}}}."
        )


def _resized(value: Tensor, size: int, key: str) -> Tensor:
    full = value.new_full((size, *value.shape[1:]), IGNORED if key == "labels" else 0)
    full[: len(value)] = value[:size]
    return full


def uneven_key(items: Sequence[object]) -> tuple[str, int] | None:
    """The first key whose values differ in length alone, and the longest: why torch's default_collate failed."""
    rows = [cast("Mapping[str, Any]", item) for item in items if isinstance(item, Mapping)]
    for key in rows[0] if len(rows) == len(items) else ():
        shapes = [_shape(row.get(key)) for row in rows]
        if all(shapes) and len({shape[1:] for shape in shapes}) == 1 and len({shape[0] for shape in shapes}) > 1:
            return key, max(shape[0] for shape in shapes)
    return None


def _shape(value: object) -> tuple[int, ...]:
    """Empty for what has no dimensions."""
    to_tensor: Callable[[Any], Tensor] = torch.as_tensor
    try:
        return tuple(to_tensor(value).shape)
    except Exception:
        return ()
