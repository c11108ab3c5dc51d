"""What follows a step: a pure function. All processes have the same values, and so come to the same decision."""

from dataclasses import dataclass
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
