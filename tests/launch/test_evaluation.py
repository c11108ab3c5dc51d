"""Whole runs that evaluate: what they write, what they keep, and when they end."""

import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cli import PYTHON, committed, events, finish, launch, losses
from safetensors.torch import load_file

from portable_fsdp.backends.contract import Batch
from portable_fsdp.checkpoint.manifests import read_manifest
from portable_fsdp.observe.run_files import read_jsonl
from portable_fsdp.train.evaluate import Evaluation, Evaluator

DATA = ("data.source=text", "data.path=train.txt", "data.eval_split=held.txt", "checkpoint.every=null")
FLAGS = ("--device=cpu", "--config=tiny.yaml", *DATA, "optim.lr=0.01", "optim.warmup_steps=0", "train.eval_every=1")


@pytest.fixture(autouse=True)
def texts(folder: Path) -> None:
    """What is trained on makes what is held out less likely with every step."""
    (folder / "train.txt").write_text("a" * 4000)
    (folder / "held.txt").write_text("z" * 400)


def evaluations(run: Path) -> list[int]:
    return [row["step"] for row in read_jsonl(run / "metrics.jsonl") if "eval_loss" in row]


def test_rows_events_and_console_tell(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And an evaluation takes no time of a step."""
    evaluate = Evaluator.__call__

    def slow(self: Evaluator, *args: object) -> Evaluation | None:
        time.sleep(3)
        return evaluate(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Evaluator, "__call__", slow)
    assert launch(*FLAGS, "train.eval_every=4", "train.steps=5") == 0
    message = capsys.readouterr().err
    rows = read_jsonl(folder / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert evaluations(folder / "run") == [4, 5]  # and the last one
    for row, event in zip(rows[3:], events(folder / "run", "evaluation"), strict=True):
        assert (event["step"], event["loss"], event["tokens"]) == (row["step"], row["eval_loss"], row["eval_tokens"])
        assert event["perplexity"] == row["eval_perplexity"] == pytest.approx(2.718281828 ** row["eval_loss"])
        assert row["eval_tokens"] == 12 * 32
        assert event["seconds"] >= 3
        assert f"step: {row['step']}  eval_loss: {row['eval_loss']:.4f}  perplexity: " in message
    assert max(row["seconds"] for row in rows[3:]) < 3


@pytest.mark.proof
def test_parts_of_a_model_evaluate_and_sample_as_the_whole(folder: Path) -> None:
    samples = ("train.sample_every=2", 'train.sample_prompts=["aa"]', "train.sample_tokens=4", "train.steps=2")
    runs = {"whole": [], "parts": ["--num_devices=2", "sharding.tensor=2"]}
    for name, more in runs.items():
        finish([*PYTHON, *FLAGS, *samples, *more, f"run.dir={name}"], folder)
    whole, parts = (read_jsonl(folder / name / "metrics.jsonl") for name in runs)
    assert [row["eval_loss"] for row in parts] == pytest.approx([row["eval_loss"] for row in whole], rel=1e-5)
    texts = [[row["text"] for row in read_jsonl(folder / name / "samples.jsonl")] for name in runs]
    assert texts[0] == texts[1]


def test_before_the_first_step(folder: Path) -> None:
    """It tells the loss of the initial weights, on the same rows, and counts for nothing else."""
    words = (*FLAGS, "train.eval_on_start=true", "train.eval_every=2", "train.steps=2")
    assert launch(*words) == 0
    before, after = events(folder / "run", "evaluation")
    assert (before["step"], before["is_best"], after["step"], after["is_best"]) == (0, False, 2, True)
    assert before["tokens"] == after["tokens"]
    assert before["loss"] == pytest.approx(math.log(256), abs=1)
    assert committed(folder / "run") == [2]
    assert launch(*words, "train.steps=3", "checkpoint.allow=[train.steps]") == 0  # resumed: no first step
    assert [event["step"] for event in events(folder / "run", "evaluation")] == [0, 2, 3]


def test_the_best_is_saved_kept_and_exported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without evaluations the newest is exported."""
    assert launch(*FLAGS, "checkpoint.keep=1", "checkpoint.export=true") == 0
    assert committed(folder / "run") == [1, 6]
    evaluation = read_manifest(folder / "run/checkpoints/step-00000006").evaluation
    assert evaluation is not None
    assert (evaluation.best_step, evaluation.without_improvement, evaluation.step) == (1, 5, 6)
    assert "step-00000001 (the best by its evaluation: eval_loss " in capsys.readouterr().err
    [best] = (folder / "run/checkpoints/step-00000001/model").glob("*.safetensors")
    exported, saved = load_file(folder / "run/export/model.safetensors"), load_file(best)
    assert torch.equal(exported["model.norm.weight"], saved["model.norm.weight"])

    assert launch(*FLAGS, "run.dir=new", "train.eval_every=null", "checkpoint.export=true") == 0
    message = capsys.readouterr().err
    assert "exported new/checkpoints/step-00000006 to new/export\n" in message
    assert "data.eval_split: 12 rows are held out but not used; set train.eval_every" in message


def test_a_run_ends_when_nothing_improves_and_stays_ended(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where a process ended between the evaluations. Other rows begin anew."""
    run = folder / "run"
    assert launch(*FLAGS, "train.patience=2", "train.stop_at=2") == 0
    assert launch(*FLAGS, "train.patience=2") == 0
    assert (len(losses(run)), committed(run)) == (3, [1, 2, 3])
    [stop] = events(run, "stop")
    assert (stop["step"], stop["reason"]) == (3, "no improvement in 2 evaluations")
    assert not (run / "STOPPED").exists()
    capsys.readouterr()
    assert launch(*FLAGS, "train.patience=2") == 0
    assert "nothing left to train (no improvement in 2 evaluations)" in capsys.readouterr().err
    assert len(losses(run)) == 3
    assert launch(*FLAGS, "train.patience=4") == 0
    assert len(losses(run)) == 5
    assert launch(*FLAGS, "train.patience=2", "train.stop_at=2", "run.dir=anew") == 0
    (folder / "held.txt").write_text("y" * 400)
    assert launch(*FLAGS, "train.patience=2", "run.dir=anew") == 0
    assert "the evaluation data changed; discarding the previous best (step 1)" in capsys.readouterr().err
    assert len(losses(folder / "anew")) == 5  # the third is the first of those


def test_an_evaluation_that_a_stop_ends_is_made_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stops, in the evaluations of steps 2 and 4: history, best and the end are those of an uninterrupted run."""
    words, batches = (*FLAGS, "train.eval_every=2", "train.patience=1", "checkpoint.keep=1"), Evaluator._batches

    def stopped_in(number: int) -> int:
        """The exit code of a start that gets a SIGTERM in this one of its evaluations."""
        begun: list[int] = []

        def interrupted(self: Evaluator, *args: object) -> Iterator[Batch]:
            begun.append(1)
            if len(begun) == number:
                os.kill(os.getpid(), signal.SIGTERM)
            yield from batches(self, *args)  # type: ignore[arg-type]

        with monkeypatch.context() as patched:
            patched.setattr(Evaluator, "_batches", interrupted)
            return launch(*words)

    assert [stopped_in(1), stopped_in(2)] == [143, 143]
    assert committed(folder / "run") == [2, 4]
    assert (folder / "run" / "STOPPED").exists()
    assert [launch(*words), launch(*words, "run.dir=alone")] == [0, 0]
    runs = folder / "run", folder / "alone"
    one, other = (read_manifest(run / "checkpoints/step-00000004").evaluation for run in runs)
    assert one == other
    for run in runs:
        assert committed(run) == [2, 4]
        assert events(run, "stop")[-1]["reason"] == "no improvement in 1 evaluations"
        assert evaluations(run) == [2, 4] == [event["step"] for event in events(run, "evaluation")]
    rows, uninterrupted = (read_jsonl(run / "metrics.jsonl") for run in runs)
    for name in (name for name in uninterrupted[1] if name.startswith("eval_")):
        assert [row.get(name) for row in rows] == [row.get(name) for row in uninterrupted]
    assert launch(*words) == 0  # and once is enough
    assert len(events(folder / "run", "evaluation")) == 2


def test_the_last_evaluation_is_made_up_too_and_a_loss_that_is_not_finite_ends_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though a start that finds the last step saved has nothing else to do."""
    words, last = (*FLAGS, "train.eval_every=6", "run.dir=last"), folder / "last"
    with monkeypatch.context() as patched:
        patched.setattr(Evaluator, "__call__", lambda *_: None)  # as on a process beside the one that got the signal
        assert launch(*words) == 143
    assert (launch(*words), evaluations(last)) == (0, [6])
    assert (launch(*words), len(events(last, "evaluation"))) == (0, 1)
    monkeypatch.setattr(Evaluator, "__call__", lambda *_: Evaluation(float("nan"), 7))
    assert launch(*FLAGS, "train.eval_every=2") == 1
    assert "step 2: expected a finite evaluation loss, found eval_loss nan" in capsys.readouterr().err
    assert committed(folder / "run") == []
