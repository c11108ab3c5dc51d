"""A run's checkpoints: save one, find the one to resume from, load it.

Process 0 decides and all processes learn its verdict, errors included, so that none waits for one that has given up.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn

from portable_fsdp import __version__
from portable_fsdp.backends.base import Backend, Part, TensorState
from portable_fsdp.checkpoint import format
from portable_fsdp.checkpoint.format import DataPosition, Index, Manifest, WrittenBy
from portable_fsdp.checkpoint.store import Reader, entries_without_pieces, write_pieces
from portable_fsdp.runtime.errors import CheckpointError

log = logging.getLogger("portable_fsdp")

T = TypeVar("T")


class Checkpoints:
    """The checkpoints in `folder`, as one run sees them. Every method is collective.

    The first save removes the debris of interrupted ones: a start that is refused changes nothing.
    """

    def __init__(
        self,
        folder: Path,
        backend: Backend,
        *,
        config: dict[str, Any],
        model_config: dict[str, Any] | None,
        wait_s: float = 1800.0,
    ) -> None:
        """`config`: the resolved config, as JSON knows it. `model_config`: transformers' config as a dict, or None.

        `wait_s`: how long process 0 waits for the others' files in a save.
        """
        self.folder = folder
        self._backend = backend
        self._config = config
        self._model_config = model_config
        self._written_by = WrittenBy(
            device=backend.device_name,
            backend=backend.name,
            process_count=backend.process.count,
            torch=str(torch.__version__),
            portable_fsdp=__version__,
        )
        self._wait_s = wait_s
        self._damaged: set[Path] = set()  # on process 0: those that `find` went past
        self._has_saved = False

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, position: tuple[int, int]) -> Path:
        """Write the state after `step`; returns its folder once it is committed.

        `position`: the data's (epoch, samples consumed in it). Raises `CheckpointError` on all processes if one of
        them could not write or the step is committed already; what was committed before stays as it was.
        """
        final = format.step_folder(self.folder, step)
        attempt = self._on_process_0(f"checkpoint {final.name}", lambda: self._begin(final))
        state = self._backend.state(model, optimizer)
        failure = self._write_part(final, attempt, state)
        try:
            self._on_process_0(
                f"checkpoint {final.name}",
                lambda: self._commit(
                    final, attempt, step, state, DataPosition(epoch=position[0], position=position[1])
                ),
            )
        except CheckpointError as error:
            raise error from failure
        return final

    def find(self, resume: str) -> Path | None:
        """The checkpoint to go on from, or None for a new run. `resume`: `auto`, `none`, or a checkpoint's path.

        auto: the newest whole one; a damaged one is passed over with a warning. Raises `CheckpointError` where a new
        run or an older checkpoint would put a second history beside the one in the folder, and where no whole one is
        left.
        """
        choose = {"none": self._find_none, "auto": self._find_newest}.get(
            resume, lambda: self._find_named(Path(resume))
        )
        return self._on_process_0(f"checkpoints in {self.folder}", choose)

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> Manifest:
        """Overwrite model and optimizer with what `path` holds, after checking that it is theirs, and whole.

        Each process hashes its share of the files. Raises `CheckpointError`, on all processes unless it is the hash
        of a file (`find` has hashed them all before).
        """
        self._on_process_0(f"checkpoint {path.name}", lambda: Reader(path).verify_sizes())
        with Reader(path) as reader:
            reader.check(self._backend.state(model, optimizer))
            reader.verify(self._backend.process)
            self._backend.load_state(model, optimizer, reader.read)
            return reader.manifest

    def _begin(self, final: Path) -> str:
        if final.exists() and final not in self._damaged:
            raise CheckpointError(
                f"checkpoint {final.name}: expected no such step in {self.folder}, found it committed.\n"
                "  A run commits a step once: use checkpoint.resume: auto, or another run.dir."
            )
        if not self._has_saved:
            format.remove_debris(self.folder)
            self._has_saved = True
        return format.begin(final)

    def _write_part(self, final: Path, attempt: str, state: dict[str, TensorState]) -> Exception | None:
        """Write this process's files and its index; returns what went wrong, after putting it into the index."""
        folder, process = format.temporary_of(final), self._backend.process.index
        if not folder.is_dir():
            raise CheckpointError(
                f"checkpoint {final.name}: expected the folder {folder} that process 0 made, process {process} finds\n"
                "  none: run.dir must lie on a file system that all processes share."
            )
        try:
            tensors, files = write_pieces(folder, state, process)
            format.write_index(folder, Index(attempt=attempt, process=process, tensors=tensors, files=files))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            format.write_index(folder, Index(attempt=attempt, process=process, error=reason))
            return error
        return None

    def _commit(
        self, final: Path, attempt: str, step: int, state: dict[str, TensorState], position: DataPosition
    ) -> None:
        indexes = format.collect(format.temporary_of(final), attempt, self._backend.process.count, self._wait_s)
        manifest = Manifest(
            format_version=1,
            step=step,
            config=self._config,
            model_config=self._model_config,
            data=position,
            tensors=format.merge(entries_without_pieces(state), indexes),
            files={file: entry for index in indexes for file, entry in index.files.items()},
            written_by=self._written_by,
        )
        format.set_aside(final)
        format.commit(final, manifest, indexes)

    def _find_none(self) -> None:
        committed = format.committed_steps(self.folder)
        if committed:
            raise CheckpointError(
                f"checkpoint.resume: none: expected no checkpoint in {self.folder}, found {committed[0].name}"
                + (f" and {len(committed) - 1} older" if len(committed) > 1 else "")
                + ".\n  Use checkpoint.resume: auto to go on from it, or another run.dir for a new run."
            )

    def _find_newest(self) -> Path | None:
        reasons: list[str] = []
        for path in format.committed_steps(self.folder):
            try:
                _require_whole(path)
            except CheckpointError as error:
                self._damaged.add(path)
                reasons.append(str(error))
                continue
            for reason in reasons:
                log.warning("passed over a damaged checkpoint: %s", reason)
            if reasons:
                log.warning("resuming from the older %s", path.name)
            return path
        if reasons:
            raise CheckpointError(
                f"checkpoint.resume: auto: expected a whole checkpoint in {self.folder}, found {len(reasons)}, "
                "all damaged:\n"
                + "\n".join(reasons)
                + "\n  Nothing was started: a run never falls back to fresh weights."
            )
        return None

    def _find_named(self, path: Path) -> Path:
        if not path.is_dir():
            raise CheckpointError(
                f"checkpoint.resume: expected auto, none, or a checkpoint's folder, found no such folder: {path}\n"
                "  Name one of run.dir's, as runs/run/checkpoints/step-00000500. Nothing was started."
            )
        manifest = _require_whole(path)
        newest = next(iter(format.committed_steps(self.folder)), None)
        if newest is not None and (format.step_of(newest) or 0) > manifest.step:
            raise CheckpointError(
                f"checkpoint.resume: {path} is step {manifest.step}, but {self.folder} already holds {newest.name}.\n"
                "  Use checkpoint.resume: auto to go on from that, or another run.dir."
            )
        return path

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
        if failure is not None and not isinstance(failure, OSError):
            raise failure
        if message is not None:
            raise CheckpointError(message) from failure
        return cast(T, result)


def _require_whole(path: Path) -> Manifest:
    """Hashes every file of it. Raises `CheckpointError`."""
    with Reader(path) as reader:
        reader.verify(Part(0, 1))
        return reader.manifest


def _message(subject: str, error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{subject}: {type(error).__name__}: {error}"
