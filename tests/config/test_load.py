import subprocess
import sys
from pathlib import Path

import pytest

from portable_fsdp.config.layout import check_batch
from portable_fsdp.config.load import config_text, load_config
from portable_fsdp.config.schema import Config, Run
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


# --- what is accepted


def test_defaults_and_overrides(tmp_path: Path) -> None:
    config = small(tmp_path, "optim.lr=3e-4", "model.architecture.hidden_size=128", "run.name=a=b", "train.steps=20")
    assert config.optim.lr == 3e-4
    assert config.model.architecture == {"model_type": "llama", "hidden_size": 128}
    assert config.run.name == "a=b"
    assert config.train.steps == 20
    assert config.train.global_batch == 8


def test_of_two_overrides_the_later_counts(tmp_path: Path) -> None:
    assert small(tmp_path, "optim.lr=1", "optim.lr=2").optim.lr == 2


def test_an_override_builds_the_mapping_it_needs(tmp_path: Path) -> None:
    path = write(tmp_path, "train: {steps: 1}\nmodel: {architecture: null}\n")
    config = load_config(path, ["model.architecture.rope.type=x", "model.architecture.model_type=llama"])
    assert config.model.architecture == {"rope": {"type": "x"}, "model_type": "llama"}


def test_numbers_as_people_write_them(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, SMALL + "optim: {lr: 1, eps: 1e-9, betas: [0.8, 1e-1]}\n"))
    assert (config.optim.lr, config.optim.eps, config.optim.betas) == (1.0, 1e-9, (0.8, 0.1))
    assert isinstance(config.optim.lr, float)


@pytest.mark.parametrize(("text", "value"), [("1e-5", 1e-5), ("1.5e3", 1500.0), ("-.5E+1", -5.0), ("1e4x", "1e4x")])
def test_floats_with_an_exponent_are_numbers_inside_architecture_too(
    tmp_path: Path, text: str, value: float | str
) -> None:
    config = small(tmp_path, f"model.architecture.rope_theta={text}")
    assert isinstance(config.model.architecture, dict)
    assert config.model.architecture["rope_theta"] == value


def test_an_empty_section_is_all_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, SMALL + "optim:\n")).optim.lr == 3e-4


def test_an_override_leaves_an_aliased_section_alone(tmp_path: Path) -> None:
    text = "train: {steps: 1}\nmodel: {architecture: {model_type: x, a: &rope {f: 1}, b: *rope}}\n"
    config = load_config(write(tmp_path, text), ["model.architecture.a.f=2"])
    assert config.model.architecture == {"model_type": "x", "a": {"f": 2}, "b": {"f": 1}}


def test_merge_keys_may_be_overridden_in_place(tmp_path: Path) -> None:
    text = "train: {steps: 1}\nmodel: {architecture: {model_type: x, a: &r {f: 1}, b: {<<: *r, f: 2}}}\n"
    config = load_config(write(tmp_path, text))
    assert config.model.architecture == {"model_type": "x", "a": {"f": 1}, "b": {"f": 2}}


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


# --- what is refused, in which words


def test_unknown_key_as_in_the_style_guide(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL + "memory:\n  gradient_checkpionting: full\n")
    assert message(path) == (
        "a.yaml:6: memory.gradient_checkpionting: unknown key.\n"
        "  nearest: memory.gradient_checkpointing (none | full | selective)."
    )


def test_all_problems_come_at_once_in_the_order_of_the_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """\
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
""",
    )
    assert message(path, "foo", "steps=3", "optim.eps.x=1", "checkpoint.export=[").splitlines() == [
        "a.yaml: model: expected a mapping with architecture, pretrained, gguf_file, allow, attention, experts, "
        "freeze, lora, found no such key.",
        "a.yaml:2: run.name: expected text or null, found no, which YAML reads as the boolean false; "
        "in quotes it is text.",
        "a.yaml:3: run.dir: expected text that is not empty, found 123, a number; in quotes it is text.",
        "a.yaml:4: run.seed: expected an integer >= 0, found -1.",
        "a.yaml:7: train.global_batch: expected an integer >= 1, found 2e1.",
        "a.yaml:8: optimizer: unknown key.",
        "  nearest: optim.",
        "a.yaml:9: lr: unknown key.",
        "  nearest: optim.lr (a number > 0).",
        "a.yaml:11: optim.betas: expected a list [a number >= 0 and < 1, a number >= 0 and < 1], "
        "found the list [0.9, 'x'].",
        "a.yaml:12: optim.momentum: expected a number >= 0 and < 1, found 3.",
        "a.yaml:14: optim.lr: expected once, found twice (first on line 13); keep one.",
        "a.yaml:14: optim.lr: expected a number > 0, found 'fast'.",
        "a.yaml:15: memory.gradient_checkpointing: expected none | full | selective, found off, which YAML reads as "
        "the boolean false; in quotes it is text.",
        "a.yaml:16: precision: expected a mapping with master, frozen, compute, reduce, output, modules, matmul, "
        "found 3.",
        "a.yaml:17: qqqq: unknown key.",
        "  expected one of run, model, data, train, optim, sharding, precision, memory, compile, checkpoint, "
        "xla_fsdp1.",
        "override 'foo': expected section.key=value (optim.lr=3e-4).",
        "override 'steps=3': steps: unknown key.",
        "  nearest: train.steps (an integer >= 1 or null).",
        "override 'optim.eps.x=1': optim.eps: expected a number > 0, found a mapping.",
        "override 'checkpoint.export=[': checkpoint.export: expected YAML after `=`: "
        "expected the node content, but found '<stream end>'.",
    ]


