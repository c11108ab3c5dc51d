"""The table of foreign keys is well formed, has every key of the tools, and a refusal's way out is one."""

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from accelerate_keys import class_fields, keys_of
from foreign_files import problems, read

from portable_fsdp.config.describe import option_names, yaml_value
from portable_fsdp.convert.facts import BY_ACCELERATE, BY_TRAINER
from portable_fsdp.convert.read import read_config
from portable_fsdp.convert.rules import LOGGING_STEPS
from portable_fsdp.convert.table import (
    AXOLOTL,
    ENVIRONMENT,
    FSDP,
    MIXED,
    SAGEMAKER,
    TRAINER,
    TRL,
    bare_name,
    find,
    find_anywhere,
    float16,
    key_table,
    nested_place,
)

TABLE = key_table()
PARALLEL, XLA = "parallelism_config", "xla_fsdp_settings"
OLDER: dict[str, dict[str, str]] = json.loads((Path(__file__).parent / "accelerate_keys.json").read_text())


def package(name: str) -> Path:
    """The folder of an installed package, which is not imported."""
    spec = find_spec(name)
    assert spec
    assert spec.origin
    return Path(spec.origin).parent


def missing(place: str, keys: Iterable[str]) -> list[str]:
    """Keys that neither a row nor a section answers for."""
    place = {"variables": ENVIRONMENT}.get(place, place)
    look = find_anywhere if place == SAGEMAKER else find  # its file has the common keys, too
    return sorted(key for key in keys if not look(place, key) and not nested_place(place, key))


