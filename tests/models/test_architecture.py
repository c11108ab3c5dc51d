"""`model.architecture`: published config.json files are taken with all that they say; wrong sizes aren't."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import ARCHITECTURES, build
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from portable_fsdp.models.architecture import config_from_json, read_architecture
from portable_fsdp.runtime.errors import ConfigError

LLAMA = ARCHITECTURES["llama"]
FILE = {"architectures": ["LlamaForCausalLM"], "transformers_version": "4.44.0", "torch_dtype": "bfloat16"}


PUBLISHED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published.json").read_text())
"""Published models: `config`, with the keys of the published file (those of older transformers, and those that no class
reads); `parameters`, a tied weight once; `rotary`: (base, rotated dimensions) of each `inv_freq`, before scaling."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_has_the_published_number_of_parameters(name: str) -> None:
    config = read_architecture(PUBLISHED[name]["config"])
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    assert sum(weight.numel() for weight in model.parameters()) == PUBLISHED[name]["parameters"]


@pytest.mark.parametrize("name", [name for name in PUBLISHED if PUBLISHED[name]["rotary"]])
def test_rotary_values_arrive_in_the_model(name: str) -> None:
    """The whole formula of the frequencies, without scaling (Llama 3's changes the slow ones)."""
    published = PUBLISHED[name]
    model = build(published["config"] | {"num_hidden_layers": 6}).model  # Gemma 3 has both kinds from there
    held = {fqn: value for fqn, value in model.named_buffers() if fqn.endswith("inv_freq") and "original" not in fqn}
    assert len(held) == len(published["rotary"])
    expected = [base ** -(torch.arange(0, width, 2).float() / width) for base, width in published["rotary"]]
    for buffer in held.values():
        fast = [each for each in expected if len(each) == len(buffer) and torch.allclose(each[:8], buffer[:8])]
        assert fast, f"{buffer} is none of {expected}"
        if not published["config"].get("rope_scaling"):
            torch.testing.assert_close(buffer, fast[0])
    if name == "llama 3.1 8b":
        torch.testing.assert_close(next(iter(held.values()))[-1], expected[0][-1] / 8)


@pytest.mark.slow
@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.proof)])
def test_a_config_of_any_class_comes_back_as_it_is(every: int) -> None:
    """All that transformers writes for its causal models, whole and as `save_pretrained` shortens it."""
    taken, model_types = 0, [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES][::every]
    for model_type in model_types:
        try:
            config: Any = CONFIG_MAPPING[model_type]()
        except Exception:  # gemma4_assistant: its defaults contradict each other
            continue
        taken += 1
        shortened = {"model_type": model_type, **json.loads(config.to_json_string(use_diff=True))}
        for values in (config.to_dict(), shortened):
            again = read_architecture(values).to_dict()
            differ = {key for key in again if again[key] != config.to_dict().get(key)}
            assert differ <= {"_name_or_path", "transformers_version", "audio_vocab_size"}, model_type
    assert taken >= len(model_types) - 1


