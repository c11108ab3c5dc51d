"""Reads a pickle of torch's checkpoint metadata as data: executes nothing, and returns no foreign class.

A pickle is a program. We run only the instructions that torch's own metadata needs. A global name becomes a stand-in: a
`Record` of a class made for this one load, a plain tuple or dict, or the name as text. An instruction may call, set or
build such stand-ins only.
"""

import pickle
from pathlib import Path
from typing import IO, Any

from portable_fsdp.runtime.errors import CheckpointError

_PATHS = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}
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
    "builtins": {"getattr"},  # how Python 3.11.0 to 3.11.3 write the members of an enum; a stand-in, as all of these
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
}
_PLAIN: dict[tuple[str, str], type] = {("torch", "Size"): tuple, ("collections", "OrderedDict"): dict}
_DTYPES = {
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64", "complex128"),
    *("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"),
}
_MAX_BYTES = 1 << 28

# Python's own reader keeps its memo in a dict. The memo of the reader in C is an array as long as the largest index
# in the pickle: four bytes of input make 64 GiB.
_Reader: Any = pickle._Unpickler  # pyright: ignore


class Record:
    """A stand-in: `kind` is the class's name, `arguments` those of its call, `state` its fields."""

    kind = ""
    arguments: tuple[object, ...] = ()
    state: Any = None

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments

    def get(self, name: str) -> Any:
        """A field of its state, or None."""
        return self.state.get(name) if isinstance(self.state, dict) else None


def read_pickle(path: Path) -> Any:
    """Plain Python values, tuples for `torch.Size`, text for dtypes, and records.

    Raises CheckpointError for any other name or instruction, and for a malformed pickle.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise CheckpointError(f"expected at most {_MAX_BYTES:,} bytes, found {path.stat().st_size:,}")
        with path.open("rb") as file:
            return _MetadataReader(file).load()
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except Exception as error:  # a damaged pickle raises nearly anything
        raise CheckpointError(f"{path}: expected a pickle, found: {type(error).__name__}: {error!s:.200}") from None


_INERT = (
    *(pickle.PROTO, pickle.FRAME, pickle.MARK, pickle.STOP, pickle.GLOBAL, pickle.STACK_GLOBAL),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.BINFLOAT, pickle.BINUNICODE, pickle.SHORT_BINUNICODE, pickle.BINBYTES, pickle.SHORT_BINBYTES),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.EMPTY_DICT),
    *(pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
)


class _MetadataReader(_Reader):
    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self._kinds: dict[str, type[Record]] = {}
        own = {
            pickle.REDUCE: _MetadataReader.load_reduce,
            pickle.NEWOBJ: _MetadataReader.load_newobj,
            pickle.BUILD: _MetadataReader.load_build,
            pickle.SETITEM: _MetadataReader.load_setitem,
            pickle.SETITEMS: _MetadataReader.load_setitems,
            pickle.APPEND: _MetadataReader.load_append,
            pickle.APPENDS: _MetadataReader.load_appends,
        }
        inert = {code[0]: _Reader.dispatch[code[0]] for code in _INERT}
        self.dispatch = inert | {code[0]: load for code, load in own.items()}

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if global_name in _RECORDS.get(module_name, ()):
            return self._kinds.setdefault(global_name, type(global_name, (Record,), {"kind": global_name}))
        if module_name == "torch" and global_name in _DTYPES:
            return f"torch.{global_name}"
        if (module_name, global_name) in _PLAIN:
            return _PLAIN[module_name, global_name]
        raise CheckpointError(
            f"expected names of torch's checkpoint metadata, found {module_name:.80}.{global_name:.80}.\n"
            "  Nothing was executed. Metadata of a plain dcp.save has no such name: ask whoever made the file."
        )

    def load_reduce(self) -> None:
        arguments, called = self.stack.pop(), self.stack[-1]
        is_size = called is tuple and type(arguments) is tuple and list(map(type, arguments)) in ([tuple], [list])
        is_empty_dict = called is dict and arguments == ()
        if not (is_size or is_empty_dict or (self._is_kind(called) and type(arguments) is tuple)):
            raise _unexpected("a call of torch's metadata classes", called)
        self.stack[-1] = called(*arguments)

    def load_newobj(self) -> None:
        arguments, made = self.stack.pop(), self.stack[-1]
        if not self._is_kind(made) or arguments != ():
            raise _unexpected("a new object of torch's metadata", made)
        self.stack[-1] = made()

    def load_build(self) -> None:
        state, record = self.stack.pop(), self.stack[-1]
        if not isinstance(record, Record):
            raise _unexpected("fields of torch's metadata", record)
        record.state = state

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set_items([key, value])

    def load_setitems(self) -> None:
        self._set_items(self.pop_mark())

    def load_append(self) -> None:
        value = self.stack.pop()
        self._extend([value])

    def load_appends(self) -> None:
        self._extend(self.pop_mark())

    def _is_kind(self, value: object) -> bool:
        return any(value is kind for kind in self._kinds.values())

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict:
            raise _unexpected("items of a dict", target)
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Torch's metadata has no others. Chosen numbers make a dict take quadratic time, and the hash of nested
            # tuples recurses without a bound.
            if not isinstance(key, str | Record):
                raise _unexpected("text or an index of torch's metadata as a key", key)
            target[key] = value

    def _extend(self, items: list[Any]) -> None:
        if type(self.stack[-1]) is not list:
            raise _unexpected("items of a list", self.stack[-1])
        self.stack[-1].extend(items)


def _unexpected(expected: str, value: object) -> CheckpointError:
    return CheckpointError(f"expected {expected}, found those of a {type(value).__name__}")