def arguments_of_xla_fsdp() -> list[str]:
    path = package("torch_xla") / "distributed/fsdp/xla_fully_sharded_data_parallel.py"
    nodes = ast.walk(ast.parse(path.read_text()))
    [cls] = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == "XlaFullyShardedDataParallel"]
    [init] = [part for part in cls.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
    return [argument.arg for argument in init.args.args if argument.arg not in ("self", "module")]


def fields(tool: str, file: str, cls: str) -> list[str]:
    return [name for name in class_fields(package(tool) / file, cls) if not name.startswith("_")]


def older(version: str) -> Mapping[str, list[str]]:
    return {place: keys.split() for place, keys in OLDER[version].items()}


def keys_of_trainers_fsdp_config() -> list[str]:
    text = (package("transformers") / "training_args.py").read_text()
    return re.findall(r'(?<!xla_)fsdp_config(?:\.get\(|\.setdefault\(|\[)"(\w+)"', text)


SOURCES: dict[str, tuple[int, Callable[[], Mapping[str, Iterable[str]]]]] = {
    "accelerate": (250, lambda: keys_of(package("accelerate"))),
    "accelerate 0.20": (100, lambda: older("0.20.3")),
    "accelerate 0.34": (100, lambda: older("0.34.2")),
    "accelerate 1.0": (100, lambda: older("1.0.1")),
    "sizes": (8, lambda: {PARALLEL: fields("accelerate", "parallelism_config.py", "ParallelismConfig")}),
    "fsdp_config": (15, lambda: {FSDP: set(keys_of_trainers_fsdp_config())}),
    "arguments": (100, lambda: {TRAINER: fields("transformers", "training_args.py", "TrainingArguments")}),
    "torch_xla": (20, lambda: {XLA: arguments_of_xla_fsdp()}),
}
"""Tool -> the least number of keys that its sources must show, and the keys by place."""


@pytest.mark.parametrize(
    "tool", [pytest.param(tool, marks=[pytest.mark.xla] if tool == "torch_xla" else []) for tool in SOURCES]
)
def test_every_key_of_a_tool_is_in_the_table(tool: str) -> None:
    least, keys_by_place = SOURCES[tool]
    lost = {place: missing(place, keys) for place, keys in keys_by_place().items()}
    assert not any(lost.values()), lost
    assert sum(len(list(keys)) for keys in keys_by_place().values()) > least


DOCUMENTED = {"backward_prefetch_policy", "xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt"}
"""Keys of fsdp_config that accelerate's manual has, and its code doesn't read; used all the same."""


def names_read_by(tool: str) -> set[str]:
    """The names of fsdp_config, without prefix, that the table has for a tool."""
    others = {BY_ACCELERATE, BY_TRAINER, "other tools"} - {tool}
    rows = [row for row in TABLE.keys if row.place == FSDP]
    return {
        bare_name(FSDP, name)
        for row in rows
        for name in (row.name, *row.aliases)
        if any(others.isdisjoint(who.split(" with ")) for who in row.read_by.split(" or "))
    }


def test_each_tool_reads_those_keys_that_its_sources_read() -> None:
    launch = (package("accelerate") / "utils/launch.py").read_text()
    keys = set(map("".join, re.findall(r'args\.fsdp_(\w+)|"fsdp_(\w+)"', launch)))
    assert names_read_by(BY_ACCELERATE) == keys | DOCUMENTED
    folder = package("transformers")
    text = "".join((folder / name).read_text() for name in ("training_args.py", "trainer.py", "integrations/tpu.py"))
    keys = set(re.findall(r'(?<!xla_)fsdp_config(?:\.get\(\s*|\.setdefault\(|\[)"(\w+)"', text))
    assert names_read_by(BY_TRAINER) == keys - {"xla_fsdp_settings"}
    # Trainer's default is what eval_steps takes where nothing is set.
    assert re.findall(r"\blogging_steps: float = field\(\s*default=(\d+)", text) == [str(LOGGING_STEPS)]


def test_rows_are_well_formed() -> None:
    """Exactly one outcome for each value, which sets options that our config has, and no field of another kind."""
    options = set(option_names())
    for row in TABLE.keys:
        assert row.kind or row.words, row.name
        for outcome in (*([row] if row.kind else []), *row.words.values()):
            kinds = [outcome.settings, outcome.ignore, outcome.launcher, outcome.refuse]
            assert len(kinds) - kinds.count(None) == 1, row.name
            assert {name for name in outcome.options if not name.startswith("~")} <= options, row.name
            kind_of = {"remark": "set", "fact": "launcher", "fix": "refuse", "override": "refuse"}
            fields = outcome.model_fields_set
            assert [name for name, kind in kind_of.items() if name in fields and kind != outcome.kind] == [], row.name
            assert outcome.override in (*options, "")
            assert not re.search(r"[a-z]\.\w+=", outcome.fix), "`override` names an option that lifts the refusal"
    facts = {name for row in TABLE.keys for outcome in (row, *row.words.values()) for name in outcome.options}
    assert [name for name in TABLE.unused if name not in facts] == []


VALUES = {
    "num_processes": (["1", "auto", "' 2 '"], ["two", "0", "-1", "2.0"], "a whole number >= 1, or auto"),
    "num_machines": (["1", "16"], ["auto", "-1", "0"], "a whole number >= 1"),
    "machine_rank": (["0", "9"], ["-1", "first"], "a whole number >= 0"),
    "main_process_port": (["0", "65535"], ["twelve", "65536", "-1"], "a whole number from 0 to 65535"),
    "num_cpu_threads_per_process": (["4"], ["0", "4.5"], "a whole number >= 1"),
    "monitor_interval": (["0.1", "5"], ["soon", "nan"], "a number >= 0"),
    "debug": (["true", "No", "'1'", "off", "t"], ["maybe", "2"], "true | false"),
    "same_network": (["yes"], ["local"], "true | false"),
    "use_fsdp": (["true"], ["FSDP"], "true | false"),
    "fsdp_limit_all_gathers": (["1", "F"], ["7"], "true | false"),
    "fsdp_sync_module_states": (["on"], ["always"], "true | false"),
    "dataloader_num_workers": (["0"], ["-1", "many"], "a whole number >= 0"),
    "tpu_use_sudo": (["false"], ["3"], "true | false"),
}
"""Keys that set nothing, but whose values must be readable: right ones, wrong ones, and what a message expects."""


def test_a_value_that_sets_nothing_is_read_all_the_same(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.yaml"
    for key, (right, wrong, expected) in VALUES.items():
        for value in (*right, "null"):
            theirs.write_text(f"distributed_type: FSDP\n{key}: {value}\n")
            assert read(theirs).config.sharding.strategy == "FULL_SHARD", (key, value)
        for value in wrong:
            theirs.write_text(f"distributed_type: FSDP\n{key}: {value}\n")
            message = problems(theirs, "model.pretrained=folder", "train.steps=1")
            assert message == f"theirs.yaml:2: {key}: expected {expected}, found {value}."


def test_flags_are_taken_in_all_of_accelerates_words(tmp_path: Path) -> None:
    theirs, words = tmp_path / "theirs.yaml", {"FULL_SHARD": "y yes t True on 1", "SHARD_GRAD_OP": "n no f FALSE off 0"}
    for strategy, word in ((strategy, word) for strategy, texts in words.items() for word in texts.split()):
        for section in (f"{FSDP}: {{fsdp_reshard_after_forward", f"{XLA}: {{reshard_after_forward"):
            theirs.write_text(f"distributed_type: FSDP\nfsdp_version: 2\nxla: true\n{section}: {word}}}\n")
            assert read(theirs).config.sharding.strategy == strategy, (section, word)


OVERRIDES: dict[str, object] = yaml.safe_load("""
{checkpoint.every: 10, checkpoint.resume: auto, compile.enabled: false, data.eval_split: 5%, data.path: rows.jsonl,
 memory.gradient_checkpointing: full,
 model.attention: sdpa, optim.min_lr_ratio: 0.5, optim.name: sgd, optim.schedule: constant, train.eval_every: 5,
 precision.compute: bfloat16, precision.buffers: bfloat16, precision.master: float32, precision.output: bfloat16,
 precision.frozen: nf4, precision.reduce: bfloat16, sharding.replicas: 2, train.global_batch: 8, train.max_grad_norm: 1,
 model.freeze: ["*norm*"], data.seq_len: 64}
""")
"""A value for each option that a refusal names."""

WHOLE_RUNS: dict[str, dict[str, object]] = {
    AXOLOTL: {"base_model": "folder", "sequence_len": 8, "micro_batch_size": 1, "val_set_size": 0.1},
    TRL: {"model_name_or_path": "folder", "dataset_name": "a/b"},
}
"""Keys by which such a file is recognised."""


def test_the_override_that_a_refusal_names_lifts_it(tmp_path: Path) -> None:
    theirs, count = tmp_path / "theirs.yaml", 0
    rest = ["model.pretrained=folder", "train.steps=10", "sharding.strategy=FULL_SHARD"]
    for row in TABLE.keys:
        outcomes = {**row.words, "some": row} | ({"float16": float16(row)} if row.reads == "dtype" else {})
        for value, refusal in outcomes.items():
            option = refusal.override
            if refusal.kind != "refuse" or not option:
                continue
            place = nested_place("", row.place)
            inside = {place: {row.name: value}} if place else {row.name: value}
            if row.place == MIXED:  # of which Trainer, whose fsdp_config it would be alone, reads nothing
                inside = {FSDP: inside}
            theirs.write_text(yaml.safe_dump(inside | WHOLE_RUNS.get(row.place, {})))
            more = ["data.format=text"] if row.place in WHOLE_RUNS else []
            message = problems(theirs, *rest, *more)
            assert f"{row.name}: {value} can't be honoured: {refusal.refuse}.\n  Fix: {refusal.fixes}." in message
            assert refusal.fixes.endswith(f", or override {option}")
            more += ["data.source=jsonl"] if option == "data.path" else []
            overrides = [*rest, *more, f"{option}={yaml_value(OVERRIDES[option])}"]
            assert read_config(theirs, overrides, devices=1), (row.place, row.name, value)
            count += 1
    assert count > 70
