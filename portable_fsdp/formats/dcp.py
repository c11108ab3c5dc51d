"""Folders of `torch.distributed.checkpoint`: `.metadata` (a pickle) and `*.distcp` (a sequence of torch.save's files).

We write the same as `dcp.save({"model": get_model_state_dict(m), "optimizer": get_optimizer_state_dict(m, o)})`:

    model.<fqn>                            every name of a tied weight, over one copy of its bytes
    optimizer.state.<fqn>.<state name>     exp_avg, exp_avg_sq, step
    train_state.step                       the run's step, where torchtitan looks for it: int64 []

and no `param_groups`, which our checkpoints don't hold: load `{"optimizer": {"state": ...}}`, or pass dcp.load a
`DefaultLoadPlanner(allow_partial_load=True)`.

We read that, the same without `model.` (torchtitan), optimizers under `optim` or at the top, and accelerate's
SHARDED_STATE_DICT (a folder with `pytorch_model_fsdp_0/` and `optimizer_0/`): tensors only.
"""

import gc
import logging
import math
import os
import pickle
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from portable_fsdp.checkpoint.manifests import DTYPE_BYTES, TensorEntry, check_tiling
from portable_fsdp.checkpoint.safetensors import converted, groups
from portable_fsdp.checkpoint.storage import store_of
from portable_fsdp.checkpoint.store import Advance, Reader
from portable_fsdp.formats import base
from portable_fsdp.formats.base import ExportOptions, ForeignCheckpoint, ForeignFormat
from portable_fsdp.runtime.errors import CheckpointError

log = logging.getLogger("portable_fsdp")

METADATA = ".metadata"
_OPTIMIZER = re.compile(r"(?:(?:optimizer|optim)\.)?state\.(?P<fqn>.+)\.(?P<state>[A-Za-z_]\w*)")
_STEPS = ("step", "train_state.step")

FilePart = tuple[str, int, int]
"""Place of a tensor in an export: file name, start and length in bytes."""


class Record:
    """A stand-in for an object of `.metadata`: `kind` is the class's name, `state` its fields."""

    kind = ""
    state: Any = None

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        """Return a field of the state, or None."""
        return self.state.get(name) if isinstance(self.state, dict) else None


class Chunk(NamedTuple):
    """A box of a tensor: the output of torch.save, at `start` in `path`."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    path: Path
    start: int
    length: int


class Chunked(NamedTuple):
    """A tensor and the chunks that tile it."""

    entry: TensorEntry
    chunks: list[Chunk]


def open_checkpoint(path: Path, *, trust_metadata: bool) -> ForeignCheckpoint:
    """Read `.metadata` as data, and tensors with `weights_only`; hold one, and its largest chunk. Raises
    `CheckpointError`."""
    folders = _folders(path)
    if not folders:
        raise CheckpointError(f"{path}: not a folder of torch.distributed.checkpoint: it has no {METADATA}")
    if not trust_metadata:
        raise CheckpointError(
            f"{path}: its {METADATA} is a Python pickle. To read it, as data only, pass --trust_metadata:\n"
            "  names outside torch's checkpoint metadata are refused, nothing is executed."
        )
    tensors: dict[str, Chunked] = {}
    step = 0
    for folder in folders:
        chunked, paths = _read_metadata(folder)
        step = next((_step(chunked[key]) for key in _STEPS if key in chunked), step)
        for key, name in _our_keys(chunked, paths).items():
            if key in tensors:
                raise CheckpointError(f"{folder}: {name}: a second tensor for {key}")
            tensors[key] = chunked[name]
    return ForeignCheckpoint({key: t.entry for key, t in tensors.items()}, lambda key: _read(key, tensors[key]), step)


def export(reader: Reader, options: ExportOptions) -> Callable[[Path], None]:
    """Export the checkpoint with its optimizer state. Holds one tensor (in both dtypes where it is converted)."""
    names = base.names_of(reader.manifest.architecture, f"checkpoint {reader.folder.name}")
    aliases = {} if names is None else names.aliases
    tensors = base.weights_of(reader, options.dtype)
    tensors |= {key: tensor for key, tensor in reader.manifest.tensors.items() if key not in tensors}

    def write(folder: Path) -> None:
        written: list[tuple[tuple[str, ...], TensorEntry, FilePart]] = []
        files = list(groups(tensors, base.MAX_FILE_BYTES))
        for ordinal, keys in enumerate(files):
            entries = {key: tensors[key] for key in keys}
            places = _write_file(folder / f"__0_{ordinal}.distcp", entries, reader.read_whole, options.advance)
            written += [(path, tensors[key], places[key]) for key in keys for path in _paths_of(key, aliases)]
        entry, step = TensorEntry(shape=(), dtype="int64"), torch.tensor(reader.manifest.step)
        last = folder / f"__0_{len(files)}.distcp"
        places = _write_file(last, {"step": entry}, lambda _: step, options.advance)
        written.append((("train_state", "step"), entry, places["step"]))
        store_of(folder).write(folder / METADATA, [pickle.dumps(_metadata(written))])

    return write


def _folders(path: Path) -> list[Path]:
    """Return the folder with `.metadata`, or such folders inside accelerate's."""
    if (path / METADATA).exists():
        return [path]
    inner = [path / name for name in ("pytorch_model_fsdp_0", "optimizer_0")]
    return [folder for folder in inner if (folder / METADATA).exists() and not folder.is_symlink()]


