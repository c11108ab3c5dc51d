"""A run's checkpoints: save one, find the one to resume from, load it.

All processes reach the same result, errors included, so that none waits for one that has given up.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from portable_fsdp.backends.contract import Backend, Read, TensorState
from portable_fsdp.checkpoint import commit, manifests, resume
from portable_fsdp.checkpoint.commit import Index, way_out
from portable_fsdp.checkpoint.manifests import Saved
from portable_fsdp.checkpoint.resume import Difference, ResumePoint
from portable_fsdp.checkpoint.snapshot import Background, Digests, Snapshot, require_equal
from portable_fsdp.checkpoint.storage import MANIFEST, is_link, locate, store_of
from portable_fsdp.checkpoint.store import OwnPart, Reader, entries_without_pieces, new_manifest, remove_files
from portable_fsdp.config import schema
from portable_fsdp.layout import Region
from portable_fsdp.runtime.collective_errors import on_process_0, together
from portable_fsdp.runtime.errors import CheckpointError, Closing

if TYPE_CHECKING:
    from portable_fsdp.checkpoint.named import Models, NamedState, Optimizers
    from portable_fsdp.models.weights import Base

log = logging.getLogger("portable_fsdp")

T = TypeVar("T")

_LAST_CHANCE_S = 5.0  # for the other processes' part of a save, when a run fails


class Fingerprint(NamedTuple):
    """Hashes of the training data; None where unknown."""

    rows: str | None = None
    tokenizer: str | None = None


@dataclass(frozen=True)
class Resumed:
    """The state that a run resumes from."""

    path: Path
    step: int
    position: tuple[int, int]  # the data's epoch, and the samples consumed in it
    changes: tuple[Difference, ...]
    weights_only: bool
    passed_over: tuple[str, ...]  # why newer checkpoints were skipped
    evaluation: manifests.Evaluated | None = None  # from a checkpoint of this run only
    drops_nothing: bool = False  # the model's rates of dropout don't apply, as in the run so far


class Checkpoints(Closing):
    """The checkpoints in `folder`, as one run sees them. Every method but `close` and `finished` is collective.

    The first save removes the debris of interrupted ones: a start that is refused changes nothing.
    """

    def __init__(
        self,
        folder: Path | str,
        backend: Backend,
        *,
        config: schema.Config | dict[str, Any],
        model_config: dict[str, Any] | None = None,
        settings: schema.Checkpoint | None = None,
        data: Fingerprint | None = None,
        ties: Mapping[str, str] | None = None,
        base: "Base | None" = None,
        wait_s: float = 1200.0,
    ) -> None:
        """`folder`: a path or a URL. `config`: the resolved config, which has the `settings`, or JSON. `model_config`:
        transformers' config as a dict. `ties`: FQN -> first FQN of the same weight. `base`: weights of
        `model.pretrained` that checkpoints leave out. `wait_s`: how long process 0 waits for the other processes'
        files in a save, less than a process group's timeout.

        Raises ConfigError for unknown names in `checkpoint.allow`, CheckpointError for an unknown kind of URL and for
        a config that JSON doesn't round-trip.
        """
        if isinstance(config, schema.Config):
            config, settings = config.model_dump(mode="json"), settings or config.checkpoint
        self.folder = locate(folder)
        self._store = store_of(self.folder)
        self._backend = backend
        self._config, self._model_config = config, model_config
        self._settings = settings or schema.Checkpoint()
        self._data, self._ties = data or Fingerprint(), dict(ties or {})
        self._base, self._fingerprint = base, base and _fingerprint_of(base)
        self._run, self._wait_s = manifests.run_name(config), wait_s
        self._search = resume.Search(self.folder, backend, self._settings)
        self._has_saved = False
        self._unfinished: Path | None = None  # the folder of the last save until its commit
        self._own: dict[int, Path] | None = None  # on process 0: the run's own, intact at the first look
        self._background, self._snapshot = Background(), Snapshot()
        self._finished: list[Saved] = []
        self.saved_elsewhere: Collection[str] = ()  # names of models whose weights aren't here
        self.on_part: Callable[[], None] = lambda: None
        """Called once this process has written its part of a checkpoint."""
        resume.check_allow(self._settings.allow, config)
        manifests.check_json({"config": config, "model_config": model_config})

    def save(
        self,
        step: int,
        model: "Models",
        optimizer: "Optimizers",
        position: tuple[int, int],
        evaluation: manifests.Evaluated | None = None,
        objects: Mapping[str, Any] | None = None,
    ) -> Path:
        """Save the state after `step`; returns the folder of the commit, which follows later with `async_save`.

        `model`, `optimizer`: one, or several by name. `objects`: others with `state_dict` and `load_state_dict`, by
        name, equal on all processes. `position`: the data's (epoch, samples consumed in it). `evaluation`: the results
        so far; retention keeps the best step. Raises `CheckpointError` on all processes if one of them could not write,
        now or in the background save before, if the step is committed already, or for a value that none can hold.
        Earlier checkpoints stay as they were.
        """
        began = time.perf_counter()
        self.wait()
        final = manifests.step_folder(self.folder, step)
        as_error = partial(self._as_error, final, None)
        attempt = on_process_0(self._backend, lambda: self._begin(final), as_error)
        self._unfinished = self._store.temporary_of(final, attempt)

        subject, saved, tensors = f"checkpoint of step {step}", None, dict[str, TensorState]()
        if named := self._save_together(subject, lambda: self._named(model, optimizer, objects)):
            self._save_together(subject, named.encode)
            saved, tensors = self._save_together(subject, named.objects)

        def take() -> tuple[manifests.Manifest, OwnPart]:
            state = named.state() if named else self._backend.state(cast(Any, model), cast(Any, optimizer))
            state, digests = state | tensors, Digests()
            manifest = self._manifest(step, position, evaluation, state, saved)
            # One tensor after another: on XLA its pieces are copies on the host.
            mine = ((key, digests.take(key, state[key].pieces())) for key in manifest.tensors)
            pieces = self._snapshot.take(mine) if self._settings.async_save else dict(mine)
            return manifest, OwnPart(manifest.tensors, pieces, digests.result())

        taken = self._save_together(subject, take)
        self._background.start(partial(self._write, final, attempt, *taken, began, time.perf_counter() - began))
        if not self._settings.async_save:
            self.wait()
        return final

    def _named(self, model: "Models", optimizer: "Optimizers", objects: Any) -> "NamedState | None":
        """What a loop of the user's own saves by name; None: one model, and an optimizer that the config describes."""
        is_one = isinstance(model, nn.Module) and isinstance(optimizer, torch.optim.Optimizer)
        if is_one and objects is None and self._backend.optimizers.get(cast(Any, optimizer)) is None:
            return None
        from portable_fsdp.checkpoint.named import NamedState

        return NamedState(self._backend, model, optimizer, objects or {}, self.saved_elsewhere)

    def wait(self) -> None:
        """Wait for the commit of a background save; raises its error on all processes."""
        self._save_together("checkpoint", self._background.wait)

    @property
    def is_saving(self) -> bool:
        """Whether this process writes a background save. Not collective."""
        return self._background.is_running

    @property
    def failed(self) -> bool:
        """Whether a background save has failed on this process: `wait` then raises on all. Not collective."""
        return self._background.failure is not None

    def finished(self) -> list[Saved]:
        """Return the commits since the last call, on process 0; an empty list on other processes."""
        saved = self._finished[:]
        del self._finished[: len(saved)]  # the thread may have added one
        return saved

    def close(self) -> None:
        """Wait a few seconds for a background save, then cancel its wait for other processes."""
        self._background.cancel(after_s=_LAST_CHANCE_S)

    def _save_together(self, subject: str, work: Callable[[], T]) -> T:
        """Run `work` on all processes; delete the partial files if the save fails."""
        try:
            return together(self._backend, work, resume.error_about(subject))
        except CheckpointError:
            unfinished, self._unfinished = self._unfinished, None
            if unfinished is not None and self._backend.process.index == 0:
                with suppress(Exception):  # the next save removes the rest
                    if manifests.step_of(unfinished) is None or not self._store.is_committed(unfinished):
                        commit.discard(unfinished)
            raise

    def _begin(self, final: Path) -> str:
        is_damaged = final.name in self._search.damaged
        if not is_damaged and self._store.is_committed(final):
            raise CheckpointError(
                f"checkpoint {final.name}: already committed in {self.folder}.\n"
                "  A run commits a step once: use checkpoint.resume: auto, or another run.dir."
            )
        self._store.make_folder(self.folder)
        if not self._has_saved:
            commit.remove_debris(self.folder, self._run)
            self._has_saved = True
        if is_damaged:
            commit.set_aside(final)  # the new checkpoint replaces it
        return commit.begin(final, self._run)

    def _manifest(
        self,
        step: int,
        position: tuple[int, int],
        evaluation: manifests.Evaluated | None,
        state: Mapping[str, TensorState],
        named: manifests.Named | None,
    ) -> manifests.Manifest:
        """Make the manifest without files and pieces, which the processes write."""
        tensors, base, scaler = entries_without_pieces(state), self._fingerprint, self._backend.loss_scaler
        if self._base is not None and base is not None:
            left_out = {key: tensors.pop(key) for key in list(tensors) if key in self._base.names}
            states = {key: TensorState(shape, torch.bfloat16) for key, shape in self._base.quantised.items()}
            left_out |= entries_without_pieces(states)
            base = base.model_copy(update={"tensors": left_out})
        return new_manifest(
            device=self._backend.device_name,
            backend=self._backend.name,
            process_count=self._backend.process.count,
            step=step,
            config=self._config,
            model_config=self._model_config,
            data=manifests.DataPosition(epoch=position[0], position=position[1], **self._data._asdict()),
            evaluation=evaluation,
            loss_scale=scaler and manifests.LossScale.model_validate(scaler.state()),
            base=base,
            named=named,
            ties=self._ties,
            files=(),
            tensors=tensors,
        )

    def _write(
        self, final: Path, attempt: str, manifest: manifests.Manifest, part: OwnPart, began: float, blocked: float
    ) -> None:
        """Write this process's part, in the background; process 0 commits and deletes outdated checkpoints."""
        try:
            index = self._write_part(final, attempt, part)
        except Exception as error:  # other processes learn of it only after their wait: log it now
            failure = self._as_error(final, manifest, error)
            log.error("%s", failure)
            raise failure from error
        if self._backend.process.index != 0:
            if index.error is not None:
                raise CheckpointError(f"checkpoint {final.name}: could not write: {index.error}")
            return
        try:
            self._commit(final, attempt, manifest)
        except OSError as error:
            raise self._as_error(final, manifest, error) from error
        removed = self._remove_outdated(final, manifest.evaluation and manifest.evaluation.best_step)
        seconds = time.perf_counter() - began
        blocked = blocked if self._settings.async_save else seconds
        self._finished.append(Saved(manifest.step, final, seconds, blocked, removed))

    def _write_part(self, final: Path, attempt: str, part: OwnPart) -> Index:
        """Write this process's files, and its index, which reports an error to process 0."""
        folder, process = self._store.temporary_of(final, attempt), self._backend.process.index
        try:
            index = part.write(folder, process, attempt)
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            if isinstance(error, OSError):
                message += way_out(error, self.folder, manifests.bytes_of_tensors(part.tensors))
            remove_files(folder, process)  # makes room on a full disk for the index
            index = Index(attempt=attempt, process=process, error=message)
        commit.write_index(folder, index)
        self.on_part()
        return index

    def _as_error(self, final: Path, manifest: manifests.Manifest | None, error: Exception) -> CheckpointError:
        """The error that all processes raise when one could not write, with the fix."""
        failure = resume.error_about(f"checkpoint {final.name}")(error)
        if not isinstance(error, OSError):
            return failure
        needed = 0 if manifest is None else manifests.bytes_of_tensors(manifest.tensors)
        return CheckpointError(f"{failure}{way_out(error, self.folder, needed)}")

    def _commit(self, final: Path, attempt: str, manifest: manifests.Manifest) -> None:
        folder, count = self._store.temporary_of(final, attempt), self._backend.process.count
        indexes = commit.collect(folder, attempt, count, self._wait_s, self._background.cancelled)
        require_equal(indexes, manifest.tensors, final, "replicas" in self._settings.allow)
        files, tensors = commit.merge(manifest.tensors, indexes)
        commit.commit(final, attempt, manifest.model_copy(update={"files": files, "tensors": tensors}), indexes)

    def _remove_outdated(self, committed: Path, best: int | None) -> tuple[int, ...]:
        """Delete this run's outdated checkpoints, but no damaged one; warn about one that can't be deleted."""
        if self._settings.keep is None:
            return ()
        removed: list[int] = []
        try:
            if self._own is None:
                paths = filter(self._is_own, manifests.committed_steps(self.folder))
                self._own = {manifests.step_of(path) or 0: path for path in paths}
            self._own[manifests.step_of(committed) or 0] = committed
            for step in commit.outdated(list(self._own), self._settings.keep, self._settings.keep_every, best):
                commit.delete(self._own.pop(step), self._run)
                removed.append(step)
        except Exception as error:  # object stores raise many classes
            log.warning("%s is saved; an older checkpoint could not be deleted: %s", committed.name, error)
        return tuple(removed)

    def _is_own(self, path: Path) -> bool:
        """True if the checkpoint has this run's name, is in this folder and has its manifest's sizes."""
        if is_link(path) or path.name in self._search.damaged:
            return False
        try:
            with Reader(path) as reader:
                reader.verify_sizes()
                return manifests.run_of(reader.manifest) == self._run
        except CheckpointError:
            return False

    def find(self, resume: str, last_save: manifests.NamedSave | None = None) -> ResumePoint | None:
        """Find the checkpoint to resume from, or None for a new run. `resume`: `auto`, `none`, or an address.
        `last_save`: the newest save that the run's events name.

        auto: the newest intact one of the run's own; warns of damaged newer ones. An address: that checkpoint, or the
        newest of the run's own if this run started there. Raises `CheckpointError` if a second history would join
        the one in the folder, if all are damaged or none exists despite `last_save`, or if the storage doesn't answer.
        """
        return self._search.find(resume, last_save)

    def note_evaluation(self, path: Path, evaluation: manifests.Evaluated) -> None:
        """Replace the evaluation of a committed checkpoint, atomically, by one made after its save."""

        def write() -> None:
            manifest = manifests.read_manifest(path).model_copy(update={"evaluation": evaluation})
            store = store_of(path)
            store.write(path / MANIFEST, [manifests.manifest_text(manifest).encode()])
            store.sync(path)

        on_process_0(self._backend, write, partial(self._as_error, path, None))

    def load(
        self, source: ResumePoint, model: "Models", optimizer: "Optimizers", objects: Mapping[str, Any] | None = None
    ) -> Resumed:
        """Check that the checkpoint fits, and overwrite models, optimizers and objects with it, as `save` got them.

        Raises `CheckpointError` on all processes: other tensors or names, another config that `checkpoint.allow`
        doesn't name, another base, a file that can't be read. An error while tensors are read leaves some overwritten:
        load again, or exit. `checkpoint.load=weights_only` leaves optimizers and objects named so as they are.
        """
        subject = f"checkpoint {source.path.name}"
        load = partial(self._load, source, model, optimizer, objects)
        return together(self._backend, load, resume.error_about(subject))

    def _load(self, source: ResumePoint, model: "Models", optimizer: "Optimizers", objects: Any) -> Resumed:
        named = self._named(model, optimizer, objects)
        allow, name, weights_only = self._settings.allow, source.path.name, source.weights_only
        with Reader(source.path) as reader:
            manifest = reader.manifest
            resume.require_same_scheme(manifest.base, self._fingerprint, name)
            if manifest.base is None:  # it holds its base, which may differ from the files: the next saves hold it too
                self._base = self._fingerprint = None
            if named or manifest.named:
                from portable_fsdp.checkpoint.named import NamedState

                named = named or NamedState(self._backend, model, optimizer, {})  # to refuse names that this run lacks
                named.prepare(reader, weights_only=weights_only)
            expected = named.state() if named else self._backend.state(cast(Any, model), cast(Any, optimizer))
            drops_nothing = not weights_only and resume.continues_without_dropout(manifest, self._config)
            if drops_nothing:  # the next saves say so
                self._config = {**self._config, "model": {**self._config["model"], "dropout": 0.0}}
            changes = resume.differences(manifest, self._config, *self._data, self._fingerprint, is_own=source.is_own)
            shown = [line for change in changes if change.makes_curve and manifest.config for line in change.lines()]
            base = self._base.names if self._base else ()
            reader.check(expected, self._ties, weights_only=weights_only, base=base, config=shown)
            resume.require_same_base(changes, allow, name)
            if not weights_only:
                resume.require_allowed(changes, allow, name, manifest.config.get("data", {}).get("source", ""))
            read = _read_from(reader, expected, self._base, weights_only)
            if named:
                named.load(read, weights_only=weights_only)
            else:
                self._backend.load_state(cast(Any, model), cast(Any, optimizer), read)
            if (scaler := self._backend.loss_scaler) and (saved := manifest.loss_scale) and not weights_only:
                allowed = {change.name: change.now for change in changes}.get("precision.loss_scale")
                started = {} if allowed is None else {"scale": allowed, "finite_steps": 0}
                scaler.restore(**saved.model_dump() | started)
        return Resumed(
            path=source.path,
            step=0 if weights_only else manifest.step,
            position=(0, 0) if weights_only else (manifest.data.epoch, manifest.data.position),
            changes=tuple(changes),
            weights_only=weights_only,
            passed_over=source.passed_over,
            evaluation=manifest.evaluation if source.is_own and not weights_only else None,
            drops_nothing=drops_nothing,
        )


def _fingerprint_of(base: "Base") -> manifests.BaseFingerprint:
    """Fingerprint the base, without tensors; at the start, since the files may change later."""
    from portable_fsdp.models.pretrained import fingerprint

    return manifests.BaseFingerprint(
        pretrained=base.pretrained,
        gguf_file=base.gguf_file,
        fingerprint=fingerprint(base.file),
        scheme=base.scheme,
        quantised=tuple(sorted(base.quantised)),
        tensors={},
    )


def _read_from(reader: Reader, expected: Mapping[str, TensorState], base: "Base | None", weights_only: bool) -> Read:
    """Make a reader of the checkpoint, and of the base for left-out weights. `weights_only`: zero optimizer state."""

    def read(key: str, slices: Region, into: Tensor | None = None) -> Tensor:
        if base is not None and key in base.names:
            value = base.fill(key, slices).to(expected[key].dtype)
            return value if into is None else into.copy_(value)
        if not weights_only or manifests.folder_of(key) == "model":
            return reader.read(key, slices, into)
        if into is not None:
            return into.zero_()
        return torch.zeros([s.stop - s.start for s in slices], dtype=expected[key].dtype)

    return read
