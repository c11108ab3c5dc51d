"""The text of a multimodal model trains from the published folder, and leaves inside a whole one."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from cli import STARTS, finish, launch, losses, tiny_config
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from portable_fsdp.checkpoint.manifests import read_manifest
from portable_fsdp.models.architecture import read_architecture
from portable_fsdp.runtime.errors import ConfigError

pytestmark = pytest.mark.slow

_TEXT: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "head_dim": 8,
} | {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "max_position_embeddings": 128}
_WINDOWS: dict[str, Any] = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_LINEAR: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
} | {"layer_types": ["linear_attention", "full_attention"]}
_TIED = {"tie_word_embeddings": True}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "intermediate_size": 16}
_TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
_IMAGES = _TOWER | {"image_size": 28, "patch_size": 14}
_QWEN = {"hidden_size": 32, "depth": 1, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 32}
_SMALL = {"global_head_dim": 8, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 256}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": _TEXT | _WINDOWS, "vision_config": _IMAGES, "mm_tokens_per_image": 4},
    "qwen3_5": {"text_config": _TEXT | _LINEAR | _TIED, "vision_config": _QWEN, **_TIED},
    "qwen3_5_moe": {"text_config": _TEXT | _LINEAR | _EXPERTS, "vision_config": _QWEN},
    "mistral3": {"text_config": _TEXT | {"model_type": "mistral"}, "vision_config": _IMAGES},
    "gemma4": {"text_config": _TEXT | _WINDOWS | _SMALL, "vision_config": _TOWER, "audio_config": None},
    "llava": {"text_config": _TEXT | {"model_type": "llama"}, "vision_config": _IMAGES, **_TIED},
}
"""transformers opens the whole; the text; experts, which it joins; no causal class of the whole, and a config that ties
what its files don't (Mistral Small 3.1); layers of several widths; ties that only the whole's config has."""

families = pytest.mark.parametrize(
    "family", [name if name == "gemma3" else pytest.param(name, marks=pytest.mark.proof) for name in FAMILIES]
)
AS_PEFT_ASKS = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
MADE = (
    *("model={pretrained: base}", "data.tokenizer=bytes", "train.steps=3", "train.log_every=1"),
    *("checkpoint.export=true", "optim.lr=0.003"),
)
IDS = torch.arange(48).view(2, 24)


def published(folder: Path, family: str) -> Any:
    """A multimodal model of random weights, and its folder with the names of the hub."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **FAMILIES[family])
    if family == "mistral3":
        config.tie_word_embeddings = False
    model: Any = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder)
    if family == "mistral3":
        config.tie_word_embeddings = True
        config.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text("{}")
    return model.eval()


def train(folder: Path, name: str, *words: str) -> Path:
    assert launch("--device=cpu", f"--config={tiny_config(folder)}", f"run.dir={name}", *MADE, *words) == 0
    return folder / name


def tensors_in(run: Path) -> set[str]:
    (newest,) = (run / "checkpoints").glob("step-*3")
    return {key for key in read_manifest(newest).tensors if "/" not in key}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def opened(folder: Path) -> Any:
    model, report = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)  # type: ignore
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model


@families
def test_the_text_trains_and_leaves_inside_the_published_folder(folder: Path, family: str) -> None:
    whole = published(folder / "base", family)
    exported = train(folder, "still", "optim.lr=1e-30", "optim.weight_decay=0") / "export"
    assert torch.equal(logits(opened(exported)), logits(whole))  # the text alone computes what the whole does
    assert losses(folder / "still")[0] > 1

    moved = load_file(train(folder, "run") / "export/model.safetensors")
    base = load_file(folder / "base/model.safetensors")
    joined = {key for key in base if ".experts." in key}  # those leave under the model's own names
    assert {key for key in moved if ".experts." not in key} == base.keys() - joined
    texts = {key for key in base.keys() - joined if not torch.equal(base[key], moved[key])}
    named = {key for key in base.keys() - joined if "language_model" in key or key.startswith("lm_head")}
    assert texts == {key for key in named if not key.endswith("layer_scalar")}  # a buffer
    assert (folder / "run/export/preprocessor_config.json").is_file()
    trained = opened(folder / "run/export")
    assert not torch.allclose(logits(trained), logits(whole), atol=1e-2)