@pytest.mark.parametrize(
    ("override", "comment", "quoted"),
    [
        ("run.dir=runs/a #1", "#1", "runs/a #1"),
        ("run.name=#1", "#1", "#1"),  # else null
        ("run.name='a' # it's", "# it's", "''a'' # it''s"),
        ("run={dir: runs/a} # mine", "# mine", "{dir: runs/a} # mine"),
        ("run=dir: runs/a #1", "#1", "dir: runs/a #1"),
        ("data.path=[a, # b\n c]", "# b", "[a, # b\n c]"),
    ],
)
def test_an_override_loses_nothing_to_a_comment(tmp_path: Path, override: str, comment: str, quoted: str) -> None:
    key = override.partition("=")[0]
    assert message(write(tmp_path, SMALL), override) == (
        f"override '{override}': {key}: expected a value without a YAML comment, found {comment!r}, which YAML "
        f"would drop.\n  Leave it out, or quote the whole: \"{key}='{quoted}'\"."
    )


def test_a_quoted_number_sign_is_no_comment(tmp_path: Path) -> None:
    assert small(tmp_path, "run.dir='runs/a #1'", "run.name=a#1").run == Run(dir="runs/a #1", name="a#1")
    assert small(tmp_path, "run=dir: 'a: b'").run.dir == "a: b"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("optim.lr=x", "optim.lr: expected a number > 0, found 'x'."),
        ("optim.lrr=1", "optim.lrr: unknown key.\n  nearest: optim.lr (a number > 0)."),
        ("optimm.lr=1", "optimm: unknown key.\n  nearest: optim."),
        ("optim.micro_batch=1", "optim.micro_batch: unknown key.\n  nearest: train.micro_batch (an integer >= 1)."),
        ("optim=3", "optim: expected a mapping with name, lr, "),
        ("train.steps=true", "train.steps: expected an integer >= 1 or null, found true."),
        ("train.epochs=3", "train: give exactly one of train.steps and train.epochs."),
        ("model.pretrained=x", "model: give exactly one of model.architecture and model.pretrained."),
        ("model.architecture={}", "model: model.architecture needs a `model_type`"),
        ("train.steps.x=1", "train.steps.x: expected train.steps to be a mapping, found 10."),
        ("optim={lr: 1, lr: 2}", "optim.lr: expected once, found twice; keep one."),
        ("=3", "expected section.key=value"),
        ("optim..lr=3", "expected section.key=value"),
    ],
)
def test_an_override_is_named_as_it_was_typed(tmp_path: Path, override: str, expected: str) -> None:
    assert message(write(tmp_path, SMALL), override).startswith(f"override '{override}': {expected}")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "sharding.wrap_classes=LlamaDecoderLayer",
            "sharding.wrap_classes: expected a list of text, found 'LlamaDecoderLayer'; a list of one is "
            "[LlamaDecoderLayer].",
        ),
        (
            "optim.betas=[0.9, 1.0]",
            "optim.betas: expected a list [a number >= 0 and < 1, a number >= 0 and < 1], found the list [0.9, 1.0].",
        ),
        (
            "optim.betas=[0.9]",
            "optim.betas: expected a list [a number >= 0 and < 1, a number >= 0 and < 1], found the list [0.9].",
        ),
        ("sharding.wrap_modules=[1]", "sharding.wrap_modules: expected a list of text, found the list [1]."),
        (
            "memory.save_ops=matmul",
            "memory.save_ops: expected a list of matmul | attention, found 'matmul'; a list of one is [matmul].",
        ),
        ("precision.modules=3", "precision.modules: expected a mapping of text to float32 | bfloat16 | float16, "),
        (
            "precision.modules={head: fp32}",
            "precision.modules.head: expected float32 | bfloat16 | float16, found 'fp32'.",
        ),
        ("precision.modules.head=fp32", "precision.modules.head: expected float32 | bfloat16 | float16, found 'fp32'."),
        ("precision.modules={1: float32}", "precision.modules: expected a mapping of text to float32 | "),
        ("optim.groups=x", "optim.groups: expected a list of mappings with match, lr, weight_decay, found 'x'."),
        ("optim.groups=[3]", "optim.groups[0]: expected a mapping with match, lr, weight_decay, found 3."),
        ("optim.groups=[{match: x, lr: -1}]", "optim.groups[0].lr: expected a number > 0 or null, found -1."),
        ("optim.groups=[{lr: 1}]", "optim.groups[0].match: expected text that is not empty, found no such key."),
        (
            "optim.groups=[{match: x, lrr: 1}]",
            "optim.groups[0].lrr: unknown key.\n  nearest: optim.groups.lr (a number > 0 or null).",
        ),
        (
            "optim.groups=[{match: x, lr: 1, lr: 2}]",
            "optim.groups[0].lr: expected once, found twice; keep one.",
        ),
    ],
)
def test_lists_and_mappings_are_named_to_the_item(tmp_path: Path, override: str, expected: str) -> None:
    assert message(write(tmp_path, SMALL), override).startswith(f"override '{override}': {expected}")


