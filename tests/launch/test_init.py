"""`init`: answers become a config that its devices accept and whose plan fits; or a sentence, and no file."""

import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import pytest
from cli import finish, losses
from documented import ROOT, commands
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

CTRL_C = "\x03"
PAGE = ROOT / "docs/fine_tuning.md"
COMMAND = [sys.executable, "-m", "portable_fsdp.init"]
SIZES: dict[str, Any] = {
    **{"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512},
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
KINDS = {"layer_types": ["linear_attention", "full_attention"], "shared_expert_intermediate_size": 32}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SIZES},
    "qwen3": {"model_type": "qwen3", **SIZES},
    "experts": {"model_type": "qwen3_moe", **SIZES, **EXPERTS},
    "images": {"model_type": "gemma3", "text_config": SIZES, "vision_config": VISION},
    "recurrent": {"model_type": "qwen3_next", **SIZES, **EXPERTS, **LINEAR, **KINDS},
    "t5": {"model_type": "t5", "vocab_size": 320, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1},
}
ASK, SAY = {"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A statement."}
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
REFUSED = {
    "pairs": "no preferences",
    "unknown": "no known form",
    "broken": "broken.jsonl:1: ",
    "t5": "language model",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models, and rows of each form; `text` is a folder of texts, `saved` a data set, `table` Parquet."""
    folder = tmp_path_factory.mktemp("world")
    pieces: Any = Tokenizer(models.BPE())
    pieces.pre_tokenizer, pieces.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    known: dict[str, Any] = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    pieces.train_from_iterator(
        [json.dumps(ROWS)], trainers.BpeTrainer(special_tokens=["</s>"], vocab_size=300, **known)
    )
    for name, values in MODELS.items():
        template = TEMPLATES["chatml"] if name == "llama" else None
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces, eos_token="</s>", chat_template=template)
        tokenizer.save_pretrained(folder / name)
        of_task: Any = AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM
        of_task.from_config(AutoConfig.for_model(**values)).save_pretrained(folder / name)
    for name, row in ROWS.items():
        (folder / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * (400 if name == "completion" else 40))
    (folder / "broken.jsonl").write_text("{\n")
    (folder / "text").mkdir()
    (folder / "text/one.txt").write_text(ROWS["text"]["text"] * 60)
    rows: Any = datasets.Dataset.from_list([ROWS["chat"]] * 40)
    rows.save_to_disk(folder / "saved")
    rows.to_parquet(folder / "table.parquet")
    return folder


def answers(world: Path, model: str, data: str, *more: str) -> list[str]:
    paths = (world / f"{data}{suffix}" for suffix in ("", ".jsonl", ".parquet"))
    return [f"--model={world / model}", f"--data={next(path for path in paths if path.exists())}", *more]


def accepted(path: Path, devices: str) -> Config:
    config, target = load_config(path), parse_target(devices)
    kind, name = target.hardware.kind, target.hardware.name
    require_supported(config, Deployment(engine_made_for(kind), kind, target.devices, target.hosts, name))
    assert "auto" not in path.read_text()
    return config


CASES = [
    (
        [*MODELS][5 if number % 15 == 0 else number % 5],
        [*ROWS, "broken", "saved", "table"][number % 13],
        ("all", "lora", "qlora")[number % 3],
        ("cpu:1", "l4:1", "cpu:2", "h100:8", "cpu:4", "l4:1", "v6e-8", "cpu:2", "cpu:4", "cpu:1")[number // 2 % 10],
        ("", "--length=256", "--length=512", "--length=4096")[number // 7 % 4],
    )
    for number in range(60)
]


@pytest.mark.proof
@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_answers_become_a_config_that_fits_or_a_sentence(
    case: list[str], world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data, train, devices, length = case
    monkeypatch.chdir(tmp_path)
    words = [f"--train={train}", f"--devices={devices}", *filter(None, [length])]
    words += ["compile.enabled=false"] * (devices == "l4:1")  # the others try it
    code = init.main(answers(world, model, data, *words))
    out, err = capsys.readouterr()
    too_long = "--length=4096: " if length.endswith("4096") else ""
    keys = (model, data, f"{model} {devices}")
    expected = next(filter(None, (*(REFUSED.get(key) for key in keys[:2]), too_long, REFUSED.get(keys[2]))), "")
    assert (code, Path("run.yaml").exists(), expected in err) == ((2, False, True) if expected else (0, True, True)), (
        err
    )
    if not expected:
        config = accepted(Path("run.yaml"), devices)
        [(used, limit)] = re.findall(r"^memory of a device, by plan: (\S+) of (\S+) GiB$", out, re.MULTILINE)
        assert 0 <= float(used) <= float(limit)
        assert (config.model.lora is None, config.precision.scheme) == (
            train == "all",
            "nf4" * (train == "qlora") or None,
        )


def test_the_printed_line_trains_what_was_written(world: Path, tmp_path: Path) -> None:
    """The command in the docs, with another data file and row length."""
    [command] = [each for each in commands(PAGE.read_text(), PAGE.name) if "portable_fsdp.init" in each.words]
    ours = [*answers(world, "qwen3", "chat"), "--devices=cpu:2", "--for=2 steps"]
    flags = [
        next((flag for flag in ours if flag.startswith(word.partition("=")[0])), word) for word in command.words[3:]
    ]
    assert len({*flags} & {*ours}) == 4
    printed = finish([*COMMAND, *flags, "optim.lr=1e-2"], tmp_path).out
    config = accepted(tmp_path / "run.yaml", "cpu:2")
    assert (config.data.chat_template, config.data.format, config.optim.lr) == ("alpaca", "chat", 1e-2)
    assert "\n+ A statement.</s>\n" in printed
    [line] = re.findall(r"^  portable-fsdp (launch .*)$", printed, re.MULTILINE)
    finish([sys.executable, "-m", "portable_fsdp", *shlex.split(line)], tmp_path)
    assert len(losses(tmp_path / "runs/run")) == 2
    assert finish(COMMAND, tmp_path, 2).err == "--out=run.yaml: the file exists; name a new one.\n"


def test_without_a_terminal_a_missing_model_or_data_is_named(world: Path, tmp_path: Path) -> None:
    assert finish(COMMAND, tmp_path, 2).err.startswith("--model: missing; name the model: ")
    assert finish([*COMMAND, f"--model={world}/llama"], tmp_path, 2).err.startswith("--data: missing; name the data: ")


def session(words: list[str], cwd: Path, *typed: tuple[str, str]) -> int:
    """Run the command on a terminal; type each answer once its question stands there. Returns the exit code."""
    leader, follower = pty.openpty()
    streams: Any = dict.fromkeys(("stdin", "stdout", "stderr"), follower)
    with subprocess.Popen([*COMMAND, *words], cwd=cwd, start_new_session=True, **streams) as process:
        os.close(follower)
        seen = ""
        for question, answer in typed:
            while question not in seen:
                seen += os.read(leader, 1000).decode()
            seen = seen.partition(question)[2]
            if answer == CTRL_C:  # as the terminal of a login does; Python misses it just before it reads
                time.sleep(1)
                process.send_signal(signal.SIGINT)
            else:
                os.write(leader, answer.encode())
    os.close(leader)
    return process.returncode


def test_a_terminal_asks_what_no_flag_answers_and_again_with_the_reason(world: Path, tmp_path: Path) -> None:
    wrong = [("the model: ", "nowhere\n"), ("no such folder: nowhere", ""), ("tokens of a row [256]: ", "9999\n")]
    right = [("the model: ", f"{world}/llama\n"), ("the data: ", f"{world}/alpaca.jsonl\n"), ("[all]: ", "lora\n")]
    rest = [("--length=9999: expected ", ""), ("[256]: ", "\n"), ("[3 epochs]: ", "7 steps\n"), ("start it:", "")]
    assert session(["--devices=cpu:1"], tmp_path, *wrong[:2], *right, wrong[2], *rest) == 0
    config = accepted(tmp_path / "run.yaml", "cpu:1")
    assert (config.train.steps, config.data.seq_len, config.data.prompt) == (7, 256, "alpaca")
    for key, code in ((CTRL_C, 130), ("\x04", 2)):
        assert session(["--out=other.yaml"], tmp_path, ("the model: ", key)) == code


@pytest.mark.proof
def test_a_model_of_the_hub_needs_a_yes_and_no_weights_and_may_be_too_large(world: Path, tmp_path: Path) -> None:
    shutil.copytree(world / "llama", tmp_path / "large")
    large = {**MODELS["llama"], "hidden_size": 8192, "intermediate_size": 32768, "vocab_size": 128256}
    (tmp_path / "large/config.json").write_text(json.dumps(large))
    words = [*COMMAND, "--model=org/large", f"--data={world}/chat.jsonl", "--devices=l4:1", "compile.enabled=false"]
    with serve(Hub({"org/large": tmp_path / "large"})) as hub:
        where = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache")}
        assert "pass --yes to download its config and tokenizer" in finish(words, tmp_path, 2, **where).err
        assert not hub.asked
        refusal = finish([*words, "--yes"], tmp_path, 2, **where).err
        assert (hub.downloads("config.json"), hub.downloads("model.safetensors")) == (1, 0)
    assert "nothing fits on 1 x NVIDIA L4 on 1 host.\n  It fits with " in refusal
    assert not (tmp_path / "run.yaml").exists()
    offline = finish([*words, "--yes"], tmp_path, 2, HF_HOME=str(tmp_path / "empty"), HF_HUB_OFFLINE="1").err
    assert offline.startswith("--model: org/large: not a local folder, and not downloaded from ")
