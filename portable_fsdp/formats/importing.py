"""An import: read a foreign checkpoint a tensor at a time, and commit it as ours, like any save."""

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from torch import Tensor

from portable_fsdp.checkpoint import commit, manifests
from portable_fsdp.checkpoint.safetensors import byte_chunks, digest_of, groups, write_file
from portable_fsdp.checkpoint.storage import FOLDERS, store_of
from portable_fsdp.checkpoint.store import Advance, dcp_metadata, new_manifest, no_progress
from portable_fsdp.formats import FORMATS, base
from portable_fsdp.formats.base import ForeignCheckpoint, ModelNames
from portable_fsdp.models.tensor_files import require_as_exported
from portable_fsdp.runtime.errors import CheckpointError, ConfigError

log = logging.getLogger("portable_fsdp")


def import_checkpoint(
    path: Path,
    folder: Path,
    name: str = "auto",
    *,
    config: Path | None = None,
    dtype: str | None = None,
    trust_metadata: bool = False,
    advance: Advance = no_progress,
) -> Path:
    """Write the model at `path` as a checkpoint below `folder`; returns the checkpoint's folder. For one process.

    `folder`: a run's, or its `checkpoints/`. `name`: of `FORMATS`, or `auto`. `config`: a config.json or its folder, in
    place of the source's. `dtype`: of the model's floating-point tensors; None: as in the source. `trust_metadata`:
    read pickled metadata, restricted.

    Holds one tensor at a time, and what its format needs to make it. Raises `CheckpointError`, and in an object
    store the errors of its client; then it commits nothing.
    """
    kind = detect(path) if name == "auto" else name
    try:
        is_verified = path.is_dir() and require_as_exported(path)
    except ConfigError as error:
        raise CheckpointError(f"import {error}") from None
    if not is_verified:
        log.warning("import %s: %s has no checksum: damage that leaves it readable stays unnoticed", path, kind)
    model_config = None if config is None else base.config_of(config)
    source: ForeignCheckpoint = base.load_format(kind).open_checkpoint(path, trust_metadata=trust_metadata)
    model_config = model_config or source.model_config
    names = base.names_of(model_config, str(config or path))
    keys = choose_tensors(source, names)
    if not keys:
        raise CheckpointError(f"{path}: no tensors (format {kind})")
    tensors = {key: base.as_dtype(source.tensors[old], None if "/" in key else dtype) for key, old in keys.items()}
    try:
        is_inner = folder.name == "checkpoints" or manifests.committed_steps(folder)
        final = manifests.step_folder(folder if is_inner else folder / "checkpoints", source.step)
        store = store_of(final)
        if store.is_committed(final):
            raise CheckpointError(f"import to {final}: this step is committed already. Name another run's folder.")
        attempt = commit.begin(final, manifests.IMPORTED)
        unfinished = store.temporary_of(final, attempt)
        try:
            files, entries = _write(unfinished, attempt, tensors, lambda key: source.read(keys[key]), advance)
            manifest = new_manifest(
                device="cpu",
                backend=f"{manifests.IMPORT}{kind}",
                process_count=1,
                step=source.step,
                config={},
                model_config=model_config,
                data=manifests.DataPosition(epoch=0, position=0),
                ties={} if names is None else names.ties,
                files=files,
                tensors=entries,
            )
            commit.commit(final, attempt, manifest, [])
        except BaseException:
            with suppress(Exception):  # storage that doesn't answer: raise the first error
                if unfinished != final or not store.is_committed(final):
                    commit.discard(unfinished)
            raise
    except OSError as error:  # errors of the source are CheckpointErrors
        raise CheckpointError(f"import to {folder}: can't be written: {error}") from error
    return final


def detect(path: Path) -> str:
    """Return the name of the format at `path`. Raises `CheckpointError`."""
    if not path.exists():
        raise CheckpointError(f"import {path}: no such file or folder")
    for name in FORMATS:
        if base.load_format(name).matches(path):
            return name
    raise CheckpointError(
        f"import {path}: unknown format; expected one of {', '.join(FORMATS)}.\n"
        "  Set --format, or name the folder that has the files."
    )