def test_an_item_of_a_list_is_named_by_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL + "optim:\n  groups:\n    - {match: a}\n    - match: b\n      lr: 0\n")
    assert message(path).startswith("a.yaml:9: optim.groups[1].lr: expected a number > 0 or null, found 0.")


def test_a_list_that_holds_itself_is_refused(tmp_path: Path) -> None:
    problem = message(write(tmp_path, SMALL + "sharding: {wrap_classes: &a [*a]}\n"))
    assert problem.startswith("a.yaml:5: expected YAML: expected a value, found an alias of what it stands in")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "a.yaml: expected a mapping of sections (run, model, "),
        ("- 1", "a.yaml: expected a mapping of sections (run, model, "),
        ("a: 1\nb: [", "a.yaml:2: expected YAML: "),
        ("a:\n\t- b", "a.yaml:2: expected YAML: found character '\\t' that cannot start any token (YAML indents"),
        ("a: !!python/object:x {}", "a.yaml:1: expected YAML: expected a plain value, found the tag"),
        ("run: 0x_", "a.yaml: expected YAML: "),
        ("[" * 3000, "a.yaml:1: expected YAML: expected at most 50 levels"),
        ("a: " + "x" * 300_000, "a.yaml: expected YAML: expected at most 262,144 characters"),
        ("model: {pretrained: x}\ntrain: {steps: 1}\n1: 2", "a.yaml:3: 1: unknown key."),
        ("? [a]\n: b", "a.yaml:1: expected YAML: found unhashable key"),
        ("a: 1\n---\nb: 1", "a.yaml:2: expected YAML: but found another document"),
    ],
)
def test_not_a_config(tmp_path: Path, text: str, expected: str) -> None:
    assert message(write(tmp_path, text)).startswith(expected)


def test_an_alias_of_what_it_stands_in_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, SMALL + "run: &a\n  name: *a\n")
    assert "a.yaml:6: expected YAML: expected a value, found an alias of what it stands in" in message(path)


def test_missing_file_folder_and_bytes(tmp_path: Path) -> None:
    assert "no such file" in message(tmp_path / "b.yaml")
    assert "found a folder" in message(tmp_path)
    path = tmp_path / "c.yaml"
    path.write_bytes(b"a: \xff")
    assert "expected UTF-8 text" in message(path)


# --- sizes


def test_check_batch_counts_micro_batches(tmp_path: Path) -> None:
    config = small(tmp_path, "train.global_batch=24", "train.micro_batch=2")
    assert check_batch(config, 3) == 4


def test_check_batch_names_what_fits(tmp_path: Path) -> None:
    config = small(tmp_path, "train.global_batch=32", "train.micro_batch=3")
    with pytest.raises(ConfigError) as caught:
        check_batch(config, 4)
    assert str(caught.value) == (
        "train.global_batch: expected a multiple of train.micro_batch * devices = 3 * 4 = 12 sequences, found 32.\n"
        "  Set train.global_batch=24 or 36, or train.micro_batch=2 or 4."
    )


def test_check_batch_offers_only_sizes_that_fit(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Set train\.global_batch=24\.$"):
        check_batch(small(tmp_path, "train.global_batch=8", "train.micro_batch=8"), 3)


def test_loading_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom portable_fsdp.config.load import load_config\n"
        f"load_config({str(write(tmp_path, SMALL))!r})\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
