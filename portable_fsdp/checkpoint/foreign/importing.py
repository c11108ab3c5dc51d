"""An import: a foreign checkpoint, read a tensor at a time, becomes one of ours by the same commit as any save."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from portable_fsdp import __version__
from portable_fsdp.checkpoint import format
from portable_fsdp.checkpoint.foreign import FORMATS
from portable_fsdp.checkpoint.foreign.base import Advance, Source, as_dtype, load_format, say_nothing
from portable_fsdp.checkpoint.foreign.names import config_of, names_of, settle
from portable_fsdp.checkpoint.foreign.streams import groups, size_of, write_file
from portable_fsdp.checkpoint.format import DataPosition, FileEntry, Index, Manifest, PieceEntry, TensorEntry, WrittenBy
from portable_fsdp.runtime.errors import CheckpointError
from portable_fsdp.runtime.files import sync_folder

_MAX_FILE_BYTES = 5_000_000_000


def import_checkpoint(
    path: Path,
    folder: Path,
    name: str = "auto",
    *,
    config: Path | None = None,
    dtype: str | None = None,
    trust_metadata: bool = False,
    advance: Advance = say_nothing,
    max_file_bytes: int = _MAX_FILE_BYTES,
) -> Path:
    """Write what lies at `path` as a checkpoint below `folder`; returns the checkpoint's folder. For one process.

    Args:
        folder: a run's folder, or its `checkpoints/`.
        name: of `FORMATS`, or `auto`.
        config: a config.json or its folder, in place of the source's own.
        dtype: of the model's floating-point tensors; None: as the source has them.
        trust_metadata: read metadata that is pickled, with an unpickler that knows a few names and nothing else.
        max_file_bytes: a file is closed before it would grow beyond.

    Holds one tensor at a time in host memory, and what its format needs to make it (see there). Raises
    `CheckpointError`; nothing is committed then.
    """
    kind = detect(path) if name == "auto" else name
    model_config = None if config is None else config_of(config)
    with load_format(kind).open_source(path, trust_metadata=trust_metadata) as source:
        model_config = model_config or source.model_config
        keys = settle(source, names_of(model_config, str(config or path)))
        if not keys:
            raise CheckpointError(f"{path}: expected tensors ({kind}), found none")
        plain = Source(
            {key: as_dtype(source.tensors[theirs], None if "/" in key else dtype) for key, theirs in keys.items()},
            lambda key: source.read(keys[key]),
            source.step,
            model_config,
        )
        return _commit(format.step_folder(checkpoints_of(folder), plain.step), plain, kind, advance, max_file_bytes)


def detect(path: Path) -> str:
    """The name of the format at `path`. Raises `CheckpointError`."""
    if not path.exists():
        raise CheckpointError(f"import {path}: expected a file or a folder, found none")
    for name in FORMATS:
        if load_format(name).matches(path):
            return name
    raise CheckpointError(
        f"import {path}: expected one of {', '.join(FORMATS)}, found none of their marks.\n"
        "  Name its format with --format, or the folder that holds the files."
    )


def checkpoints_of(folder: Path) -> Path:
    """Where the checkpoints of a run lie; `folder` itself where it is that already."""
    is_one = folder.name == "checkpoints" or bool(format.committed_steps(folder))
    return folder if is_one else folder / "checkpoints"


def _commit(final: Path, source: Source, kind: str, advance: Advance, max_file_bytes: int) -> Path:
    """The protocol of `format.py`, for a process that is alone. The only place that writes a checkpoint here."""
    if final.exists():
        raise CheckpointError(
            f"import to {final}: expected no such step, found it committed. Name another run's folder."
        )
    folder = format.temporary_of(final)
    try:
        attempt = format.begin(final)
        tensors, files = _write(folder, source, advance, max_file_bytes)
        format.write_index(folder, Index(attempt=attempt, process=0, tensors=tensors, files=files))
        indexes = format.collect(folder, attempt, 1, 60.0)
        format.commit(final, _manifest(source, kind, format.merge(tensors, indexes), files), indexes)
    except OSError as error:
        raise CheckpointError(f"import to {final}: can't be written: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # what an error left; after the commit it has another name
    return final


def _manifest(source: Source, kind: str, tensors: dict[str, TensorEntry], files: dict[str, FileEntry]) -> Manifest:
    return Manifest(
        format_version=1,
        step=source.step,
        config={},
        model_config=source.model_config,
        data=DataPosition(epoch=0, position=0),
        tensors=tensors,
        files=files,
        written_by=WrittenBy(
            device="cpu",
            backend=f"import {kind}",
            process_count=1,
            torch=str(torch.__version__),
            portable_fsdp=__version__,
        ),
    )


def _write(
    folder: Path, source: Source, advance: Advance, max_file_bytes: int
) -> tuple[dict[str, TensorEntry], dict[str, FileEntry]]:
    tensors: dict[str, TensorEntry] = {}
    files: dict[str, FileEntry] = {}
    for part in format.FOLDERS:
        below = {key: tensor for key, tensor in source.tensors.items() if format.folder_of(key) == part}
        for ordinal, keys in enumerate(groups(below, max_file_bytes)):
            file = f"{part}/shard-00000-{ordinal:02d}.safetensors"
            written = {key: below[key] for key in keys if size_of(below[key])}
            tensors.update({key: _placed(below[key], file) for key in keys})
            if written:
                files[file] = write_file(folder / file, written, source.read, _whole_pieces(written), advance)
        sync_folder(folder / part)
    return tensors, files


def _placed(tensor: TensorEntry, file: str) -> TensorEntry:
    """In one piece, in `file`; in none if it is empty."""
    piece = PieceEntry(file=file, offset=(0,) * len(tensor.shape), shape=tensor.shape)
    return TensorEntry(shape=tensor.shape, dtype=tensor.dtype, pieces=(piece,) if size_of(tensor) else ())


def _whole_pieces(tensors: Mapping[str, TensorEntry]) -> dict[str, str]:
    """As `store.py` writes it, for `dcp.load` with a HuggingFaceStorageReader."""
    offsets: dict[str, Any] = {key: {"saved_offsets": [0] * len(tensor.shape)} for key, tensor in tensors.items()}
    return {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