TAKEN: dict[str, dict[str, Any]] = {
    "of no class, in a file": FILE | {"is_llama_config": True, "rope_interleaved": False, "vendor": "x"},
    "one letter off": FILE | {"eod_token_id": 3, "n_layers": 2, "rms_norm_epz": 1e-5, "use_sliding_window": False},
    "older names": {"torch_dtype": "float16", "rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "of generation": {"temperature": 0.7, "do_sample": True},
    "dropout, in a file": FILE | {"attention_dropout": 0.1},
    "of remote code and of quantisation": FILE
    | {"auto_map": {"AutoConfig": "configuration_x.X"}, "quantization_config": {"quant_method": "mxfp4"}},
}


@pytest.mark.parametrize("name", TAKEN)
def test_keys_of_published_files_are_taken(name: str) -> None:
    config = read_architecture(LLAMA | TAKEN[name])
    assert (config.hidden_size, config._name_or_path) == (48, "")
    assert not hasattr(config, "auto_map")
    assert not hasattr(config, "quantization_config")
    assert config_from_json(json.loads(config.to_json_string(use_diff=False))).to_dict() == config.to_dict()


def test_the_log_names_keys_without_effect(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "portable_fsdp"):
        read_architecture(LLAMA | TAKEN["of no class, in a file"] | {"attention_dropout": 0.1})
        read_architecture(LLAMA | {"tie_word_embedings": False, "sliding_window": 5})
        read_architecture({"model_type": "gemma3", "text_config": {"hiden_size": 64}})
    assert [record.getMessage() for record in caplog.records if record.name == "portable_fsdp"] == [
        "model.architecture: LlamaConfig declares no is_llama_config, rope_interleaved, vendor: "
        "probably without effect",
        "model.architecture: attention_dropout: set to 0; to keep it: model.dropout=published",
        "model.architecture: LlamaConfig declares no tie_word_embedings (nearest: tie_word_embeddings), "
        "sliding_window: probably without effect",
        "model.architecture: Gemma3Config declares no text_config.hiden_size (nearest: hidden_size): "
        "probably without effect",
    ]


_OF_SIZES = "vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32"
_NO_WIDTH = {key: value for key, value in LLAMA.items() if key != "hidden_size"}
_NO_DEPTH = {key: value for key, value in LLAMA.items() if key != "num_hidden_layers"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "instead of the right one": (_NO_WIDTH | {"hidden_sze": 64}, r"missing sizes of LlamaConfig: hidden_size\."),
    "no sizes": (
        {"model_type": "llama"},
        rf"missing sizes of LlamaConfig: vocab_size, .*, num_attention_heads\.\n.* defaults are {_OF_SIZES}\.",
    ),
    "no sizes, in a file": (FILE | {"model_type": "llama"}, r"missing sizes of LlamaConfig: vocab_size, hidden_size"),
    "one size": (_NO_DEPTH, r"LlamaConfig: num_hidden_layers\.\n  Add it; .* num_hidden_layers=32\."),
    "sizes by the class's own names": ({"model_type": "gpt2"}, r"vocab_size=50257, n_embd=768, n_layer=12, n_head=12"),
    "sizes beside a default": ({"model_type": "llama", "hidden_size": 48}, r"sizes of LlamaConfig: vocab_size, inter"),
    "sizes of a part": ({"model_type": "gemma3"}, r"sizes of Gemma3Config: text_config"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_refused(name: str) -> None:
    architecture, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        read_architecture(architecture)


def test_other_names_of_sizes_count() -> None:
    """One of attribute_map, one that the class converts, and a default that a derived value replaces."""
    gpt2 = {"model_type": "gpt2", "vocab_size": 101, "hidden_size": 48, "num_hidden_layers": 2, "n_head": 4}
    assert read_architecture(gpt2).n_embd == 48
    bloom = {"model_type": "bloom", "vocab_size": 101, "n_embed": 48, "n_layer": 2, "n_head": 4}
    assert read_architecture(bloom).hidden_size == 48


@pytest.mark.parametrize("folder", [True, False])
def test_a_path_is_what_it_holds(tmp_path: Path, folder: bool, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / ("config.json" if folder else "mine.json")
    path.write_text(json.dumps(LLAMA | {"vendor": "x", "rms_norm_epz": 1e-5, "rope_theta": 5.0}))
    with caplog.at_level(logging.WARNING, "portable_fsdp"):
        config = read_architecture(str(tmp_path if folder else path))
    assert "LlamaConfig declares no vendor, rms_norm_epz (nearest: rms_norm_eps): probably" in caplog.text
    assert config.rope_parameters["rope_theta"] == 5.0
    assert config.hidden_size == 48


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"architecture: no such file: .*c\.json\n  Name a config\.json or its folder"),
        ("x" * 5000, r"c\.json: can't be read as JSON: .*\.$"),
        ("{", r"c\.json: can't be read as JSON"),
        ("[1]", r"c\.json: no `model_type`, which a config\.json of transformers needs"),
        ('{"hidden_size": 4}', r"c\.json: no `model_type`"),
        ('{"model_type": "lama"}', r"c\.json: model_type: expected a causal .*'lama'\.\n  nearest: llama"),
        ('{"model_type": "llama"}', r"c\.json: missing sizes of LlamaConfig"),
        (json.dumps(LLAMA | {"num_attention_heads": 5}), r"c\.json: transformers refuses it: .*hidden size.*5"),
    ],
)
def test_a_path_that_holds_none_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "c.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_architecture(str(tmp_path / "c.json"))
