"""From a model of the hub to a folder that transformers' pipeline opens: what people do, as they do it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hub_server import COMMIT, Hub, serve
from safetensors.torch import load_file
from started import PYTHON, TINY, tiny_config
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

TEXT = "the model reads what the hub has, and the folder says what the model read.\n"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}</s>{% endfor %}"
GENERATION = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": 0, "pad_token_id": 0}

GENERATE = """
import json
from transformers import pipeline
generate = pipeline("text-generation", model="run/export")
text = generate("the model")[0]["generated_text"]
chat = generate([{"role": "user", "content": "the hub"}])[0]["generated_text"]
ids = generate.tokenizer("<tool>", add_special_tokens=False)["input_ids"]
print(json.dumps([text, chat, ids, generate.tokenizer.chat_template, generate.model.generation_config.max_new_tokens]))
"""


def write_repository(folder: Path) -> PreTrainedTokenizerFast:
    """A model with its tokenizer, chat template and generation config."""
    pieces: Any = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.train_from_iterator([TEXT], trainers.BpeTrainer(special_tokens=["</s>"], show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="</s>", chat_template=TEMPLATE)
    model: dict[str, Any] = TINY["model"]
    architecture: dict[str, Any] = {**model["architecture"], "vocab_size": len(tokenizer), "eos_token_id": 0}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    return tokenizer


def start(tmp_path: Path, command: list[str], **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **environment}, capture_output=True, text=True, timeout=280
    )


def test_a_model_of_the_hub_is_tuned_with_a_grown_tokenizer_and_generates(tmp_path: Path) -> None:
    tokenizer = write_repository(tmp_path / "repository")
    ids = len(tokenizer)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(tmp_path / "grown")
    (tmp_path / "corpus.txt").write_text(TEXT * 50)
    tiny_config(tmp_path)
    words = ["--device=cpu", "--config=tiny.yaml", "train.steps=2", "optim.warmup_steps=0", "checkpoint.export=true"]
    words += ["model={pretrained: org/tiny}", "data={source: text, path: corpus.txt, seq_len: 32, tokenizer: grown}"]
    with serve(Hub({"org/tiny": tmp_path / "repository"})) as hub:
        where = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
        done = start(tmp_path, [*PYTHON, *words], **where)
    assert done.returncode == 0, done.stderr
    said = (
        f"snapshots/{COMMIT}: the tokenizer has {ids + 1} ids, the model rows for {ids}: embedding and head grow by 1"
    )
    assert said in done.stderr

    export = tmp_path / "run" / "export"
    assert (export / "generation_config.json").read_text() == json.dumps(GENERATION)
    assert json.loads((export / "config.json").read_text())["vocab_size"] == ids + 1
    assert len(load_file(export / "model.safetensors")["model.embed_tokens.weight"]) == ids + 1
    assert str(tmp_path) not in (export / "config.json").read_text()
    done = start(tmp_path, [sys.executable, "-c", GENERATE], PYTHONPATH="", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    text, chat, tool, template, tokens = json.loads(done.stdout.splitlines()[-1])
    assert text.startswith("the model")
    assert len(text) > len("the model")
    assert [message["role"] for message in chat] == ["user", "assistant"]
    assert (tool, template, tokens) == ([ids], TEMPLATE, GENERATION["max_new_tokens"])
