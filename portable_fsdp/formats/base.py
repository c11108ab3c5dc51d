"""The interface of a format: a source of tensors to import from, or an export.

A module of `FORMATS` has `matches(path)`, by names and first bytes alone, and `open_checkpoint(path, trust_metadata)`;
`trust_metadata` lets it read pickled metadata, restricted. A module of `EXPORTS` has `export(reader, options)`, which
checks what it can and returns the function that writes into a path. Both raise `CheckpointError`. An import and an
export hold one tensor at a time, in the order of our files.
"""

import reprlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from portable_fsdp.checkpoint.format import TensorEntry, folder_of, is_too_large
from portable_fsdp.checkpoint.storage import require_regular
from portable_fsdp.checkpoint.store import Advance, Reader, no_progress
from portable_fsdp.formats import MODULES
from portable_fsdp.runtime.errors import CheckpointError

SaveTokenizer = Callable[[Path], None]
"""Writes a tokenizer's files into a folder."""

FLOAT_DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ExportOptions:
    """`dtype`: of the model's floating-point tensors; None: as saved. `save_tokenizer`: for folders of transformers.
    `base`: of adapters, a folder or a hub id; None: where the run read it. No file exceeds `max_file_bytes`."""

    dtype: str | None = None
    save_tokenizer: SaveTokenizer | None = None
    advance: Advance = no_progress
    base: str | None = None
    max_file_bytes: int = 5_000_000_000


@dataclass(frozen=True)
class ForeignCheckpoint:
    """A foreign checkpoint, open for reading.

    `tensors` has shapes and dtypes by our keys: FQN for the model's, `<state name>/<FQN>` for the optimizer's.
    `read(key)` gives a tensor whole, contiguous, on the host, in that shape and dtype. `model_config` is transformers'
    config, where the source has one.
    """

    tensors: dict[str, TensorEntry]
    read: Callable[[str], Tensor]
    step: int = 0
    model_config: dict[str, Any] | None = None


def load_format(name: str) -> Any:
    """The module of a format."""
    return import_module(f"portable_fsdp.formats.{MODULES.get(name, name)}")


def weights_of(reader: Reader, dtype: str | None = None) -> dict[str, TensorEntry]:
    """The tensors of the model, in another `dtype`."""
    tensors = reader.manifest.tensors.items()
    return {key: as_dtype(tensor, dtype) for key, tensor in tensors if folder_of(key) == "model"}


def as_dtype(tensor: TensorEntry, dtype: str | None) -> TensorEntry:
    """The same tensor in `dtype`, if it is of floating point and there is a `dtype`."""
    if dtype is None or tensor.dtype not in FLOAT_DTYPES:
        return tensor
    return TensorEntry(shape=tensor.shape, dtype=dtype)


def file_inside(folder: Path, name: object) -> Path:
    """`folder/name` for a plain file of that folder. Raises `CheckpointError` for a path, a link, or none."""
    if not isinstance(name, str) or not name or name in (".", "..") or any(c in name for c in "/\\\0"):
        raise CheckpointError(f"{folder}: expected the plain name of a file in this folder, found {reprlib.repr(name)}")
    if (folder / name).is_symlink():
        raise CheckpointError(
            f"{folder / name}: expected a plain file, found a link, which could lead anywhere.\n"
            "  Copy the folder with the targets of its links (cp -rL, as for a snapshot in the hub's cache)."
        )
    require_regular(folder / name, folder.name)
    return folder / name


def check_numbers(where: str, value: object, what: str = "a shape (at most 16 sizes)") -> tuple[int, ...]:
    """`value` as a tuple, if it is a list of at most 16 integers, none negative. Raises `CheckpointError`."""
    numbers: tuple[Any, ...] = tuple(cast(Any, value)) if isinstance(value, list | tuple) else (None,)
    if len(numbers) > 16 or not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise CheckpointError(f"{where}: expected {what}, found {reprlib.repr(value)}")
    return numbers


def check_shape(where: str, shape: object) -> tuple[int, ...]:
    """`shape` as a tuple, if it is a list of sizes whose strides and bytes fit 64 bits. Raises `CheckpointError`."""
    sizes = check_numbers(where, shape)
    if is_too_large(sizes):  # for a manifest too: what we read we can write
        raise CheckpointError(f"{where}: expected at most 2**59 elements, found shape {list(sizes)}")
    return sizes


@contextmanager
def torch_saving(path: Path) -> Generator[None]:
    """Turns the RuntimeError that torch.save's zip writer raises for a failed write into an OSError."""
    try:
        yield
    except RuntimeError as error:
        cause = error.__context__ or error  # the first failure; closing the writer raises a second one
        raise OSError(f"{path.name}: {(str(cause).splitlines() or [''])[0]}") from error
