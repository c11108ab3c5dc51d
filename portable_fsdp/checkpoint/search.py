"""Finds the checkpoint that a run resumes from. All processes search together and reach the same result."""

import logging
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from portable_fsdp.backends.contract import Backend
from portable_fsdp.checkpoint import commit
from portable_fsdp.checkpoint.format import NamedSave, committed_steps, read_manifest, require_checkpoint, step_of
from portable_fsdp.checkpoint.storage import exists, locate, store_of
from portable_fsdp.checkpoint.store import Reader
from portable_fsdp.config import schema
from portable_fsdp.runtime import collective_errors
from portable_fsdp.runtime.errors import CheckpointError, StoreError, without_passwords

log = logging.getLogger("portable_fsdp")

T = TypeVar("T")
_PROBE = ".portable_fsdp-"  # prefix of the file by which processes check that they share a folder


class ResumePoint(NamedTuple):
    """A checkpoint to resume from, intact as far as `checkpoint.verify` checks."""

    path: Path
    passed_over: tuple[str, ...]  # why newer ones were not taken
    is_own: bool  # in this run's folder
    weights_only: bool = False


def as_checkpoint_error(subject: str, error: Exception) -> CheckpointError:
    """A CheckpointError as it is; any other error by its class and message."""
    is_ours = isinstance(error, CheckpointError)
    return error if is_ours else CheckpointError(f"{subject}: {type(error).__name__}: {error}")


def together(backend: Backend, subject: str, work: Callable[[], T]) -> T:
    """As `collective_errors.together`, with CheckpointErrors about `subject`. *collective*"""
    return collective_errors.together(backend, work, partial(as_checkpoint_error, subject))


