"""Writes docs/foreign_configs.md from the table of foreign keys: `make docs`. A test compares the two."""

import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from textwrap import fill

from portable_fsdp.config.describe import yaml_value
from portable_fsdp.convert.table import ENVIRONMENT, KeyOutcome, KeyRow, key_table

INTRODUCTION = """# Configs of other tools

`--config` and `--import` take a file of `accelerate config` (0.20 to 1.15), a Trainer's `fsdp_config`, and
TrainingArguments, as YAML or JSON. Set the model and the data by overrides, or in our own config with the file as
`--import`:

```bash
python -m portable_fsdp.explain --config=configs/quickstart.yaml --import=tests/convert/samples/multi_gpu.yaml
python -m portable_fsdp.explain --config=tests/convert/samples/training_arguments.json
python -m portable_fsdp.launch --config=configs/quickstart.yaml --import=tests/convert/samples/unquoted_no.yaml
```

`explain --write=ours.yaml` saves the translation, with a comment on the origin of each key.

## Recipes

A recipe of axolotl and a config of TRL's `trl sft` stand for a whole run: data, model and length come from them.

```bash
python -m portable_fsdp.explain --config=tests/convert/recipes/axolotl.yaml --num_devices=2
python -m portable_fsdp.explain --config=tests/convert/recipes/trl_sft.yaml --num_devices=2 data.format=chat
```

- Keys that the file leaves out have the tool's own defaults, which `explain` shows as `default of axolotl`.
- The global batch follows from `--num_devices` or the launcher; without them set `train.global_batch`.
- axolotl's types of rows: `alpaca`, `alpaca:chat`, `completion`, `chat_template`, and a mapping with your own format.
  Several datasets become a mixture with all rows of each. A named template is ours (chatml, llama3, gemma, phi_3,
  alpaca), or the tokenizer's own, if it renders a few chats as axolotl's does.
- TRL sees from the first row whether rows are texts, prompts or chats. Here you say it: `data.format`.
- `test_datasets` holds one file, or split of the dataset that trains, with rows in the same form.
- Where axolotl holds out the last rows, a share is chosen by hash. Epochs end with whole batches.
- Names in a multimodal base (`model.language_model.layers`) find the layers of its text, which trains alone
  ([how](pretrained.md#the-text-of-a-multimodal-model)).
- `unfrozen_parameters` becomes `model.train_only` where a pattern says the same: the start of a name, and `[0-9]`.
  `[4-9]+`, alternatives and ranges of rows are refused.
- `sample_packing` with a [model that mixes documents](packing.md#models-that-mix-documents): one document per row.
- Not built, and refused: tasks other than texts, instructions and chats, and rows of images.
- Configs of LLaMA-Factory and torchtune are recognised and refused: their rows or parts stand in other files.

## How keys are read

- Overrides win over everything, and lift the refusal that names them. If our file and an import set one key to
  different values, the run doesn't start, and the message names both lines.
- TrainingArguments that a Trainer's file leaves out have Trainer's own defaults (rate 5e-5, linear to 0, decay 0, beta2
  0.999, seed 42, 3 epochs, 8 rows per device), beneath all that you set; `explain` shows each as `default of Trainer`.
  Without num_processes the batch is that of one device. Other keys that no file sets have our default
  ([configuration.md](configuration.md)).
- An unknown key or an unreadable value (`num_processes: two`) is an error with the line and the nearest key.
- You may omit prefixes (`fsdp_`, `dynamo_` ...). Case doesn't matter; `true`, `yes`, `on` and `1` are one value;
  numbers select strategies as in accelerate's menus; an unquoted `NO` is the word. Null and keys that begin with `_`,
  `//` or `#` set nothing.
- The launcher decides the number of processes and hosts, and the device. A run whose devices differ from the file's
  `num_processes` warns, and keeps the global batch that the file describes.
- A key that its own tool doesn't read beside the file's other keys sets nothing. The run warns and names the nearest
  key of ours, unless the config has that value anyway.
- The file's other keys show its tool: `distributed_type` is accelerate's; TrainingArguments and an `fsdp_config` by
  itself are Trainer's; in recipes of axolotl every name counts.

Some options follow from several keys, marked `~name` below:

- `train.global_batch` = rows of a device * accumulation * `num_processes`, which another file or accelerate launch may
  set.
- HYBRID_SHARD on one machine is FULL_SHARD, since one machine is one replica of the model.
- `mixed_precision: bf16` under FSDP also sums gradients in bfloat16, as accelerate does.
- A warmup ratio becomes steps, and so does `eval_steps` below 1; without `eval_steps`, `logging_steps` counts.

## Under accelerate launch

```bash
accelerate launch --config_file tests/convert/samples/accelerate_1_15_fsdp2.yaml -m portable_fsdp.launch \\
  --config=configs/quickstart.yaml train.global_batch=32
```

(The file says 8 processes, which can't share quickstart's batch of 24 rows.)

accelerate passes its file and flags in environment variables. A process that `accelerate launch` started reads them as
strictly as a file: an unknown `ACCELERATE_` or `FSDP_` variable is an error. Overrides, our own file and a Trainer's
arguments take precedence; an imported accelerate file must agree. The second line of a run lists these options.

accelerate 1.15's FSDP2 and ours ran one file on two CPU processes for 6 steps
(tests/launch/test_accelerate_launch.py). Units, dtypes and reshard_after_forward are the same; losses agree to 1e-5 in
float32 and 2e-3 in bfloat16. What differs in accelerate:

- it gathers the final norm with the head, we gather it with the root;
- `mixed_precision: bf16` adds autocast to FSDP's dtypes;
- it averages gradients over processes, which needs as many tokens in each; we divide the loss by all tokens;
- on hosts without accelerators it does no FSDP: each process trains by itself, or as DDP with `--cpu`.

## The keys

Keys that are [refused](#refused), [left to the launcher](#left-to-the-launcher) or [without effect](#without-effect)
are below the sections. `a` = `b`: two names of one key. An option without a value takes the key's. Brackets behind a
key name the tools that read it, and the values that other keys must have.
"""

