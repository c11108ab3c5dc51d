"""Which checkpoint a run goes on from. All processes look together, and come to one verdict."""

import logging
import uuid
from pathlib import Path
from typing import Any, NamedTuple

from portable_fsdp.backends.base import Backend
from portable_fsdp.checkpoint import commit, storage
from portable_fsdp.checkpoint.format import committed_steps, read_manifest, require_checkpoint, step_of
from portable_fsdp.checkpoint.store import Reader
from portable_fsdp.checkpoint.together import as_checkpoint_error, on_process_0, raise_together
from portable_fsdp.config import schema
from portable_fsdp.runtime.errors import CheckpointError, StoreError

log = logging.getLogger("portable_fsdp")

_PROBE = ".portable_fsdp-"  # begins the name of a file by which processes find that they share the folder


class ResumePoint(NamedTuple):
    """A checkpoint that was found whole, as far as `checkpoint.verify` asked."""

    path: Path
    passed_over: tuple[str, ...]  # why newer ones were not taken
    is_own: bool  # of this run's folder
    weights_only: bool = False


class Search:
    """Looks among the checkpoints in `folder`, or at the one that the config names."""

    def __init__(self, folder: Path, backend: Backend, settings: schema.Checkpoint, run: str) -> None:
        self.damaged: set[str] = set()  # names of those that were passed over
        self._folder = folder
        self._backend = backend
        self._settings = settings
        self._run = run

    def find(self, resume: str) -> ResumePoint | None:
        """As `Checkpoints.find`."""
        self._require_shared()
        own = [self._folder / name for name in on_process_0(self._backend, f"checkpoints in {self._folder}", self._own)]
        if resume == "none" and own:
            raise CheckpointError(
                f"checkpoint.resume: none: expected no checkpoint in {self._folder}, found {own[0].name}"
                + (f" and {len(own) - 1} older" if len(own) > 1 else "")
                + ".\n  Use checkpoint.resume: auto to go on from it, or another run.dir for a new run."
            )
        if resume == "none":
            return None
        if resume == "auto" or (own and self._began_at(resume, own)):
            return self._newest(own)
        return self._named(storage.locate(resume), own)

    # ------------------------------------------------------------------------------------------------- the folder

    def _require_shared(self) -> None:
        """Refuse a folder that this process can't write to, or that is another one on another host; leaves nothing."""
        subject = f"checkpoints in {self._folder}"
        probed = self._probed
        probe = on_process_0(self._backend, subject, lambda: self._write_probe(probed))
        failure: Exception | None = None
        try:
            if not storage.exists(probed / probe):
                failure = CheckpointError(
                    f"{subject}: expected a folder that all processes share, found that process\n"
                    f"  {self._backend.process.index} doesn't see what process 0 writes there. Is it local to each "
                    "host?\n  Set checkpoint.dir (or run.dir) to a shared folder, or to an object store (s3://, gs://)."
                )
        except Exception as error:
            failure = error
        try:
            raise_together(self._backend, subject, failure)
        finally:
            on_process_0(self._backend, subject, lambda: storage.remove(probed / probe))

    @property
    def _probed(self) -> Path:
        """The folder itself, or the nearest above it that exists."""
        if storage.is_object_store(self._folder):
            return self._folder
        return next(path for path in (self._folder, *self._folder.absolute().parents) if path.exists())

    def _write_probe(self, folder: Path) -> str:
        name = _PROBE + uuid.uuid4().hex
        try:
            for old in storage.names(folder):
                if old.startswith(_PROBE):  # of a start that was killed
                    storage.remove(folder / old)
            storage.write(folder / name, [b""], durable=False)
        except OSError as error:
            raise CheckpointError(
                f"checkpoints in {self._folder}: expected a folder that can be written to, found: {error}\n"
                "  Set checkpoint.dir or run.dir to one. Nothing was started."
            ) from None
        return name

    def _own(self) -> list[str]:
        commit.warn_of_others(self._folder, self._run)
        return [path.name for path in committed_steps(self._folder)]

    # --------------------------------------------------------------------------------------------- the checkpoint

    def _newest(self, own: list[Path]) -> ResumePoint | None:
        reasons: list[str] = []
        for path in own:
            reason = self._damage(path)
            if reason is None:
                for one in reasons:
                    log.warning("passed over a damaged checkpoint: %s", one)
                if reasons:
                    log.warning("resuming from the older %s", path.name)
                return ResumePoint(path, tuple(reasons), is_own=True)
            self.damaged.add(path.name)
            reasons.append(reason)
        if reasons:
            raise CheckpointError(
                f"checkpoint.resume: auto: expected a whole checkpoint in {self._folder}, found {len(reasons)}, "
                "all damaged:\n"
                + "\n".join(reasons)
                + "\n  Nothing was started: a run never falls back to fresh weights."
            )
        return None

    def _began_at(self, resume: str, own: list[Path]) -> bool:
        """Whether the run that saved the newest of its own was started from this address: the same command again."""

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

        saved = on_process_0(self._backend, f"checkpoints in {self._folder}", saved_resume)
        return saved not in (None, "auto", "none") and _same(str(saved), resume)

    def _named(self, path: Path, own: list[Path]) -> ResumePoint:
        on_process_0(self._backend, f"checkpoint {path.name}", lambda: require_checkpoint(path))
        reason = self._damage(path)
        if reason is not None:
            raise CheckpointError(reason)
        weights_only = self._settings.load == "weights_only"
        is_own = any(_same(str(one), str(path)) for one in own)
        step = on_process_0(self._backend, f"checkpoint {path.name}", lambda: read_manifest(path).step)
        begins_at = 0 if weights_only else step
        newest = next(iter(own), None)
        if newest is not None and (not is_own or (step_of(newest) or 0) > begins_at):
            raise CheckpointError(
                f"checkpoint.resume: from {path} the run would begin at step {begins_at}, but {self._folder} already\n"
                f"  holds {newest.name} of another history. Use checkpoint.resume: auto to go on from that, or another "
                "run.dir."
            )
        return ResumePoint(path, (), is_own, weights_only)

    def _damage(self, path: Path) -> str | None:
        """Why a checkpoint isn't whole, as far as `checkpoint.verify` asks; each process hashes some of the files.

        Raises CheckpointError where the storage doesn't answer, which says nothing of what lies there.
        """
        reason: str | None = None
        unanswered: StoreError | None = None
        try:
            with Reader(path) as reader:
                if self._settings.verify == "full":
                    reader.verify(self._backend.process)
                elif self._settings.verify == "size":
                    reader.verify_sizes()
        except StoreError as error:
            unanswered = error
        except Exception as error:
            reason = str(as_checkpoint_error(f"checkpoint {path.name}", error))
        raise_together(self._backend, f"checkpoint {path.name}", unanswered)
        return next((one for one in self._backend.gather(reason) if one is not None), None)


def _same(one: str, other: str) -> bool:
    """Whether two addresses, paths or URLs, name one place."""
    paths = storage.locate(one), storage.locate(other)
    if any(storage.is_object_store(path) for path in paths):
        return paths[0] == paths[1]
    return paths[0].resolve() == paths[1].resolve()
