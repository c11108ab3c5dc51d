"""Writes docs/foreign_configs.md from the table of foreign keys: `make docs`. tests/test_docs.py compares the two."""

from pathlib import Path

from portable_fsdp.config.describe import yaml_value
from portable_fsdp.convert.keys_fsdp import FSDP
from portable_fsdp.convert.keys_variables import ENVIRONMENT, VARIABLES
from portable_fsdp.convert.rows import Answer, Launcher, Refuse, Row, Set, Skip
from portable_fsdp.convert.table import ORDER, TABLE
from portable_fsdp.convert.tools import READ

INTRODUCTION = """# Configs of other tools

A file that `accelerate config` wrote (0.20 to 1.15), a Trainer's `fsdp_config` or TrainingArguments as YAML or JSON is
taken where one of ours is; what it can't say (the model, the data) comes from overrides, or from a file of ours that it
is laid under:

```bash
python -m portable_fsdp.explain --config=configs/quickstart.yaml --import=tests/convert/samples/tpu.yaml
python -m portable_fsdp.explain --config=tests/convert/samples/training_arguments.json
python -m portable_fsdp.launch --config=configs/quickstart.yaml --import=tests/convert/samples/unquoted_no.yaml
```

`explain --write=ours.yaml` saves the translation with a comment on each key. Where such a file is all there is, an
error says what it sets and what a run needs beside it. Overrides win over all; where a file of ours and an import give
one key different values, both lines are named, and nothing starts. A key that is absent has our default
([configuration.md](configuration.md)), which need not be the other tool's.

Each key is *honoured*, *refused* (with the way out), *not needed*, or the *launcher*'s: counts of processes and
machines are compared with what was started, and never obeyed. An override that a refusal names lifts it. An unknown
key is an error that names the nearest; a value that its tool couldn't read (`num_processes: two`) is one, too. Prefixes
(`fsdp_`, `dynamo_` ...) may be left out, words are taken in any case, `true`, `yes`, `on` and `1` are one value,
numbers stand for strategies as in accelerate's menus, and an unquoted `NO` is the word. Null and keys that begin with
`_`, `//` or `#` set nothing.

A key that its own tool doesn't read sets nothing here either, and `explain` says why: Trainer reads `cpu_offload` where
accelerate reads `fsdp_offload_params`, version 2 of FSDP reads `reshard_after_forward` and no `sharding_strategy`,
`fp8_config` counts beside `mixed_precision: fp8`, and `downcast_bf16` on TPUs. The file's other keys tell the tool:
`distributed_type` is accelerate's, TrainingArguments and an `fsdp_config` by itself are Trainer's; in other files
(axolotl's) every name counts. Taken at their word, with a remark, are keys that a tool's manual or questions name
though nothing reads them: `fsdp_backward_prefetch_policy`, a strategy's name under `fsdp_reshard_after_forward` with
version 1, transformers' `xla` keys in a file of accelerate's; so are keys outside their section.

Some options follow from several keys: `train.global_batch` is rows of a device * accumulation * `num_processes`, which
another of the files, or accelerate launch, may say;
HYBRID_SHARD on one machine is FULL_SHARD, as one machine is one copy; `mixed_precision: bf16` under FSDP sums gradients
in bfloat16 too, as accelerate does; a warmup ratio becomes steps, and so does `eval_steps` below 1, which is
`logging_steps` where it isn't set. In the table `~name` marks what such a rule reads.

## Under accelerate launch

```bash
accelerate launch --config_file tests/convert/samples/accelerate_1_15_fsdp2.yaml -m portable_fsdp.launch \\
  --config=configs/quickstart.yaml train.global_batch=32
```

The file says 8 processes, which can't share quickstart's own batch of 24 rows.

What its file and flags say travels in variables, and is read from there as strictly as from a file: each is honoured,
refused or compared with what there is; a name with one of its prefixes (`ACCELERATE_`, `FSDP_` ...) that no row knows
ends the start with the nearest name. Nothing of it is read where `accelerate launch` isn't the starter. Overrides and a
file of ours go first, and so do a Trainer's arguments; an accelerate file that is imported too must agree. The second
line of a run says which options came this way; `explain` names them `accelerate launch: FSDP_SHARDING_STRATEGY`. The
launcher sets FSDP_SHARDING_STRATEGY and FSDP_RESHARD_AFTER_FORWARD even where nobody asks: under version 1, one that
has the launcher's own value says nothing beside another value of the other; under version 2, only the second counts.

The same file through accelerate 1.15's own FSDP2 (Accelerator, prepare, a plain loop) and through us, two processes on
CPUs (tests/launch/test_accelerate_launch.py): layers, embedding and head are units in both, with the same dtypes and
the same reshard_after_forward; the losses of 6 steps agree to 1e-5 in float32 and to 2e-3 in bfloat16. What differs:

- the final norm is gathered with the head there, with the root here;
- `mixed_precision: bf16` adds autocast to FSDP's dtypes there; here a unit's dtype is all;
- gradients are averaged over processes there, and summed over a loss that is divided by all tokens here: the same where
  each process has as many tokens, and right where it hasn't;
- on hosts without accelerators accelerate does no FSDP: each process trains by itself, or as DDP with `--cpu`. The test
  puts its plugin on by hand.

This page is made from `portable_fsdp/convert/` by `make docs`.
"""


def render() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for place in (*ORDER, ENVIRONMENT):
        rows = "\n".join(_row(row) for row in TABLE if row.place == place)
        parts.append(f"## {place}\n\n| key | becomes | how |\n|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def _row(row: Row) -> str:
    names = ", ".join(f"`{name}`" for name in (row.key, *row.aliases))
    if row.key in VARIABLES:
        place, key = VARIABLES[row.key]
        return f"| {names} | {row.fate} | as `{key}` of {place} |"
    how: dict[str, list[str]] = {}
    for value, answer in row.takes.cases():
        how.setdefault(_words(answer), []).append(value)
    cases = [f"{', '.join(filter(None, values))}: {text}".removeprefix(": ") for text, values in how.items()]
    cases += [_readers(row)] if row.place == FSDP else []
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in (names, row.fate, "; ".join(cases))) + " |"


def _readers(row: Row) -> str:
    """`read by accelerate (fsdp_offload_params)`: with the name where it is one of several."""
    names = {name.removeprefix("fsdp_"): name for name in (row.key, *row.aliases)}
    readers = [
        tool + f" (`{name}`)" * (len(names) > 1)
        for tool, read in READ.items()
        for plain, name in names.items()
        if plain in read
    ]
    return f"read by {' and '.join(readers) or 'neither tool'}"


def _words(answer: Answer) -> str:
    match answer:
        case Set(settings, remark):
            said = " and ".join(f"`{name}={yaml_value(value)}`" for name, value in settings.items())
            return f"{said} ({remark})" if remark else said
        case Skip(reason):
            return f"nothing ({reason})"
        case Launcher(reason):
            return reason
        case Refuse(reason):
            return f"refused: {reason}; {answer.ways}"


if __name__ == "__main__":
    Path(__file__).with_suffix(".md").write_text(render(), encoding="utf-8")
