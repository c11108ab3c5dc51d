"""A run's checkpoints: save one, find the one to resume from, load it.

All processes come to the same verdict, errors included, so that none waits for one that has given up.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from portable_fsdp.backends.base import Backend, Fill, Piece, Read, Region, TensorState
from portable_fsdp.checkpoint import commit, replicas, storage
from portable_fsdp.checkpoint.background import Background, Snapshot
from portable_fsdp.checkpoint.commit import Index, ReplicaDigest
from portable_fsdp.checkpoint.config_diff import (
    Difference,
    check_allow,
    differences,
    require_allowed,
    require_same_base,
)
from portable_fsdp.checkpoint.format import (
    BaseFingerprint,
    DataPosition,
    Evaluated,
    Manifest,
    TensorEntry,
    WrittenBy,
    bytes_of_tensors,
    check_json,
    committed_steps,
    folder_of,
    is_committed,
    run_name,
    run_of,
    step_folder,
    step_of,
)
from portable_fsdp.checkpoint.replicas import Digests
from portable_fsdp.checkpoint.search import ResumePoint, Search
from portable_fsdp.checkpoint.store import (
    Reader,
    entries_without_pieces,
    remove_files,
    write_pieces,
)
from portable_fsdp.checkpoint.together import as_checkpoint_error, raise_together
from portable_fsdp.checkpoint.write_errors import way_out
from portable_fsdp.config import schema
from portable_fsdp.models import pretrained
from portable_fsdp.runtime import collective_errors
from portable_fsdp.runtime.closing import Closing
from portable_fsdp.runtime.errors import CheckpointError
from portable_fsdp.version import __version__

log = logging.getLogger("portable_fsdp")

_LAST_CHANCE_S = 5.0  # for the others' part of a save, when a run ends by an error


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
    evaluation: Evaluated | None = None  # of this run's own


class Checkpoints(Closing):
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
        base: pretrained.Base | None = None,
        wait_s: float = 1200.0,
    ) -> None:
        """`folder`: a path or an URL. `config`: the resolved config, as JSON knows it. `model_config`: transformers'
        config as a dict, or None. `ties`: FQN -> first FQN of the same weight. `base`: weights that a checkpoint leaves
        out, since they come from `model.pretrained` as they are. `wait_s`: how long process 0 waits for the others'
        files in a save: less than a process group's timeout, which would end the run without the reason.

        Raises ConfigError for names in `checkpoint.allow` that mean nothing, CheckpointError for an URL of no store and
        for a config that JSON doesn't give back as it is.
        """
        self.folder = storage.locate(folder)
        self._backend = backend
        self._config = config
        self._model_config = model_config
        self._settings = settings or schema.Checkpoint()
        self._data = data or Fingerprint()
        self._ties = dict(ties or {})
        self._base = None if base is None else _LeftOut(base.names, base.fill, _entry_of(base))
        self._run = run_name(config)
        self._written_by = WrittenBy(
            device=backend.device_name,
            backend=backend.name,
            process_count=backend.process.count,
            torch=str(torch.__version__),
            portable_fsdp=__version__,
        )
        self._wait_s = wait_s
        self._search = Search(self.folder, backend, self._settings, self._run)
        self._has_saved = False
        self._unfinished: Path | None = None  # what the last save writes to until its commit
        self._own: dict[int, Path] | None = None  # on process 0: the run's own, whole when they were first seen
        self._background, self._snapshot = Background(), Snapshot()
        self._finished: list[Saved] = []
        check_allow(self._settings.allow, config)
        check_json({"config": config, "model_config": model_config})

    # ------------------------------------------------------------------------------------------------------- save

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        position: tuple[int, int],
        evaluation: Evaluated | None = None,
    ) -> Path:
        """Write the state after `step`; returns the folder in which it is committed: now, or with `async_save` later.

        `position`: the data's (epoch, samples consumed in it). `evaluation`: what the evaluations have told; retention
        keeps the best. Raises `CheckpointError` on all processes if one of them could not write, now or in the
        background save before, or if the step is committed already. What was committed before stays as it was.
        """
        began = time.perf_counter()
        self.wait()
        final = step_folder(self.folder, step)
        as_error = partial(self._as_error, final, None)
        attempt = collective_errors.on_process_0(self._backend, lambda: self._begin(final), as_error)
        self._unfinished = commit.temporary_of(final, attempt)
        manifest, pieces, copies = self._taken(step, position, evaluation, model, optimizer)
        blocked = time.perf_counter() - began

        def work() -> None:
            try:
                index = self._write_part(final, attempt, manifest.tensors, pieces, copies)
            except Exception as error:  # the others learn of it when they have waited: say it now
                failure = self._as_error(final, manifest, error)
                log.error("%s", failure)
                raise failure from error
            if self._backend.process.index == 0:
                try:
                    self._commit(final, attempt, manifest)
                except OSError as error:
                    raise self._as_error(final, manifest, error) from error
                removed = self._remove_outdated(final, evaluation and evaluation.best_step)
                seconds = time.perf_counter() - began
                waited = blocked if self._settings.async_save else seconds
                self._finished.append(Saved(step, final, seconds, waited, removed))
            elif index.error is not None:
                raise CheckpointError(f"checkpoint {final.name}: could not write: {index.error}")

        self._background.start(work)
        if not self._settings.async_save:
            self.wait()
        return final

    def _taken(
        self,
        step: int,
        position: tuple[int, int],
        evaluation: Evaluated | None,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> tuple[Manifest, dict[str, list[Piece]], tuple[ReplicaDigest, ...]]:
        """What is to be written: of all processes, and this one's pieces; and digests of replicas that it doesn't
        write. Raises on all what fails on one."""
        failure: Exception | None = None
        try:
            everything = self._backend.state(model, optimizer)
            manifest = self._manifest(step, position, evaluation, everything)
            digests = Digests()
            # One tensor after another: on XLA its pieces are copies on the host.
            mine = ((key, digests.take(key, everything[key].pieces())) for key in manifest.tensors)
            pieces = self._snapshot.take(mine) if self._settings.async_save else dict(mine)
            copies = digests.result()
        except Exception as error:
            failure = error
        self._raise_together(f"checkpoint of step {step}", failure)
        return manifest, pieces, copies  # pyright: ignore[reportPossiblyUnboundVariable]  # else it was raised

    def wait(self) -> None:
        """Until the background save is committed; raises on all processes what it failed with on any of them."""
        self._raise_together("checkpoint", self._background.wait())

    def _raise_together(self, subject: str, failure: Exception | None) -> None:
        """As `raise_together`, in a save. A failed one leaves no files: no process writes them any more."""
        try:
            raise_together(self._backend, subject, failure)
        except CheckpointError:
            unfinished, self._unfinished = self._unfinished, None
            if unfinished is not None and self._backend.process.index == 0:
                with suppress(Exception):  # else the next save removes them
                    if step_of(unfinished) is None or not is_committed(unfinished):
                        commit.discard(unfinished)
            raise

    @property
    def failed(self) -> bool:
        """Whether a background save has failed on this process: `wait` then says so on all. Not collective."""
        return self._background.failed

    def finished(self) -> list[Saved]:
        """What was committed since the last call, on process 0; nothing on the others."""
        found = self._finished[:]
        del self._finished[: len(found)]  # the thread may have added one
        return found

    def close(self) -> None:
        """Give a background save some seconds to commit, then end it where it waits for other processes."""
        self._background.cancel(after_s=_LAST_CHANCE_S)

    def _begin(self, final: Path) -> str:
        if final.name not in self._search.damaged and is_committed(final):
            raise CheckpointError(
                f"checkpoint {final.name}: expected no such step in {self.folder}, found it committed.\n"
                "  A run commits a step once: use checkpoint.resume: auto, or another run.dir."
            )
        storage.make_folder(self.folder)
        if not self._has_saved:
            commit.remove_debris(self.folder, self._run)
            self._has_saved = True
        if storage.is_object_store(final) and final.name in self._search.damaged:
            commit.set_aside(final)  # the new one is written in its place
        return commit.begin(final, self._run)

    def _manifest(
        self, step: int, position: tuple[int, int], evaluation: Evaluated | None, state: Mapping[str, TensorState]
    ) -> Manifest:
        """Without files and pieces, which the processes write."""
        tensors, base = entries_without_pieces(state), None
        if self._base is not None:
            left_out = {key: tensors.pop(key) for key in list(tensors) if key in self._base.names}
            base = self._base.entry.model_copy(update={"tensors": left_out})
        return Manifest(
            format_version=1,
            step=step,
            saved_at=datetime.now(UTC).isoformat(timespec="seconds"),
            config=self._config,
            model_config=self._model_config,
            data=DataPosition(epoch=position[0], position=position[1], **self._data._asdict()),
            evaluation=evaluation,
            base=base,
            ties=self._ties,
            written_by=self._written_by,
            files=(),
            tensors=tensors,
        )

    def _write_part(
        self,
        final: Path,
        attempt: str,
        tensors: Mapping[str, TensorEntry],
        pieces: Mapping[str, list[Piece]],
        copies: Sequence[ReplicaDigest] = (),
    ) -> Index:
        """Write this process's files and its index, in which stands what went wrong."""
        folder, process = commit.temporary_of(final, attempt), self._backend.process.index
        if not storage.is_object_store(folder) and not folder.is_dir():
            raise CheckpointError(
                f"checkpoint {final.name}: expected the folder {folder} that process 0 made, process {process} finds\n"
                "  none: checkpoints must lie on a file system that all processes share, or in an object store."
            )
        try:
            index = write_pieces(folder, tensors, pieces, process, attempt, copies)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            if isinstance(error, OSError):
                message += way_out(error, self.folder, bytes_of_tensors(tensors), folder)
            remove_files(folder, process)  # a full disk has room again for the word of it
            index = Index(attempt=attempt, process=process, error=message)
        commit.write_index(folder, index)
        return index

    def _as_error(self, final: Path, manifest: Manifest | None, error: Exception) -> CheckpointError:
        """What all processes get for what one of them couldn't write, with the way out."""
        failure = as_checkpoint_error(f"checkpoint {final.name}", error)
        if isinstance(error, OSError):
            needed = 0 if manifest is None else bytes_of_tensors(manifest.tensors)
            return CheckpointError(f"{failure}{way_out(error, self.folder, needed, self._unfinished)}")
        return failure

    def _commit(self, final: Path, attempt: str, manifest: Manifest) -> None:
        folder, count = commit.temporary_of(final, attempt), self._backend.process.count
        indexes = commit.collect(folder, attempt, count, self._wait_s, self._background.cancelled)
        self._compare_replicas(final, indexes, manifest.tensors)
        files, tensors = commit.merge(manifest.tensors, indexes)
        if not storage.is_object_store(final):
            commit.set_aside(final)
        commit.commit(final, attempt, manifest.model_copy(update={"files": files, "tensors": tensors}), indexes)

    def _compare_replicas(self, final: Path, indexes: Sequence[Index], tensors: Mapping[str, TensorEntry]) -> None:
        """Raises CheckpointError where replicas differ; a warning, where `checkpoint.allow` names them."""
        found = replicas.differing(indexes, tensors)
        if not found:
            return
        table = replicas.describe_differing(found)
        if "replicas" in self._settings.allow:
            log.warning("%s: replicas differ in %d places; saving the first:\n%s", final.name, len(found), table)
            return
        last = next(iter(committed_steps(self.folder)), None)
        odd = replicas.odd_ones(found)
        raise CheckpointError(
            f"checkpoint {final.name}: expected equal values in all replicas, found {len(found)} that differ:\n"
            f"{table}\n"
            + (f"  All others agree against {', '.join(odd)}.\n" if odd else "")
            + "  Replicas apply the same gradients: memory, a device or a program has changed one of them since "
            f"{last.name if last else 'the run began'}.\n"
            "  This step isn't saved. Rerun the same command: it "
            + (f"resumes from {last.name}. " if last else "begins anew. ")
            + "If it happens again, test those devices.\n"
            "  To save the first replica's values with a warning: checkpoint.allow='[replicas]'."
        )

    def _remove_outdated(self, committed: Path, best: int | None) -> tuple[int, ...]:
        """Delete what retention gives up, of what this run wrote; what can't be deleted is warned about, and forgotten.

        Damaged ones count as none, and are left alone.
        """
        if self._settings.keep is None:
            return ()
        removed: list[int] = []
        try:
            if self._own is None:
                self._own = {step_of(path) or 0: path for path in committed_steps(self.folder) if self._is_own(path)}
            self._own[step_of(committed) or 0] = committed
            for step in commit.outdated(list(self._own), self._settings.keep, self._settings.keep_every, best):
                commit.delete(self._own.pop(step), self._run)
                removed.append(step)
        except Exception as error:  # object stores raise many classes
            log.warning("%s is saved; an older checkpoint could not be deleted: %s", committed.name, error)
        return tuple(removed)

    def _is_own(self, path: Path) -> bool:
        """Of this run's name, in this folder, and whole by its sizes."""
        is_link = not storage.is_object_store(path) and path.is_symlink()
        if is_link or path.name in self._search.damaged:
            return False
        try:
            with Reader(path) as reader:
                reader.verify_sizes()
                return run_of(reader.manifest) == self._run
        except CheckpointError:
            return False

    # ------------------------------------------------------------------------------------------------------- load

    def find(self, resume: str) -> ResumePoint | None:
        """The checkpoint to go on from, or None for a new run. `resume`: `auto`, `none`, or a checkpoint's address.

        auto: the newest whole one of the run's own; a damaged one is passed over with a warning. An address: that
        checkpoint, or the newest of the run's own if this run began there. Raises `CheckpointError` where a second
        history would come beside the one in the folder, where no whole one is left, where storage doesn't answer.
        """
        return self._search.find(resume)

    def load(self, found: ResumePoint, model: nn.Module, optimizer: torch.optim.Optimizer) -> Resumed:
        """Overwrite model and optimizer with what was found, after checking that it is theirs.

        Raises `CheckpointError`, on all processes: other tensors, another config that `checkpoint.allow` doesn't name,
        another base than the one that it leaves out, a file that can't be read. What fails while tensors are read
        leaves both half overwritten: load again, or end.
        """
        weights_only = found.weights_only
        resumed: Resumed | None = None
        failure: Exception | None = None
        try:
            with Reader(found.path) as reader:
                expected = self._backend.state(model, optimizer)
                if reader.manifest.base is None:
                    self._base = None  # it holds its base, which need not be that of the files: so will the next ones
                base = self._base
                entry = base.entry if base else None
                changes = differences(reader.manifest, self._config, *self._data, entry, is_own=found.is_own)
                told = [line for one in changes if one.makes_curve and reader.manifest.config for line in one.lines()]
                names = base.names if base else ()
                reader.check(expected, self._ties, weights_only=weights_only, base=names, config=told)
                require_same_base(changes, self._settings.allow, found.path.name)
                if not weights_only:
                    require_allowed(changes, self._settings.allow, found.path.name)
                self._backend.load_state(model, optimizer, _source(reader, expected, base, weights_only))
                resumed = _resumed(found, reader.manifest, tuple(changes), weights_only)
        except Exception as error:
            failure = error
        raise_together(self._backend, f"checkpoint {found.path.name}", failure)
        return cast(Resumed, resumed)


