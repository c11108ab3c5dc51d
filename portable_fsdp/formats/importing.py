"""An import: a foreign checkpoint, read a tensor at a time, becomes one of ours by the same commit as any save."""

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from torch import Tensor

from portable_fsdp.checkpoint import commit, format
from portable_fsdp.checkpoint.safetensors import groups, write_tensors
from portable_fsdp.checkpoint.storage import FOLDERS, store_of
from portable_fsdp.checkpoint.store import Advance, dcp_metadata, new_manifest, no_progress
from portable_fsdp.formats import FORMATS, WITHOUT_CHECKSUM, require_source
from portable_fsdp.formats.base import ForeignCheckpoint, as_dtype, load_format
from portable_fsdp.formats.names import choose_tensors, config_of, names_of
from portable_fsdp.models.tensor_files import require_as_exported
from portable_fsdp.runtime.errors import CheckpointError, ConfigError

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
    try:
        is_verified = path.is_dir() and require_as_exported(path)
    except ConfigError as error:
        raise CheckpointError(f"import {error}") from None
    if kind in WITHOUT_CHECKSUM and not is_verified:
        log.warning(
            "import %s: %s (%s) has no checksum: damage that leaves it readable would go unnoticed",
            *(path, WITHOUT_CHECKSUM[kind], kind),
        )
    model_config = None if config is None else config_of(config)
    source: ForeignCheckpoint = load_format(kind).open_checkpoint(path, trust_metadata=trust_metadata)
    model_config = model_config or source.model_config
    names = names_of(model_config, str(config or path))
    keys = choose_tensors(source, names)
    if not keys:
        raise CheckpointError(f"{path}: expected tensors ({kind}), found none")
    tensors = {key: as_dtype(source.tensors[old], None if "/" in key else dtype) for key, old in keys.items()}
    try:
        final = format.step_folder(checkpoints_of(folder), source.step)
        with _new_checkpoint(final) as (attempt, unfinished):
            files, entries = _write(
                unfinished, attempt, tensors, lambda key: source.read(keys[key]), advance, max_file_bytes
            )
            manifest = new_manifest(
                device="cpu",
                backend=f"{format.IMPORT}{kind}",
                process_count=1,
                step=source.step,
                config={},
                model_config=model_config,
                data=format.DataPosition(epoch=0, position=0),
                ties={} if names is None else names.ties,
                files=files,
                tensors=entries,
            )
            commit.commit(final, attempt, manifest, [])
    except OSError as error:  # errors of the source are CheckpointErrors
        raise CheckpointError(f"import to {folder}: can't be written: {error}") from error
    return final


@contextmanager
def _new_checkpoint(final: Path) -> Generator[tuple[str, Path]]:
    """The id and the folder of an attempt by a single process, which an error removes."""
    store = store_of(final)
    if store.is_committed(final):
        raise CheckpointError(
            f"import to {final}: expected no such step, found it committed. Name another run's folder."
        )
    attempt = commit.begin(final, format.IMPORTED)
    temporary = store.temporary_of(final, attempt)
    try:
        yield attempt, temporary
    except BaseException:
        with suppress(Exception):  # a storage that doesn't answer: the first error says so
            if temporary != final or not store.is_committed(final):
                commit.discard(temporary)
        raise


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


def _write(
    folder: Path,
    attempt: str,
    tensors: Mapping[str, format.TensorEntry],
    read: Callable[[str], Tensor],
    advance: Advance,
    max_file_bytes: int,
) -> tuple[tuple[format.FileEntry, ...], dict[str, format.TensorEntry]]:
    """The files, and each tensor with its one piece; an empty one has none."""
    entries: dict[str, format.TensorEntry] = {}
    files: list[format.FileEntry] = []
    for part in FOLDERS:
        below = {key: tensor for key, tensor in tensors.items() if format.folder_of(key) == part}
        for ordinal, keys in enumerate(groups(below, max_file_bytes)):
            name = f"{part}/shard-00000-{ordinal:02d}-{attempt[:8]}.safetensors"  # `commit.py` says why
            entries.update((key, format.TensorEntry(shape=below[key].shape, dtype=below[key].dtype)) for key in keys)
            written = {key: below[key] for key in keys if below[key].nbytes}
            for key, entry in written.items():
                piece = {"files": [len(files)], "offsets": [0] * len(entry.shape), "sizes": list(entry.shape)}
                entries[key] = entries[key].model_copy(update=piece)
            if written:
                metadata = dcp_metadata({key: entries[key].offsets for key in written})
                files.append(write_tensors(folder / name, written, read, metadata, advance, name))
        store_of(folder).sync(folder / part)
    return tuple(files), entries
