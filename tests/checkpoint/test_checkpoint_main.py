"""`python -m portable_fsdp.checkpoint`: what it prints, and its exit codes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from plain_backend import PlainBackend, checkpoints, save_once
from test_foreign import MODELS, build
from torch.optim import SGD
from transformers import AutoModelForCausalLM, AutoTokenizer

from portable_fsdp.checkpoint.__main__ import main


def test_show_says_what_it_holds_and_who_wrote_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_once(tmp_path / "checkpoints", count=2, devices=2)
    assert main(["show", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [f"checkpoint  {path}", "step        5 (data: epoch 1, position 20)"]
    assert lines[2].endswith("backend plain on cpu, 2 processes")
    assert re.fullmatch(r"saved       \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", lines[3])
    assert lines[4] == "model       4 tensors, 65 elements, 0.0 MiB in 4 files"
    assert "  0.weight  float32 [7, 5]" in lines
    assert main(["show", "--config", str(path)]) == 0
    assert capsys.readouterr().out == "optim:\n  lr: 0.001\n"


def test_layers_of_one_shape_share_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build(MODELS["llama"])
    checkpoints(tmp_path, PlainBackend()).save(1, model, SGD(model.parameters()), (0, 0))
    assert main(["show", str(tmp_path)]) == 0
    assert "  model.layers.*.mlp.up_proj.weight  float32 [24, 16]  x 2\n" in capsys.readouterr().out


def test_verify_takes_the_newest_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    older = save_once(tmp_path / "checkpoints", step=5)
    newest = save_once(tmp_path / "checkpoints", step=10)
    assert main(["verify", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{newest}: whole: 8 files, 0.0 MiB\n"
    shard = newest / "model" / "shard-00000-00.safetensors"
    shard.write_bytes(shard.read_bytes() + b"x")
    assert main(["verify", str(tmp_path)]) == 2
    assert "expected" in capsys.readouterr().err
    assert main(["verify", str(older)]) == 0


def test_export_brings_the_tokenizer_of_the_run(tmp_path: Path) -> None:
    model = build(MODELS["gpt2"])
    opened = checkpoints(
        tmp_path, PlainBackend(), config={"data": {"tokenizer": "bytes"}}, model_config=model.config.to_dict()
    )
    path = opened.save(1, model, SGD(model.parameters()), (0, 0))
    assert main(["export", str(path), str(tmp_path / "export")]) == 0
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "export")) is type(model)
    assert AutoTokenizer.from_pretrained(tmp_path / "export")("a").input_ids == [97]


@pytest.mark.parametrize("arguments", [["show"], ["verify"], ["export", "out"]], ids=lambda arguments: arguments[0])
def test_a_folder_without_checkpoint_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    command, *rest = arguments
    assert main([command, str(tmp_path), *(str(tmp_path / name) for name in rest)]) == 2
    assert "expected a checkpoint (step-00000500) or a run's folder with one, found none" in capsys.readouterr().err


def test_a_users_mistake_shows_no_traceback(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "portable_fsdp.checkpoint"]
    done = subprocess.run([*program, "show", str(tmp_path)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    done = subprocess.run([*program, "destroy"], capture_output=True, text=True)
    assert done.returncode == 2