class _LeftOut(NamedTuple):
    """Weights that a checkpoint leaves out: where they come from instead, and what its manifest says of them."""

    names: frozenset[str]
    fill: Fill
    entry: BaseFingerprint


def _entry_of(base: pretrained.Base) -> BaseFingerprint:
    """Without tensors. Read now: later the files may be others than those that filled the model."""
    found = pretrained.fingerprint(base.file)
    return BaseFingerprint(pretrained=base.pretrained, gguf_file=base.gguf_file, fingerprint=found, tensors={})


def _source(reader: Reader, expected: Mapping[str, TensorState], base: _LeftOut | None, weights_only: bool) -> Read:
    """The checkpoint; what it leaves out from where the base lies; with `weights_only` optimizer state as it begins."""

    def read(key: str, slices: Region, into: Tensor | None = None) -> Tensor:
        if base is not None and key in base.names:
            value = base.fill(key, slices).to(expected[key].dtype)
            return value if into is None else into.copy_(value)
        if not weights_only or folder_of(key) == "model":
            return reader.read(key, slices, into)
        if into is not None:
            return into.zero_()
        return torch.zeros([s.stop - s.start for s in slices], dtype=expected[key].dtype)

    return read


def _resumed(found: ResumePoint, manifest: Manifest, changes: tuple[Difference, ...], weights_only: bool) -> Resumed:
    step, data = (0, (0, 0)) if weights_only else (manifest.step, (manifest.data.epoch, manifest.data.position))
    evaluation = manifest.evaluation if found.is_own and not weights_only else None
    return Resumed(found.path, step, data, changes, weights_only, found.passed_over, evaluation)
