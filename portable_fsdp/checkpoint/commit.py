"""How a checkpoint comes to be, so that a kill at any instant leaves it whole or absent. Two protocols.

On a file system, where a folder's rename is one step:
1. Process 0 makes `step-00000500.tmp-1f3a5c7e/`, named by this attempt, with `model/`, `optimizer/` and the mark.
2. Each process writes its safetensors files there and fsyncs them, and the folders.
3. Then it describes them in `index-00003-1f3a5c7e.json`: pieces, bytes, hashes, digests of replicas; or its error.
4. Process 0 waits for the index files of this attempt from all processes, compares the replicas' digests, merges the
   files, and checks the result as a reader would: the pieces tile every tensor exactly once.
5. It removes the index files, writes `manifest.json`, sealed with its own hash (fsync), fsyncs the folders, renames to
   `step-00000500` (the commit), fsyncs the parent, and removes the mark.

In an object store, where nothing can be renamed and an upload shows whole or not at all: the same, but under
`step-00000500/` from the start, the attempt in every file's name so that a straggler of an earlier one writes beside
it, and `manifest.json`, uploaded last, is the commit. The mark goes after it.

A kill before the commit leaves debris, which no reader looks at, and which the next save of the same run removes: the
mark says whose it is, and goes last wherever something is deleted. An older checkpoint is never touched.
"""

import itertools
import json
import logging
import re
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from pydantic import Field

from portable_fsdp.checkpoint import storage
from portable_fsdp.checkpoint.format import (
    FOLDERS,
    IMPORTED,
    MANIFEST,
    Dims,
    FileEntry,
    Manifest,
    StrictModel,
    TensorEntry,
    check_manifest,
    committed_steps,
    describe,
    is_committed,
    manifest_text,
    read_manifest,
    run_of,
    step_of,
)
from portable_fsdp.runtime.errors import CheckpointError, StoreError

log = logging.getLogger("portable_fsdp")

MARK = "attempt.json"
_DELETED = "deleted"  # in the mark: this was a checkpoint
_TEMPORARY = re.compile(r"step-\d{8,}\.tmp-[0-9a-f]{8}")


class ReplicaDigest(StrictModel):
    """A piece that several processes or devices hold: which replica this is, and a digest of its bits."""

    key: str
    offset: Dims
    shape: Dims
    replica: int
    digest: str


class Index(StrictModel):
    """`index-00003-1f3a5c7e.json`: what one process wrote, or why it could not. Its tensors number its own files."""

    attempt: str
    process: int
    error: str | None = None
    files: tuple[FileEntry, ...] = ()
    tensors: dict[str, TensorEntry] = Field(default_factory=dict)
    copies: tuple[ReplicaDigest, ...] = ()


def temporary_of(final: Path, attempt: str) -> Path:
    """The folder that `final` is written to before its commit; of this attempt, so that no straggler finds it."""
    return final if storage.is_object_store(final) else final.with_name(f"{final.name}.tmp-{attempt[:8]}")


def unfinished(final: Path) -> list[Path]:
    """What attempts at `final` have begun and not committed, theirs or of a deletion."""
    if storage.is_object_store(final):
        return [final] if storage.names(final) and not is_committed(final) else []
    names = storage.names(final.parent)
    return [
        final.with_name(name) for name in names if _TEMPORARY.fullmatch(name) and name.startswith(f"{final.name}.tmp-")
    ]


def begin(final: Path, run: str) -> str:
    """Make the empty folder that `final` is written to, and return the id of this attempt. Only process 0.

    `run`: whose debris it is until the commit. Raises `CheckpointError` where another run is at work on that step in
    an object store.
    """
    attempt = uuid.uuid4().hex
    folder = temporary_of(final, attempt)
    for path in unfinished(final):
        if whose := _other(path, run):
            if path == folder:  # there the other's manifest could come over ours
                raise CheckpointError(_at_work(path, whose))
            log.warning("%s", _at_work(path, whose))
        elif _owner(path) == run or path == folder:
            discard(path)
    storage.make_folder(folder)
    _mark(folder, run, attempt)
    for name in FOLDERS:
        storage.make_folder(folder / name)
    return attempt


def warn_of_others(run_folder: Path, run: str) -> None:
    """Say in time what `begin` will refuse in an object store: steps that another run, or an import, has begun."""
    if storage.is_object_store(run_folder):
        for path in (run_folder / name for name in storage.names(run_folder)):
            if _is_debris(path) and (whose := _other(path, run)):
                log.warning("%s\n  A save of that step will be refused.", _at_work(path, whose))