HEADINGS = {
    "refuse": """### Refused

The run doesn't start unless the value is off (false, 0, none, empty). The fix follows the semicolon; if there is none,
leave the key out.
""",
    "launcher": "### Left to the launcher\n",
    "ignore": "### Without effect\n",
}
REPEATED = 12
"""The words of an outcome that a table shows once."""


def render() -> str:
    """The whole page."""
    rows = key_table().keys
    places = [_place(name, [row for row in rows if row.place == name]) for name in dict.fromkeys(r.place for r in rows)]
    return "\n".join([INTRODUCTION, *filter(None, places), *(_reasons(kind, rows) for kind in HEADINGS)])


def _place(place: str, rows: Iterable[KeyRow]) -> str:
    """The keys of a place that set options, or whose values differ: a line for each outcome."""
    outcomes: dict[str, list[KeyRow]] = {}
    for row in rows:
        if row.words or row.kind == "set":
            outcomes.setdefault(_values(row), []).append(row)
    lines = [_wrapped(f"- {_names(rows)}: {_shared(rows[0], text)}") for text, rows in outcomes.items()]
    if place == ENVIRONMENT:
        families = (f"`{prefix}*`: {like}" for prefix, like in key_table().families.items())
        lines.append(_wrapped(f"- variables with a section's prefix are its keys: {', '.join(families)}"))
    usual = f" ({_usual_readers(place)})" if _usual_readers(place) else ""
    return "\n".join([f"### {place}{usual}\n", *lines, ""]) if lines else ""


