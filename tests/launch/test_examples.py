"""The examples, as people start them."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from cli import ROOT

ROW = {"grad_norm": 1.0, "lr": 1e-3, "tokens": 64, "tokens_per_second": 10.0, "mfu": None, "memory_bytes": 1}
START = {"time": "2026-01-01T00:00:00.000+00:00", "event": "start", "device": "cpu"}


def run_example(patch: pytest.MonkeyPatch, name: str, *arguments: str) -> object:
    """Its exit code, in this process, or the sentence that it ends with."""
    patch.chdir(ROOT)
    patch.setattr(sys, "argv", [name, *arguments])
    try:
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    except SystemExit as end:
        return end.code
    return 0


def test_plot_loss_writes_a_picture_and_gives_each_step_to_the_start_that_ran_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = enumerate([5.5, 5.0, 4.5, None, 3.5, 3.0], start=1)
    rows = [{"step": step, "loss": loss, **ROW, "seconds": 0.1} for step, loss in losses]
    starts = [{**START, "step": step, "backend": name, "devices": 2} for step, name in ((0, "native"), (3, "xla"))]
    events = [*starts, {"time": "x", "event": "stop", "step": 6}]
    for name, lines in (("metrics.jsonl", rows), ("events.jsonl", events)):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run_example(monkeypatch, "plot_loss.py", str(tmp_path)) in (0, None)
    assert capsys.readouterr() == (f"{tmp_path / 'loss.png'}\n", "")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert run_example(monkeypatch, "plot_loss.py", str(tmp_path / "no-run")) == 2
    assert "found no metrics.jsonl and no events.jsonl" in capsys.readouterr().err
    stretches = runpy.run_path(str(ROOT / "examples/plot_loss.py"))["stretches"]
    for history, expected in HISTORIES:
        events = [{**START, "step": step, "backend": backend, "devices": devices} for step, backend, devices in history]
        by_start = stretches([{"step": step, "loss": 1.0} for step in range(1, 5)], events)
        assert [(name, [row["step"] for row in rows]) for name, rows in by_start] == expected


N1, N2, X4 = "native, 1 x cpu", "native, 2 x cpu", "xla, 4 x cpu"
HISTORIES = [
    ([(0, "native", 1)], [(N1, [1, 2, 3, 4])]),
    ([(0, "native", 2), (2, "xla", 4)], [(N2, [1, 2]), (X4, [3, 4])]),
    # the second start was killed before its first save: the third repeats what it had run
    ([(0, "native", 1), (2, "native", 2), (2, "xla", 4)], [(N1, [1, 2]), (X4, [3, 4])]),
    # a start from an earlier checkpoint takes over all that comes after it
    ([(0, "native", 1), (3, "xla", 4), (1, "native", 2)], [(N1, [1]), (N2, [2, 3, 4])]),
]


def test_a_loop_of_ones_own_goes_on_where_it_stopped_and_a_mistake_ends_it_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one in the environment of `accelerate launch`."""
    small = "data.seq_len=32 train.global_batch=4 train.log_every=2 optim.schedule=constant optim.warmup_steps=0"

    def losses(folder: str, steps: int) -> list[str]:
        run = [f"run.dir={tmp_path / folder}", f"train.steps={steps}", "checkpoint.allow=[train.steps]"]
        words = ["configs/quickstart.yaml", "cpu", "native", *small.split(), *run]
        assert run_example(monkeypatch, "own_loop.py", *words) == 0
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("step: ")]

    whole = losses("whole", 4)
    assert [line.split()[1] for line in whole] == ["2", "4"]
    assert [*losses("parts", 2), *losses("parts", 4)] == whole
    usage = run_example(monkeypatch, "own_loop.py")
    assert "python examples/own_loop.py configs/quickstart.yaml" in str(usage)
    for words, message in (
        (["native", "optim.lrr=1"], "optim.lrr: unknown key"),
        (["fsdp"], "--backend=fsdp: expected one of"),
        (["native"], "ACCELERATE_MIXED_PRECISION"),
    ):
        if message.startswith("ACCELERATE"):
            monkeypatch.setenv(message, "fp4")
        assert run_example(monkeypatch, "own_loop.py", "configs/quickstart.yaml", "cpu", *words) == 2
        error = capsys.readouterr().err
        assert message in error
        assert "Traceback" not in error


def test_loops_stay_short_and_have_no_branch_on_the_device() -> None:
    for name in ("ported_loop.py", "own_rows.py", "image_classifier.py", "vit.py", "seq2seq.py", "dpo.py"):
        assert len((ROOT / "examples" / name).read_text().splitlines()) < 60, name
    text = (ROOT / "examples/own_loop.py").read_text()
    assert len(text.splitlines()) < 40
    code = text.split('"""', 2)[2]
    assert not re.search(r"\b(if|match)\b.*\b(device|backend|cpu|cuda|tpu|xla|native)\b", code)
