"""Write tensors into safetensors files, and read slices of them.

Process 3 writes its k-th piece of every tensor into `model/shard-00003-0k.safetensors` (optimizer state likewise), so
that a file has a key once. Each header has offsets as `torch.distributed.checkpoint` writes them: `dcp.load` with
its HuggingFaceStorageReader opens `model/` too.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from portable_fsdp import __version__
from portable_fsdp.backends.contract import Partition, Piece, TensorState
from portable_fsdp.backends.state import dtype_name
from portable_fsdp.checkpoint import manifests, safetensors
from portable_fsdp.checkpoint.commit import Index, ReplicaDigest
from portable_fsdp.checkpoint.safetensors import Stored
from portable_fsdp.checkpoint.snapshot import digest_of
from portable_fsdp.checkpoint.storage import FOLDERS, FileReader, is_link, require_regular, store_of
from portable_fsdp.layout import Region, full_region
from portable_fsdp.runtime.errors import CheckpointError, Closing

Advance = Callable[[int], object]
"""Reports the bytes that were just read or written, for a progress bar."""


def no_progress(_: int) -> None: ...


_ALL = Partition(0, 1)
_MAX_OPEN = 64  # files at a time: many systems allow a process 1,024, and a checkpoint may have more


def new_manifest(device: str, backend: str, process_count: int, **fields: Any) -> manifests.Manifest:
    """Make a manifest with the present time and release; `fields`: all other fields of `Manifest`."""
    return manifests.Manifest(
        format_version=1,
        saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
        written_by=manifests.WrittenBy(
            device=device,
            backend=backend,
            process_count=process_count,
            torch=str(torch.__version__),
            portable_fsdp=__version__,
        ),
        **fields,
    )


def entries_without_pieces(state: Mapping[str, TensorState]) -> dict[str, manifests.TensorEntry]:
    """Return each tensor's entry with shape and dtype. Raises `CheckpointError` for a dtype we can't store."""
    entries = {key: manifests.TensorEntry(shape=tuple(s.shape), dtype=dtype_name(s.dtype)) for key, s in state.items()}
    for key, entry in entries.items():
        if entry.dtype not in manifests.DTYPE_BYTES:
            raise CheckpointError(f"{key}: expected a dtype of {', '.join(manifests.DTYPE_BYTES)}; found {entry.dtype}")
    return entries


class OwnPart(NamedTuple):
    """What one process writes of a state."""

    tensors: Mapping[str, manifests.TensorEntry]  # all of the state
    pieces: Mapping[str, Sequence[Piece]]
    digests: Sequence[ReplicaDigest] = ()  # those of numbered pieces join them

    def write(self, folder: Path, process: int, attempt: str) -> Index:
        """Write the pieces below `folder`, durably; returns their index.

        Copies pieces on CUDA to the host one by one. Raises OSError, TypeError.
        """
        entry_of = manifests.TensorEntry
        tensors = {key: entry_of(shape=entry.shape, dtype=entry.dtype) for key, entry in self.tensors.items()}
        store = store_of(folder)
        # A name, or that of its folder, includes the attempt: a straggler of an earlier one overwrites nothing.
        mark = "" if attempt[:8] in folder.name else f"-{attempt[:8]}"
        shards: dict[str, dict[str, Piece]] = {}
        for key, entry in tensors.items():
            for ordinal, piece in enumerate(piece for piece in self.pieces[key] if piece.data.numel()):
                name = f"{manifests.folder_of(key)}/shard-{process:05d}-{ordinal:02d}{mark}.safetensors"
                shards.setdefault(name, {})[key] = piece
                entry.files.append(list(shards).index(name))
                entry.offsets.extend(piece.offset)
                entry.sizes.extend(piece.data.shape)
        digested = list(self.digests)
        files = tuple(self._write_shard(folder, name, shard, digested) for name, shard in shards.items())
        for name in FOLDERS:
            store.sync(folder / name)
        written = {key: entry for key, entry in tensors.items() if entry.files}
        return Index(attempt=attempt, process=process, files=files, tensors=written, copies=tuple(digested))

    def _write_shard(
        self, folder: Path, name: str, pieces: Mapping[str, Piece], digested: list[ReplicaDigest]
    ) -> manifests.FileEntry:
        """Write one file, and add the digest of each numbered piece to `digested`."""
        metadata = dcp_metadata({key: piece.offset for key, piece in pieces.items()})
        entries: dict[str, manifests.TensorEntry] = {}
        for key, piece in pieces.items():
            entries[key] = manifests.TensorEntry(shape=tuple(piece.data.shape), dtype=dtype_name(piece.data.dtype))
            if entries[key].dtype != self.tensors[key].dtype:
                raise TypeError(f"{key}: a piece is {entries[key].dtype}, the tensor is {self.tensors[key].dtype}")

        def chunks(key: str, _: manifests.TensorEntry) -> Iterator[memoryview]:
            piece, digest = pieces[key], xxhash.xxh3_128()
            for chunk in safetensors.chunks_of(piece.data):
                if piece.replica is not None:
                    digest.update(chunk)
                yield chunk
            if piece.replica is not None:
                digested.append(digest_of(key, piece, digest.hexdigest()))

        return safetensors.write_file(folder / name, name, entries, chunks, metadata)


def remove_files(folder: Path, process: int) -> None:
    """Delete the files that `OwnPart.write` of this process wrote, as far as the storage allows."""
    store = store_of(folder)
    for path in (folder / name for name in FOLDERS):
        with suppress(Exception):  # object stores raise many classes
            for name in store.names(path):
                if name.startswith(f"shard-{process:05d}-"):
                    store.remove(path / name)


class Reader(Closing):
    """A committed checkpoint, open for reading. A context manager: it keeps files open.

    Opening reads and checks the manifest only. All methods raise `CheckpointError`; none is collective.
    """

    manifest: manifests.Manifest

    def __init__(self, folder: Path, model: str = "") -> None:
        """`model`: read one of several models by the keys that it would have alone."""
        self.folder = folder
        self._all = self.manifest = manifest = manifests.read_manifest(folder)
        self._model = model
        if model:
            from portable_fsdp.checkpoint.named import only_model

            self.manifest = only_model(manifest, model)
        self._store = store_of(folder)
        for name in FOLDERS:
            if is_link(folder / name):
                raise CheckpointError(f"checkpoint {folder.name}: {name}/: expected a folder, found a link")
        self._pieces: list[dict[str, int]] = [{} for _ in manifest.files]  # file -> key -> number of its piece
        for key, tensor in manifest.tensors.items():
            for k, number in enumerate(tensor.files):
                self._pieces[number][key] = k
        self._headers: dict[int, dict[str, Stored]] = {}
        self._open: dict[int, FileReader] = {}  # the least recently used first

    def close(self) -> None:
        for source in self._open.values():
            source.close()
        self._open.clear()

    def verify_sizes(self) -> None:
        """Check that every file is plain and has its length."""
        for file in self.manifest.files:
            manifests.verify_file(self.folder, file, content=False)

    def verify(self, part: Partition = _ALL, folder: str = "", advance: Advance = no_progress) -> None:
        """Check sizes, hashes and headers of every `part.count`-th file below `folder`, in sorted order."""
        numbers = [n for n, file in enumerate(self.manifest.files) if file.name.startswith(folder)]
        numbers.sort(key=lambda number: self.manifest.files[number].name)
        for number in numbers[part.index :: part.count]:
            file = self.manifest.files[number]
            manifests.verify_file(self.folder, file, content=True)
            self._file(number)
            advance(file.bytes)

    def check(
        self,
        expected: Mapping[str, TensorState],
        ties: Mapping[str, str],
        *,
        weights_only: bool = False,
        base: Collection[str] = (),
        config: Sequence[str] = (),
    ) -> None:
        """Check that the checkpoint has just the tensors (or weights) of `expected`: keys, shapes, dtypes, ties; those
        in `base` may be in the manifest's base alone. Raises `CheckpointError` with a table of differences, below
        `config`: the differences of the configs."""
        left_out = {key: e for key, e in self.manifest.left_out.items() if key in base and key in expected}
        kept, describe = ("model",) if weights_only else FOLDERS, manifests.describe
        ours, stored = (
            {key: describe(tensor) for key, tensor in tensors.items() if manifests.folder_of(key) in kept}
            for tensors in (entries_without_pieces(expected), self.manifest.tensors | left_out)
        )
        stored = {key: text for key, text in stored.items() if not key.startswith(manifests.OBJECTS)}
        has_state = weights_only or any(manifests.folder_of(key) == "optimizer" for key in stored)
        for aliases, tensors in ((ties, ours), (self.manifest.ties, stored)):
            tensors |= {alias: f"tied to {key}" for alias, key in aliases.items()}
        if weights_only:  # an import without a model's config doesn't know which weights are tied
            for alias, key in ties.items():
                if stored.get(key) == ours.get(key) and (alias not in stored or self._are_equal(alias, key)):
                    stored[alias] = ours[alias]
        rows = [
            (key, ours.get(key, "nothing"), stored.get(key, "nothing"))
            for key in dict.fromkeys([*ours, *stored])
            if ours.get(key) != stored.get(key)
        ]
        if not rows:
            return
        advice = (
            "Resume with the config of the run that saved it\n"
            f"  (python -m portable_fsdp.checkpoint show --config {self.folder}), or train in another run.dir."
            if has_state
            else "It has no optimizer state: start from its weights,\n"
            f"  checkpoint.load=weights_only checkpoint.resume={self.folder}"
        )
        raise CheckpointError(
            f"checkpoint {self.folder.name}: {len(rows)} tensors differ from those of this model:\n"
            + "".join(f"  {line}\n" for line in config)
            + f"{manifests.first_rows(('', 'this model', 'checkpoint'), rows)}\n  {advice}"
        )

    def _are_equal(self, first: str, second: str) -> bool:
        """Return whether two tensors in the files are the same, bit for bit."""
        stored = [(key, self.manifest.tensors[key]) for key in (first, second) if key in self.manifest.tensors]
        if len(stored) < 2 or manifests.describe(stored[0][1]) != manifests.describe(stored[1][1]):
            return False
        one, other = (safetensors.digest_of(key, self.read_whole, entry) for key, entry in stored)
        return one == other

    def read(self, key: str, slices: Region, into: Tensor | None = None) -> Tensor:
        """Read a slice of a tensor to the host, bit for bit, in its saved dtype.

        `into`: the host tensor to fill, of this shape and dtype. Raises `CheckpointError` for a key or bytes that
        can't be read, IndexError for slices outside the tensor, TypeError for an `into` that doesn't fit.
        """
        tensor = self.manifest.tensors.get(key)
        if tensor is None:
            raise CheckpointError(f"checkpoint {self.folder.name}: no such tensor: {key}")
        if len(slices) != len(tensor.shape) or not all(
            0 <= s.start <= s.stop <= size for s, size in zip(slices, tensor.shape, strict=True)
        ):
            raise IndexError(f"{key}: {slices} is no part of {list(tensor.shape)}")
        shape = [s.stop - s.start for s in slices]
        result = torch.empty(shape, dtype=getattr(torch, tensor.dtype)) if into is None else into
        if list(result.shape) != shape or dtype_name(result.dtype) != tensor.dtype:
            raise TypeError(f"{key}: expected a buffer of {tensor.dtype} {shape}, found {result.dtype} {result.shape}")
        if result.numel():
            for number, inside, target in touching(tensor, slices):
                source = self._file(number)
                try:
                    stored = self._headers[number][manifests.key_in(self._model, key)]
                    safetensors.read_slice(source, stored, inside, result[target])
                except OSError as error:
                    raise CheckpointError(f"checkpoint {self.folder.name}: {error}") from None
        return result

    def read_whole(self, key: str) -> Tensor:
        """Read a whole tensor, like `read`."""
        return self.read(key, full_region(self.manifest.tensors[key].shape))

    def _file(self, number: int) -> FileReader:
        """Return the open file, once its header matches the manifest."""
        if number in self._open:
            self._open[number] = self._open.pop(number)
            return self._open[number]
        if len(self._open) == _MAX_OPEN:
            self._open.pop(next(iter(self._open))).close()
        file = self.manifest.files[number]
        require_regular(self.folder / file.name, self.folder.name)
        try:
            source = self._store.open(self.folder / file.name)
        except OSError as error:
            raise CheckpointError(f"checkpoint {self.folder.name}: {file.name}: {error}") from None
        self._open[number] = source
        if number not in self._headers:
            try:
                header = safetensors.read_header(source)
            except (OSError, ValueError) as error:
                raise manifests.damaged(self.folder, file.name, "a safetensors file", str(error)) from None
            pieces = self._pieces[number]
            for key in dict.fromkeys([*header, *pieces]):
                expected = "nothing"
                if key in pieces:
                    tensor, rank, k = self._all.tensors[key], len(self._all.tensors[key].shape), pieces[key]
                    expected = f"{tensor.dtype} {tensor.sizes[rank * k : rank * (k + 1)]}"
                actual = manifests.describe(header[key].entry if key in header else None)
                if actual != expected:
                    raise manifests.damaged(self.folder, file.name, f"{key} as {expected} (manifest.json)", actual)
            self._headers[number] = header
        return source


def dcp_metadata(offsets: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Return the offset of each tensor's piece for a file's header, as HuggingFaceStorageWriter(save_distributed=True)
    writes it (torch/distributed/checkpoint/filesystem.py)."""
    saved = {key: {"saved_offsets": list(offset)} for key, offset in offsets.items()}
    return {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(saved)}


def touching(tensor: manifests.TensorEntry, slices: Region) -> list[tuple[int, Region, Region]]:
    """Return for each piece that overlaps `slices` its file number, and the overlap in the piece and in `slices`."""
    shape = len(tensor.files), len(tensor.shape)
    offsets, sizes = (np.array(rows, dtype=np.int64).reshape(shape) for rows in (tensor.offsets, tensor.sizes))
    begin, end = (np.array(bounds, dtype=np.int64) for bounds in ([s.start for s in slices], [s.stop for s in slices]))
    first, last = np.maximum(offsets, begin), np.minimum(offsets + sizes, end)

    def overlap(k: int, origin: NDArray[np.int64]) -> Region:
        return tuple(map(slice, (first[k] - origin).tolist(), (last[k] - origin).tolist()))

    numbers = np.flatnonzero((first < last).all(axis=1)).tolist()
    return [(tensor.files[k], overlap(k, offsets[k]), overlap(k, begin)) for k in numbers]
