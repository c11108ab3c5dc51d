"""`python -m portable_fsdp.sample`: a folder made by transformers alone, a run's export, adapters, a chat."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from portable_fsdp.data.tokenize import load_tokenizer
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.sample import main, sample

pytestmark = pytest.mark.slow

TEMPLATE = "{% for message in messages %}{{ message.content }}>{% endfor %}"


def save_model(folder: Path) -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", vocab_size=256, max_position_embeddings=64, use_cache=False, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    load_tokenizer("bytes").save(folder)
    return model


def texts(folder: Path, prompt: str = "Grüße", **arguments: Any) -> list[str]:
    chosen: dict[str, Any] = {"count": 1, "tokens": 20, "temperature": 0.7, "seed": 1}
    return list(sample(folder, prompt, **chosen | arguments))


def test_the_command_prints_what_the_same_seed_gives_and_another_gives_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path)
    first, second = texts(tmp_path, count=2)
    assert first.startswith("Grüße")
    assert len(first.encode()) > len("Grüße".encode()) + 5
    assert first != second
    assert texts(tmp_path, seed=2) != [first]
    capsys.readouterr()
    assert main([str(tmp_path), "--prompt", "Grüße", "--tokens=20", "--seed=1", "--count=2"]) == 0
    printed = capsys.readouterr()
    assert (printed.out.split(), printed.err) == (f"{first} {second}".split(), "")  # a text may hold line ends


def test_temperature_0_takes_the_likeliest(tmp_path: Path) -> None:
    model = save_model(tmp_path)
    assert texts(tmp_path, temperature=0, count=2) == texts(tmp_path, temperature=0, seed=5) * 2
    ids = torch.tensor([list(b"ab")])
    for _ in range(5):
        with torch.no_grad():
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    expected = AutoTokenizer.from_pretrained(tmp_path).decode(ids[0], skip_special_tokens=True)
    assert texts(tmp_path, "ab", temperature=0, tokens=5) == [expected]


def test_a_chat_is_answered(tmp_path: Path) -> None:
    save_model(tmp_path)
    with pytest.raises(ConfigError, match="the tokenizer has no chat template; leave --chat out"):
        texts(tmp_path, chat=True)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    [answer] = texts(tmp_path, "ab", chat=True, temperature=0)
    assert texts(tmp_path, "ab>", temperature=0) == [f"ab>{answer}"]


# transformers', of how peft 0.21 asks it.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_are_opened_with_their_base(tmp_path: Path) -> None:
    import peft  # here: all who collect tests would wait seconds for it

    model = save_model(tmp_path / "base")
    adapters = peft.LoraConfig(r=2, target_modules=["o_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, adapters)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter))
    adapted.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    adapted.save_pretrained(str(tmp_path / "adapter"))
    load_tokenizer("bytes").save(tmp_path / "adapter")
    assert texts(tmp_path / "adapter") != texts(tmp_path / "base")


REFUSED = [
    ("none", "", "{}: no exported model here"),
    ("untold", "", "{}: no tokenizer beside the model"),
    ("model", "--gguf_file=a.gguf", "--gguf_file: no file a.gguf in {}."),
    ("model", "--prompt=", "--prompt: empty, and the tokenizer adds no first token"),
    ("model", f"--prompt={'a' * 64}", "--prompt: expected fewer tokens than the model's 64 positions, found 64."),
    ("model", "--tokens=0", "--tokens: expected a whole number of at least 1, found 0"),
    ("model", "--count=-1", "--count: expected a whole number of at least 1, found -1"),
    ("model", "--count=two", "--count: expected a whole number of at least 1, found two"),
    ("model", "--temperature=-1", "--temperature: expected a number of at least 0, found -1"),
    ("model", "--temperature=nan", "--temperature: expected a number of at least 0, found nan"),
    ("no base", "", "{}: the adapters need a base model in Hugging Face format: none is named"),
    ("gguf", "", "format: no config.json in {} (adapter_config.json).\n  Export the run with merged adapters"),
    ("broken", "", "{}/adapter_config.json: not a JSON object: "),
]
"""Folder, a flag, and the sentence."""


def test_what_gives_no_text_ends_with_2_and_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "none").mkdir()
    for name in ("model", "untold"):
        save_model(tmp_path / name)
    for file in (tmp_path / "untold").glob("tokenizer*"):
        file.unlink()
    bases = {"base_model_name_or_path": None}, {"base_model_name_or_path": str(tmp_path / "gguf")}, []
    for name, adapters in zip(("no base", "gguf", "broken"), bases, strict=True):
        load_tokenizer("bytes").save(tmp_path / name)
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(adapters))
    capsys.readouterr()
    for name, word, expected in REFUSED:
        code = main([str(tmp_path / name), *([word] if word else [])])
        printed = capsys.readouterr()
        assert (code, printed.out) == (2, ""), (name, word)
        assert expected.format(tmp_path / name) in printed.err
        assert "Traceback" not in printed.err


def test_a_text_ends_with_the_models_positions_and_a_runs_folder_stands_for_its_export(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_model(tmp_path / "export")
    capsys.readouterr()
    assert texts(tmp_path / "export", "ab", tokens=500) == texts(tmp_path / "export", "ab", tokens=62)
    assert capsys.readouterr().err == "--tokens=500: 62 fit after a prompt of 2 (model: 64 positions)\n"
    assert main([str(tmp_path), "--prompt=ab", "--tokens=5", "--count=1"]) == 0
    assert capsys.readouterr().out.startswith("ab")
