"""An import: a foreign checkpoint, read a tensor at a time, becomes one of ours by the same commit as any save."""

import logging
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from portable_fsdp.checkpoint import commit, format, storage
from portable_fsdp.checkpoint.commit import Index
from portable_fsdp.checkpoint.store import dcp_metadata
from portable_fsdp.formats import FORMATS, WITHOUT_CHECKSUM, require_source
from portable_fsdp.formats.base import Advance, ForeignCheckpoint, as_dtype, load_format, no_progress
from portable_fsdp.formats.names import choose_tensors, config_of, names_of
from portable_fsdp.formats.safetensors_file import groups, write_file
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
    advance: Advance = no_progress,
    max_file_bytes: int = _MAX_FILE_BYTES,
) -> Path:
    """Write the model at `path` as a checkpoint below `folder`; returns the checkpoint's folder. For one process.

    `folder`: a run's, or its `checkpoints/`. `name`: of `FORMATS`, or `auto`. `config`: a config.json or its folder, in
    place of the source's. `dtype`: of the model's floating-point tensors; None: as in the source. `trust_metadata`:
    read pickled metadata, restricted. No file exceeds `max_file_bytes`.

    Holds one tensor at a time, and whatever its format needs to make it. Raises `CheckpointError`, and in an object
    store the errors of its client; then it commits nothing.
    """
    kind = detect(path) if name == "auto" else name
    if kind in WITHOUT_CHECKSUM:
        log.warning(
            "import %s: %s (%s) has no checksum: damage that leaves it readable would go unnoticed",
            *(path, WITHOUT_CHECKSUM[kind], kind),
        )
    model_config = None if config is None else config_of(config)
    with load_format(kind).open_checkpoint(path, trust_metadata=trust_metadata) as opened:
        source: ForeignCheckpoint = opened
        model_config = model_config or source.model_config
        names = names_of(model_config, str(config or path))
        keys = choose_tensors(source, names)
        if not keys:
            raise CheckpointError(f"{path}: expected tensors ({kind}), found none")
        chosen = replace(
            source,
            tensors={key: as_dtype(source.tensors[old], None if "/" in key else dtype) for key, old in keys.items()},
            read=lambda key: source.read(keys[key]),
            model_config=model_config,
            ties={} if names is None else names.ties,
        )
        try:
            final = format.step_folder(checkpoints_of(folder), source.step)
            _commit(final, chosen, kind, advance, max_file_bytes)
        except OSError as error:  # errors of the source are CheckpointErrors
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
    """The folder of a run's checkpoints; perhaps `folder` itself."""
    is_that = folder.name == "checkpoints" or bool(format.committed_steps(folder))
    return folder if is_that else folder / "checkpoints"


def _commit(final: Path, source: ForeignCheckpoint, kind: str, advance: Advance, max_file_bytes: int) -> None:
    """The protocol of `commit.py`, for a single process."""
    if format.is_committed(final):
        raise CheckpointError(
            f"import to {final}: expected no such step, found it committed. Name another run's folder."
        )
    attempt = commit.begin(final, format.IMPORTED)
    try:
        index = _write(commit.temporary_of(final, attempt), attempt, source, advance, max_file_bytes)
        commit.commit(final, attempt, _manifest(source, kind, index), [])
    except BaseException:
        temporary = commit.temporary_of(final, attempt)
        with suppress(Exception):  # a storage that doesn't answer: the first error says so
            if temporary != final or not format.is_committed(final):
                commit.discard(temporary)
        raise


def _manifest(source: ForeignCheckpoint, kind: str, index: Index) -> format.Manifest:
    return format.Manifest(
        format_version=1,
        step=source.step,
        saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
        config={},
        model_config=source.model_config,
        data=format.DataPosition(epoch=0, position=0),
        ties=source.ties,
        written_by=format.WrittenBy(
            device="cpu",
            backend=f"{format.IMPORT}{kind}",
            process_count=1,
            torch=str(torch.__version__),
            portable_fsdp=__version__,
        ),
        files=index.files,
        tensors=index.tensors,
    )


def _write(folder: Path, attempt: str, source: ForeignCheckpoint, advance: Advance, max_file_bytes: int) -> Index:
    tensors: dict[str, format.TensorEntry] = {}
    files: list[format.FileEntry] = []
    for part in format.FOLDERS:
        below = {key: tensor for key, tensor in source.tensors.items() if format.folder_of(key) == part}
        for ordinal, keys in enumerate(groups(below, max_file_bytes)):
            name = f"{part}/shard-00000-{ordinal:02d}-{attempt[:8]}.safetensors"  # `commit.py` says why
            tensors.update({key: _in_one_piece(below[key], len(files)) for key in keys})
            written = {key: below[key] for key in keys if below[key].nbytes}
            if written:
                metadata = dcp_metadata({key: [0] * len(tensor.shape) for key, tensor in written.items()})
                files.append(write_file(folder / name, written, source.read, metadata, advance, name))
        storage.sync(folder / part)
    return Index(attempt=attempt, process=0, files=tuple(files), tensors=tensors)


def _in_one_piece(tensor: format.TensorEntry, file: int) -> format.TensorEntry:
    """In the file of that number; without a piece if it is empty."""
    if not tensor.nbytes:
        return format.TensorEntry(shape=tensor.shape, dtype=tensor.dtype)
    offsets, sizes = [0] * len(tensor.shape), list(tensor.shape)
    return format.TensorEntry(shape=tensor.shape, dtype=tensor.dtype, files=[file], offsets=offsets, sizes=sizes)
