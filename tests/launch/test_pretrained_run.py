"""From a model of the hub to a folder that transformers' pipeline opens: what people do, as they do it."""

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from cli import PYTHON, TINY, finish, free_port, started, tiny_config
from hub_server import COMMIT, Hub, serve
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

TEXT = "the model reads what the hub has, and the folder says what the model read.\n"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}</s>{% endfor %}"
WORDS = [
    *("model={pretrained: org/tiny}", "data={source: text, path: corpus.txt, seq_len: 32}"),
    *("train.steps=1", "optim.warmup_steps=0"),
]
GENERATION = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": 0, "pad_token_id": 0}


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


def cached(home: Path, repository: Path, commit: str) -> Path:
    """The hub's cache of a host that has seen `commit` as the main branch of org/tiny."""
    of_model = home / "hub" / "models--org--tiny"
    shutil.copytree(repository, of_model / "snapshots" / commit)
    (of_model / "refs").mkdir()
    (of_model / "refs" / "main").write_text(commit)
    return home


@pytest.mark.proof
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TEXT.upper().encode(), "data: expected the same on all processes, found"),
        (b"\xff" + TEXT.encode(), "data: corpus.txt: expected UTF-8"),
    ],
    ids=["data", "damaged"],
)
def test_hosts_that_see_another_commit_or_other_data_are_refused(tmp_path: Path, text: bytes, message: str) -> None:
    write_repository(tmp_path / "repository")
    words = ["--device=cpu", f"--config={tiny_config(tmp_path)}", f"run.dir={tmp_path}/run", *WORDS]
    variables = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    commits = [COMMIT, COMMIT[::-1]]
    with ExitStack() as stack:
        hosts = []
        for rank, (commit, own) in enumerate(zip(commits, (TEXT.encode(), text), strict=True)):
            home = cached(tmp_path / f"host{rank}", tmp_path / "repository", commit)
            (home / "corpus.txt").write_bytes(own * 50)
            where = {**variables, "RANK": str(rank), "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
            hosts.append(stack.enter_context(started([*PYTHON, *words], home, **where)))
        assert [host.wait() for host in hosts] == [2, 2]
        errors = [host.err for host in hosts]
    assert all(message in error for error in errors), errors
    if text.startswith(b"\xff"):
        assert errors[0].count("process 1: data: corpus.txt") == 1
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_model_of_the_hub_is_tuned_with_a_grown_tokenizer_and_generates(tmp_path: Path) -> None:
    from transformers import pipeline  # here: all who collect tests would wait seconds for it

    tokenizer = write_repository(tmp_path / "repository")
    ids = len(tokenizer)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(tmp_path / "grown")
    (tmp_path / "corpus.txt").write_text(TEXT * 50)
    words = ["--device=cpu", f"--config={tiny_config(tmp_path)}", *WORDS, "data.tokenizer=grown"]
    with serve(Hub({"org/tiny": tmp_path / "repository"})) as hub:
        where = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache")}
        run = finish([*PYTHON, *words, "train.steps=2", "checkpoint.export=true"], tmp_path, **where)
    grown = f"the tokenizer has {ids + 1} ids, the model rows for {ids}: embedding and head grow by 1"
    assert f"snapshots/{COMMIT}: {grown}" in run.err

    export = tmp_path / "run" / "export"
    assert (export / "generation_config.json").read_text() == json.dumps(GENERATION)
    assert json.loads((export / "config.json").read_text())["vocab_size"] == ids + 1
    assert len(load_file(export / "model.safetensors")["model.embed_tokens.weight"]) == ids + 1
    assert str(tmp_path) not in (export / "config.json").read_text()
    generate: Any = pipeline("text-generation", model=str(export))
    text = generate("the model")[0]["generated_text"]
    assert text.startswith("the model")
    assert len(text) > len("the model")
    chat = generate([{"role": "user", "content": "the hub"}])[0]["generated_text"]
    assert [message["role"] for message in chat] == ["user", "assistant"]
    assert generate.tokenizer("<tool>", add_special_tokens=False)["input_ids"] == [ids]
    assert generate.tokenizer.chat_template == TEMPLATE
    assert generate.model.generation_config.max_new_tokens == GENERATION["max_new_tokens"]
