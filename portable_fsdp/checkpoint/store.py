"""Tensors in and out of safetensors files: who writes which file, and which files hold a slice.

Process 3 writes its k-th piece of every tensor into `model/shard-00003-0k.safetensors` (optimizer state likewise), so
that a key stands once in a file. Each header carries the offsets as `torch.distributed.checkpoint` writes them, so
`dcp.load` with its HuggingFaceStorageReader opens `model/` too.
"""

import json
import os
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self, cast

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors import torch as safetensors_torch
from torch import Tensor

from portable_fsdp.backends.base import Part, Piece, Slices, TensorState
from portable_fsdp.checkpoint.format import (
    DTYPE_BYTES,
    FOLDERS,
    FileEntry,
    Manifest,
    PieceEntry,
    TensorEntry,
    describe,
    folder_of,
    read_manifest,
    require_regular,
)
from portable_fsdp.runtime.errors import CheckpointError
from portable_fsdp.runtime.files import sync_folder

_DTYPE_OF_CODE = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_CHUNK_BYTES = 1 << 22


def entries_without_pieces(state: Mapping[str, TensorState]) -> dict[str, TensorEntry]:
    """What all processes know: every tensor's shape and dtype. Raises `CheckpointError` for a dtype we can't store."""
    entries = {key: TensorEntry(shape=tuple(s.shape), dtype=_name(s.dtype), pieces=()) for key, s in state.items()}
    for key, entry in entries.items():
        if entry.dtype not in DTYPE_BYTES:
            raise CheckpointError(f"{key}: expected a dtype of {', '.join(DTYPE_BYTES)}; found {entry.dtype}")
    return entries


