"""What a checkpoint folder holds, and how it is committed.

1. Process 0 makes `step-00000500.tmp/` with `model/` and `optimizer/`, and tells all processes the attempt's id.
2. Each process writes its safetensors files there and fsyncs them.
3. Then it describes them in `index-00003.json`, by rename: attempt, pieces, bytes, hashes; or its error.
4. Process 0 waits for the index files of this attempt from all processes, merges them, and checks the result as a
   reader would: the pieces tile every tensor exactly once.
5. It writes `manifest.json`, sealed with its own hash (fsync), removes the index files, fsyncs the folders, renames
   to `step-00000500` (the commit), and fsyncs the parent.
6. A kill before the rename leaves `*.tmp`, which no reader looks at and the run's next opening removes. An older
   checkpoint is never touched.

A manifest that is read is hostile input: everything in it is checked before a file is opened. No torch here.
"""

import itertools
import json
import math
import re
import shutil
import stat
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from portable_fsdp.runtime.errors import CheckpointError
from portable_fsdp.runtime.files import sync_folder, write_text_atomically

MANIFEST = "manifest.json"
FOLDERS = ("model", "optimizer")

DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element, by torch's name of the dtype: those that safetensors and torch share."""

_STEP_NAME = re.compile(r"step-(\d{8,})")
_DEBRIS_NAME = re.compile(r"step-\d{8,}\.tmp")
_FILE_NAME = re.compile(r"(?:model|optimizer)/[A-Za-z0-9][A-Za-z0-9._-]*\.safetensors")
_MAX_ELEMENTS = 2**60  # strides and byte counts of anything below it fit 64 bits

Dims = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=16)]


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class PieceEntry(_Entry):
    """A piece of a global tensor: stored in `file` under the tensor's own key."""

    file: str
    offset: Dims
    shape: Dims


class TensorEntry(_Entry):
    """A global tensor; its pieces tile it exactly once."""

    shape: Dims
    dtype: str
    pieces: tuple[PieceEntry, ...]


class FileEntry(_Entry):
    """A file's length, and the 128-bit XXH3 of its content in hexadecimal."""

    bytes: int = Field(ge=0)
    xxh3_128: str = Field(pattern="^[0-9a-f]{32}$")


class DataPosition(_Entry):
    """Where the data order stands: the epoch, and the samples consumed in it."""

    epoch: int = Field(ge=0)
    position: int = Field(ge=0)


class WrittenBy(_Entry):
    """Who wrote the checkpoint; for people, no reader depends on it."""

    device: str
    backend: str
    process_count: int = Field(ge=1)
    torch: str
    portable_fsdp: str


class Manifest(_Entry):
    """`manifest.json`. `architecture` (transformers' config as a dict) is its key `model_config`, a name that pydantic
    keeps for itself."""

    format_version: int = Field(ge=1, le=1)
    step: int = Field(ge=0)
    config: dict[str, Any]
    architecture: dict[str, Any] | None = Field(alias="model_config")
    data: DataPosition
    tensors: dict[str, TensorEntry]
    files: dict[str, FileEntry]
    written_by: WrittenBy


class Index(_Entry):
    """`index-00003.json`: what one process wrote, or why it could not."""

    attempt: str
    process: int
    error: str | None = None
    tensors: dict[str, TensorEntry] = {}
    files: dict[str, FileEntry] = {}


def folder_of(key: str) -> str:
    """The folder that holds a tensor: optimizer state is keyed `<state name>/<FQN>`, and no FQN has a slash."""
    return "optimizer" if "/" in key else "model"


