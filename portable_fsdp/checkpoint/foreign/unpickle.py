"""Reads a pickle as data: names on a list become inert records, any other name is refused, and nothing is executed.

The classes of torch are never touched: each load makes stand-ins of its own, which keep what they are given.
"""

import pickle
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import IO, Any

import torch

from portable_fsdp.runtime.errors import CheckpointError

_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint._fsspec_filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
}
_PATHS = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}
_MAX_BYTES = 1 << 30


class Record:
    """A stand-in: `kind` is the class's name, `arguments` what it was called with, `state` what was set on it."""

    kind = ""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments
        self.state: Any = {}

    def __setstate__(self, state: object) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        """A field of its state; None if there is none."""
        return self.state.get(name) if isinstance(self.state, dict) else None


def read_pickle(path: Path) -> Any:
    """What the file holds: plain Python values, dtypes, tuples for `torch.Size`, and records. `CheckpointError`."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"{path}: expected at most {_MAX_BYTES:,} bytes, found {path.stat().st_size:,}")
        with path.open("rb") as file:
            return _Unpickler(file).load()
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except Exception as error:  # a damaged pickle raises nearly anything
        raise CheckpointError(f"{path}: expected a pickle, found: {type(error).__name__}: {error}") from None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self._kinds: dict[str, type[Record]] = {}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if global_name in _RECORDS.get(module_name, ()):
            return self._kinds.setdefault(global_name, type(global_name, (Record,), {"kind": global_name}))
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        if (module_name, global_name) == ("torch", "Size"):
            return _Size
        if module_name in ("pathlib", "pathlib._local") and global_name in _PATHS:
            return PurePosixPath
        if (module_name, global_name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise CheckpointError(
            f"expected names of torch's checkpoint metadata, found {module_name}.{global_name}.\n"
            "  Nothing was executed. Metadata of a plain dcp.save has no such name: ask whoever made the file."
        )


class _Size(tuple[int, ...]):
    """In place of `torch.Size`, whose pickle calls it with one tuple."""

    __slots__ = ()

    def __new__(cls, sizes: Iterable[int] = ()) -> "_Size":
        return super().__new__(cls, sizes)