def write_pieces(
    folder: Path, state: Mapping[str, TensorState], process_index: int
) -> tuple[dict[str, TensorEntry], dict[str, FileEntry]]:
    """Write this process's pieces below `folder`, fsynced. Returns its tensors (those with pieces) and its files."""
    tensors: dict[str, TensorEntry] = {}
    shards: dict[str, dict[str, Piece]] = {}
    for key, entry in entries_without_pieces(state).items():
        written: list[PieceEntry] = []
        for ordinal, piece in enumerate(piece for piece in state[key].pieces if piece.data.numel()):
            file = f"{folder_of(key)}/shard-{process_index:05d}-{ordinal:02d}.safetensors"
            if _name(piece.data.dtype) != entry.dtype:
                raise TypeError(f"{key}: a piece is {piece.data.dtype}, the tensor is {entry.dtype}")
            shards.setdefault(file, {})[key] = piece
            written.append(PieceEntry(file=file, offset=tuple(piece.offset), shape=tuple(piece.data.shape)))
        if written:
            tensors[key] = TensorEntry(shape=entry.shape, dtype=entry.dtype, pieces=tuple(written))
    files = {file: _write_shard(folder / file, pieces) for file, pieces in shards.items()}
    for name in FOLDERS:
        sync_folder(folder / name)
    return tensors, files


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write contiguous CPU tensors to a new file, and fsync it. The caller fsyncs the folder."""
    cast(Any, safetensors_torch).save_file(dict(tensors), path, {"format": "pt", **metadata})
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors makes it 0600; files follow their folder
    with path.open("rb") as file:
        os.fsync(file.fileno())


def hash_file(path: Path) -> FileEntry:
    """Length and hash of what `path` holds now."""
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return FileEntry(bytes=size, xxh3_128=digest.hexdigest())


class Reader:
    """A committed checkpoint, open for reading. A context manager: it keeps the files that it read from open.

    Opening reads and checks the manifest only. All methods raise `CheckpointError`; none is collective.
    """

    manifest: Manifest

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        for name in FOLDERS:
            if (folder / name).is_symlink():
                raise CheckpointError(f"checkpoint {folder.name}: {name}/: expected a folder, found a link")
        self._stored = _pieces_by_file(self.manifest)
        self._open_files: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open_files.clear()
        self._stack.close()

    def verify_sizes(self) -> None:
        """Every file is there, a plain file, with its length."""
        for file in self.manifest.files:
            self._verify_size(file)

    def verify(self, part: Part, folder: str = "") -> None:
        """Sizes, hashes and headers of this part of the files below `folder` (sorted, dealt out by turns)."""
        files = sorted(file for file in self.manifest.files if file.startswith(folder))
        for file in files[part.index :: part.count]:
            self._verify_size(file)
            self._verify_hash(file)
            with self._checked(file):
                pass

    def check(self, expected: Mapping[str, TensorState]) -> None:
        """The checkpoint holds exactly the tensors of `expected`: keys, shapes, dtypes."""
        mine, theirs = entries_without_pieces(expected), self.manifest.tensors
        differing = [key for key in mine if key in theirs and describe(mine[key]) != describe(theirs[key])]
        missing = [key for key in mine if key not in theirs]
        extra = [key for key in theirs if key not in mine]
        lines: list[str] = []
        if differing:
            key, more = differing[0], len(differing) - 1
            lines.append(
                f"{key}: expected {describe(mine[key])} (this model),\n  found {describe(theirs[key])} (manifest.json)"
                + (f", and {more} more tensors like it" if more else "")
            )
        if missing:
            lines.append(f"not in the checkpoint: {_some(missing)}")
        if extra:
            lines.append(f"not in this model: {_some(extra)}")
        if lines:
            raise CheckpointError(
                f"checkpoint {self.folder.name}: " + ".\n  ".join(lines) + ".\n"
                "  Resume with the config of the run that saved it\n"
                f"  (python -m portable_fsdp.checkpoint show --config {self.folder}), or train in another run.dir."
            )

    def read(self, key: str, slices: Slices) -> Tensor:
        """That slice of a tensor on the host, bit for bit, in the dtype that it was saved in."""
        tensor = self.manifest.tensors.get(key)
        if tensor is None:
            raise CheckpointError(f"checkpoint {self.folder.name}: expected a tensor {key}, found none")
        if len(slices) != len(tensor.shape) or not all(
            0 <= s.start <= s.stop <= size for s, size in zip(slices, tensor.shape, strict=True)
        ):
            raise IndexError(f"{key}: {slices} is no part of {list(tensor.shape)}")
        result = torch.empty([s.stop - s.start for s in slices], dtype=getattr(torch, tensor.dtype))
        if result.numel():
            for piece in tensor.pieces:
                self._copy_overlap(key, piece, slices, result)
        return result

    def _copy_overlap(self, key: str, piece: PieceEntry, slices: Slices, result: Tensor) -> None:
        inside: list[slice] = []
        target: list[slice] = []
        for wanted, offset, size in zip(slices, piece.offset, piece.shape, strict=True):
            start, stop = max(wanted.start, offset), min(wanted.stop, offset + size)
            if start >= stop:
                return
            inside.append(slice(start - offset, stop - offset))
            target.append(slice(start - wanted.start, stop - wanted.start))
        if piece.file not in self._open_files:
            self._open_files[piece.file] = self._stack.enter_context(self._checked(piece.file))
        result[tuple(target)] = self._open_files[piece.file].get_slice(key)[tuple(inside)]

    def _verify_size(self, file: str) -> None:
        require_regular(self.folder / file, self.folder.name)
        expected, found = self.manifest.files[file].bytes, (self.folder / file).stat().st_size
        if found != expected:
            raise self._damaged(file, f"{expected} bytes", f"{found} bytes")

    def _verify_hash(self, file: str) -> None:
        try:
            found = hash_file(self.folder / file)
        except OSError as error:
            raise CheckpointError(f"checkpoint {self.folder.name}: {file}: {error}") from None
        expected = self.manifest.files[file]
        if found != expected:
            raise self._damaged(file, f"content with xxh3_128 {expected.xxh3_128}", found.xxh3_128)

    @contextmanager
    def _checked(self, file: str) -> Generator[Any]:
        """The file, open, after its header was found to say what the manifest says."""
        require_regular(self.folder / file, self.folder.name)
        try:
            handle = cast(Any, safe_open(self.folder / file, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"checkpoint {self.folder.name}: {file}: {error}") from None
        with handle:
            self._check_header(file, handle)
            yield handle

    def _check_header(self, file: str, handle: Any) -> None:
        views = {key: handle.get_slice(key) for key in cast(list[str], handle.keys())}
        found = {
            key: f"{_DTYPE_OF_CODE.get(view.get_dtype(), view.get_dtype())} {list(view.get_shape())}"
            for key, view in views.items()
        }
        expected = self._stored[file]
        for key in sorted(found.keys() | expected.keys()):
            if found.get(key) != expected.get(key):
                raise self._damaged(
                    file, f"{key} as {expected.get(key, 'nothing')} (manifest.json)", f"{found.get(key, 'nothing')}"
                )

    def _damaged(self, file: str, expected: str, found: str) -> CheckpointError:
        return CheckpointError(
            f"checkpoint {self.folder.name}: {file}: expected {expected}, found {found}.\n"
            "  The file was altered or cut after the save: copy it again from where it was whole,\n"
            "  or take an older checkpoint."
        )


def _write_shard(path: Path, pieces: Mapping[str, Piece]) -> FileEntry:
    offsets = {key: {"saved_offsets": list(piece.offset)} for key, piece in pieces.items()}
    data = {key: piece.data.detach().cpu().contiguous() for key, piece in pieces.items()}
    # As torch/distributed/checkpoint/filesystem.py writes them for HuggingFaceStorageWriter(save_distributed=True).
    write_safetensors(path, data, {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)})
    return hash_file(path)


def _pieces_by_file(manifest: Manifest) -> dict[str, dict[str, str]]:
    """What each file's header must say: key -> `float32 [63, 24]`."""
    stored: dict[str, dict[str, str]] = {file: {} for file in manifest.files}
    for key, tensor in manifest.tensors.items():
        for piece in tensor.pieces:
            stored[piece.file][key] = f"{tensor.dtype} {list(piece.shape)}"
    return stored


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _some(keys: list[str]) -> str:
    return keys[0] + (f" and {len(keys) - 1} more" if len(keys) > 1 else "")
