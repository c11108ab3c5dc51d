"""docs/fine_tuning.md as a reader follows it: its data, its config, its three starts, its adapters; on CPUs."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from cli import PROGRAMS, STARTS, events, finish, launch, losses
from documented import blocks
from safetensors.torch import load_file
from test_pretrained_run import write_repository
from transformers import AutoModelForCausalLM

from portable_fsdp import sample

PAGE = "docs/fine_tuning.md"
SMALL = [
    *("data.seq_len=32", "data.eval_split=20%", "train.global_batch=4", "train.micro_batch=1", "train.eval_every=3"),
    *("precision.compute=float32", "optim.warmup_steps=1", "train.epochs=2", "train.stop_at=6", "optim.lr=1e-2"),
]
PROJECTION = "model.layers.0.self_attn.q_proj.weight"
DEVICES = {
    "cpu": (["--device=cpu"], ["--device=cpu"]),
    "cuda": (["--nproc_per_node=8", "--device=cuda"], ["--nproc_per_node=2", "--device=cpu"]),
    "tpu": (["--device=tpu"], ["--device=cpu", "--backend=xla", "--num_devices=2"]),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a reader has: the page's config, forty lines as the page's one, and a model."""
    write_repository(tmp_path / "model")
    config = yaml.safe_load(next(block for block in blocks(PAGE, "yaml") if block.startswith("# finetune.yaml")))
    config["model"]["pretrained"] = "model"
    (tmp_path / "finetune.yaml").write_text(yaml.safe_dump({**config, "run": {"dir": "run"}}))
    with (tmp_path / "mine.jsonl").open("w") as file:
        for number in range(40):
            user, assistant = (line := json.loads(blocks(PAGE, "json")[0]))["messages"]
            user["content"], assistant["content"] = "the hub " * (1 + number % 3), "the model reads"  # in 32 tokens
            file.write(json.dumps(line) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def evaluations(folder: Path) -> list[float]:
    return [event["loss"] for event in events(folder, "evaluation")]


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param("cuda", marks=pytest.mark.proof),
        pytest.param("tpu", marks=[pytest.mark.proof, pytest.mark.xla]),
    ],
)
def test_from_a_jsonl_to_a_model(folder: Path, device: str) -> None:
    """By the page's own line for the device, with CPUs in place of it."""
    lines = [line for block in blocks(PAGE, "bash") for line in block.splitlines() if "--config=finetune.yaml" in line]
    words = shlex.split(next(line for line in lines if f"--device={device}" in line))
    theirs, ours = DEVICES[device]
    assert set(theirs) <= set(words)
    replaced = [ours[theirs.index(word)] if word in theirs else word for word in words]
    replaced += [*ours[len(theirs) :], *SMALL]
    if device == "cpu":
        assert words[:3] == ["python", "-m", "portable_fsdp.launch"]
        assert launch(*replaced[3:]) == 0
    else:
        finish([PROGRAMS / words[0], *replaced[1:]], folder)
    assert [event["step"] for event in events(folder / "run", "evaluation")] == [0, 3, 6]
    before, _, after = evaluations(folder / "run")
    assert after < before - 0.1
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "run/export")
    assert model.config.model_type == "llama"
    assert sample.main(["run", "--chat", "--prompt=What?", "--count=1", "--tokens=3"]) == 0


def trained(folder: Path, *words: str) -> list[float]:
    assert launch("--device=cpu", "--config=finetune.yaml", *SMALL, f"run.dir={folder}", *words) == 0
    return losses(folder)


