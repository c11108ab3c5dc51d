"""The benchmarks start and write what they say; nothing here is timed."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli import PROGRAMS, ROOT, TINY, finish, launch, started

from portable_fsdp.convert.read import load_config

BENCHMARKS = ROOT / "benchmarks"


def _result(folder: Path, name: str, *flags: str, limit_s: float = 280, processes: int = 1) -> tuple[Any, str]:
    """The result of a benchmark and its output; it must end well."""
    out = folder / f"{name}.json"
    torchrun = [PROGRAMS / "torchrun", "--standalone", f"--nproc_per_node={processes}"]
    start = [sys.executable] if processes == 1 else torchrun
    with started([*start, BENCHMARKS / f"{name}.py", f"--out={out}", *flags], folder, HF_HUB_OFFLINE="1") as run:
        assert run.wait(limit_s) == 0, run.err
    return json.loads(out.read_text()), run.out


def test_each_deliberate_mistake_has_its_place_in_the_code() -> None:
    for mistake in yaml.safe_load((BENCHMARKS / "breaks.yaml").read_text(encoding="utf-8")):
        source = (ROOT / "portable_fsdp" / mistake["file"]).read_text(encoding="utf-8")
        assert source.count(mistake["old"]) == 1, mistake["what"]


@pytest.mark.proof
def test_loop_overhead_and_checkpoints_of_all_ways_write_their_tables(tmp_path: Path) -> None:
    result, printed = _result(tmp_path, "loop_overhead", "--pairs=2", processes=2)
    assert (result["pairs"], result["config"]["processes"]) == (2, 2)
    assert 3.5e6 < result["config"]["parameters"] < 4.5e6
    ratio = result["ratio"]
    assert 0 < ratio["low"] <= ratio["median"] <= ratio["high"]
    assert "ratio " in printed
    saved = tmp_path / "saved"
    saved.mkdir()
    result, _ = _result(tmp_path, "checkpoints", "--layers=1", "--rounds=1", f"--folder={saved}", processes=2)
    assert result["state_bytes"] > 2e8
    assert result["plan"]["pieces"] > 440_000
    assert set(result["goals"]) < set(result["figures"])
    assert all(value > 0 for value in result["figures"].values())
    assert list(saved.iterdir()) == []


@pytest.mark.proof
def test_beside_trainer_a_random_model_takes_the_same_course(folder: Path) -> None:
    """With weight decay and warmup, and a learning rate that would show another row, token or share of the schedule."""
    # Here: all who collect tests would wait seconds for transformers' Trainer.
    from beside_trainer import TRAINER, Run, read_run, report
    from transformers import AutoConfig, AutoModelForCausalLM

    model: dict[str, Any] = TINY["model"]
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**model["architecture"])).save_pretrained("model")
    words = ["--config=tiny.yaml", "model={pretrained: model}", "data.tokenizer=bytes", "data.eval_split=5%"]
    words += ["train.eval_every=6", "train.eval_on_start=true", "train.eval_batches=3", "optim.weight_decay=0.5"]
    assert launch("--device=cpu", *words) == 0
    ours = read_run(folder / "run")
    finish([sys.executable, BENCHMARKS / "beside_trainer.py", "--trainer=trainer.json", *words], folder)
    theirs = Run(**json.loads(Path("trainer.json").read_text()))

    for key, rel in (("lr", 1e-6), ("grad_norm", 1e-4)):
        assert [step[key] for step in theirs.steps] == pytest.approx([step[key] for step in ours.steps], rel=rel)
    assert theirs.losses == pytest.approx(ours.losses, rel=2e-6)
    assert theirs.losses_held_out == pytest.approx(ours.losses_held_out, rel=2e-6)
    assert theirs.tokens_held_out == ours.tokens_held_out == 12 * 32
    text = report(load_config("tiny.yaml", words[1:]), [], {"native": ours, TRAINER: theirs})
    assert "(goal: 0.0001): met." in text


@pytest.mark.proof
def test_gpu_tunes_checks_options_and_times_all_ways_to_the_same_losses(tmp_path: Path) -> None:
    """`make proof-py312` runs it with another Python and another torch."""
    result, printed = _result(tmp_path, "gpu", "--tiny")
    assert {"device", "driver", "cuda", "cudnn", "nccl", "python", "versions"} <= result["environment"].keys()

    tuning = result["tuning"]
    assert "memory.gradient_checkpointing=full" in "\n".join(tuning["measured"])
    assert "chosen: " in printed

    answers = {check["name"]: check for check in result["checks"]}
    names = ["curve: FULL_SHARD", "curve: checkpointing full", "curve: bfloat16", "checkpoint: bfloat16"]
    assert {*names} <= answers.keys()
    assert all(check["outcome"] == "passed" for check in answers.values()), answers
    assert answers["curve: bfloat16"]["figures"]["worst_relative_difference"] > 0  # it did compute in bfloat16

    runs = {run["way"]: run for run in result["speed"]}
    assert (list(runs), result["left_out"]) == (["auto", "eager", "trainer", "tuned", "plain"], [])
    assert (runs["eager"]["chosen"], runs["tuned"]["chosen"]) == ({}, tuning["chosen"])
    assert result["config"]["memory"]["gradient_checkpointing"] == "none"
    for run in runs.values():
        assert (run["status"], len(run["step_seconds"])) == ("finished", 7)
        assert len(run["losses"]) == 9  # one of warm-up, one under the profiler
        assert any("scaled_dot_product" in name for name in run["attention_kernels"])
        assert run["losses"] == pytest.approx(runs["plain"]["losses"], rel=1e-3)  # bfloat16, cast in other places
    assert runs["plain"]["losses"][-1] < runs["plain"]["losses"][0] - 0.1, "nothing was learnt: no fault would show"
    (row,) = result["comparison"]
    assert row["losses_agree"]
    assert row["ratios"].keys() == {"auto", "eager", "tuned"}
    for way, ratios in row["ratios"].items():
        assert ratios.keys() == runs.keys() - {way}
        assert ratios["plain"] == runs[way]["tokens_per_second"] / runs["plain"]["tokens_per_second"]


@pytest.mark.proof
@pytest.mark.timeout(1800)
def test_gpu_plans_are_near_to_what_was_measured_to_torchs_tracker_and_to_published_figures(tmp_path: Path) -> None:
    result, _ = _result(tmp_path, "gpu", "--parts", "references", "cost", limit_s=1500)
    for row in result["references"]:
        assert 0.98 <= row["ratio"] <= 1.1, row["what"]
    for row in result["cost"]:
        assert row["plan_rss_bytes"] < 3 * 2**30, row["what"]
    (row,) = _result(tmp_path, "gpu", "--parts=plans", "--tiny")[0]["plans"]
    assert row["live_bytes"] > 1e7
    # Whether the script works; tests/plan/test_fake_step.py holds plans to 5 %. With one process the plan is 2.5 % low
    # under torch 2.9, and 7 % high under 2.13: there the peak is the optimizer's, and why less lives then isn't known.
    assert row["ratio"] == pytest.approx(1, rel=0.1)
