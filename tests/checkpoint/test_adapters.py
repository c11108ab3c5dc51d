"""Adapters leave a checkpoint in peft's own format, or merged into the base: both give the logits of the run."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from plain_backend import PlainBackend, checkpoints
from transformers import AutoConfig, AutoModelForCausalLM

from portable_fsdp.checkpoint.__main__ import main
from portable_fsdp.checkpoint.foreign.huggingface import export_huggingface
from portable_fsdp.checkpoint.foreign.peft import export_adapters
from portable_fsdp.models.config_json import config_to_json
from portable_fsdp.runtime.errors import CheckpointError

pytestmark = pytest.mark.slow  # peft takes seconds to import

_COMMON = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": _COMMON | {"model_type": "llama", "intermediate_size": 36, "num_key_value_heads": 1},
    "llama_tied": _COMMON | {"model_type": "llama", "intermediate_size": 36, "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", "vocab_size": 61, "n_embd": 24, "n_layer": 2, "n_head": 2, "n_positions": 32},
}
IDS = torch.arange(24).view(2, 12)


def train(
    folder: Path,
    name: str,
    targets: Any = "all-linear",
    dtype: torch.dtype = torch.float32,
    **said: Any,
) -> tuple[Path, Any]:
    """A base, saved to `folder`/base, and the checkpoint of a run over it, whose adapters have moved."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS[name]), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder / "base")
    architecture = config_to_json(model.config)
    settings = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=targets, fan_in_fan_out=name == "gpt2", task_type="CAUSAL_LM"
    )
    peft.inject_adapter_in_model(settings, model)
    with torch.no_grad():
        for fqn, parameter in model.named_parameters():
            if "lora_" in fqn:
                parameter.copy_(torch.randn_like(parameter) * 0.1)
    config = {"model": {"pretrained": str(folder / "base"), "lora": {"r": 3, "alpha": 5.0} | said}}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-9, momentum=0.9)
    model(input_ids=IDS).logits.sum().backward()
    optimizer.step()  # it has state of the adapters
    saved = checkpoints(folder / "checkpoints", PlainBackend(devices=3), config=config, model_config=architecture)
    return saved.save(1, model, optimizer, (0, 0)), model.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


# transformers', of how peft 0.21 asks it.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", MODELS)
def test_peft_opens_the_adapters(tmp_path: Path, name: str) -> None:
    path, model = train(tmp_path, name)
    export_adapters(path, tmp_path / "export", lambda folder: (folder / "tokenizer.json").touch())
    assert sorted(file.name for file in (tmp_path / "export").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "portable_fsdp.json",
        "tokenizer.json",
    ]

    base: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    plain = logits(base)
    opened = peft.PeftModel.from_pretrained(base, str(tmp_path / "export"))
    assert torch.equal(logits(opened), logits(model))
    assert not torch.allclose(logits(opened), plain, atol=1e-2)
    # Without naming the base: the adapters know it.
    by_name: Any = peft.AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "export"))
    assert torch.equal(logits(by_name), logits(model))
    plainly: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert torch.equal(logits(plainly), logits(model))


@pytest.mark.parametrize("name", MODELS)
def test_merged_it_is_a_plain_model(tmp_path: Path, name: str) -> None:
    path, model = train(tmp_path, name)
    export_huggingface(path, tmp_path / "export", None)
    opened, report = AutoModelForCausalLM.from_pretrained(tmp_path / "export", output_loading_info=True)  # type: ignore
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(opened.model if hasattr(opened, "model") else opened.transformer).__module__.startswith("transformers.")
    torch.testing.assert_close(logits(opened), logits(model), rtol=1e-5, atol=1e-5)


def test_merging_rounds_once(tmp_path: Path) -> None:
    """In float32, and then to the base's dtype: peft's own merge computes in the base's."""
    path, model = train(tmp_path, "llama", dtype=torch.bfloat16)
    export_huggingface(path, tmp_path / "export", None)
    opened: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    name = "model.layers.1.mlp.up_proj"
    layer = model.get_submodule(name)
    a, b = (half["default"].weight.float() for half in (layer.lora_A, layer.lora_B))
    expected = (layer.base_layer.weight.float() + 5 / 3 * b @ a).bfloat16()
    assert torch.equal(opened.get_submodule(name).weight, expected)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["v_proj", "q_proj"], ["q_proj", "v_proj"]),
        (["model.layers.1.self_attn.q_proj"], ["model.layers.1.self_attn.q_proj"]),
    ],
)
def test_target_modules_name_just_the_layers(tmp_path: Path, targets: list[str], expected: list[str]) -> None:
    path, model = train(tmp_path, "llama", targets)
    assert main(["export", str(path), str(tmp_path / "export"), "--format", "peft", "--tokenizer", "none"]) == 0
    settings = json.loads((tmp_path / "export" / "adapter_config.json").read_text())
    assert settings["target_modules"] == expected
    assert (settings["r"], settings["lora_alpha"], settings["peft_type"]) == (3, 5, "LORA")
    opened: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert torch.equal(logits(opened), logits(model))


def test_adapters_in_another_dtype(tmp_path: Path) -> None:
    path, model = train(tmp_path, "llama")
    arguments = ["--format", "peft", "--tokenizer", "none", "--dtype", "bfloat16"]
    assert main(["export", str(path), str(tmp_path / "export"), *arguments]) == 0
    opened: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    torch.testing.assert_close(logits(opened), logits(model), rtol=0.05, atol=0.05)
    assert not torch.equal(logits(opened), logits(model))


def test_whole_weights_have_no_adapters_to_export(tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**MODELS["llama"]))
    saved = checkpoints(tmp_path / "checkpoints", PlainBackend(), model_config=config_to_json(model.config))
    path = saved.save(1, model, torch.optim.SGD(model.parameters()), (0, 0))
    with pytest.raises(CheckpointError, match=r"expected adapters \(model\.lora\), found none"):
        export_adapters(path, tmp_path / "export", None)


@pytest.mark.parametrize("wrong", [{"r": None}, {"r": 0}, {"r": "3"}, {"alpha": [1.0]}])
def test_adapters_without_their_settings_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    path, _ = train(tmp_path, "llama", **wrong)
    with pytest.raises(CheckpointError, match=r"expected r and alpha in model\.lora of its config"):
        export_huggingface(path, tmp_path / "export", None)