def step_folder(run_folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` is committed."""
    return run_folder / f"step-{step:08d}"


def committed_steps(run_folder: Path) -> list[Path]:
    """The checkpoint folders that bear a committed name, newest first. Whether they are whole is the reader's care."""
    if not run_folder.is_dir():
        return []
    found = [path for path in run_folder.iterdir() if step_of(path) is not None and path.is_dir()]
    return sorted(found, key=lambda path: (step_of(path), path.name), reverse=True)


def step_of(folder: Path) -> int | None:
    """The step that a folder's name states; None if the name is not that of a committed checkpoint."""
    match = _STEP_NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def remove_debris(run_folder: Path) -> None:
    """Delete what interrupted saves left. Only process 0, and before any process writes."""
    if run_folder.is_dir():
        for path in run_folder.iterdir():
            if _DEBRIS_NAME.fullmatch(path.name):
                shutil.rmtree(path)


def begin(final: Path) -> str:
    """Make the empty folder that `final` is written to, and return the id of this attempt. Only process 0."""
    folder = temporary_of(final)
    if folder.exists():
        shutil.rmtree(folder)
    for name in FOLDERS:
        (folder / name).mkdir(parents=True)
    return uuid.uuid4().hex


def temporary_of(final: Path) -> Path:
    """The folder that `final` is written to before its commit."""
    return final.with_name(final.name + ".tmp")


def write_index(folder: Path, index: Index) -> None:
    """Announce that this process has written its part, and fsynced it. The last thing that it does in `folder`."""
    path = folder / _index_name(index.process)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(index.model_dump_json(), encoding="utf-8")
    temporary.replace(path)  # and no fsync of the folder: process 0 may have seen the index and renamed it by now


def collect(folder: Path, attempt: str, process_count: int, wait_s: float) -> list[Index]:
    """Wait for the index of every process. Raises `CheckpointError` if one reports an error or stays away."""
    found: dict[int, Index] = {}
    deadline = time.monotonic() + wait_s
    pause_s = 0.001
    while True:
        for process in range(process_count):
            index = None if process in found else _read_index(folder / _index_name(process), attempt)
            if index is not None and index.error is not None:
                raise CheckpointError(f"checkpoint {folder.name}: process {process} could not write: {index.error}")
            if index is not None:
                found[process] = index
        if len(found) == process_count:
            return [found[process] for process in range(process_count)]
        if time.monotonic() > deadline:
            missing = ", ".join(str(process) for process in range(process_count) if process not in found)
            raise CheckpointError(
                f"checkpoint {folder.name}: expected an index file of each of {process_count} processes in {folder},\n"
                f"  found none of process {missing} after {wait_s:.0f} s. run.dir must lie on a file system that all\n"
                "  processes share. The checkpoints committed before are untouched."
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)


def merge(all_tensors: Mapping[str, TensorEntry], indexes: Iterable[Index]) -> dict[str, TensorEntry]:
    """The tensors with the pieces of all processes. `all_tensors` states shapes and dtypes."""
    pieces: dict[str, list[PieceEntry]] = {key: [] for key in all_tensors}
    for index in indexes:
        for key, written in index.tensors.items():
            expected = all_tensors.get(key)
            if expected is None or (written.shape, written.dtype) != (expected.shape, expected.dtype):
                raise CheckpointError(
                    f"process {index.process} wrote {key} as {describe(written)}, "
                    f"process 0 has it as {describe(expected)}: all processes must hold the same model"
                )
            pieces[key].extend(written.pieces)
    return {
        key: TensorEntry(shape=tensor.shape, dtype=tensor.dtype, pieces=tuple(pieces[key]))
        for key, tensor in all_tensors.items()
    }


def set_aside(final: Path) -> None:
    """Make room at `final` without deleting: rename what lies there to a name that no reader takes. Only process 0."""
    aside = (final.with_name(f"{final.name}.damaged-{count}") for count in itertools.count(1))
    if final.exists():
        final.rename(next(path for path in aside if not path.exists()))


def commit(final: Path, manifest: Manifest, indexes: Sequence[Index]) -> None:
    """Make `final` exist, whole, at one instant. Only process 0, after `collect`."""
    folder = temporary_of(final)
    check_manifest(manifest, final.name)
    write_text_atomically(folder / MANIFEST, manifest_text(manifest))
    for index in indexes:
        (folder / _index_name(index.process)).unlink()
    for name in FOLDERS:
        sync_folder(folder / name)
    sync_folder(folder)
    folder.rename(final)
    sync_folder(final.parent)


def manifest_text(manifest: Manifest) -> str:
    """JSON with one tensor and one file a line, so that people can read it and `diff` shows what changed; sealed."""
    parts: list[str] = []
    for key, value in manifest.model_dump(mode="json", by_alias=True).items():
        if key in ("tensors", "files"):
            lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in value.items()]
            parts.append(f"{json.dumps(key)}: {{\n" + ",\n".join(lines) + "\n}")
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return seal("{\n" + ",\n".join(parts))


def seal(content: str) -> str:
    """Close the object with a last key `xxh3_128`: the hash of all that stands before the comma in front of it."""
    return f'{content},\n"xxh3_128": "{xxhash.xxh3_128_hexdigest(content.encode())}"\n}}\n'


def read_manifest(folder: Path) -> Manifest:
    """Read and check `folder/manifest.json`; opens no other file. Raises `CheckpointError`."""
    path = folder / MANIFEST
    require_regular(path, folder.name)
    try:
        text = path.read_bytes().decode()
        version = _version(json.loads(text, object_pairs_hook=_refuse_duplicates))
        if version != 1:
            raise ValueError(f"expected format_version 1, found {version!r}; is it of a newer portable_fsdp?")
        manifest = Manifest.model_validate_json(_content_under_seal(text) + "}")
    except ValidationError as error:
        raise CheckpointError(f"checkpoint {folder.name}: manifest.json: {_sentence(error)}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"checkpoint {folder.name}: manifest.json: expected the manifest as it was saved, found: {error}\n"
            "  It was altered or cut after the save: copy it again from where it was whole,\n"
            "  or take an older checkpoint."
        ) from None
    check_manifest(manifest, folder.name)
    if step_of(folder) not in (None, manifest.step):
        raise CheckpointError(
            f"checkpoint {folder.name}: expected step {step_of(folder)} (the folder's name), "
            f"found step {manifest.step} (manifest.json). Was the folder renamed?"
        )
    return manifest


def check_manifest(manifest: Manifest, name: str) -> None:
    """Files are plain names inside the folder, all of them used; pieces tile every tensor once. `CheckpointError`."""
    try:
        for file in manifest.files:
            if not _FILE_NAME.fullmatch(file):
                raise ValueError(f"file {file!r}: expected model/NAME.safetensors or optimizer/NAME.safetensors")
        used: dict[str, int] = {}
        for key, tensor in manifest.tensors.items():
            _check_tensor(key, tensor, used)
        _check_files(manifest.files, used)
    except ValueError as error:
        raise CheckpointError(f"checkpoint {name}: manifest.json: {error}") from None


def require_regular(path: Path, name: str) -> None:
    """Refuse what is absent, or is a link, a folder or a pipe. Raises `CheckpointError`."""
    try:
        is_regular = stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        raise CheckpointError(f"checkpoint {name}: expected the file {path}, found none") from None
    if not is_regular:
        raise CheckpointError(f"checkpoint {name}: {path}: expected a plain file, found a link or a special file")


def describe(tensor: TensorEntry | None) -> str:
    """`float32 [8192, 2048]`."""
    return "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def _index_name(process: int) -> str:
    return f"index-{process:05d}.json"


def _read_index(path: Path, attempt: str) -> Index | None:
    """None while there is none, and for one that another attempt left."""
    try:
        index = Index.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return index if index.attempt == attempt else None


def _content_under_seal(text: str) -> str:
    content = text[: -len(seal(""))]
    if text != seal(content):
        raise ValueError("expected its own xxh3_128 as the last key, found another: it was altered after the save")
    return content


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        key, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {key!r} stands twice")
    return result


def _version(value: object) -> object:
    return cast(dict[str, object], value).get("format_version") if isinstance(value, dict) else None


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    others = error.error_count() - 1
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" + (f", and {others} more problems" if others else "")


def _check_tensor(key: str, tensor: TensorEntry, used: dict[str, int]) -> None:
    """Adds the bytes of each piece to `used[file]`. Raises ValueError."""
    if tensor.dtype not in DTYPE_BYTES:
        raise ValueError(f"{key}: expected a dtype of {', '.join(DTYPE_BYTES)}; found {tensor.dtype!r}")
    if math.prod(max(size, 1) for size in tensor.shape) > _MAX_ELEMENTS:
        raise ValueError(f"{key}: expected at most 2**60 elements, found shape {list(tensor.shape)}")
    for piece in tensor.pieces:
        _check_piece(key, tensor, piece)
        used[piece.file] = used.get(piece.file, 0) + math.prod(piece.shape) * DTYPE_BYTES[tensor.dtype]
    if len({piece.file for piece in tensor.pieces}) != len(tensor.pieces):
        raise ValueError(f"{key}: expected each piece in a file of its own, found two in one file")
    expected, found = math.prod(tensor.shape), sum(math.prod(piece.shape) for piece in tensor.pieces)
    if expected != found:
        raise ValueError(f"{key}: expected pieces of {expected} elements in all, found {found}")
    _refuse_overlap(key, tensor.pieces)


def _check_piece(key: str, tensor: TensorEntry, piece: PieceEntry) -> None:
    if not len(piece.offset) == len(piece.shape) == len(tensor.shape):
        raise ValueError(f"{key}: expected pieces of {len(tensor.shape)} dimensions, found {piece.shape}")
    if not all(
        size > 0 and start + size <= whole
        for start, size, whole in zip(piece.offset, piece.shape, tensor.shape, strict=True)
    ):
        raise ValueError(
            f"{key}: expected a piece inside {list(tensor.shape)}, "
            f"found {list(piece.shape)} at {list(piece.offset)} ({piece.file})"
        )
    if not piece.file.startswith(folder_of(key) + "/"):
        raise ValueError(f"{key}: expected in {folder_of(key)}/, found in {piece.file!r}")


def _refuse_overlap(key: str, pieces: Sequence[PieceEntry]) -> None:
    """A sweep along the dimension with the most cuts: there, few pieces are open at a time (one, if it is the only)."""
    if len(pieces) < 2:
        return
    axis = max(range(len(pieces[0].offset)), key=lambda dim: len({piece.offset[dim] for piece in pieces}))
    is_open: list[PieceEntry] = []
    for piece in sorted(pieces, key=lambda piece: piece.offset[axis]):
        is_open = [other for other in is_open if other.offset[axis] + other.shape[axis] > piece.offset[axis]]
        for other in is_open:
            if _overlap(piece, other):
                raise ValueError(f"{key}: the pieces in {other.file} and {piece.file} overlap")
        is_open.append(piece)


def _overlap(a: PieceEntry, b: PieceEntry) -> bool:
    return all(
        a_start < b_start + b_size and b_start < a_start + a_size
        for a_start, a_size, b_start, b_size in zip(a.offset, a.shape, b.offset, b.shape, strict=True)
    )


def _check_files(files: Mapping[str, FileEntry], used: Mapping[str, int]) -> None:
    if files.keys() != used.keys():
        name = min(files.keys() ^ used.keys())
        raise ValueError(f"file {name!r}: " + ("no tensor uses it" if name in files else "used, but not in `files`"))
    for name, file in files.items():
        if used[name] > file.bytes:
            raise ValueError(f"file {name!r}: expected at least {used[name]} bytes for its tensors, found {file.bytes}")
