"""Deletes older checkpoints of a run. What to keep is a pure function of the steps; what is not whole is left alone."""

from dataclasses import dataclass
from pathlib import Path

from portable_fsdp.backends.base import Part
from portable_fsdp.checkpoint import commit
from portable_fsdp.checkpoint.format import MANIFEST, committed_steps, read_manifest
from portable_fsdp.checkpoint.store import Reader
from portable_fsdp.runtime.errors import CheckpointError


@dataclass(frozen=True)
class Pruned:
    """What `prune` did, or would do: checkpoints newest first, each with its bytes."""

    kept: dict[Path, int]
    deleted: dict[Path, int]
    left_alone: dict[Path, str]  # with the reason


def prune(folder: Path, keep: int, keep_every: int | None = None, *, dry_run: bool = False) -> Pruned:
    """Delete older whole checkpoints directly below `folder`. Not while a run writes there. For one process.

    Whole: sizes are those of the manifest, and nothing else lies beside the files. The newest of them is hashed
    first, and none is deleted if that is damaged. Each is renamed to the name of an interrupted save before it is
    deleted, so that a kill leaves nothing that looks like a checkpoint. Raises `CheckpointError`.
    """
    whole: dict[int, tuple[Path, int]] = {}
    left_alone: dict[Path, str] = {}
    for path in committed_steps(folder):
        try:
            step, size = _require_ours(path)
            whole[step] = (path, size)
        except CheckpointError as error:
            left_alone[path] = str(error).splitlines()[0]
    if not whole:
        raise CheckpointError(f"prune {folder}: expected checkpoints (step-00000500) that are whole, found none")
    with Reader(whole[max(whole)][0]) as newest:
        newest.verify(Part(0, 1))
    deleted = dict(whole[step] for step in reversed(commit.outdated(list(whole), keep, keep_every)))
    for path in [] if dry_run else reversed(deleted):
        if found := commit.unfinished(path):
            raise CheckpointError(
                f"prune: expected no {found[0]}, found one: does a run write there? Nothing more was done."
            )
        commit.delete(path, "prune")
    return Pruned({path: size for path, size in whole.values() if path not in deleted}, deleted, left_alone)


def _require_ours(path: Path) -> tuple[int, int]:
    """Its step and its bytes. Raises `CheckpointError` for a link, a damaged checkpoint, and one with other files."""
    if path.is_symlink():
        raise CheckpointError(f"checkpoint {path.name}: expected a folder, found a link")
    with Reader(path) as reader:
        reader.verify_sizes()
    manifest = read_manifest(path)
    found = {str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir()}
    others = sorted(found - {file.name for file in manifest.files} - {MANIFEST, commit.MARK})
    if others:
        raise CheckpointError(f"checkpoint {path.name}: expected the files of its manifest, found {others[0]} too")
    return manifest.step, manifest.bytes
