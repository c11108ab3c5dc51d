"""The benchmarks start and write what they say; nothing here is timed."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from beside_trainer import TRAINER, Run, checked, report, said_by
from cli import TINY, launch, tiny_config
from transformers import AutoConfig, AutoModelForCausalLM

from portable_fsdp.config.load import load_config

ROOT = Path(__file__).parents[2]
GPU = ROOT / "benchmarks" / "gpu.py"
HAS_ACCELERATE = importlib.util.find_spec("accelerate") is not None  # without it transformers' Trainer is left out


def _on_two_processes(name: str, folder: Path, *flags: str) -> str:
    """Run a benchmark under torchrun in `folder`; returns what it printed."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    return _printed(folder, 200, *torchrun, str(ROOT / "benchmarks" / name), *flags)


def _printed(folder: Path, limit_s: float, *words: str) -> str:
    """What `python WORDS` prints in `folder`; it must end well."""
    finished = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=limit_s,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.proof
def test_loop_overhead_writes_its_table(tmp_path: Path) -> None:
    out = tmp_path / "loop_overhead.json"
    printed = _on_two_processes("loop_overhead.py", tmp_path, "--pairs=2", f"--out={out}")
    result = json.loads(out.read_text())
    assert result["pairs"] == 2
    assert result["config"]["processes"] == 2
    assert 3.5e6 < result["config"]["parameters"] < 4.5e6
    ratio = result["ratio"]
    assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
    assert "ratio " in printed


@pytest.mark.proof
def test_checkpoints_of_all_ways_are_saved_and_loaded(tmp_path: Path) -> None:
    out = tmp_path / "checkpoints.json"
    _on_two_processes("checkpoints.py", tmp_path, "--layers=1", "--rounds=1", f"--folder={tmp_path}", f"--out={out}")
    result = json.loads(out.read_text())
    assert result["state_bytes"] > 2e8
    assert result["plan"]["pieces"] > 440_000
    assert set(result["goals"]) < set(result["figures"])
    assert all(value > 0 for value in result["figures"].values())
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints.json"]