def _other(path: Path, run: str) -> str | None:
    """Whose it is in words, if not that of `run`. Without a mark it is anybody's: it was killed before it wrote."""
    owner = _owner(path)
    if owner in (run, None):
        return None
    return "an import" if owner == IMPORTED else f"run {owner!r}" if owner else "a run without a name"


def _at_work(path: Path, whose: str) -> str:
    return (
        f"checkpoints in {path.parent}: expected no other run at work there, found {path.name} of {whose}.\n"
        f"  Give each run a run.dir (or checkpoint.dir) of its own. If that one has ended, delete {path}."
    )


def remove_debris(run_folder: Path, run: str) -> None:
    """Delete what interrupted saves and deletions of `run` left. Only process 0, and before any process writes."""
    for path in (run_folder / name for name in storage.names(run_folder)):
        part_of_mark = storage.part_of(path / MARK).name
        if _is_debris(path) and (_owner(path) == run or set(storage.names(path)) <= {part_of_mark}):
            discard(path)
    for path in committed_steps(run_folder):
        marks = {MARK, storage.part_of(path / MARK).name}.intersection(storage.names(path))
        if marks and _writer(path) == run:
            for name in marks:
                storage.remove(path / name)


def _writer(path: Path) -> str | None:
    """The run that wrote a checkpoint; None where its manifest can't be read."""
    try:
        return run_of(read_manifest(path))
    except CheckpointError:
        return None


def remove_half_deleted(run_folder: Path) -> None:
    """Delete what killed deletions left, of whichever run: it was given up, and no reader takes it."""
    for path in (run_folder / name for name in storage.names(run_folder)):
        if _is_debris(path) and _read_mark(path).get("attempt") == _DELETED:
            discard(path)


def write_index(folder: Path, index: Index) -> None:
    """Announce that this process has written its part, and fsynced it. The last thing that it does in `folder`.

    No fsync of the folder: process 0 may have seen the index and renamed it by now.
    """
    _write_text(folder / _index_name(index.process, index.attempt), index.model_dump_json())


def collect(
    folder: Path, attempt: str, process_count: int, wait_s: float, cancelled: threading.Event | None = None
) -> list[Index]:
    """Wait for the index of every process. Raises `CheckpointError` if one reports an error or stays away.

    `cancelled`: set it to end the waiting.
    """
    cancelled = cancelled or threading.Event()
    name = folder.name.partition(".tmp-")[0]
    found: dict[int, Index] = {}
    deadline = time.monotonic() + wait_s
    unanswered: Exception | None = None
    pause_s, longest_s = (0.1, 2.0) if storage.is_object_store(folder) else (0.001, 0.1)
    while True:
        for process in range(process_count):
            index = None
            try:
                index = None if process in found else _read_index(folder / _index_name(process, attempt))
            except (OSError, StoreError) as error:  # storage may answer again
                unanswered = error
            if index is not None and index.error is not None:
                raise CheckpointError(f"checkpoint {name}: process {process} could not write: {index.error}")
            if index is not None:
                found[process] = index
        if len(found) == process_count:
            return [found[process] for process in range(process_count)]
        if time.monotonic() > deadline:
            missing = ", ".join(str(process) for process in range(process_count) if process not in found)
            raise CheckpointError(
                f"checkpoint {name}: expected an index file of each of {process_count} processes in {folder},\n"
                f"  found none of process {missing} after {wait_s:.0f} s. Has it ended, or another folder before it?\n"
                "  The checkpoints committed before are untouched."
                + (f" The storage's last word: {unanswered}" if unanswered else "")
            )
        if cancelled.wait(pause_s):
            raise CheckpointError(f"checkpoint {name}: given up before all processes had written it")
        pause_s = min(2 * pause_s, longest_s)


def merge(
    all_tensors: Mapping[str, TensorEntry], indexes: Iterable[Index]
) -> tuple[tuple[FileEntry, ...], dict[str, TensorEntry]]:
    """The files of all processes, and the tensors with all their pieces.

    `all_tensors` states shapes and dtypes. Raises `CheckpointError` where a process has others.
    """
    files: list[FileEntry] = []
    merged = {key: TensorEntry(shape=tensor.shape, dtype=tensor.dtype) for key, tensor in all_tensors.items()}
    for index in indexes:
        for key, written in index.tensors.items():
            tensor = merged.get(key)
            if tensor is None or (written.shape, written.dtype) != (tensor.shape, tensor.dtype):
                raise CheckpointError(
                    f"process {index.process} wrote {key} as {describe(written)}, "
                    f"process 0 has it as {describe(tensor)}: all processes must hold the same model"
                )
            tensor.files.extend(len(files) + number for number in written.files)
            tensor.offsets.extend(written.offsets)
            tensor.sizes.extend(written.sizes)
        files.extend(index.files)
    return tuple(files), merged


