"""What follows a step, the whole table; saves besides those every n steps; the number of updates of a run."""

import logging
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from portable_fsdp.checkpoint.manifests import Evaluated
from portable_fsdp.config.schema import Config, Model, Optim, Train
from portable_fsdp.runtime.errors import EXIT_FAILED, ConfigError
from portable_fsdp.runtime.signals import Stopped
from portable_fsdp.train import loop
from portable_fsdp.train.build import total_steps
from portable_fsdp.train.control import Decision, Limits, SaveTriggers, Votes, decide

LIMITS = Limits(last=10, save_every=4, eval_every=3, patience=2)
SELDOM = Limits(last=10, save_every=None, eval_every=None, patience=None)
SAMPLES = Limits(last=10, save_every=None, eval_every=None, patience=None, sample_every=4)
STOP, SAVE, NONE = Votes(stop=True), Votes(save=True), Votes()


def history(best_step: int, without: int) -> Evaluated:
    return Evaluated(rows="", step=9, loss=2.0, best_step=best_step, best_loss=1.0, without_improvement=without)


def test_what_follows_a_step() -> None:
    for limits, step, votes, evaluations, expected in (
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
    ):
        decision = decide(limits, step, votes, evaluations)
        assert decision == expected, (limits, step, votes, evaluations)
        assert decision.reads_metrics == (expected.evaluate or expected.sample or expected.save)
    assert Votes(stop=True, save=True) == STOP | SAVE  # of two steps
    assert NONE | NONE == NONE


def config(**train: float) -> Config:
    return Config(model=Model(pretrained="folder"), train=Train.model_validate(train))


def test_steps_are_as_set_and_epochs_are_whole_steps() -> None:
    assert total_steps(config(steps=10), rows=1) == 10
    assert total_steps(config(epochs=0.29, global_batch=1), rows=100) == 29  # 28.999... in binary
    assert total_steps(config(epochs=2, global_batch=8), rows=15) == 3
    with pytest.raises(ConfigError, match=r"train\.epochs: expected at least one step of train\.global_batch=8"):
        total_steps(config(epochs=1, global_batch=8), rows=7)
    long = config(epochs=1, global_batch=1).model_copy(update={"optim": Optim(warmup_steps=6)})
    with pytest.raises(ConfigError, match=r"optim\.warmup_steps: expected at most 5"):
        total_steps(long, rows=5)


def test_a_stop_while_the_engine_opens_is_one_plain_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torch_xla takes seconds to import; the engine configures the log."""
    log = logging.getLogger("portable_fsdp")
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "propagate", True)
    monkeypatch.setattr(loop, "open_backend", Mock(side_effect=Stopped("SIGTERM")))
    assert loop.train(config(steps=1), device="cpu") == EXIT_FAILED
    assert capsys.readouterr().err == "stopped before the first step (SIGTERM): nothing to save\n"


def test_minutes_are_counted_from_the_last_save(tmp_path: Path) -> None:
    clock = Mock(return_value=1e6)
    triggers = SaveTriggers(tmp_path, 1.5, clock)
    for seconds, is_due in ((0, False), (89, False), (90, True), (91, True)):  # until it is answered
        clock.return_value = 1e6 + seconds
        assert triggers.due == is_due
    triggers.began(1)
    assert not triggers.due
    clock.return_value += 90
    assert triggers.due


def test_a_file_asks_for_one_save_and_goes_when_that_is_committed(tmp_path: Path) -> None:
    file, triggers = tmp_path / "SAVE", SaveTriggers(tmp_path, None)
    absent = SaveTriggers(tmp_path / "absent", None)
    absent.began(1)
    absent.committed([1])
    assert not triggers.due | absent.due
    file.touch()
    assert triggers.due
    triggers.committed([4])  # began before it was made
    assert triggers.due
    triggers.began(5)
    assert not triggers.due
    triggers.committed([])
    triggers.committed([4])
    assert file.exists()
    assert not triggers.due
    assert SaveTriggers(tmp_path, None).due  # of the next run, where this one ends before the commit
    triggers.committed([5])
    assert not file.exists()
    assert not triggers.due


def test_a_request_that_is_made_again_is_answered_too(tmp_path: Path) -> None:
    """Touched while it is answered; or taken back, and made again after the commit."""
    file, triggers = tmp_path / "SAVE", SaveTriggers(tmp_path, None)
    file.touch()
    triggers.began(5)
    os.utime(file, ns=(1, 1))  # as `touch` does, to another time
    assert triggers.due
    triggers.committed([5])
    assert file.exists()
    assert triggers.due
    triggers.began(6)
    file.unlink()
    triggers.committed([6])
    file.touch()
    assert triggers.due


def test_a_file_that_can_not_be_deleted_makes_one_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Path, "unlink", Mock(side_effect=PermissionError(1, "Operation not permitted")))
    (tmp_path / "SAVE").touch()
    triggers = SaveTriggers(tmp_path, None)
    triggers.began(1)
    triggers.committed([1])
    assert not triggers.due
    assert "the file can't be deleted: Operation not permitted" in caplog.text
    monkeypatch.undo()