@pytest.mark.skipif(not HAS_ACCELERATE, reason="transformers' Trainer needs accelerate")
def test_beside_trainer_a_random_model_takes_the_same_course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With weight decay and warmup, and a learning rate that would show another row, token or share of the schedule."""
    model: dict[str, Any] = TINY["model"]
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**model["architecture"])).save_pretrained(tmp_path / "model")
    config = tiny_config(tmp_path)
    words = [f"--config={config}", "model={pretrained: model}", "data.tokenizer=bytes", "data.eval_split=5%"]
    words += ["train.eval_every=6", "train.eval_on_start=true", "train.eval_batches=3", "optim.weight_decay=0.5"]
    monkeypatch.chdir(tmp_path)
    assert launch("--device=cpu", *words) == 0
    ours = said_by(tmp_path / "run", seconds=1.0, cpu_seconds=1.0)
    _printed(tmp_path, 200, str(ROOT / "benchmarks" / "beside_trainer.py"), "--trainer=trainer.json", *words)
    theirs = Run(**json.loads((tmp_path / "trainer.json").read_text()))

    assert [step["lr"] for step in theirs.steps] == pytest.approx([step["lr"] for step in ours.steps])
    assert theirs.losses == pytest.approx(ours.losses, rel=2e-6)
    assert [step["grad_norm"] for step in theirs.steps] == pytest.approx(
        [step["grad_norm"] for step in ours.steps], rel=1e-4
    )
    assert theirs.losses_held_out == pytest.approx(ours.losses_held_out, rel=2e-6)
    assert theirs.tokens_held_out == ours.tokens_held_out == 12 * 32
    text = report(checked(load_config(config, words[1:])), [], {"native": ours, TRAINER: theirs})
    assert "(goal: 0.0001): met." in text


def _gpu(folder: Path, *flags: str) -> tuple[dict[str, Any], str]:
    """Result and output of the GPU benchmark in its tiny form, on the CPU."""
    out = folder / "gpu.json"
    printed = _printed(folder, 280, str(GPU), "--tiny", f"--out={out}", *flags)
    return json.loads(out.read_text()), printed


@pytest.mark.proof
def test_gpu_checks_options_and_times_three_ways_to_the_same_losses(tmp_path: Path) -> None:
    result, printed = _gpu(tmp_path)
    assert {"what", "command", "date", "minutes", "seconds", "config", "environment"} <= result.keys()
    assert {"device", "driver", "cuda", "cudnn", "nccl", "python", "versions"} <= result["environment"].keys()
    assert result["environment"]["versions"]["torch"].startswith("2.")

    answers = {check["name"]: check for check in result["checks"]}
    names = ["curve: FULL_SHARD", "curve: checkpointing full", "curve: bfloat16", "checkpoint: bfloat16"]
    assert {*names} <= answers.keys()
    assert all(check["outcome"] == "passed" for check in answers.values()), answers
    assert answers["curve: bfloat16"]["figures"]["worst_relative_difference"] > 0  # it did compute in bfloat16

    runs = {run["way"]: run for run in result["speed"]}
    ways = ["ours", "plain", *(["trainer"] if HAS_ACCELERATE else [])]
    assert list(runs) == ways
    assert [run["way"] for run in result["left_out"]] == [way for way in ("trainer",) if way not in ways]
    for run in runs.values():
        assert run["status"] == "finished"
        assert len(run["step_seconds"]) == 7
        assert len(run["losses"]) == 9  # one of warm-up, one under the profiler
        assert any("scaled_dot_product" in name for name in run["attention_kernels"])
        assert 0 < sum(run["step_seconds"]) <= run["span_seconds"] * 1.01
        assert run["losses"] == pytest.approx(runs["plain"]["losses"], rel=1e-3)  # bfloat16, cast in other places
    assert runs[ways[-1]]["losses"] == pytest.approx(runs["plain"]["losses"], rel=1e-5)  # the same operations
    assert runs["plain"]["losses"][-1] < runs["plain"]["losses"][0] - 0.1, "nothing was learnt: no fault would show"
    row = result["comparison"][0]
    assert row["losses_agree"]
    assert row["ours_over_plain"] == pytest.approx(
        runs["ours"]["tokens_per_second"] / runs["plain"]["tokens_per_second"]
    )
    assert f"ours / {ways[-1]}" in printed


def test_gpu_names_what_no_time_is_left_for(tmp_path: Path) -> None:
    result, printed = _gpu(tmp_path, "--parts=speed", "--minutes=0")
    assert not result["speed"]
    assert [run["way"] for run in result["left_out"]] == ["ours", "plain", "trainer"]
    assert "left out: eager/full/8 plain, pass 1: no time left" in printed


def _gpu_plan(folder: Path, *flags: str) -> dict[str, Any]:
    out = folder / "plan.json"
    _printed(folder, 1500, str(ROOT / "benchmarks" / "gpu_plan.py"), f"--out={out}", *flags)
    return json.loads(out.read_text())


@pytest.mark.proof
def test_gpu_plan_compares_a_plan_with_what_was_measured(tmp_path: Path) -> None:
    (row,) = _gpu_plan(tmp_path, "--parts=gpu", "--tiny")["gpu"]
    assert row["live_bytes"] > 1e7
    # Whether the script works; tests/plan/test_cuda.py holds plans to 5 %. With one process the plan is 2.5 % low under
    # torch 2.9, and 7 % high under 2.13: there the peak is the optimizer's, and why less lives then isn't known.
    assert row["ratio"] == pytest.approx(1, rel=0.1)


@pytest.mark.proof
@pytest.mark.timeout(1800)
def test_gpu_plans_are_near_to_torchs_tracker_and_to_published_figures(tmp_path: Path) -> None:
    result = _gpu_plan(tmp_path, "--parts=references,cost")
    for row in result["references"]:
        assert 0.98 <= row["ratio"] <= 1.1, row["what"]
    for row in result["cost"]:
        assert row["plan_rss_bytes"] < 3 * 2**30, row["what"]
