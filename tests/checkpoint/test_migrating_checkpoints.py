"""The table `Checkpoints that open` of docs/migrating.md: what each tool writes, and what `import` says to it."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_models import MODELS, assert_same, build, dcp_save, tensors_in, weights

from portable_fsdp.checkpoint.__main__ import main

PAGE = (Path(__file__).parents[2] / "docs/migrating.md").read_text()
OTHER_NAMES = "are these another library's names?"
TITAN = {
    "model.embed_tokens.": "tok_embeddings.",
    "model.layers.": "layers.",
    "self_attn.q_proj": "attention.qkv_linear.wq",
    "self_attn.k_proj": "attention.qkv_linear.wk",
    "self_attn.v_proj": "attention.qkv_linear.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "model.norm.": "norm.",
}
"""The names of torchtitan 0.3.0's Llama, models/llama3/state_dict_adapter.py."""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A Llama, whose config.json is in the folder `hub` of an empty working folder."""
    monkeypatch.chdir(tmp_path)
    model = build(MODELS["llama"])
    model.config.save_pretrained("hub")
    return model


def titan(name: str) -> str:
    for ours, theirs in TITAN.items():
        name = name.replace(ours, theirs)
    return name


def test_torchtitans_folder_opens_under_its_names_alone(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = {titan(name): tensor for name, tensor in model.state_dict().items()}
    dcp_save({**tensors, "train_state": {"step": torch.tensor(7)}}, Path("step-7"))
    assert main(["import", "step-7", "run", "--config", "hub", "--trust-metadata"]) == 2
    assert OTHER_NAMES in capsys.readouterr().err
    assert main(["import", "step-7", "run", "--trust-metadata"]) == 0
    assert_same(tensors_in(Path("run/checkpoints/step-00000007")), tensors)


def test_fabrics_checkpoints_of_a_transformers_model_open(model: Any) -> None:
    state = {name: {"exp_avg": tensor + 1} for name, tensor in model.state_dict().items()}
    dcp_save({"model": model.state_dict(), "optimizer": {"state": state}}, Path("sharded"))
    assert main(["import", "sharded", "run", "--config", "hub", "--trust-metadata"]) == 0
    optimizer = {f"exp_avg/{name}": tensors["exp_avg"] for name, tensors in state.items()}
    assert_same(tensors_in(Path("run/checkpoints/step-00000000")), {**weights(model), **optimizer})
    torch.save({"model": model.state_dict(), "optimizer": {"state": state}, "step": 3}, "full.ckpt")
    assert main(["import", "full.ckpt", "full", "--config", "hub"]) == 0
    assert_same(tensors_in(Path("full/checkpoints/step-00000000")), weights(model))


def test_lightning_trainers_file_opens_once_its_names_are_the_models(
    model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    prefixed = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"state_dict": prefixed, "optimizer_states": [], "epoch": 1, "global_step": 3}, "last.ckpt")
    assert main(["import", "last.ckpt", "run", "--config", "hub"]) == 2
    assert OTHER_NAMES in capsys.readouterr().err
    [lines] = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    exec(lines, {})
    assert main(["import", "weights.pt", "run", "--config", "hub"]) == 0
    assert_same(tensors_in(Path("run/checkpoints/step-00000000")), weights(model))


@pytest.mark.parametrize("key", ["model", "state_dict"])  # FSDPStrategy's, ModelParallelStrategy's
def test_lightning_trainers_folders_are_refused(model: Any, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    dcp_save({key: {f"model.{name}": tensor for name, tensor in model.state_dict().items()}}, Path("sharded"))
    assert main(["import", "sharded", "run", "--config", "hub", "--trust-metadata"]) == 2
    assert OTHER_NAMES in capsys.readouterr().err
    assert not Path("run/checkpoints/step-00000000").exists()
