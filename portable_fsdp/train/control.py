"""Decide what follows a step, a pure function of values that all processes have; detect requests for a save; warn where
a stopped run may have no time for one."""

import logging
import math
import stat
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from portable_fsdp.checkpoint.manifests import Evaluated, Saved
from portable_fsdp.observe.callbacks import Callback, Outcome, RunStart, StepEnd
from portable_fsdp.observe.run_files import measured_seconds


@dataclass(frozen=True)
class Limits:
    """Intervals and end of a run, in steps; None: never."""

    last: int
    save_every: int | None
    eval_every: int | None
    patience: int | None  # evaluations
    sample_every: int | None = None

    def evaluates(self, step: int) -> bool:
        """Return whether an evaluation follows `step`."""
        return self.eval_every is not None and (step >= self.last or step % self.eval_every == 0)


class Votes(NamedTuple):
    """Requests that any process made with a step."""

    stop: bool = False
    save: bool = False

    def __or__(self, other: "Votes") -> "Votes":
        return Votes(self.stop or other.stop, self.save or other.save)


@dataclass(frozen=True)
class Decision:
    """The actions after a step, in this order."""

    evaluate: bool
    save: bool
    end: Outcome | None  # "stopped", "no improvement" or "finished"
    sample: bool = False  # runs before the save

    @property
    def reads_metrics(self) -> bool:
        """Whether to read the metrics of the step itself first: values that aren't finite are never saved."""
        return self.evaluate or self.sample or self.save


def decide(limits: Limits, step: int, votes: Votes, history: Evaluated | None) -> Decision:
    """Decide what follows `step`; call again after reading its votes, and after its evaluation. A stop request has
    priority: it skips evaluation and samples, and saves. The last and the best step are saved."""
    end: Outcome | None = "finished" if step >= limits.last else None
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
    """Return whether to stop early: `train.patience` evaluations in a row without improvement."""
    return limits.patience is not None and history is not None and history.without_improvement >= limits.patience


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


log = logging.getLogger("portable_fsdp")

_Request = tuple[int, int]
"""Inode and time (ns) of a file `SAVE`; a file created or touched later has others."""


class SaveTriggers:
    """Triggers of saves: `every_minutes` since the last one, or the file `SAVE` (`touch RUN/SAVE`), which causes one
    save. The commit of that save, perhaps in the background, deletes the file."""

    def __init__(self, folder: Path, every_minutes: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: monotonic seconds."""
        self._file, self._clock, self._last = folder / "SAVE", clock, clock()
        self._every_s = math.inf if every_minutes is None else 60 * every_minutes
        self._taken: tuple[int, _Request] | None = None  # step of the save that answers it, and the request
        self._has_warned = False

    @property
    def due(self) -> bool:
        """Whether a save is due. True until `began` is called."""
        request = self._request()
        is_new = request is not None and (self._taken is None or self._taken[1] != request)
        return is_new or self._clock() - self._last >= self._every_s

    def began(self, step: int) -> None:
        """Record that a save of `step` began, for any reason; it fulfils earlier requests."""
        self._last = self._clock()
        if (request := self._request()) is not None:
            self._taken = step, request

    def committed(self, steps: Iterable[int]) -> None:
        """Record that `steps` were committed; only process 0 knows it and deletes the file `SAVE` they fulfil."""
        if self._taken is None or not any(step >= self._taken[0] for step in steps):
            return
        try:
            if self._request() == self._taken[1]:  # else already deleted, or created again
                self._file.unlink()
            self._taken = None
        except OSError as error:  # not a reason to end the run or to save again
            log.warning("%s: saved, but the file can't be deleted: %s", self._file, error.strerror)

    def _request(self) -> _Request | None:
        try:
            status = self._file.lstat()
        except OSError:
            return None
        if stat.S_ISREG(status.st_mode):
            return status.st_ino, status.st_mtime_ns
        if not self._has_warned:
            self._has_warned = True
            log.warning("%s: not a regular file; ignoring it. To request a save, remove it and touch it", self._file)
        return None


_STEPS = 4
"""A request travels with the next step. All processes read it a step later, while the device computes one more."""


class Grace(Callback):
    """Warns once if the grace period is too short: at the start if an earlier start measured a save."""

    _grace_s, _save_s, _has_warned = 0.0, 0.0, False

    def on_start(self, start: RunStart) -> None:
        self._grace_s, self._first = start.config.run.grace_s, start.step + 1
        self._steps = deque[float](maxlen=20)
        if start.resumed is not None:
            self._steps.extend(measured_seconds(start.folder / "metrics.jsonl", None))
            self._save_s = max(measured_seconds(start.folder / "events.jsonl", "save")[-3:], default=0.0)
        self._check()

    def on_step(self, step: StepEnd) -> None:
        if step.step > self._first:  # the first one compiles
            self._steps.append(step.seconds)

    def on_save(self, save: Saved) -> None:
        self._save_s = save.seconds
        self._check()

    def _check(self) -> None:
        step_s = statistics.median(self._steps or [0.0])
        needed_s = self._save_s + _STEPS * step_s
        if self._save_s and needed_s > self._grace_s and not self._has_warned:
            self._has_warned = True
            log.warning(
                f"a stop request may come too late: a save takes {self._save_s:.1f} s and a step {step_s:.2f} s, so "
                f"{_STEPS} steps and a save {needed_s:.1f} s, more than run.grace_s={self._grace_s:g} s.\n"
                "  Raise your platform's grace period and run.grace_s, or rely on the saves of checkpoint.every."
            )

    def before_last_save(self, requested_at: float | None, saves: int, newest: Path | None) -> None:
        """Warn if the time left seems too short for `saves` saves in a row. `requested_at`: by time.monotonic()."""
        left_s = self._grace_s - (0.0 if requested_at is None else time.monotonic() - requested_at)
        if self._save_s and self._save_s * saves > left_s:  # unknown on other processes than 0
            under_way = ", after one that is under way" if saves > 1 else ""
            saved = newest.name if newest else "none"
            log.warning(
                f"the save may take {self._save_s:.1f} s{under_way}, but {max(0.0, left_s):.1f} s of run.grace_s are "
                f"left. Newest checkpoint until then: {saved}"
            )
