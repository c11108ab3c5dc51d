"""An import: a foreign checkpoint, read a tensor at a time, becomes one of ours by the same commit as any save."""

import logging
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import torch

from portable_fsdp.checkpoint import commit, storage
from portable_fsdp.checkpoint.commit import Index
from portable_fsdp.checkpoint.format import (
    FOLDERS,
    IMPORT,
    IMPORTED,
    DataPosition,
    FileEntry,
    Manifest,
    TensorEntry,
    WrittenBy,
    committed_steps,
    folder_of,
    is_committed,
    step_folder,
)
from portable_fsdp.checkpoint.store import dcp_metadata
from portable_fsdp.formats import FORMATS, WITHOUT_CHECKSUM, require_source
from portable_fsdp.formats.base import Advance, ForeignCheckpoint, as_dtype, load_format, say_nothing
from portable_fsdp.formats.names import config_of, names_of, settle
from portable_fsdp.formats.streams import groups, size_of, write_file
from portable_fsdp.runtime.errors import CheckpointError
from portable_fsdp.version import __version__

log = logging.getLogger("portable_fsdp")

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
    `CheckpointError`, and in an object store what its client raises; nothing is committed then.
    """
    kind = detect(path) if name == "auto" else name
    if kind in WITHOUT_CHECKSUM:
        log.warning(
            "import %s: %s (%s) has no checksum: damage that leaves it readable would go unnoticed",
            *(path, WITHOUT_CHECKSUM[kind], kind),
        )
    model_config = None if config is None else config_of(config)
    with load_format(kind).open_checkpoint(path, trust_metadata=trust_metadata) as source:
        model_config = model_config or source.model_config
        names = names_of(model_config, str(config or path))
        keys = settle(source, names)
        if not keys:
            raise CheckpointError(f"{path}: expected tensors ({kind}), found none")
        plain = ForeignCheckpoint(
            {key: as_dtype(source.tensors[theirs], None if "/" in key else dtype) for key, theirs in keys.items()},
            lambda key: source.read(keys[key]),
            source.step,
            model_config,
            {} if names is None else names.ties,
        )
        try:
            final = step_folder(checkpoints_of(folder), plain.step)
            _commit(final, plain, kind, advance, max_file_bytes)
        except OSError as error:  # what can't be read of the source is a CheckpointError
            raise CheckpointError(f"import to {folder}: can't be written: {error}") from error
        return final


def detect(path: Path) -> str:
    """The name of the format at `path`. Raises `CheckpointError`."""
    require_source(path)
    for name in FORMATS:
        if load_format(name).matches(path):
            return name
    raise CheckpointError(
        f"import {path}: expected one of {', '.join(FORMATS)}, found none of their marks.\n"
        "  Name its format with --format, or the folder that holds the files."
    )


def checkpoints_of(folder: Path) -> Path:
    """Where the checkpoints of a run lie; `folder` itself where it is that already."""
    is_one = folder.name == "checkpoints" or bool(committed_steps(folder))
    return folder if is_one else folder / "checkpoints"


def _commit(final: Path, source: ForeignCheckpoint, kind: str, advance: Advance, max_file_bytes: int) -> None:
    """The protocol of `commit.py`, for a process that is alone. The only place that writes a checkpoint here."""
    if is_committed(final):
        raise CheckpointError(
            f"import to {final}: expected no such step, found it committed. Name another run's folder."
        )
    attempt = commit.begin(final, IMPORTED)
    try:
        index = _write(commit.temporary_of(final, attempt), attempt, source, advance, max_file_bytes)
        commit.commit(final, attempt, _manifest(source, kind, index), [])
    except BaseException:
        _discard_uncommitted(final, commit.temporary_of(final, attempt))
        raise


def _discard_uncommitted(final: Path, temporary: Path) -> None:
    """In an object store they are one: there the commit decides."""
    with suppress(Exception):  # storage that doesn't answer: the error that led here says so
        if temporary != final or not is_committed(final):
            commit.discard(temporary)


def _manifest(source: ForeignCheckpoint, kind: str, index: Index) -> Manifest:
    return Manifest(
        format_version=1,
        step=source.step,
        saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
        config={},
        model_config=source.model_config,
        data=DataPosition(epoch=0, position=0),
        ties=source.ties,
        written_by=WrittenBy(
            device="cpu",
            backend=f"{IMPORT}{kind}",
            process_count=1,
            torch=str(torch.__version__),
            portable_fsdp=__version__,
        ),
        files=index.files,
        tensors=index.tensors,
    )


def _write(folder: Path, attempt: str, source: ForeignCheckpoint, advance: Advance, max_file_bytes: int) -> Index:
    tensors: dict[str, TensorEntry] = {}
    files: list[FileEntry] = []
    for part in FOLDERS:
        below = {key: tensor for key, tensor in source.tensors.items() if folder_of(key) == part}
        for ordinal, keys in enumerate(groups(below, max_file_bytes)):
            name = f"{part}/shard-00000-{ordinal:02d}-{attempt[:8]}.safetensors"  # see commit.py: no mixture in a store
            written = {key: below[key] for key in keys if size_of(below[key])}
            tensors.update({key: _placed(below[key], len(files)) for key in keys})
            if written:
                begins = {key: [0] * len(tensor.shape) for key, tensor in written.items()}
                done = write_file(folder / name, written, source.read, dcp_metadata(begins), advance)
                files.append(FileEntry(name=name, bytes=done.bytes, xxh3_128=done.xxh3_128))
        storage.sync(folder / part)
    return Index(attempt=attempt, process=0, files=tuple(files), tensors=tensors)


def _placed(tensor: TensorEntry, file: int) -> TensorEntry:
    """In one piece, in the file of that number; in none if it is empty."""
    if not size_of(tensor):
        return TensorEntry(shape=tensor.shape, dtype=tensor.dtype)
    offsets, sizes = [0] * len(tensor.shape), list(tensor.shape)
    return TensorEntry(shape=tensor.shape, dtype=tensor.dtype, files=[file], offsets=offsets, sizes=sizes)
