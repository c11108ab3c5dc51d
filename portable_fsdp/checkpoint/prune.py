"""Deletes older checkpoints of runs, and leaves damaged ones alone. `commit.outdated` decides what goes."""

from dataclasses import dataclass, field
from pathlib import Path

from portable_fsdp.checkpoint import commit, storage
from portable_fsdp.checkpoint.format import MANIFEST, committed_steps, run_of
from portable_fsdp.checkpoint.store import Reader
from portable_fsdp.runtime.errors import CheckpointError


@dataclass(frozen=True)
class Pruned:
    """The result of `prune`, or of its dry run: checkpoints newest first, each with its bytes."""

    kept: dict[Path, int] = field(default_factory=dict[Path, int])
    deleted: dict[Path, int] = field(default_factory=dict[Path, int])
    left_alone: dict[Path, str] = field(default_factory=dict[Path, str])  # with the reason


def prune(folder: Path, keep: int, keep_every: int | None = None, *, dry_run: bool = False) -> Pruned:
    """Delete older intact checkpoints directly below `folder`, of each run. One process.

    Each run (`run.name`) keeps its newest `keep`, steps that `keep_every` divides, and the best of its evaluations by
    the newest checkpoint. Intact: files have the sizes of the manifest, and no other file lies beside them. Hashes the
    newest of each run first, and deletes nothing if one is damaged. A killed deletion leaves the checkpoint whole, or
    debris that the next `prune` and the run's next save remove. Raises `CheckpointError`.
    """
    pruned = Pruned()
    sizes: dict[Path, int] = {}
    runs: dict[str, dict[int, Path]] = {}  # the checkpoints of each run by step
    for path in committed_steps(folder):
        try:
            run, step, sizes[path] = _require_ours(path)
            runs.setdefault(run, {})[step] = path
        except CheckpointError as error:
            pruned.left_alone[path] = str(error).splitlines()[0]
    if not runs:
        raise CheckpointError(f"prune {folder}: expected checkpoints (step-00000500) that are whole, found none")
    outdated: dict[Path, str] = {}
    for run, paths in runs.items():
        with Reader(paths[max(paths)]) as newest:
            newest.verify()
            best = newest.manifest.evaluation and newest.manifest.evaluation.best_step
        outdated.update((paths[step], run) for step in commit.outdated(list(paths), keep, keep_every, best))
    for path, size in sizes.items():
        (pruned.deleted if path in outdated else pruned.kept)[path] = size
    if not dry_run:
        commit.remove_half_deleted(folder)
        for path in reversed(pruned.deleted):
            commit.delete(path, outdated[path])
    return pruned


def _require_ours(path: Path) -> tuple[str, int, int]:
    """Run, step and bytes. Raises `CheckpointError` for a link, a damaged checkpoint, and one with other files."""
    if path.is_symlink():
        raise CheckpointError(f"checkpoint {path.name}: expected a folder, found a link")
    with Reader(path) as reader:
        reader.verify_sizes()
        manifest = reader.manifest
    files = {str(file.relative_to(path)) for file in path.rglob("*") if not file.is_dir()}
    marks = {commit.MARK, storage.part_of(path / commit.MARK).name}  # a deletion that was killed at its start
    others = sorted(files - {file.name for file in manifest.files} - {MANIFEST} - marks)
    if others:
        raise CheckpointError(f"checkpoint {path.name}: expected the files of its manifest, found {others[0]} too")
    return run_of(manifest), manifest.step, manifest.bytes