def set_aside(final: Path) -> None:
    """Make room at `final` without deleting: give what lies there a name that no reader takes. Only process 0."""
    aside = (final.with_name(f"{final.name}.damaged-{count}") for count in itertools.count(1))
    if storage.names(final):
        storage.move(final, next(path for path in aside if not storage.names(path)))


def commit(final: Path, attempt: str, manifest: Manifest, indexes: Sequence[Index]) -> None:
    """Make `final` exist, whole, at one instant. Only process 0, after `collect`."""
    folder = temporary_of(final, attempt)
    check_manifest(manifest, final.name)
    for index in indexes:
        storage.remove(folder / _index_name(index.process, attempt))
    _require_files(folder, manifest)
    _write_text(folder / MANIFEST, manifest_text(manifest))
    if not storage.is_object_store(final):
        storage.require_regular(folder / MANIFEST, folder.name)
        for part in (*(folder / name for name in FOLDERS), folder):
            storage.sync(part)
        folder.rename(final)
        storage.sync(final.parent)
    storage.require_regular(final / MANIFEST, final.name)
    storage.remove(final / MARK)


def _require_files(folder: Path, manifest: Manifest) -> None:
    """All is there under its name, with its length. A rename that says that it was done, and wasn't, costs otherwise
    the older checkpoint that is deleted after this one's commit."""
    sizes = {f"{part}/{name}": size for part in FOLDERS for name, size in storage.sizes(folder / part).items()}
    for file in manifest.files:
        found = sizes.get(file.name)
        if found != file.bytes:
            raise CheckpointError(
                f"checkpoint {folder.name}: {file.name}: expected {file.bytes} bytes after it was written, found "
                f"{'no such file' if found is None else found}.\n"
                "  The storage lost it, or somebody deleted it. The checkpoints committed before are untouched."
            )


def delete(folder: Path, run: str) -> None:
    """Delete a committed checkpoint; a kill in between leaves it whole, or debris of `run`."""
    _mark(folder, run, _DELETED)
    if storage.is_object_store(folder):
        storage.remove(folder / MANIFEST)
    else:
        folder = folder.rename(temporary_of(folder, uuid.uuid4().hex))
        storage.sync(folder.parent)
    discard(folder)


def outdated(steps: Sequence[int], keep: int | None, keep_every: int | None, best: int | None = None) -> list[int]:
    """Of the committed `steps`, those that retention gives up: not among the last `keep`, no multiple of `keep_every`,
    not the `best` one.

    None for `keep` keeps all.
    """
    if keep is None:
        return []
    older = sorted(steps)[: -max(keep, 1)]
    return [step for step in older if step != best and not (keep_every and step % keep_every == 0)]


def _is_debris(path: Path) -> bool:
    if storage.is_object_store(path):
        return step_of(path) is not None and not is_committed(path)
    return _TEMPORARY.fullmatch(path.name) is not None


def _owner(folder: Path) -> str | None:
    """The run that the mark names; None where there is none: killed before it, or after all else was deleted."""
    return _read_mark(folder).get("run")


def _read_mark(folder: Path) -> dict[str, str]:
    try:
        mark = json.loads(storage.read(folder / MARK))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return mark if isinstance(mark, dict) else {}


def _mark(folder: Path, run: str, attempt: str) -> None:
    _write_text(folder / MARK, json.dumps({"run": run, "attempt": attempt}))


def discard(folder: Path) -> None:
    """Delete a folder that is no checkpoint, its mark last."""
    for name in storage.names(folder):
        if name != MARK:
            storage.remove(folder / name)
    storage.remove(folder)


def _write_text(path: Path, text: str) -> None:
    storage.write(path, [text.encode()])


def _index_name(process: int, attempt: str) -> str:
    return f"index-{process:05d}-{attempt[:8]}.json"


def _read_index(path: Path) -> Index | None:
    """None while there is none. Raises OSError (StoreError too), CheckpointError for one that isn't as we write it."""
    try:
        return Index.model_validate_json(storage.read(path))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CheckpointError(f"{path}: expected the index that a process of this run writes, found: {error}") from None
