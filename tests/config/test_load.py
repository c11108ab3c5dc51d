from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from portable_fsdp.config.data import Data, share_held_out
from portable_fsdp.config.load import config_text
from portable_fsdp.config.schema import Config, Memory, Run
from portable_fsdp.convert.read import load_config
from portable_fsdp.layout import split_batch, split_note
from portable_fsdp.runtime.errors import ConfigError

SMALL = """\
model:
  architecture: {model_type: llama, hidden_size: 64}
train:
  steps: 10
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "a.yaml"
    path.write_text(text)
    return path


def message(path: Path, *overrides: str) -> str:
    """The error of a config that must be refused, with the folder cut out."""
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    text = str(caught.value)
    assert "Nothing was started" not in text  # the command adds it
    return text.replace(f"{path.parent}/", "")


def small(folder: Path, *overrides: str) -> Config:
    return load_config(write(folder, SMALL), overrides)


def test_defaults_and_overrides(tmp_path: Path) -> None:
    words = ["optim.lr=3e-4", "model.architecture.hidden_size=128", "run.name=a=b", "train.steps=2", "train.steps=20"]
    config = small(tmp_path, *words)
    assert config.optim.lr == 3e-4
    assert config.model.architecture == {"model_type": "llama", "hidden_size": 128}
    assert config.run.name == "a=b"
    assert config.train.steps == 20
    assert config.train.global_batch == 8
    # A quoted number sign is no comment.
    assert small(tmp_path, "run.dir='runs/a #1'", "run.name=a#1").run == Run(dir="runs/a #1", name="a#1")
    assert small(tmp_path, "run=dir: 'a: b'").run.dir == "a: b"
    # Numbers as people write them.
    config = load_config(write(tmp_path, SMALL + "optim: {lr: 1, eps: 1e-9, betas: [0.8, 1e-1]}\nmemory:\n"))
    assert (config.optim.lr, config.optim.eps, config.optim.betas) == (1.0, 1e-9, (0.8, 0.1))
    assert isinstance(config.optim.lr, float)
    assert config.memory == Memory()  # an empty section


ARCHITECTURES: list[tuple[str, str, dict[str, object]]] = [
    ("null", "rope.type=x", {"rope": {"type": "x"}}),  # an override builds the mapping it needs
    ("{a: &rope {f: 1}, b: *rope}", "a.f=2", {"a": {"f": 2}, "b": {"f": 1}}),  # and leaves an alias alone
    ("{a: &r {f: 1}, b: {<<: *r, f: 2}}", "", {"a": {"f": 1}, "b": {"f": 2}}),  # a merged key may be set again
    ("{a: 1e-5, b: 1.5e3, c: -.5E+1, d: 1e4x}", "", {"a": 1e-5, "b": 1500.0, "c": -5.0, "d": "1e4x"}),
]


def test_values_inside_an_architecture(tmp_path: Path) -> None:
    for architecture, overrides, expected in ARCHITECTURES:
        path = write(tmp_path, f"train: {{steps: 1}}\nmodel: {{architecture: {architecture}}}\n")
        words = [f"model.architecture.{override}" for override in ("model_type=x", *overrides.split())]
        assert load_config(path, words).model.architecture == {"model_type": "x", **expected}


def test_the_resolved_text_reads_back_to_an_equal_config(tmp_path: Path) -> None:
    config = small(
        tmp_path,
        "run.dir='1e5'",
        "run.name='no'",
        "optim.lr=1e-7",
        "train.max_grad_norm=null",
        "model.architecture.extra={eps: 1e-6, word: '3e-4', day: '2020-01-01', none: null, list: [1, 2.5], ü: ß}",
    )
    assert load_config(write(tmp_path, config_text(config))) == config


def test_a_removed_key_sets_nothing_in_a_file_and_is_refused_as_an_override(tmp_path: Path) -> None:
    """Files of earlier releases hold all keys."""
    path = write(tmp_path, SMALL + "run: {preemption: auto, seed: 3}\n")
    assert load_config(path) == load_config(write(tmp_path, SMALL + "run: {seed: 3}\n"))
    refusal = message(path, "run.preemption=off")
    assert refusal.startswith("override 'run.preemption=off': run.preemption: removed, and sets nothing: only signals")
    for dtype, now in (("float32", ""), ("bfloat16", "precision: {buffers: bfloat16}\n")):
        path = write(tmp_path, SMALL + f"xla_fsdp1: {{buffer_dtype: {dtype}}}\n")
        assert load_config(path) == load_config(write(tmp_path, SMALL + now))


ALL_AT_ONCE = """\
run:
  name: no
  dir: 123
  seed: -1
