"""What follows a step, the whole table; and how many updates a run has, as set or as its epochs come to."""

import pytest

from portable_fsdp.checkpoint.format import Evaluated
from portable_fsdp.config.schema import Config, Model, Optim, Train
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.train.build import total_steps
from portable_fsdp.train.control import Decision, Limits, Votes, decide

LIMITS = Limits(last=10, save_every=4, eval_every=3, patience=2)
SELDOM = Limits(last=10, save_every=None, eval_every=None, patience=None)
SAMPLES = Limits(last=10, save_every=None, eval_every=None, patience=None, sample_every=4)
STOP, SAVE, NONE = Votes(stop=True), Votes(save=True), Votes()


def history(best_step: int, without: int) -> Evaluated:
    return Evaluated(rows="", step=9, loss=2.0, best_step=best_step, best_loss=1.0, without_improvement=without)


@pytest.mark.parametrize(
    ("limits", "step", "votes", "evaluations", "expected"),
    [
        (LIMITS, 1, NONE, None, Decision(evaluate=False, save=False, end=None)),
        (LIMITS, 3, NONE, None, Decision(evaluate=True, save=False, end=None)),
        (LIMITS, 3, NONE, history(3, 0), Decision(evaluate=True, save=True, end=None)),  # the best is saved
        (LIMITS, 3, NONE, history(1, 1), Decision(evaluate=True, save=False, end=None)),
        (LIMITS, 3, NONE, history(1, 2), Decision(evaluate=True, save=True, end="no improvement")),
        (LIMITS, 4, NONE, history(1, 1), Decision(evaluate=False, save=True, end=None)),
        (LIMITS, 4, STOP, None, Decision(evaluate=False, save=True, end="stopped")),
        (LIMITS, 5, SAVE, None, Decision(evaluate=False, save=True, end=None)),
        (LIMITS, 6, STOP, None, Decision(evaluate=False, save=True, end="stopped")),  # a stop skips the evaluation
        (LIMITS, 10, NONE, None, Decision(evaluate=True, save=True, end="finished")),  # the last is always evaluated
        (LIMITS, 10, STOP, history(1, 2), Decision(evaluate=False, save=True, end="stopped")),
        (LIMITS, 10, NONE, history(1, 2), Decision(evaluate=True, save=True, end="no improvement")),
        (SELDOM, 9, NONE, history(1, 9), Decision(evaluate=False, save=False, end=None)),
        (SELDOM, 10, NONE, None, Decision(evaluate=False, save=True, end="finished")),
        (SAMPLES, 4, NONE, None, Decision(evaluate=False, save=False, end=None, sample=True)),
        (SAMPLES, 4, STOP, None, Decision(evaluate=False, save=True, end="stopped")),
        (SAMPLES, 10, NONE, None, Decision(evaluate=False, save=True, end="finished", sample=True)),
    ],
)
def test_what_follows_a_step(
    limits: Limits, step: int, votes: Votes, evaluations: Evaluated | None, expected: Decision
) -> None:
    decision = decide(limits, step, votes, evaluations)
    assert decision == expected
    assert decision.reads_metrics == (expected.evaluate or expected.sample or expected.save)


def test_votes_of_two_steps_count_together() -> None:
    assert Votes(stop=True, save=True) == STOP | SAVE
    assert NONE | NONE == NONE


def config(**train: float) -> Config:
    return Config(model=Model(pretrained="folder"), train=Train.model_validate(train))


def test_steps_are_as_set_and_epochs_are_whole_steps() -> None:
    assert total_steps(config(steps=10), rows=1) == 10
    assert total_steps(config(epochs=0.29, global_batch=1), rows=100) == 29  # 28.999... in binary
    assert total_steps(config(epochs=2, global_batch=8), rows=15) == 3
    with pytest.raises(ConfigError, match=r"train\.epochs: expected at least one step of train\.global_batch=8"):
        total_steps(config(epochs=1, global_batch=8), rows=7)


def test_a_schedule_that_does_not_fit_is_refused() -> None:
    long = config(epochs=1, global_batch=1).model_copy(update={"optim": Optim(warmup_steps=6)})
    assert total_steps(long, rows=6) == 6
    with pytest.raises(ConfigError, match=r"optim\.warmup_steps: expected at most 5"):
        total_steps(long, rows=5)
