"""Read a pickle of torch's checkpoint metadata as data: execute nothing, and return no foreign class.

A pickle is a program. Every name in it becomes a stand-in: a `Record`, a tuple or dict, or text. So all that it calls,
sets or builds is one of these.
"""

import pickle
from pathlib import Path
from typing import Any

import torch

from portable_fsdp.runtime.errors import CheckpointError

_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
RECORDS = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata"),
        *("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.distributed.checkpoint._fsspec_filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "builtins": ("getattr",),  # how Python 3.11.0 to 3.11.3 write the members of an enum; a stand-in, as all of these
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
}
_PLAIN = {("torch", "Size"): tuple, ("collections", "OrderedDict"): dict}


class Record:
    """A stand-in: `kind` is the class's name, `state` its fields."""

    kind = ""
    state: Any = None

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        """Return a field of the state, or None."""
        return self.state.get(name) if isinstance(self.state, dict) else None


def read_pickle(path: Path) -> Any:
    """Read a pickle as plain Python values, text for dtypes, and records.

    Raises CheckpointError for any other name, and for a malformed pickle.
    """
    try:
        with path.open("rb") as file:
            return _MetadataReader(file).load()
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except Exception as error:  # a damaged pickle raises nearly anything
        raise CheckpointError(f"{path}: not a valid pickle: {type(error).__name__}: {error!s:.200}") from None


class _MetadataReader(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if global_name in RECORDS.get(module_name, ()):
            return type(global_name, (Record,), {"kind": global_name})
        if module_name == "torch" and isinstance(vars(torch).get(global_name), torch.dtype):
            return f"torch.{global_name}"
        if stand_in := _PLAIN.get((module_name, global_name)):
            return stand_in
        raise CheckpointError(
            f"refused {module_name:.80}.{global_name:.80}: not a name of torch's checkpoint metadata.\n"
            "  Nothing was executed. A plain dcp.save writes no such name: ask the author of the file."
        )
