"""`init`: answers become a config that loads, that its devices accept, and whose plan fits; or a sentence, and no file."""

import json
import os
import pty
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import pytest
from cli import finish, losses
from hub_server import Hub, serve
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedTokenizerFast

from portable_fsdp import init
from portable_fsdp.backends.open import engine_made_for
from portable_fsdp.backends.refusals import Deployment, require_supported
from portable_fsdp.config.schema import Config
from portable_fsdp.convert.read import load_config
from portable_fsdp.data.templates import TEMPLATES
from portable_fsdp.plan.target import parse_target

COMMAND = [sys.executable, "-m", "portable_fsdp.init"]
SIZES = {
    **{"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512},
}
LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES},
    "qwen3": {"model_type": "qwen3", **SIZES},
    "experts": {"model_type": "qwen3_moe", **SIZES, **EXPERTS},
    "images": {"model_type": "gemma3", "text_config": SIZES, "vision_config": VISION},
    "recurrent": {
        **{"model_type": "qwen3_next", **SIZES, **EXPERTS, **LINEAR, "shared_expert_intermediate_size": 32},
        "layer_types": ["linear_attention", "full_attention"],
    },
    "t5": {"model_type": "t5", "vocab_size": 320, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1},
}
WITH_TEMPLATE = ("llama", "experts")

ASK, SAY = {"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A statement. "}
ROWS: dict[str, dict[str, Any]] = {
    "text": {"text": "The with statement closes a file. " * 4},
    "chat": {"messages": [ASK, SAY]},
    "sharegpt": {"conversations": [{"from": "human", "value": "What is it?"}, {"from": "gpt", "value": "It is."}]},
    "completion": {"prompt": "What is it?", "completion": " A statement."},
    "messages": {"prompt": [ASK], "completion": [SAY]},
    "alpaca": {"instruction": "Say what it is.", "input": "with", "output": "A statement."},
    "dolly": {"instruction": "Say what it is.", "context": "with", "response": "A statement.", "category": "qa"},
    "question": {"id": "1", "question": "What is it?", "answer": "A statement."},
    "pairs": {"prompt": "What is it?", "chosen": "A statement.", "rejected": "A file."},
    "unknown": {"subject": "with", "score": 0.5},
}
REFUSED = {"pairs": "no preferences", "unknown": "no known form", "broken": "broken.jsonl:1: ", "t5": "language model"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models, and rows of each form as files; `text` a folder of texts, `saved` a data set, `table` Parquet."""
    folder = tmp_path_factory.mktemp("world")
    text = json.dumps(list(ROWS.values()))
    for name, values in MODELS.items():
        pieces: Any = Tokenizer(models.BPE())
        pieces.pre_tokenizer, pieces.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        special = ["</s>", *["<|im_start|>", "<|im_end|>"] * (name != "qwen3")]
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        known = {"special_tokens": special, "initial_alphabet": alphabet, "show_progress": False, "vocab_size": 300}
        pieces.train_from_iterator([text], trainers.BpeTrainer(**known))
        template = TEMPLATES["chatml"] if name in WITH_TEMPLATE else None
        PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="</s>", chat_template=template).save_pretrained(
            folder / name
        )
        of_task: Any = AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM
        of_task.from_config(AutoConfig.for_model(**values)).save_pretrained(folder / name)
    for name, row in ROWS.items():
        (folder / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * (400 if name == "completion" else 40))
    (folder / "broken.jsonl").write_text("{\n")
    (folder / "text").mkdir()
    for number in range(3):
        (folder / f"text/{number}.txt").write_text(ROWS["text"]["text"] * 20)
    rows: Any = datasets.Dataset.from_list([ROWS["chat"]] * 40)
    rows.save_to_disk(folder / "saved")
    rows.to_parquet(folder / "table.parquet")
    return folder


def answers(world: Path, model: str, data: str, *more: str) -> list[str]:
    path = next(path for path in (world / data, world / f"{data}.jsonl", world / f"{data}.parquet") if path.exists())
    return [f"--model={world / model}", f"--data={path}", *more]


def accepted(path: Path, devices: str) -> Config:
    """The written config, which its devices accept."""
    config, target = load_config(path), parse_target(devices)
    kind, generation = target.hardware.kind, target.hardware.name if target.hardware.kind == "tpu" else ""
    require_supported(config, Deployment(engine_made_for(kind), kind, target.devices, target.hosts, generation))
    assert "auto" not in path.read_text()
    return config


DATA = [*ROWS, "broken", "saved", "table"]
CASES = [
    (
        [*MODELS][number % 6 if number % 12 else 5],  # the last is refused: a few
        DATA[number % 13],
        ("all", "lora", "qlora")[number % 3],
        ("cpu:1", "h100:8", "cpu:2", "l4:1", "v6e-8")[number // 2 % 5],
        ("", "--length=64", "--length=128", "--length=4096")[number // 7 % 4],
    )
    for number in range(60)
]
IN_SUITE = (0,)


@pytest.mark.proof
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_answers_become_a_config_that_fits_or_a_sentence(
    case: tuple[str, ...],
    world: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, data, train, devices, length = case
    monkeypatch.chdir(tmp_path)
    words = [f"--train={train}", f"--devices={devices}", *filter(None, [length])]
    code = init.main(answers(world, model, data, *words))
    out, err = capsys.readouterr()
    expected = REFUSED.get(model) or REFUSED.get(data) or ("--length=4096: " if length.endswith("4096") else "")
    assert (code, Path("run.yaml").exists()) == ((2, False) if expected else (0, True)), err
    assert expected in err
    if not expected:
        config = accepted(Path("run.yaml"), devices)
        used, limit = map(float, re.findall(r"^memory of a device, by plan: (\S+) of (\S+) GiB$", out, re.MULTILINE)[0])
        assert 0 <= used <= limit
        assert (config.model.lora is not None, config.precision.frozen) == (
            train != "all",
            {"all": "auto", "lora": "float32" if "cpu" in devices else "bfloat16", "qlora": "nf4"}[train],
        )