def _write(
    folder: Path,
    attempt: str,
    tensors: Mapping[str, manifests.TensorEntry],
    read: Callable[[str], Tensor],
    advance: Advance,
) -> tuple[tuple[manifests.FileEntry, ...], dict[str, manifests.TensorEntry]]:
    """Write all tensors; return the files, and each tensor with its one piece (none if it is empty)."""
    entries = {key: manifests.TensorEntry(shape=tensor.shape, dtype=tensor.dtype) for key, tensor in tensors.items()}
    files: list[manifests.FileEntry] = []
    for part in FOLDERS:
        below = {key: entry for key, entry in entries.items() if manifests.folder_of(key) == part and entry.nbytes}
        for ordinal, keys in enumerate(groups(below, base.MAX_FILE_BYTES) if below else ()):
            name = f"{part}/shard-00000-{ordinal:02d}-{attempt[:8]}.safetensors"  # see `commit.py`
            written = {key: below[key] for key in keys}
            for entry in written.values():
                entry.files.append(len(files))
                entry.offsets.extend([0] * len(entry.shape))
                entry.sizes.extend(entry.shape)
            metadata = dcp_metadata({key: entry.offsets for key, entry in written.items()})
            files.append(write_file(folder / name, name, written, partial(byte_chunks, read), metadata, advance))
        store_of(folder).sync(folder / part)
    return tuple(files), entries


def choose_tensors(source: ForeignCheckpoint, names: ModelNames | None) -> dict[str, str]:
    """Map our keys to the source's, for all that we import: each tied tensor once, under its first FQN.

    With `names`, the source must have the model's tensors, in its shapes; warns of others, and ignores them. Raises
    `CheckpointError`: a tensor is missing, or occurs twice with different bytes.
    """
    for key in source.tensors:
        state, slash, name = key.rpartition("/")
        if not name or not name.isprintable() or len(key) > 1000 or (slash and not state.isidentifier()):
            raise CheckpointError(f"expected a tensor name like layers.0.weight, found {key[:200]!r}")
    if names is None:
        return {key: key for key in source.tensors}
    # A folder may hold a tensor under any of its FQNs, or one without the base model's prefix (GPT-2's).
    candidates = {
        first: list(dict.fromkeys([*aliases, *(alias.removeprefix(f"{names.base}.") for alias in aliases)]))
        for first, aliases in names.aliases.items()
    }
    first_of = {name: first for first, options in candidates.items() for name in options}
    matches = {first: [name for name in options if name in source.tensors] for first, options in candidates.items()}
    left_out = [key for key in source.tensors if key.rpartition("/")[2] not in first_of]
    if missing := [first for first, options in matches.items() if not options]:
        others = [key for key in left_out if manifests.folder_of(key) == "model"]
        raise CheckpointError(
            f"of the model's {len(matches)} tensors (by its config) the source lacks {missing[0]}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
            + (f".\n  The source has others, such as {others[0]}" if others else "")
            + ".\n  Is the config another model's, or are the names another library's?"
        )
    for first, options in matches.items():
        shape = names.shapes[first]
        for name in options:
            if (actual := source.tensors[name].shape) != shape:
                raise CheckpointError(f"{name}: expected {list(shape)} (the model's config), found {list(actual)}")
        if len(options) > 1 and len({digest_of(name, source.read, source.tensors[name]) for name in options}) > 1:
            raise CheckpointError(
                f"{first}: the tied weights {' and '.join(options)} have different values.\n"
                "  Was it saved with tie_word_embeddings=false? Then set that in config.json."
            )
    chosen = {first: options[0] for first, options in matches.items()}
    for key in source.tensors:
        state, slash, name = key.rpartition("/")
        if slash and name in first_of:
            chosen.setdefault(f"{state}/{first_of[name]}", key)
    if left_out:
        shown = ", ".join(sorted(left_out)[:3]) + (", ..." if len(left_out) > 3 else "")
        log.warning("ignoring %d tensors that are not the model's: %s", len(left_out), shown)
    return chosen