train:
  steps: 10
  global_batch: 2e1
optimizer: {lr: 2}
lr: 3
optim:
  betas: [0.9, x]
  momentum: 3
  lr: 1
  lr: fast
memory: {gradient_checkpointing: off}
precision: 3
qqqq: 1
"""

REFUSED_FILES = [
    (SMALL + "memory:\n  gradient_checkpionting: full\n",),
    (ALL_AT_ONCE, "foo", "steps=3", "optim.eps.x=1", "checkpoint.export=["),
    (SMALL + "optim:\n  groups:\n    - {match: a}\n    - match: b\n      lr: 0\n",),
    (SMALL + "sharding: {wrap_classes: &a [*a]}\n",),
    (SMALL + "run: &a\n  name: *a\n",),
    *((text,) for text in ("", "- 1", "a: 1\nb: [", "a:\n\t- b", "a: !!python/object:x {}", "run: 0x_")),
    ("a: &a [1]\n" + "".join(f"{b}: &{b} [{', '.join(9 * [f'*{a}'])}]\n" for a, b in pairwise("abcdef")),),
    *((text,) for text in ("a: " + "x" * 300_000, "model: {pretrained: x}\ntrain: {steps: 1}\n1: 2", "? [a]\n: b")),
    ("a: 1\n---\nb: 1",),
]
"""Texts of a file and overrides; all problems come at once, in the order of the lines."""

JSONL = "source: jsonl, path: a.jsonl"
REFUSED_OVERRIDES = [
    *("optim.lr=x", "optim.lrr=1", "optimm.lr=1", "optim.micro_batch=1", "optim=3", "run=3", "xla_fsdp1=3"),
    *("train.steps=true", "train.epochs=3"),
    *("model.dropout=1", "model.dropout=publish", 'model={factory: "a:b", dropout: 0.1}'),
    *("model.pretrained=x", "model.architecture={}", "train.steps.x=1", "optim={lr: 1, lr: 2}", "=3", "optim..lr=3"),
    *("sharding.wrap_classes=LlamaDecoderLayer", "sharding.wrap_modules=[1]", "memory.save_ops=matmul"),
    *("optim.betas=[0.9, 1.0]", "optim.betas=[0.9]", "precision.modules=3", "precision.modules={head: fp32}"),
    *("sharding.strategy=full_shard", "sharding.strategy=ZERO3", "optim.schedule=linea", "precision.modules.head=fp32"),
    *("precision.modules={1: float32}", "optim.groups=x", "optim.groups=[3]"),
    *("optim.groups=[{match: x, lr: -1}]", "optim.groups=[{lr: 1}]", "optim.groups=[{match: x, lrr: 1}]"),
    "optim.groups=[{match: x, lr: 1, lr: 2}]",
    *("data={source: jsonl}", "data={path: a}", "data.path=x.jsonl.gz", "data.format=sharegpt", "data.format=Alpaca"),
    *(f"data={{{JSONL}, split: train}}", "data={columns: {text: body}}"),
    *("data={source: text, path: a, format: chat}", f"data={{{JSONL}, columns: {{prompt: q}}}}"),
    *(f"data={{{JSONL}, columns: {{body: q}}}}", f"data={{{JSONL}, format: chat, packing: stream}}"),
    *(f"data={{{JSONL}, mixture: [{{{JSONL}}}]}}", f"data={{{JSONL}, chat_template_kwargs: {{a: 1}}}}"),
    f"data={{{JSONL}, format: prompt_completion, columns: {{messages: t}}}}",
    f"data={{mixture: [{{{JSONL}, format: chat}}, {{{JSONL}}}], packing: stream}}",
    *(f"data={{mixture: [{{{JSONL}, weight: 0.0}}]}}", "data={mixture: [{source: jsonl}]}"),
    *(f"data={{mixture: [{{{JSONL}}}], eval_split: b.jsonl}}", "data={eval_split: validation}"),
    *(f"data={{{JSONL}, eval_split: 0%}}", f"data={{{JSONL}, eval_split: 100%}}"),
    *("report_to=tensorboard", "observe={profile: {steps: [1, 21]}}"),
    # Nothing is lost to a comment: run.name=#1 would be null.
    *("run.dir=runs/a #1", "run.name=#1", "run.name='a' # it's", "run={dir: runs/a} # mine", "run=dir: runs/a #1"),
    "data.path=[a, # b\n c]",
]
"""Each with a good file; lists and mappings are named to the item."""


def test_the_words_of_a_refusal(tmp_path: Path, assert_golden: Callable[[Path, str], None]) -> None:
    texts: list[str] = []
    for text, *overrides in (*REFUSED_FILES, *((SMALL, override) for override in REFUSED_OVERRIDES)):
        shown = [f"| {line[:100]}" for line in text.splitlines() if text != SMALL]
        texts += [*shown, f"$ {' '.join(overrides)}".rstrip(), message(write(tmp_path, text), *overrides), ""]
    assert_golden(Path(__file__).parent / "golden/refused.txt", "\n".join(texts))


def test_missing_file_folder_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(b"a: \xff")
    for name, text in {"b.yaml": "no such file", "": "this is a folder", "c.yaml": "not UTF-8 text"}.items():
        assert text in message(tmp_path / name)


FILE = {"source": "jsonl", "path": "a.jsonl"}


KEYS: list[dict[str, Any]] = [
    {},
    {**FILE, "format": "prompt_completion", "columns": {"prompt": "q"}, "eval_split": "b.jsonl"},
    {**FILE, "format": "chat", "columns": {"tools": "t"}, "chat_template_kwargs": {"enable_thinking": False}},
    {"source": "huggingface", "path": "org/name", "split": "train[:10%]", "eval_split": "test"},
    {"mixture": [{**FILE, "weight": 3}, {"source": "python_docs"}], "eval_split": "2.5%", "packing": "stream"},
]


def test_data_survives_being_written_and_read_back_and_a_share_is_told_from_a_name() -> None:
    for data in (Data(**keys) for keys in KEYS):
        assert Data(**data.model_dump(mode="json")) == data
    shares = {"5%": 0.05, "2.5%": 0.025, "50 %": None, "5%.jsonl": None, "train[:5%]": None}
    assert {text: share_held_out(text) for text in shares} == shares


SPLITS = [
    *((24, 2, 3, (2, 4, 0)), (12, 1, 5, (1, 3, 3)), (12, 1, 8, (1, 2, 4))),
    (48, 8, 4, (6, 2, 0)),  # the micro batch shrinks to what a device has
    *((16, 3, 2, (3, 3, 2)), (32, 8, 3, (6, 2, 4)), (7, 7, 1, (7, 1, 0)), (1, 1, 3, (1, 1, 2))),
]
"""Global batch, micro batch, row shards; rows, accumulation and padding."""


def test_a_global_batch_is_split_with_little_padding_and_a_note_of_its_cost(tmp_path: Path) -> None:
    for global_batch, micro_batch, row_shards, (rows, accumulation, padding) in SPLITS:
        config = small(tmp_path, f"train.global_batch={global_batch}", f"train.micro_batch={micro_batch}")
        assert split_batch(config, row_shards) == (rows, accumulation, padding)
        assert rows * accumulation * row_shards == global_batch + padding
        assert bool(split_note(config, row_shards)) == (padding > 0 or rows < micro_batch)
    assert split_note(small(tmp_path, "train.global_batch=4", "train.micro_batch=3"), 1) == (
        "train.micro_batch: a step of 4 rows trains 2 micro batches of 2 rows, not of 3"
    )
    assert split_note(small(tmp_path, "train.global_batch=16", "train.micro_batch=3"), 2) == (
        "train.global_batch: a step of 16 rows computes 18 on 2 devices: 2 row(s) of padding (11%) count nothing "
        "(train.micro_batch=2 or 4 needs none)"
    )


def test_a_batch_that_can_not_be_split_is_refused_with_what_fits(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        split_batch(small(tmp_path, "train.global_batch=8", "train.micro_batch=8"), 3)
    assert str(caught.value) == (
        "train.micro_batch: expected at most 3, the rows of each of 3 devices (train.global_batch=8), found 8.\n"
        "  Set train.micro_batch=3, or train.global_batch=24."
    )
    own = small(tmp_path, "train.global_batch=32", "train.micro_batch=3", "train.task=my:task")
    with pytest.raises(ConfigError) as caught:
        split_batch(own, 4)
    assert str(caught.value) == (
        "train.global_batch: expected a multiple of train.micro_batch * devices = 3 * 4 = 12 sequences, found 32: "
        "train.task=my:task counts its losses itself.\n"
        "  Set train.global_batch=24 or 36, or train.micro_batch=2 or 4."
    )