def _read_metadata(folder: Path) -> tuple[dict[str, Chunked], dict[str, tuple[Any, ...]]]:
    """Return tensors by flat key, and the nested dictionary keys of flat keys, if the metadata has them."""
    metadata = _expect(folder, "Metadata", read_pickle(base.file_inside(folder, METADATA)))
    places: dict[tuple[str, tuple[int, ...]], Record] = {}
    for index, info in _expect(folder, dict, metadata.get("storage_data")).items():
        record = _expect(folder, "MetadataIndex", index)
        fqn, offset = record.get("fqn"), record.get("offset")
        if not isinstance(fqn, str):
            raise CheckpointError(f"{folder / METADATA}: expected a tensor's name, found {reprlib.repr(fqn)}")
        numbers = () if offset is None else base.check_numbers(str(folder), offset)
        places[fqn, numbers] = _expect(folder, "_StorageInfo", info)
    tensors = {
        key: _chunked(folder, key, value, places)
        for key, value in _expect(folder, dict, metadata.get("state_dict_metadata")).items()
        if isinstance(key, str) and isinstance(value, Record) and value.kind == "TensorStorageMetadata"
    }
    planned: Any = metadata.get("planner_data")
    paths = planned.items() if isinstance(planned, dict) else ()
    return tensors, {key: path for key, path in paths if isinstance(key, str) and isinstance(path, tuple)}


def _chunked(folder: Path, key: str, value: Record, places: Mapping[tuple[str, tuple[int, ...]], Record]) -> Chunked:
    name = f"{folder}: {key}"
    properties = _expect(folder, "TensorProperties", value.get("properties")).state
    first = properties[0] if isinstance(properties, tuple) and properties else None
    dtype = first.removeprefix("torch.") if isinstance(first, str) else "nothing"
    if dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{name}: expected a dtype of {', '.join(DTYPE_BYTES)}; found {dtype}")
    shape = base.check_numbers(name, value.get("size"))
    chunks: list[Chunk] = []
    for record in value.get("chunks") or []:
        record = _expect(folder, "ChunkStorageMetadata", record)
        offset, size = base.check_numbers(name, record.get("offsets")), base.check_numbers(name, record.get("sizes"))
        info = places.get((key, offset))
        if info is None:
            raise CheckpointError(f"{name}: no file for its chunk at {list(offset)}")
        if not len(offset) == len(size) == len(shape):
            raise CheckpointError(f"{name}: expected chunks of {len(shape)} dimensions, found {size} at {offset}")
        chunk = Chunk(offset, size, *_place(folder, name, info))
        if (expected := math.prod(size) * DTYPE_BYTES[dtype]) > chunk.length:  # before memory is made for it
            raise CheckpointError(
                f"{name}: expected its chunk at {list(offset)} to take {expected:,} bytes, found {chunk.length:,}"
            )
        chunks.append(chunk)
    filled = [chunk for chunk in chunks if math.prod(chunk.shape)]
    boxes = ([chunk.offset for chunk in filled], [chunk.shape for chunk in filled])
    try:
        check_tiling(name, shape, *(np.array(box, dtype=np.int64).reshape(len(filled), len(shape)) for box in boxes))
    except (ValueError, OverflowError) as error:
        raise CheckpointError(str(error)) from None
    return Chunked(TensorEntry(shape=shape, dtype=dtype), chunks)


def _place(folder: Path, name: str, info: Record) -> tuple[Path, int, int]:
    """Return file, start and length of a chunk's bytes."""
    if info.get("transform_descriptors"):
        extensions = reprlib.repr(info.get("transform_descriptors"))
        raise CheckpointError(
            f"{name}: its bytes are transformed by {extensions}, which we can't undo.\n"
            "  Save it again without extensions."
        )
    path = base.file_inside(folder, info.get("relative_path"))
    start, length = base.check_numbers(name, (info.get("offset"), info.get("length")), "offset and length")
    size = path.stat().st_size
    if start + length > size:
        raise CheckpointError(f"{name}: expected {path.name} to hold {start + length:,} bytes, found {size:,}")
    return path, start, length


def _our_keys(tensors: Mapping[str, Chunked], paths: Mapping[str, tuple[Any, ...]]) -> dict[str, str]:
    """Map our keys to flat keys, for the model's and the optimizer's tensors; warns of others."""
    nested = {key: path for key, path in paths.items() if len(path) > 1}
    unknown_nesting = not paths and all(key.startswith("model.") or _OPTIMIZER.fullmatch(key) for key in tensors)
    keys: dict[str, str] = {}
    left_out: list[str] = []
    for key in tensors:
        state = _OPTIMIZER.fullmatch(key)
        path = nested.get(key, ("model",) if unknown_nesting else ())
        if state is not None:
            keys[f"{state['state']}/{state['fqn']}"] = key
        elif path[:1] == ("model",):
            keys[key.removeprefix("model.")] = key
        elif path or "/" in key or key in _STEPS:
            left_out += [key] if key not in _STEPS else []
        else:
            keys[key] = key
    if left_out:
        names = ", ".join(left_out[:3])
        log.warning("ignoring %d tensors that are not the model's or the optimizer's: %s", len(left_out), names)
    return keys