def _reasons(kind: str, rows: Iterable[KeyRow]) -> str:
    """The keys of one kind, all of whose values have the same outcome: a line for each reason."""
    reasons: dict[str, list[KeyRow]] = {}
    for row in rows:
        if row.kind == kind and not row.words:
            reasons.setdefault(_outcome(row), []).append(row)
    named = {text: _names(keys) if kind == "refuse" else ", ".join(map(_name, keys)) for text, keys in reasons.items()}
    return "\n".join([HEADINGS[kind], *(_wrapped(f"- {names}: {text}") for text, names in named.items()), ""])


@cache
def _usual_readers(place: str) -> str:
    """The readers that the page names once for a place, since they would take most of its words."""
    readers = Counter(_readers(row) for row in key_table().keys if row.place == place)
    if readers.most_common(1)[0][0] == "":
        return ""
    return max(readers, key=lambda text: readers[text] * len(text.split()))


def _readers(row: KeyRow) -> str:
    return row.read_by or " or ".join(dict.fromkeys(o.read_by for o in row.words.values() if o.read_by))


def _names(rows: Iterable[KeyRow]) -> str:
    """The names of the rows, each group with its readers; those without a note have their place's usual ones."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        readers, usual = _readers(row), _usual_readers(row.place)
        note = (readers or "all") if readers != usual else row.place if usual and row.kind == "refuse" else ""
        groups.setdefault(note, []).append(_name(row))
    return ", ".join(", ".join(names) + (f" ({note})" if note else "") for note, names in groups.items())


def _name(row: KeyRow) -> str:
    return " = ".join(f"`{name}`" for name in (row.name, *row.aliases))


@cache
def _first_with_values() -> dict[str, KeyRow]:
    rows: dict[str, KeyRow] = {}
    for row in key_table().keys:
        rows.setdefault(_values(row), row)
    return rows


def _shared(row: KeyRow, text: str) -> str:
    """The text, or the key that has it already."""
    first = _first_with_values()[text]
    return text if first is row or len(text.split()) < REPEATED else f"as `{first.name}` of {first.place}"


def _values(row: KeyRow) -> str:
    """The outcome of each value of a key, with equal ones together and a reason given once."""
    words_of: dict[str, list[str]] = {}
    for word, outcome in row.words.items():
        words_of.setdefault(_outcome(outcome, in_list=True), []).append(word)
    by_text: dict[str, list[str]] = {}
    for text, words in words_of.items():
        values = {str(value).lower() for value in row.words[words[0]].options.values()}
        is_named = values == {word.lower() for word in words}
        by_text.setdefault(re.sub(r"=[^`]*`", "`", text) if is_named else text, []).extend(words)
    own = _outcome(row, in_list=bool(row.words))
    if [*by_text] == [own]:
        return own
    parts = [f"{', '.join(words)}: {text}" for text, words in by_text.items()]
    if own:
        parts.append("else: " * bool(parts) + own)
    reasons = (reason for outcome in row.words.values() for reason in (outcome.remark, outcome.refuse) if reason)
    for reason in dict.fromkeys(reasons):
        repeated = [part for part in parts if reason in part][1:]
        parts = [part.replace(reason, "the same") if part in repeated else part for part in parts]
    return "; ".join(parts)


def _outcome(outcome: KeyOutcome, in_list: bool = False) -> str:
    """An outcome in words, by itself or in a list of outcomes."""
    match outcome.kind:
        case "set":
            settings = (f"`{n}`" if v == "it" else f"`{n}={yaml_value(v)}`" for n, v in outcome.options.items())
            return " and ".join(settings) + (f" ({outcome.remark})" if outcome.remark else "")
        case "refuse":
            override = f", or override {outcome.override}" if outcome.override else ""
            fix = outcome.fix.removeprefix("leave it out").removeprefix("; ")
            return f"{'refused: ' * in_list}{outcome.refuse}{f'; {fix}' * bool(fix)}{override}"
        case _:
            return outcome.ignore or outcome.launcher or ""


def _wrapped(text: str) -> str:
    indent = "  " * text.startswith("- ")
    return fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    Path(__file__).with_suffix(".md").write_text(render(), encoding="utf-8")