def test_adapters_are_trained_resumed_and_exported(folder: Path) -> None:
    """The page's own section, resumed from its middle; the base stays as it was, bit for bit."""
    section = yaml.safe_load(next(block for block in blocks(PAGE, "yaml") if "lora:" in block))
    words = [f"model.lora={json.dumps(section['model']['lora'])}", "precision.frozen=bfloat16"]
    whole = trained(folder / "whole", *words)
    assert whole[-1] < whole[0] - 0.1
    trained(folder / "half", *words, "train.stop_at=3")
    shutil.copytree(folder / "model", folder / "moved")
    assert trained(folder / "half", *words, "model.pretrained=moved") == whole

    base = load_file(folder / "model/model.safetensors")
    for shard in (folder / "whole/checkpoints/step-00000006").glob("*/*.safetensors"):
        assert all("lora_" in name for name in load_file(shard))

    adapters = json.loads((folder / "whole/export/adapter_config.json").read_text())
    assert (adapters["r"], adapters["lora_alpha"]) == (16, 32)
    assert adapters["base_model_name_or_path"] == str(folder / "model")
    assert (folder / "whole/export/tokenizer.json").is_file()

    shutil.copytree(folder / "whole/export", folder / "adapters")
    more = {**section["model"]["lora"], "start_from": "adapters"}
    trained(folder / "more", *words, f"model.lora={json.dumps(more)}", "train.stop_at=1", "checkpoint.export=false")
    assert evaluations(folder / "more")[0] == min(evaluations(folder / "whole"))

    assert trained(folder / "whole", *words, "checkpoint.merge_adapters=true") == whole  # nothing is left to train
    merged = load_file(folder / "whole/export/model.safetensors")
    assert {name: tensor.dtype for name, tensor in merged.items()} == dict.fromkeys(base, torch.bfloat16)
    kept = "model.embed_tokens.weight"
    assert torch.equal(merged[kept], base[kept].bfloat16())
    assert not torch.equal(merged[PROJECTION], base[PROJECTION].bfloat16())


@pytest.mark.proof
@pytest.mark.xla
def test_every_kind_of_adapters_goes_on_as_it_began(folder: Path) -> None:
    """Through a stop, a move to another engine, an export, and a start from that."""
    lora = {"r": 4, "alpha": 8, "dora": True, "rslora": True, "rank_pattern": {"q_proj": 2}}
    words = [f"model.lora={json.dumps(lora | {'train_whole': ['embed_tokens', 'model.norm']})}", "checkpoint.every=2"]
    whole = trained(folder / "whole", *words)
    trained(folder / "half", *words, "train.stop_at=3")
    for shard in (folder / "half/checkpoints/step-00000003/model").glob("*.safetensors"):
        names = {name for name in load_file(shard) if "lora_" not in name}
        assert names == {"model.embed_tokens.weight", "model.norm.weight"}
    finish([*STARTS["xla"], "--config=finetune.yaml", *SMALL, *words, f"run.dir={folder / 'half'}"], folder)
    assert losses(folder / "half") == pytest.approx(whole, rel=1e-5)

    settings = json.loads((folder / "whole/export/adapter_config.json").read_text())
    assert settings["modules_to_save"] == ["model.embed_tokens", "model.norm", "lm_head"]  # which is tied
    assert (settings["use_dora"], settings["use_rslora"], settings["rank_pattern"]) == (True, True, {"q_proj": 2})
    more = lora | {"train_whole": ["embed_tokens", "model.norm"], "start_from": "whole/export"}
    trained(folder / "more", f"model.lora={json.dumps(more)}", "train.stop_at=1", "checkpoint.export=false")
    assert evaluations(folder / "more")[0] == min(evaluations(folder / "whole"))
    assert trained(folder / "whole", *words, "checkpoint.merge_adapters=true") == whole
    merged: Any = AutoModelForCausalLM.from_pretrained(folder / "whole/export")
    assert not torch.equal(merged.model.norm.weight, load_file(folder / "model/model.safetensors")["model.norm.weight"])
    assert sample.main(["whole", "--chat", "--prompt=What?", "--count=1", "--tokens=3"]) == 0


@pytest.mark.proof
@pytest.mark.xla
def test_adapters_of_one_engine_go_on_on_another(folder: Path) -> None:
    trained(folder / "before", "model.lora={r: 4, alpha: 8}")
    words = ["model.lora={r: 4, alpha: 8, start_from: before/export}", "checkpoint.every=2"]
    whole = trained(folder / "whole", *words)
    assert evaluations(folder / "whole")[0] == min(evaluations(folder / "before"))
    trained(folder / "half", *words, "train.stop_at=3")
    # Each in a process of its own: torch_xla is imported before autograd has run.
    for engine, stop in (("xla", 5), ("xla_fsdp1", 6)):
        more = ["--config=finetune.yaml", *SMALL, *words, f"run.dir={folder / 'half'}", f"train.stop_at={stop}"]
        finish([*STARTS[engine], *more], folder)
    assert losses(folder / "half") == pytest.approx(whole, rel=1e-5)
    for path in (folder / "half/checkpoints").glob("*/*/*.safetensors"):
        assert all("lora_" in name for name in load_file(path)), path