class Search:
    """Searches the checkpoints in `folder`, or checks the one that the config names."""

    def __init__(self, folder: Path, backend: Backend, settings: schema.Checkpoint, run: str) -> None:
        self.damaged: set[str] = set()  # names of the checkpoints that were passed over
        self._folder = folder
        self._backend = backend
        self._settings = settings
        self._run = run

    def find(self, resume: str, last_save: NamedSave | None) -> ResumePoint | None:
        """As `Checkpoints.find`."""
        self._require_shared()
        own = [self._folder / name for name in self._on_process_0(self._own_names)]
        if last_save is not None and resume != "none":
            self._compare(last_save, resume, own)
        if resume == "none" and own:
            older = f" and {len(own) - 1} older" if len(own) > 1 else ""
            raise CheckpointError(
                f"checkpoint.resume: none: expected no checkpoint in {self._folder}, found {own[0].name}{older}.\n"
                "  Use checkpoint.resume: auto to resume from it, or another run.dir for a new run."
            )
        if resume == "none":
            return None
        if resume == "auto" or (own and self._started_from(resume, own)):
            return self._newest(own)
        return self._named(locate(resume), own)

    def _on_process_0(self, work: Callable[[], T], subject: str | None = None) -> T:
        as_error = partial(as_checkpoint_error, subject or f"checkpoints in {self._folder}")
        return collective_errors.on_process_0(self._backend, work, as_error)

    def _require_shared(self) -> None:
        """Refuse a folder that isn't writable, or that is a different one on another host. Leaves no file."""
        store = store_of(self._folder)
        # A local folder may not exist yet: probe the nearest parent that does.
        parents = (self._folder, *self._folder.absolute().parents)
        probed = next(path for path in parents if path.exists()) if store.is_local else self._folder
        probe = self._on_process_0(lambda: self._write_probe(probed))

        def require_probe() -> None:
            if not exists(probed / probe):
                raise CheckpointError(
                    f"checkpoints in {self._folder}: expected a folder that all processes share, found that process\n"
                    f"  {self._backend.process.index} doesn't see what process 0 writes there. Is it local to each "
                    "host?\n  Set checkpoint.dir (or run.dir) to a shared folder, or to an object store (s3://, gs://)."
                )

        try:
            together(self._backend, f"checkpoints in {self._folder}", require_probe)
        finally:
            self._on_process_0(lambda: store.remove(probed / probe))

    def _write_probe(self, folder: Path) -> str:
        name, store = _PROBE + uuid.uuid4().hex, store_of(folder)
        try:
            for old in store.names(folder):
                if old.startswith(_PROBE):  # a killed start left it
                    store.remove(folder / old)
            store.write(folder / name, [b""])
        except OSError as error:
            raise CheckpointError(
                f"checkpoints in {self._folder}: expected a folder that can be written to, found: {error}\n"
                "  Set checkpoint.dir or run.dir to one."
            ) from None
        return name

    def _own_names(self) -> list[str]:
        commit.warn_of_others(self._folder, self._run)
        return [path.name for path in committed_steps(self._folder)]

    def _newest(self, own: list[Path]) -> ResumePoint | None:
        reasons: list[str] = []
        for path in own:
            reason = self._damage(path)
            if reason is None:
                for passed_over in reasons:
                    log.warning("passed over a damaged checkpoint: %s", passed_over)
                if reasons:
                    log.warning("resuming from the older %s", path.name)
                return ResumePoint(path, tuple(reasons), is_own=True)
            self.damaged.add(path.name)
            reasons.append(reason)
        if reasons:
            raise CheckpointError(
                f"checkpoint.resume: auto: expected an intact checkpoint in {self._folder}, found {len(reasons)}, "
                "all damaged:\n" + "\n".join(reasons) + "\n  A run never falls back to fresh weights."
            )
        return None

    def _compare(self, last_save: NamedSave, resume: str, own: list[Path]) -> None:
        """Refuse to begin anew where the run's events name a save; log where the newest one found is older."""
        newest = next(iter(own), None)
        if newest is None and resume != "auto":  # the way out of a full disk: on from a save, to another folder
            newest = locate(resume)
            folders = [address.rpartition("/")[0] for address in (without_passwords(str(newest)), last_save.path)]
            newest = newest if _is_same_place(*folders) else None
        if newest is None:
            begin_anew = "checkpoint.resume=none" if resume == "auto" else "another run.dir"
            raise CheckpointError(
                f"checkpoint.resume: {resume}: the last save that {last_save.events} names is {last_save.path},\n"
                f"  but there is no checkpoint in {self._folder}. Mount or restore that folder, or set checkpoint.dir "
                f"to the one\n  that holds it. To begin anew, without the steps so far: {begin_anew}."
            )
        if (step_of(newest) or 0) < last_save.step and self._backend.process.index == 0:
            log.warning(
                "the newest checkpoint is that of step %d, though %s names a save of step %d: %s",
                *(step_of(newest), last_save.events, last_save.step, last_save.path),
            )

    def _started_from(self, resume: str, own: list[Path]) -> bool:
        """Whether the run that saved its newest own checkpoint started from this address: the same command again."""

        def saved_resume() -> object:
            for path in own:
                try:
                    config: Any = read_manifest(path).config
                except StoreError:
                    raise
                except CheckpointError:  # `_newest` passes over it
                    continue
                return config.get("checkpoint", {}).get("resume")
            return None

        saved = self._on_process_0(saved_resume)
        return saved not in (None, "auto", "none") and _is_same_place(str(saved), without_passwords(resume))

    def _named(self, path: Path, own: list[Path]) -> ResumePoint:
        self._on_process_0(lambda: require_checkpoint(path), f"checkpoint {path.name}")
        reason = self._damage(path)
        if reason is not None:
            raise CheckpointError(reason)
        weights_only = self._settings.load == "weights_only"
        is_own = any(_is_same_place(str(each), str(path)) for each in own)
        start = 0 if weights_only else self._on_process_0(lambda: read_manifest(path).step, f"checkpoint {path.name}")
        newest = next(iter(own), None)
        if newest is not None and (not is_own or (step_of(newest) or 0) > start):
            raise CheckpointError(
                f"checkpoint.resume: from {path} the run would begin at step {start}, but {self._folder} already\n"
                f"  holds {newest.name} of another history. Use checkpoint.resume: auto to resume from that, or "
                "another run.dir."
            )
        return ResumePoint(path, (), is_own, weights_only)

    def _damage(self, path: Path) -> str | None:
        """Why a checkpoint isn't intact, as far as `checkpoint.verify` checks; each process hashes some of the files.

        Raises CheckpointError where the storage doesn't answer: that says nothing about the content.
        """
        subject = f"checkpoint {path.name}"

        def check() -> str | None:
            try:
                with Reader(path) as reader:
                    if self._settings.verify == "full":
                        reader.verify(self._backend.process)
                    elif self._settings.verify == "size":
                        reader.verify_sizes()
            except StoreError:
                raise
            except Exception as error:
                return str(as_checkpoint_error(subject, error))
            return None

        reason = together(self._backend, subject, check)
        return next((each for each in self._backend.gather(reason) if each is not None), None)


def _is_same_place(a: str, b: str) -> bool:
    """Whether two addresses, paths or URLs, name one place."""
    return locate(a).resolve() == locate(b).resolve()