@pytest.mark.proof
def test_two_xla_devices_read_and_train_the_same_text(folder: Path) -> None:
    published(folder / "base", "gemma3")
    train(folder, "native")
    finish([*STARTS["xla"], f"--config={tiny_config(folder)}", "run.dir=run", *MADE], folder)
    assert losses(folder / "run") == pytest.approx(losses(folder / "native"), rel=5e-5)
    saved, alone = (load_file(folder / run / "export/model.safetensors") for run in ("run", "native"))
    assert saved.keys() == alone.keys()


@AS_PEFT_ASKS
@families
def test_adapters_leave_for_the_model_that_peft_opens(folder: Path, family: str) -> None:
    published(folder / "base", family)
    run = train(folder, "run", "model={pretrained: base, lora: {r: 4}}")
    opens = AutoModelForImageTextToText if family in ("mistral3", "llava") else AutoModelForCausalLM
    adapted: Any = peft.PeftModel.from_pretrained(opens.from_pretrained(folder / "base"), str(run / "export"))
    assert not any("vision" in name or "visual" in name for name, _ in adapted.named_parameters() if "lora_" in name)
    words = ("checkpoint.merge_adapters=true", "model={pretrained: base, lora: {r: 4}}")
    merged = opened(train(folder, "merged", *words) / "export")
    assert losses(folder / "merged") == losses(run)
    assert not torch.allclose(logits(merged), logits(opened(folder / "base")), atol=1e-3)
    torch.testing.assert_close(logits(adapted), logits(merged), rtol=1e-4, atol=1e-4)

    began = train(folder, "again", f"model={{pretrained: base, lora: {{r: 4, start_from: {run / 'export'}}}}}")
    assert losses(began)[0] < losses(run)[0]  # the adapters were read


def test_names_of_the_published_model_name_its_text_too(folder: Path) -> None:
    published(folder / "base", "gemma3")
    for names in ("language_model", "text_model_of_another"):
        lora = f"{{r: 2, targets: 'model.{names}.layers.[\\d]+.(mlp|self_attn).(up|q)_proj'}}"
        words = ("--device=cpu", f"--config={tiny_config(folder)}", *MADE, f"run.dir={names}")
        code = 0 if names == "language_model" else 2
        assert launch(*words, "checkpoint.export=false", f"model={{pretrained: base, lora: {lora}}}") == code
        only = f"model={{pretrained: base, train_only: ['model.{names}.layers.1.*']}}"
        assert launch(*words, f"run.dir={names}_only", only) == code
    before, after = (load_file(folder / run / "model.safetensors") for run in ("base", "language_model_only/export"))
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    assert moved == {key for key in before if "language_model.model.layers.1." in key}
    layers = {key.partition(".lora_")[0] for key in tensors_in(folder / "language_model") if ".lora_" in key}
    assert layers == {f"model.layers.{at}.{name}" for at in (0, 1) for name in ("mlp.up_proj", "self_attn.q_proj")}


def test_a_new_model_is_its_text_alone(folder: Path) -> None:
    config = read_architecture({"model_type": "mistral3", **FAMILIES["mistral3"]})
    assert config.model_type == "mistral3"
    words = [
        "optim.warmup_steps=0",
        f"model.architecture={config.to_json_string(use_diff=False)}".replace("\n", " "),
        "train.steps=1",
    ]
    made = ("--device=cpu", f"--config={tiny_config(folder)}", "checkpoint.export=true", "run.dir=run")
    assert launch(*made, "model.architecture=null", *words) == 0
    model = AutoModelForCausalLM.from_pretrained(folder / "run/export")
    assert type(model).__name__ == "MistralForCausalLM"
    with pytest.raises(ConfigError, match="a causal language model of transformers, found 'qwen2_5_vl'"):
        read_architecture({"model_type": "qwen2_5_vl", "text_config": _TEXT})
