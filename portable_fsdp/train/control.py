"""What follows a step: a pure function of values that all processes have, and what requests a save at other times."""

import logging
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from portable_fsdp.checkpoint.format import Evaluated
from portable_fsdp.observe.callbacks import Outcome


@dataclass(frozen=True)
class Limits:
    """Intervals and ends of a run, in steps; None: never."""

    last: int
    save_every: int | None
    eval_every: int | None
    patience: int | None  # evaluations
    sample_every: int | None = None

    def evaluates(self, step: int) -> bool:
        """Whether an evaluation follows `step`."""
        return self.eval_every is not None and (step >= self.last or step % self.eval_every == 0)


class Votes(NamedTuple):
    """What any process requested with a step."""

    stop: bool = False
    save: bool = False

    def __or__(self, other: "Votes") -> "Votes":
        return Votes(self.stop or other.stop, self.save or other.save)


@dataclass(frozen=True)
class Decision:
    """What follows a step, in this order."""

    evaluate: bool
    save: bool
    end: Outcome | None  # "stopped", "no improvement" or "finished"
    sample: bool = False  # before the save

    @property
    def reads_metrics(self) -> bool:
        """Whether the metrics of the step itself must be read first: nothing that isn't finite is ever saved."""
        return self.evaluate or self.sample or self.save


def decide(limits: Limits, step: int, votes: Votes, history: Evaluated | None) -> Decision:
    """Decide what follows `step`; ask again once its votes have been read, and once it has been evaluated.

    A stop request goes first: it skips evaluation and samples, and saves. The last step is saved, and so is the best.
    """
    is_last = step >= limits.last
    end: Outcome | None = "finished" if is_last else None
    if votes.stop:
        end = "stopped"
    elif is_patience_over(limits, history):
        end = "no improvement"
    is_best = history is not None and history.best_step == step
    return Decision(
        evaluate=not votes.stop and limits.evaluates(step),
        save=votes.save or is_best or end is not None or _is_due(step, limits.save_every),
        end=end,
        sample=not votes.stop
        and limits.sample_every is not None
        and (end is not None or _is_due(step, limits.sample_every)),
    )


def is_patience_over(limits: Limits, history: Evaluated | None) -> bool:
    """Early stopping: `train.patience` evaluations in a row brought no improvement."""
    return limits.patience is not None and history is not None and history.without_improvement >= limits.patience


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


log = logging.getLogger("portable_fsdp")


class _Request(NamedTuple):
    """Tells a file `SAVE` from one that is made (or touched) later."""

    inode: int
    modified_ns: int


class SaveTriggers:
    """Whether a save is due: `every_minutes` after the last one, or because of the file `SAVE` (`touch RUN/SAVE`).

    One file makes one save. Its commit, perhaps in the background, deletes the file.
    """

    def __init__(self, folder: Path, every_minutes: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds that only grow."""
        self._file = folder / "SAVE"
        self._every_s = None if every_minutes is None else 60 * every_minutes
        self._clock = clock
        self._last = clock()
        self._taken: tuple[int, _Request] | None = None  # step of the save that answers it, and the request
        self._has_warned = False

    @property
    def due(self) -> bool:
        """Whether to save soon. True until `began`."""
        by_clock = self._every_s is not None and self._clock() - self._last >= self._every_s
        request = self._request()
        return by_clock or (request is not None and (self._taken is None or self._taken[1] != request))

    def began(self, step: int) -> None:
        """A save of `step` has begun, for whatever reason; it answers earlier requests."""
        self._last = self._clock()
        request = self._request()
        if request is not None:
            self._taken = step, request

    def committed(self, steps: Iterable[int]) -> None:
        """These were committed, which process 0 alone knows: it deletes the file that they answer."""
        if self._taken is None or not any(step >= self._taken[0] for step in steps):
            return
        if self._request() != self._taken[1]:  # gone already, or made again
            self._taken = None
            return
        try:
            self._file.unlink()
            self._taken = None
        except OSError as error:  # no reason to end a run, nor to save again
            log.warning("%s: saved, but the file can't be deleted: %s", self._file, error.strerror)

    def _request(self) -> _Request | None:
        try:
            status = self._file.lstat()
        except OSError:
            return None
        if stat.S_ISREG(status.st_mode):
            return _Request(status.st_ino, status.st_mtime_ns)
        if not self._has_warned:
            self._has_warned = True
            log.warning("%s: expected a plain file, which requests a save; ignoring what is there", self._file)
        return None
