"""`python -m portable_fsdp.evaluate`: the loss of a run, a checkpoint or an export, on any data and engine."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from cli import contents, events, finish, launch

from portable_fsdp import evaluate

DATA = ("data.source=text", "data.path=train.txt", "data.eval_split=held.txt")
HELD = ("data.source=text", "data.path=held.txt")


@pytest.fixture
def run(folder: Path) -> Path:
    """A run whose best checkpoint is its last, with an export."""
    (folder / "train.txt").write_text("the cat sat on the mat. " * 200)
    (folder / "held.txt").write_text("the mat sat on the cat. " * 20)
    words = ("train.steps=6", "train.eval_every=3", "checkpoint.every=3", "checkpoint.export=true", "optim.lr=0.01")
    assert launch("--device=cpu", "--config=tiny.yaml", *DATA, *words) == 0
    return folder / "run"


def evaluated(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert evaluate.main([*words, "--device=cpu", "--json"]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    return json.loads(out.splitlines()[-1])


@pytest.mark.slow
def test_a_run_has_the_loss_of_its_own_evaluation(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(run)
    last = events(run, "evaluation")[-1]
    native = evaluated(capsys, str(run), "--backend=native", "data.on_error=skip")  # still the validation set
    assert native["loss"] == pytest.approx(last["loss"], rel=1e-6)
    assert native["perplexity"] == pytest.approx(math.exp(last["loss"]), rel=1e-5)
    assert (native["counted"], native["devices"], native["backend"]) == (last["tokens"], 1, "native")
    assert native["source"] == str(run / "checkpoints/step-00000006")
    assert evaluate.main([str(run), "--device=cpu"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"loss: {native['loss']:.4f}  perplexity: {native['perplexity']:.4f}  (")
    assert "native on 1 x cpu)" in text
    # The same rows, named: of the checkpoint, of its export.
    export = ("data.tokenizer=bytes", "data.seq_len=32")
    assert evaluated(capsys, str(run / "checkpoints/step-00000006"), *HELD)["loss"] == native["loss"]
    assert evaluated(capsys, str(run / "export"), *HELD, *export)["loss"] == pytest.approx(native["loss"], rel=1e-6)
    earlier = evaluated(capsys, str(run / "checkpoints/step-00000003"))
    assert earlier["loss"] == pytest.approx(events(run, "evaluation")[0]["loss"], rel=1e-6)
    assert contents(run) == before, "it writes nothing"


@pytest.mark.proof
@pytest.mark.xla
def test_two_devices_of_each_engine_say_what_one_says(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = evaluated(capsys, str(run), "--backend=native")
    for engine in ("native", "xla"):
        command = [sys.executable, "-m", "portable_fsdp.evaluate", str(run), *HELD, f"--backend={engine}", "--json"]
        done = finish([*command, "--device=cpu", "--num_devices=2"], run.parent)
        two = json.loads(done.out.splitlines()[-1])
        assert (two["loss"], two["backend"]) == (pytest.approx(one["loss"], rel=1e-5), engine)
        assert two["devices"] == 2
