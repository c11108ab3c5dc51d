"""What a foreign format gives: a source of tensors to import from, or an export.

A module of `FORMATS` has `matches` and `open_checkpoint`; one of `EXPORTS` has `export`. An import never holds
more than one tensor: it asks the source for them one at a time, in whatever order suits our files.
"""

import reprlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from torch import Tensor

from portable_fsdp.backends.base import Rank
from portable_fsdp.checkpoint.format import TensorEntry, folder_of
from portable_fsdp.checkpoint.storage import require_regular
from portable_fsdp.checkpoint.store import Reader
from portable_fsdp.formats import EXPORTS, FORMATS
from portable_fsdp.runtime.errors import CheckpointError

Advance = Callable[[int], None]
"""Told the bytes that were just read or written, for a progress bar."""

SaveTokenizer = Callable[[Path], None]
"""Writes a tokenizer's files into a folder."""

FLOAT_DTYPES = ("float64", "float32", "bfloat16", "float16")


def say_nothing(_: int) -> None:
    """No progress bar."""


@dataclass(frozen=True)
class ForeignCheckpoint:
    """A foreign checkpoint, open for reading.

    `tensors` says shape and dtype (its pieces stay empty) by our keys: FQN for the model's, `<state name>/<FQN>` for
    the optimizer's. `read(key)` gives one of them whole, contiguous, on the host, in exactly that shape and dtype;
    it may raise `CheckpointError`. `model_config` is transformers' config as a dict, where the source holds one.
    `ties`: further FQN -> key, of tensors that the model's config ties; a format leaves them to the import.
    """

    tensors: dict[str, TensorEntry]
    read: Callable[[str], Tensor]
    step: int = 0
    model_config: dict[str, Any] | None = None
    ties: dict[str, str] = field(default_factory=dict)


class CheckpointFormat(Protocol):
    """A module of `FORMATS`."""

    def matches(self, path: Path) -> bool:
        """Whether `path` looks like this format, from names and first bytes alone."""
        ...

    def open_checkpoint(self, path: Path, *, trust_metadata: bool) -> AbstractContextManager[ForeignCheckpoint]:
        """Open it. `trust_metadata`: may read pickled metadata (restricted). Raises `CheckpointError`."""
        ...


class ExportFormat(Protocol):
    """A module of `EXPORTS`."""

    def export(
        self, reader: Reader, target: Path, *, dtype: str | None, save_tokenizer: SaveTokenizer | None, advance: Advance
    ) -> None:
        """Hash the files that it needs, then write `reader`'s checkpoint as `target`. For one process.

        `dtype`: of the model's floating-point tensors; None: as saved. `save_tokenizer(folder)`: where the format has
        a place for it. Raises `CheckpointError`: it is damaged, can't be said in that format, or `target` is somebody
        else's.
        """
        ...


def load_format(name: str) -> CheckpointFormat:
    """The module of a format."""
    return cast(CheckpointFormat, import_module(FORMATS[name]))


def load_export(name: str) -> ExportFormat:
    """The module of a format of `EXPORTS`."""
    return cast(ExportFormat, import_module(EXPORTS[name]))


def verify(reader: Reader, advance: Advance = say_nothing, folder: str = "") -> None:
    """`Reader.verify` of all files below `folder`, one at a time. Raises `CheckpointError`."""
    for file in sorted(reader.manifest.files, key=lambda file: file.name):
        if file.name.startswith(folder):
            reader.verify(Rank(0, 1), file.name)
            advance(file.bytes)


def tensors_of(reader: Reader, folder: str) -> dict[str, TensorEntry]:
    """The tensors below `folder`: model or optimizer."""
    return {key: tensor for key, tensor in reader.manifest.tensors.items() if folder_of(key) == folder}


def as_dtype(tensor: TensorEntry, dtype: str | None) -> TensorEntry:
    """The same tensor, converted to `dtype` if it is of floating point, and there is one."""
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
            "  Copy the folder with what its links name (cp -rL, as for a snapshot in the hub's cache)."
        )
    require_regular(folder / name, folder.name)
    return folder / name
