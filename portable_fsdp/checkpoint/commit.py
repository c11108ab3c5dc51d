"""Commit a checkpoint, so that a kill at any instant leaves it whole or absent. `storage.py` has the two protocols.

On a file system, where the rename of a folder is atomic:
1. Process 0 creates `step-00000500.tmp-1f3a5c7e/`, named by this attempt, with `model/`, `optimizer/` and the mark.
2. Each process writes its safetensors files there (fsync), then their list or its error to `index-00003-1f3a5c7e.json`.
3. Process 0 waits for all indexes, compares the replicas' digests, merges the files and checks the result as a reader.
4. It removes the indexes, writes the sealed `manifest.json` (fsync), renames to `step-00000500` (the commit), fsyncs
   the parent, and removes the mark.

In an object store nothing can be renamed. All processes write under `step-00000500/` from the start, with the attempt
in every file's name, so that a straggler overwrites nothing; the upload of `manifest.json` is the commit.

A kill before the commit leaves debris, which no reader opens and the next save of the same run removes: the mark names
its run, and every deletion removes it last.
"""

import errno
import itertools
import json
import logging
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pydantic import Field

from portable_fsdp.checkpoint import manifests
from portable_fsdp.checkpoint.storage import FOLDERS, MANIFEST, read_file, require_regular, store_of
from portable_fsdp.runtime.errors import CheckpointError, StoreError
from portable_fsdp.runtime.host import in_units

log = logging.getLogger("portable_fsdp")

MARK = "attempt.json"
_MARKS = {MARK, f"{MARK}.part"}  # the second one is left by a kill while the mark is written
_DELETED = "deleted"  # the attempt in the mark of a checkpoint that is being deleted


class ReplicaDigest(manifests.StrictModel):
    """A digest of a piece that several processes or devices hold, and the number of this replica."""

    key: str
    offset: manifests.Dims
    shape: manifests.Dims
    replica: int
    digest: str


class Index(manifests.StrictModel):
    """`index-00003-1f3a5c7e.json`: the files of one process, or its error. Its tensors number its own files."""

    attempt: str
    process: int
    error: str | None = None
    files: tuple[manifests.FileEntry, ...] = ()
    tensors: dict[str, manifests.TensorEntry] = Field(default_factory=dict)
    copies: tuple[ReplicaDigest, ...] = ()


def begin(final: Path, run: str) -> str:
    """Create the empty folder of an attempt at `final`; returns the attempt's id. Only process 0.

    `run`: the owner of the debris that a kill leaves. Raises `CheckpointError` where another run is at work on that
    step in an object store.
    """
    attempt, store = uuid.uuid4().hex, store_of(final)
    folder = store.temporary_of(final, attempt)
    for path in store.unfinished(final.parent, final.name):
        if owner := _other_owner(path, run):
            message = (
                f"checkpoints in {path.parent}: another run may be saving there: {path.name} belongs to {owner}.\n"
                f"  Give each run its own run.dir (or checkpoint.dir). If that run has ended, delete {path}."
            )
            if path == folder:  # the other's manifest could overwrite ours
                raise CheckpointError(message)
            log.warning("%s", message)
        elif path == folder or _is_debris_of(path, run):
            discard(path)
    store.make_folder(folder)
    _mark(folder, run, attempt)
    for name in FOLDERS:
        store.make_folder(folder / name)
    return attempt


def _other_owner(path: Path, run: str) -> str | None:
    """The owner in words, unless it is `run`. A folder without a mark has none: its attempt died before it wrote."""
    owner = _read_mark(path).get("run")
    if owner in (run, None):
        return None
    return "an import" if owner == manifests.IMPORTED else f"run {owner!r}" if owner else "a run without a name"


def _is_debris_of(path: Path, run: str) -> bool:
    """Whether `run` may delete a folder. One without mark and files has no owner: a kill came before its mark."""
    return _read_mark(path).get("run") == run or set(store_of(path).names(path)) <= _MARKS - {MARK}


