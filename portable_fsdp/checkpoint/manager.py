"""A run's checkpoints: save one, find the one to resume from, load it.

All processes come to the same verdict, errors included, so that none waits for one that has given up.
"""

import logging
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn

from portable_fsdp import __version__
from portable_fsdp.backends.base import Backend, Piece, Read, Slices, TensorState
from portable_fsdp.checkpoint import commit, storage
from portable_fsdp.checkpoint.background import Background, Snapshot
from portable_fsdp.checkpoint.changes import Difference, check_allow, differences, require_allowed
from portable_fsdp.checkpoint.commit import Index
from portable_fsdp.checkpoint.format import (
    Data,
    Manifest,
    TensorEntry,
    WrittenBy,
    committed_steps,
    folder_of,
    read_manifest,
    run_of,
    step_folder,
    step_of,
)
from portable_fsdp.checkpoint.store import Reader, entries_without_pieces, write_pieces
from portable_fsdp.config import schema
from portable_fsdp.runtime.errors import CheckpointError, StoreError

log = logging.getLogger("portable_fsdp")

T = TypeVar("T")


class Fingerprint(NamedTuple):
    """Hashes of what a run trains on; None where it isn't known."""

    rows: str | None = None
    tokenizer: str | None = None


class Saved(NamedTuple):
    """A checkpoint that was committed."""

    step: int
    path: Path
    seconds: float  # from the call until the commit
    blocked_seconds: float  # that the training stood still for it
    removed: tuple[int, ...]  # older steps that retention deleted after it


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on from."""

    path: Path
    step: int
    position: tuple[int, int]  # the data's epoch, and the samples consumed in it
    changes: tuple[Difference, ...]
    weights_only: bool
    passed_over: tuple[str, ...]  # why newer checkpoints were not taken


class Found(NamedTuple):
    """A checkpoint that was found whole, as far as `checkpoint.verify` asked."""

    path: Path
    passed_over: tuple[str, ...]
    is_own: bool  # of this run's folder


class Checkpoints:
    """The checkpoints in `folder`, as one run sees them. Every method but `close` and `finished` is collective.

    The first save removes the debris of interrupted ones: a start that is refused changes nothing.
    """

    def __init__(
        self,
        folder: Path | str,
        backend: Backend,
        *,
        config: dict[str, Any],
        model_config: dict[str, Any] | None,
        settings: schema.Checkpoint | None = None,
        data: Fingerprint | None = None,
        ties: Mapping[str, str] | None = None,
        wait_s: float = 1800.0,
    ) -> None:
        """`folder`: a path or an URL. `config`: the resolved config, as JSON knows it. `model_config`: transformers'
        config as a dict, or None. `ties`: FQN -> first FQN of the same weight. `wait_s`: how long process 0 waits for
        the others' files in a save.

        Raises ConfigError for names in `checkpoint.allow` that mean nothing, CheckpointError for an URL of no store.
        """
        self.folder = storage.locate(folder)
        self._backend = backend
        self._config = config
        self._model_config = model_config
        self._settings = settings or schema.Checkpoint()
        self._data = data or Fingerprint()
        self._ties = dict(ties or {})
        self._run = str(config.get("run", {}).get("name", ""))
        self._written_by = WrittenBy(
            device=backend.device_name,
            backend=backend.name,
            process_count=backend.process.count,
            torch=str(torch.__version__),
            portable_fsdp=__version__,
        )
        self._wait_s = wait_s
        self._damaged: set[str] = set()  # names of those that `find` went past
        self._has_saved = False
        self._owners: dict[str, str] = {}  # on process 0: name of a checkpoint -> the run that wrote it
        self._background, self._snapshot = Background(), Snapshot()
        self._finished: list[Saved] = []
        check_allow(self._settings.allow, config)

    # ------------------------------------------------------------------------------------------------------- save

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, position: tuple[int, int]) -> Path:
        """Write the state after `step`; returns the folder in which it is committed: now, or with `async_save` later.

        `position`: the data's (epoch, samples consumed in it). Raises `CheckpointError` on all processes if one of
        them could not write, now or in the background save before, or if the step is committed already. What was
        committed before stays as it was.
        """
        began = time.perf_counter()
        self.wait()
        final = step_folder(self.folder, step)
        attempt = self._on_process_0(f"checkpoint {final.name}", lambda: self._begin(final))
        state = self._backend.state(model, optimizer)
        manifest = self._manifest(step, position, state)
        if self._settings.async_save:
            pieces = self._snapshot.take(state)
        else:
            pieces = {key: one.pieces() for key, one in state.items()}
        blocked = time.perf_counter() - began

        def work() -> None:
            index = self._write_part(final, attempt, manifest.tensors, pieces)
            if self._backend.process.index == 0:
                removed = self._commit(final, attempt, manifest)
                seconds = time.perf_counter() - began
                waited = blocked if self._settings.async_save else seconds
                self._finished.append(Saved(step, final, seconds, waited, removed))
            elif index.error is not None:
                raise CheckpointError(f"checkpoint {final.name}: could not write: {index.error}")

        self._background.start(work)
        if not self._settings.async_save:
            self.wait()
        return final

    def wait(self) -> None:
        """Until the background save is committed; raises on all processes what it failed with on any of them."""
        failure = self._background.wait()
        self._raise_together(None if failure is None else _message("checkpoint", failure), failure)

    @property
    def failed(self) -> bool:
        """Whether a background save has failed on this process: `wait` then says so on all. Not collective."""
        return self._background.failed

    def finished(self) -> list[Saved]:
        """What was committed since the last call, on process 0; nothing on the others."""
        found, self._finished = self._finished, []
        return found

    def close(self) -> None:
        """End a background save where it waits for other processes."""
        self._background.cancel()

    def _begin(self, final: Path) -> str:
        if final.name not in self._damaged and final in committed_steps(self.folder):
            raise CheckpointError(
                f"checkpoint {final.name}: expected no such step in {self.folder}, found it committed.\n"
                "  A run commits a step once: use checkpoint.resume: auto, or another run.dir."
            )
        storage.make_folder(self.folder)
        if not self._has_saved:
            commit.remove_debris(self.folder, self._run)
            self._has_saved = True
        if storage.is_object_store(final) and final.name in self._damaged:  # there the new one is written in its place
            commit.set_aside(final)
        return commit.begin(final, self._run)

    def _manifest(self, step: int, position: tuple[int, int], state: Mapping[str, TensorState]) -> Manifest:
        """Without files and pieces, which the processes write."""
        return Manifest(
            format_version=1,
            step=step,
            saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
            config=self._config,
            model_config=self._model_config,
            data=Data(epoch=position[0], position=position[1], **self._data._asdict()),
            ties=self._ties,
            written_by=self._written_by,
            files=(),
            tensors=entries_without_pieces(state),
        )

    def _write_part(
        self, final: Path, attempt: str, tensors: Mapping[str, TensorEntry], pieces: Mapping[str, list[Piece]]
    ) -> Index:
        """Write this process's files and its index, in which stands what went wrong."""
        folder, process = commit.temporary_of(final), self._backend.process.index
        if not storage.is_object_store(folder) and not folder.is_dir():
            raise CheckpointError(
                f"checkpoint {final.name}: expected the folder {folder} that process 0 made, process {process} finds\n"
                "  none: checkpoints must lie on a file system that all processes share, or in an object store."
            )
        try:
            index = write_pieces(folder, tensors, pieces, process, attempt)
        except Exception as error:
            index = Index(attempt=attempt, process=process, error=f"{type(error).__name__}: {error}")
        commit.write_index(folder, index)
        return index

    def _commit(self, final: Path, attempt: str, manifest: Manifest) -> tuple[int, ...]:
        """Returns the steps that were deleted after it."""
        folder, count = commit.temporary_of(final), self._backend.process.count
        indexes = commit.collect(folder, attempt, count, self._wait_s, self._background.cancelled)
        files, tensors = commit.merge(manifest.tensors, indexes)
        if not storage.is_object_store(final):
            commit.set_aside(final)
        commit.commit(final, manifest.model_copy(update={"files": files, "tensors": tensors}), indexes)
        self._owners[final.name] = self._run
        return self._remove_outdated()

    def _remove_outdated(self) -> tuple[int, ...]:
        """Delete what retention gives up, of what this run wrote. Damaged ones count as none, and are left alone."""
        if self._settings.keep is None:
            return ()
        own = {step_of(path) or 0: path for path in committed_steps(self.folder) if self._is_own(path)}
        outdated = commit.outdated(list(own), self._settings.keep, self._settings.keep_every)
        for step in outdated:
            commit.delete(own[step], self._run)
        return tuple(outdated)

    def _is_own(self, path: Path) -> bool:
        if path.name in self._damaged:
            return False
        if path.name not in self._owners:
            run = run_of(path)
            if run is None:
                return False
            self._owners[path.name] = run
        return self._owners[path.name] == self._run

    # ------------------------------------------------------------------------------------------------------- load

    def find(self, resume: str) -> Found | None:
        """The checkpoint to go on from, or None for a new run. `resume`: `auto`, `none`, or a checkpoint's address.

        auto: the newest whole one; a damaged one is passed over with a warning. An address from which only weights are
        wanted is that of a new run, whose own newest checkpoint comes first. Raises `CheckpointError` where a new run
        or an older checkpoint would put a second history beside the one in the folder, and where no whole one is left.
        """
        self._require_shared()
        own = [self.folder / name for name in self._on_process_0(f"checkpoints in {self.folder}", self._own)]
        if resume == "none" and own:
            raise CheckpointError(
                f"checkpoint.resume: none: expected no checkpoint in {self.folder}, found {own[0].name}"
                + (f" and {len(own) - 1} older" if len(own) > 1 else "")
                + ".\n  Use checkpoint.resume: auto to go on from it, or another run.dir for a new run."
            )
        if resume == "none":
            return None
        if resume == "auto" or (own and self._settings.load == "weights_only"):
            return self._find_newest(own)
        return self._find_named(storage.locate(resume), own)

    def load(self, found: Found, model: nn.Module, optimizer: torch.optim.Optimizer) -> Resumed:
        """Overwrite model and optimizer with what was found, after checking that it is theirs.

        Raises `CheckpointError`, on all processes: other tensors, another config that `checkpoint.allow` doesn't name,
        a file that can't be read.
        """
        weights_only = self._settings.load == "weights_only" and not found.is_own
        resumed: Resumed | None = None
        failure: Exception | None = None
        try:
            with Reader(found.path) as reader:
                expected = self._backend.state(model, optimizer)
                reader.check(expected, self._ties, weights_only=weights_only)
                changes = differences(reader.manifest, self._config, *self._data)
                if not weights_only:
                    require_allowed(changes, self._settings.allow, found.path.name)
                read = _zeros_for_the_rest(reader, expected) if weights_only else reader.read
                self._backend.load_state(model, optimizer, read)
                resumed = _resumed(found, reader.manifest, tuple(changes), weights_only)
        except Exception as error:
            failure = error
        self._raise_together(None if failure is None else _message(f"checkpoint {found.path.name}", failure), failure)
        return cast(Resumed, resumed)

    def _require_shared(self) -> None:
        """Refuse a folder that this process can't write to, or that is another one on another host; writes nothing."""
        if not storage.is_object_store(self.folder) and self._backend.process.count == 1:
            return
        subject = f"checkpoints in {self.folder}"
        probe = self._on_process_0(subject, self._write_probe)
        folder = self.folder if storage.is_object_store(self.folder) else _nearest(self.folder)
        message = None
        try:
            if not storage.exists(folder / probe):
                message = (
                    f"{subject}: expected a folder that all processes share, found that process\n"
                    f"  {self._backend.process.index} doesn't see what process 0 writes there. Is it local to each "
                    "host?\n  Set checkpoint.dir (or run.dir) to a shared folder, or to an object store (s3://, gs://)."
                )
        except Exception as error:
            message = _message(subject, error)
        try:
            self._raise_together(message, None)
        finally:
            self._on_process_0(subject, lambda: storage.remove(folder / probe))

    def _write_probe(self) -> str:
        folder = self.folder if storage.is_object_store(self.folder) else _nearest(self.folder)
        name = f".portable_fsdp-{uuid.uuid4().hex}"
        storage.write(folder / name, [b""])
        return name

    def _own(self) -> list[str]:
        return [path.name for path in committed_steps(self.folder)]

    def _find_newest(self, own: list[Path]) -> Found | None:
        reasons: list[str] = []
        for path in own:
            reason = self._damage(path)
            if reason is None:
                for one in reasons:
                    log.warning("passed over a damaged checkpoint: %s", one)
                if reasons:
                    log.warning("resuming from the older %s", path.name)
                return Found(path, tuple(reasons), is_own=True)
            self._damaged.add(path.name)
            reasons.append(reason)
        if reasons:
            raise CheckpointError(
                f"checkpoint.resume: auto: expected a whole checkpoint in {self.folder}, found {len(reasons)}, "
                "all damaged:\n"
                + "\n".join(reasons)
                + "\n  Nothing was started: a run never falls back to fresh weights."
            )
        return None

    def _find_named(self, path: Path, own: list[Path]) -> Found:
        if not self._on_process_0(f"checkpoint {path.name}", path.is_dir):
            raise CheckpointError(
                f"checkpoint.resume: expected auto, none, or a checkpoint's folder, found no such folder: {path}\n"
                "  Name one of run.dir's, as runs/run/checkpoints/step-00000500. Nothing was started."
            )
        reason = self._damage(path)
        if reason is not None:
            raise CheckpointError(reason)
        step = self._on_process_0(f"checkpoint {path.name}", lambda: read_manifest(path).step)
        newest = next(iter(own), None)
        if newest is not None and (step_of(newest) or 0) > step:
            raise CheckpointError(
                f"checkpoint.resume: {path} is step {step}, but {self.folder} already holds {newest.name}.\n"
                "  Use checkpoint.resume: auto to go on from that, or another run.dir."
            )
        return Found(path, (), is_own=path.absolute() in [one.absolute() for one in own])

    def _damage(self, path: Path) -> str | None:
        """Why a checkpoint isn't whole, as far as `checkpoint.verify` asks; each process hashes some of the files.

        Raises CheckpointError where an object store doesn't answer, which says nothing of what lies there.
        """
        reason: str | None = None
        unanswered: str | None = None
        try:
            with Reader(path) as reader:
                if self._settings.verify == "full":
                    reader.verify(self._backend.process)
                elif self._settings.verify == "size":
                    reader.verify_sizes()
        except StoreError as error:
            unanswered = str(error)
        except Exception as error:
            reason = _message(f"checkpoint {path.name}", error)
        self._raise_together(unanswered, None)
        return next((one for one in self._backend.gather(reason) if one is not None), None)

    # -------------------------------------------------------------------------------------------------- together

    def _on_process_0(self, subject: str, work: Callable[[], T]) -> T:
        """`work()` of process 0, on all processes; what it raises is raised on all of them."""
        result: T | None = None
        failure: Exception | None = None
        if self._backend.process.index == 0:
            try:
                result = work()
            except Exception as error:
                failure = error
        message = None if failure is None else _message(subject, failure)
        result, message = self._backend.agree((result, message))
        if message is not None:
            _raise(message, failure)
        return cast(T, result)

    def _raise_together(self, message: str | None, failure: Exception | None) -> None:
        """Raise the first process's message, on all processes; nothing where none has one."""
        messages = self._backend.gather(message)
        first = next((one for one in messages if one is not None), None)
        if first is not None:
            _raise(first, failure if message == first else None)


def _zeros_for_the_rest(reader: Reader, expected: Mapping[str, TensorState]) -> Read:
    """Weights from the checkpoint, optimizer state as it begins."""

    def read(key: str, slices: Slices) -> Tensor:
        if folder_of(key) == "model":
            return reader.read(key, slices)
        return torch.zeros([s.stop - s.start for s in slices], dtype=expected[key].dtype)

    return read


def _resumed(found: Found, manifest: Manifest, changes: tuple[Difference, ...], weights_only: bool) -> Resumed:
    step, data = (0, (0, 0)) if weights_only else (manifest.step, (manifest.data.epoch, manifest.data.position))
    return Resumed(found.path, step, data, changes, weights_only, found.passed_over)


def _nearest(folder: Path) -> Path:
    """The folder itself, or the nearest above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.is_dir())


def _raise(message: str, failure: Exception | None) -> NoReturn:
    raise CheckpointError(message) from (None if isinstance(failure, CheckpointError) else failure)


def _message(subject: str, error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{subject}: {type(error).__name__}: {error}"
