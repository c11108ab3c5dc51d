"""Read a pickle of torch's checkpoint metadata as data: execute nothing, and return no foreign class.

A pickle is a program. Every name in it becomes a stand-in: a `Record`, a plain value, or text. So all that it calls,
sets or builds is one of these.
"""

import io
import pickle
from collections.abc import Callable
from functools import partial
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
_MAX_BYTES = 1 << 28

# Python's own reader keeps its memo in a dict. The memo of the reader in C is an array as long as the largest index
# in the pickle: four bytes of input make 64 GiB.
_Reader: Any = pickle._Unpickler  # pyright: ignore

# Torch's metadata needs none of these. They make sets and dicts without `_Table`, number the memo by text (a dict too),
# allocate as much as their argument says, or call by other rules than `_MetadataReader`.
_REFUSED = (
    *(pickle.DICT, pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET, pickle.BYTEARRAY8, pickle.PUT, pickle.GET),
    *(pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX),
)


class Record:
    """A stand-in: `kind` is the class's name, `state` its fields."""

    def __init__(self, kind: str, *_: object) -> None:
        self.kind = kind
        self.state: Any = None

    def get(self, name: str) -> Any:
        """Return a field of the state, or None."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class _Table(dict[Any, Any]):
    """A dict with the kinds of keys that torch's metadata has. Chosen numbers make a dict take quadratic time, and the
    hash of nested tuples recurses without a bound."""

    def __setitem__(self, key: object, value: object) -> None:
        if not isinstance(key, str | Record):
            raise CheckpointError(
                f"expected text or an index of torch's metadata as a key, found a {type(key).__name__}"
            )
        super().__setitem__(key, value)


_PLAIN: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): lambda sizes=(): sizes,
    ("collections", "OrderedDict"): lambda: _Table(),  # takes no items, which would bypass `__setitem__`
}


def read_pickle(path: Path) -> Any:
    """Read a pickle as plain Python values, text for dtypes, and records.

    Raises CheckpointError for any other name, and for a malformed pickle.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"expected at most {_MAX_BYTES:,} bytes, found {path.stat().st_size:,}")
        return _MetadataReader(path.read_bytes()).load()
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except Exception as error:  # a damaged pickle raises nearly anything
        raise CheckpointError(f"{path}: not a valid pickle: {type(error).__name__}: {error!s:.200}") from None


class _MetadataReader(_Reader):
    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        own = dict.fromkeys((pickle.REDUCE, pickle.NEWOBJ), _MetadataReader.load_call)
        own |= {pickle.EMPTY_DICT: _MetadataReader.load_empty_dict, pickle.BUILD: _MetadataReader.load_fields}
        self.dispatch = self.dispatch | {code[0]: load for code, load in own.items()}
        for code in _REFUSED:
            del self.dispatch[code[0]]

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if global_name in RECORDS.get(module_name, ()):
            return partial(Record, global_name)
        if module_name == "torch" and isinstance(vars(torch).get(global_name), torch.dtype):
            return f"torch.{global_name}"
        if stand_in := _PLAIN.get((module_name, global_name)):
            return stand_in
        raise CheckpointError(
            f"refused {module_name:.80}.{global_name:.80}: not a name of torch's checkpoint metadata.\n"
            "  Nothing was executed. A plain dcp.save writes no such name: ask the author of the file."
        )

    def load_empty_dict(self) -> None:
        self.append(_Table())

    def load_call(self) -> None:
        arguments = self.stack.pop()
        if type(arguments) is not tuple:
            raise CheckpointError(f"expected arguments, found a {type(arguments).__name__}")
        self.stack[-1] = self.stack[-1](*arguments)

    def load_fields(self) -> None:
        state, record = self.stack.pop(), self.stack[-1]
        if not isinstance(record, Record):
            raise CheckpointError(f"expected fields of torch's metadata, found those of a {type(record).__name__}")
        record.state = state