def remove_debris(run_folder: Path, run: str) -> None:
    """Delete the debris of `run`'s interrupted saves and deletions. Only process 0, before any process writes."""
    store = store_of(run_folder)
    for path in store.unfinished(run_folder):
        if _is_debris_of(path, run):
            discard(path)
    for path in manifests.committed_steps(run_folder):
        marks = _MARKS.intersection(store.names(path))
        with suppress(CheckpointError):  # a manifest that can't be read: the owner of the mark is unknown
            if marks and manifests.run_of(manifests.read_manifest(path)) == run:
                for name in marks:
                    store.remove(path / name)


def write_index(folder: Path, index: Index) -> None:
    """Announce that this process has written its part, its last action in `folder`: process 0 may rename it at once."""
    path = folder / _index_name(index.process, index.attempt)
    store_of(path).write(path, [index.model_dump_json().encode()])


def collect(
    folder: Path, attempt: str, process_count: int, wait_s: float, cancelled: threading.Event | None = None
) -> list[Index]:
    """Wait for the index of every process. Raises `CheckpointError` if one reports an error, or none after `wait_s`.

    `cancelled`: set it to stop waiting.
    """
    cancelled = cancelled or threading.Event()
    name = folder.name.partition(".tmp-")[0]
    indexes: dict[int, Index] = {}
    deadline = time.monotonic() + wait_s
    last_error: Exception | None = None
    pause_s, longest_s = store_of(folder).pauses_s
    while True:
        for process in set(range(process_count)) - indexes.keys():
            path = folder / _index_name(process, attempt)
            try:
                index = Index.model_validate_json(read_file(path))
            except FileNotFoundError:
                continue
            except (OSError, StoreError) as error:  # the storage may answer again
                last_error = error
                continue
            except ValueError as error:
                raise CheckpointError(f"{path}: not a valid index of this run: {error}") from None
            if index.error is not None:
                raise CheckpointError(f"checkpoint {name}: process {process} could not write: {index.error}")
            indexes[process] = index
        missing = [str(process) for process in range(process_count) if process not in indexes]
        if not missing:
            return [indexes[process] for process in range(process_count)]
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"checkpoint {name}: no index file from process {', '.join(missing)} (of {process_count}) after "
                f"{wait_s:.0f} s in {folder}.\n  Has it ended, or does it write to another folder?\n"
                "  Earlier checkpoints are untouched."
                + (f" The storage's last error: {last_error}" if last_error else "")
            )
        if cancelled.wait(pause_s):
            raise CheckpointError(f"checkpoint {name}: cancelled before all processes had written it")
        pause_s = min(2 * pause_s, longest_s)


def merge(
    all_tensors: Mapping[str, manifests.TensorEntry], indexes: Iterable[Index]
) -> tuple[tuple[manifests.FileEntry, ...], dict[str, manifests.TensorEntry]]:
    """Merge the files of all processes, and the pieces of each tensor. Raises `CheckpointError` for another shape or
    dtype than in `all_tensors`."""
    files: list[manifests.FileEntry] = []
    merged = {key: manifests.TensorEntry(shape=tensor.shape, dtype=tensor.dtype) for key, tensor in all_tensors.items()}
    for index in indexes:
        for key, written in index.tensors.items():
            tensor = merged.get(key)
            if tensor is None or (written.shape, written.dtype) != (tensor.shape, tensor.dtype):
                raise CheckpointError(
                    f"process {index.process} wrote {key} as {manifests.describe(written)}, "
                    f"process 0 has it as {manifests.describe(tensor)}: all processes must hold the same model"
                )
            tensor.files.extend(len(files) + number for number in written.files)
            tensor.offsets.extend(written.offsets)
            tensor.sizes.extend(written.sizes)
        files.extend(index.files)
    return tuple(files), merged


def set_aside(final: Path) -> None:
    """Rename `final`, if it exists, to a name that no reader opens. Only process 0."""
    store = store_of(final)
    aside = (final.with_name(f"{final.name}.damaged-{count}") for count in itertools.count(1))
    if store.names(final):
        store.move(final, next(path for path in aside if not store.names(path)))