def _read(key: str, tensor: Chunked) -> Tensor:
    if len(tensor.chunks) == 1:
        return _load(key, tensor.entry, tensor.chunks[0])
    result = torch.empty(tensor.entry.shape, dtype=getattr(torch, tensor.entry.dtype))
    for chunk in tensor.chunks:
        box = tuple(slice(start, start + size) for start, size in zip(chunk.offset, chunk.shape, strict=True))
        result[box] = _load(key, tensor.entry, chunk)
    return result


def _load(key: str, entry: TensorEntry, chunk: Chunk) -> Tensor:
    from torch.distributed.checkpoint.utils import _create_file_view  # pyright: ignore[reportPrivateUsage]

    try:
        with chunk.path.open("rb") as file:
            part = _create_file_view(file, chunk.start, chunk.length)
            value = torch.load(cast(Any, part), map_location="cpu", weights_only=True)
    except Exception as error:  # damage raises errors of many classes
        first_line = (str(error).splitlines() or [""])[0]
        raise CheckpointError(f"{chunk.path}: {key}: {type(error).__name__}: {first_line}") from None
    expected = f"torch.{entry.dtype} {list(chunk.shape)}"
    actual = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    if actual != expected:
        raise CheckpointError(f"{chunk.path}: {key}: expected {expected} ({METADATA}), found {actual}")
    return value.contiguous()


def _step(tensor: Chunked) -> int:
    if tensor.entry.shape != () or "int" not in tensor.entry.dtype:
        return 0
    return max(0, int(_read("step", tensor).item()))


def _expect(folder: Path, kind: str | type[dict[Any, Any]], value: Any) -> Any:
    """Return a record of the class `kind`, or a dict. Raises `CheckpointError`."""
    if not (isinstance(value, kind) if isinstance(kind, type) else isinstance(value, Record) and value.kind == kind):
        name = kind if isinstance(kind, str) else "dict"
        raise CheckpointError(f"{folder / METADATA}: expected {name}, found {type(value).__name__}")
    return value


def _write_file(
    path: Path, entries: Mapping[str, TensorEntry], read: Callable[[str], Tensor], advance: Advance
) -> dict[str, FilePart]:
    """Write one torch.save after another."""
    places: dict[str, FilePart] = {}
    with path.open("xb") as file:
        for key, entry in entries.items():
            start = file.tell()
            tensor = converted(key, read(key), entry.dtype)
            try:
                torch.save(tensor, cast(Any, file))
            except RuntimeError as error:  # of its zip writer, for a failed write
                cause = error.__context__ or error  # the first failure; closing the writer raises a second one
                raise OSError(f"{path.name}: {(str(cause).splitlines() or [''])[0]}") from error
            del tensor
            gc.collect(0)  # torch.save leaves the tensor in a young reference cycle
            places[key] = (path.name, start, file.tell() - start)
            advance(file.tell() - start)
        file.flush()
        os.fsync(file.fileno())
    return places


def _metadata(written: Iterable[tuple[tuple[str, ...], TensorEntry, FilePart]]) -> Any:
    """Make the content of `.metadata` from the nested dictionary keys of each tensor; a tensor is one chunk."""
    from torch.distributed.checkpoint import metadata as torch_metadata
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # pyright: ignore[reportPrivateUsage]

    described: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    paths: dict[str, Any] = {}
    for path, entry, place in written:
        zero, size = torch.Size([0] * len(entry.shape)), torch.Size(entry.shape)
        flat = ".".join(path)
        described[flat] = torch_metadata.TensorStorageMetadata(
            torch_metadata.TensorProperties(dtype=getattr(torch, entry.dtype)),
            size,
            [torch_metadata.ChunkStorageMetadata(zero, size)],
        )
        stored[torch_metadata.MetadataIndex(flat, zero, 0)] = _StorageInfo(*place)
        paths[flat] = path
    return torch_metadata.Metadata(described, planner_data=paths, storage_data=stored, version="1.0.0")


def _paths_of(key: str, aliases: Mapping[str, list[str]]) -> list[tuple[str, ...]]:
    """Return the nested dictionary keys of a tensor, for each of its names."""
    state, slash, fqn = key.rpartition("/")
    return [("optimizer", "state", fqn, state)] if slash else [("model", name) for name in aliases.get(key, [key])]


# ------------------------------------------------------------------------------------------------ .metadata as data

# A pickle is a program. We execute nothing, and return no foreign class: every name in it becomes a stand-in (a
# `Record`, a tuple or dict, or text). So all that it calls, sets or builds is one of these.

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


DCP = ForeignFormat(lambda path: bool(_folders(path)), open_checkpoint, export)