def commit(final: Path, attempt: str, manifest: manifests.Manifest, indexes: Sequence[Index]) -> None:
    """Make `final` appear, whole, at one instant. Only process 0, after `collect`."""
    store = store_of(final)
    folder = store.temporary_of(final, attempt)
    manifests.check_manifest(manifest, final.name)
    for index in indexes:
        store.remove(folder / _index_name(index.process, attempt))
    _require_files(folder, manifest)
    store.commit(folder, final, manifests.manifest_text(manifest).encode())
    require_regular(final / MANIFEST, final.name)
    store.remove(final / MARK)


def _require_files(folder: Path, manifest: manifests.Manifest) -> None:
    """Check that every file exists and has its length, before retention deletes an older one: else CheckpointError."""
    store = store_of(folder)
    sizes = {f"{part}/{name}": size for part in FOLDERS for name, size in store.sizes(folder / part).items()}
    for file in manifest.files:
        size = sizes.get(file.name)
        if size != file.bytes:
            raise CheckpointError(
                f"checkpoint {folder.name}: {file.name}: expected {file.bytes} bytes after it was written, found "
                f"{'no such file' if size is None else size}.\n"
                "  The storage lost it, or it was deleted. Earlier checkpoints are untouched."
            )


def delete(folder: Path, run: str) -> None:
    """Delete a committed checkpoint; a kill in between leaves it whole, or debris of `run`."""
    _mark(folder, run, _DELETED)
    discard(store_of(folder).withdraw(folder, uuid.uuid4().hex))


def outdated(steps: Sequence[int], keep: int, keep_every: int | None, best: int | None = None) -> list[int]:
    """The committed `steps` that retention deletes: not among the last `keep`, no multiple of `keep_every`, not the
    `best` one."""
    older = sorted(steps)[: -max(keep, 1)]
    return [step for step in older if step != best and not (keep_every and step % keep_every == 0)]


def _read_mark(folder: Path) -> dict[str, str]:
    """The `run` that owns a folder and its `attempt`; {} without a mark."""
    try:
        mark = json.loads(read_file(folder / MARK))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return mark if isinstance(mark, dict) else {}


def _mark(folder: Path, run: str, attempt: str) -> None:
    store_of(folder).write(folder / MARK, [json.dumps({"run": run, "attempt": attempt}).encode()])


def discard(folder: Path) -> None:
    """Delete a folder that is no checkpoint, its mark last."""
    store = store_of(folder)
    for name in store.names(folder):
        if name != MARK:
            store.remove(folder / name)
    store.remove(folder)


def _index_name(process: int, attempt: str) -> str:
    return f"index-{process:05d}-{attempt[:8]}.json"


_CAUSES = {
    errno.ENOSPC: "No space left in {folder}: {room}.",
    errno.EDQUOT: "Your quota in {folder} is used up: {room}.",
    errno.EFBIG: "A file in {folder} may not become that large: raise the limit (ulimit -f).",
}


def way_out(error: OSError, folder: Path, needed_bytes: int = 0) -> str:
    """Return the last lines of a message, each after a line break: cause, newest save in `folder`, and fix.

    `needed_bytes`: size of the checkpoint.
    """
    cause = cause_of(error, folder, needed_bytes)
    try:
        steps = manifests.committed_steps(folder)
    except Exception:  # the storage that failed may not answer here either
        return cause
    before = "Then"
    if cause and error.errno != errno.EFBIG:
        older = " (delete older checkpoints; checkpoint.keep=N does so after each save)" if len(steps) > 1 else ""
        before = f"Free room there{older} and"
    saved = f"The last saved checkpoint is {steps[0]}." if steps else "No checkpoint was saved before it."
    rerun = f"{before} rerun the same command: it {f'resumes from {steps[0].name}' if steps else 'starts over'}."
    elsewhere = "Or save elsewhere: checkpoint.dir=ANOTHER" + (f" checkpoint.resume={steps[0]}" if steps else "") + "."
    return f"{cause}\n  {saved}\n  {rerun}\n  {elsewhere}"


def cause_of(error: Exception, folder: Path, needed_bytes: int = 0) -> str:
    """Return a line break, the cause and the fix; "" where the system's own text names them."""
    text = _CAUSES.get(error.errno or 0) if isinstance(error, OSError) else None
    room = f"{in_units(needed_bytes)} are needed" if needed_bytes else "free some"
    return "\n  " + text.format(folder=folder, room=room) if text else ""
