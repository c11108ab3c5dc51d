"""Writes docs/foreign_configs.md from the table of foreign keys: `make docs`. A test compares the two."""

from pathlib import Path

from portable_fsdp.config.describe import yaml_value
from portable_fsdp.convert.table import ENVIRONMENT, KeyOutcome, KeyRow, key_table

INTRODUCTION = """# Configs of other tools

`--config` and `--import` take a file of `accelerate config` (0.20 to 1.15), a Trainer's `fsdp_config`, and
TrainingArguments, as YAML or JSON. The model and the data, which such a file doesn't set, come from overrides or from
`--config`, with the file as `--import`:

```bash
python -m portable_fsdp.explain --config=configs/quickstart.yaml --import=tests/convert/samples/multi_gpu.yaml
python -m portable_fsdp.explain --config=tests/convert/samples/training_arguments.json
python -m portable_fsdp.launch --config=configs/quickstart.yaml --import=tests/convert/samples/unquoted_no.yaml
```

`explain --write=ours.yaml` saves the translation, with a comment on the origin of each key.

- Overrides win over everything. Where our file and an import set one key to different values, the run doesn't start,
  and the message names both lines.
- A key that no file sets has our default ([configuration.md](configuration.md)), which may differ from the other
  tool's.
- An unknown key or an unreadable value (`num_processes: two`) is an error that names the line and the nearest key.
- The override that a refusal names lifts it.
- Prefixes (`fsdp_`, `dynamo_` ...) may be left out. Words are read in any case; `true`, `yes`, `on` and `1` are one
  value; numbers stand for strategies as in accelerate's menus; an unquoted `NO` is the word. Null and keys that begin
  with `_`, `//` or `#` set nothing.
- The launcher decides the number of processes and hosts, and the device. A file's `num_processes`, and `num_machines`
  under torchrun and by hand, must equal those of the start.

A key that its own tool doesn't read sets nothing here either, and `explain` says to whom it applies. In the tables that
stands in brackets behind the key: tools, and other keys of the file with the value that they must have. Trainer reads
`cpu_offload` where accelerate reads `fsdp_offload_params`; version 2 of FSDP reads `reshard_after_forward` and no
`sharding_strategy`. The other keys of a file show which tool it is for: `distributed_type` is accelerate's;
TrainingArguments and an `fsdp_config` by itself are Trainer's; in other files (axolotl's) every name counts. What
accelerate's manual has and its code doesn't read counts too: `fsdp_backward_prefetch_policy`, a strategy's name under
`fsdp_reshard_after_forward` with version 1, and transformers' `xla` keys; and so do keys outside their section, with a
remark.

Some options follow from several keys, marked `~name` in the tables:

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

accelerate passes its file and flags on in environment variables. We read these as strictly as a file, and only where
`accelerate launch` started the process: an unknown `ACCELERATE_` or `FSDP_` variable is an error. Overrides, a file of
ours and a Trainer's arguments take precedence; an imported accelerate file must agree. The second line of a run lists
the options that came this way. accelerate always sets FSDP_SHARDING_STRATEGY and FSDP_RESHARD_AFTER_FORWARD: under
version 1 the first counts, unless it has the launcher's default and the second names a strategy; under version 2 only
the second counts.

We compared accelerate 1.15's FSDP2 with ours on one file, two CPU processes, 6 steps
(tests/launch/test_accelerate_launch.py). Units, dtypes and reshard_after_forward are the same; the losses agree to
1e-5 in float32 and 2e-3 in bfloat16. What differs:

- accelerate gathers the final norm with the head, we gather it with the root;
- `mixed_precision: bf16` adds autocast to FSDP's dtypes in accelerate; here a unit's dtype is all;
- accelerate averages gradients over processes; we divide the loss by all tokens and sum. Both agree where each process
  has as many tokens, and ours is right where it hasn't;
- on hosts without accelerators accelerate does no FSDP: each process trains by itself, or as DDP with `--cpu`. The
  test puts its plugin on by hand.

## The keys

*set*: it sets our options. *refused*: the run doesn't start unless the value is off (false, 0, none, empty); after
the semicolon, the fix. *ignored*: nothing depends on it. *launcher*: the launcher decides it. `make docs` writes
these tables from `portable_fsdp/convert/keys.yaml`.
"""


def render() -> str:
    """The whole page."""
    table = key_table()
    parts = [INTRODUCTION]
    for place in dict.fromkeys(row.place for row in table.keys):
        groups: dict[tuple[str, str], list[str]] = {}
        for row in table.keys:
            if row.place == place:
                groups.setdefault((_kind(row), _words(row)), []).append(_names(row))
        rows = [f"| {', '.join(names)} | {kind} | {words} |" for (kind, words), names in groups.items()]
        if place == ENVIRONMENT:
            rows += [f"| `{prefix}*` | | like the keys of {like} |" for prefix, like in table.families.items()]
        parts.append("\n".join([f"### {place}\n", "| key | becomes | how |", "|---|---|---|", *rows, ""]))
    return "\n".join(parts)


def _names(row: KeyRow) -> str:
    readers = row.read_by or " or ".join(dict.fromkeys(o.read_by for o in row.words.values() if o.read_by))
    return " = ".join(f"`{name}`" for name in (row.name, *row.aliases)) + (f" ({readers})" if readers else "")


def _kind(row: KeyRow) -> str:
    kinds = [outcome.kind for outcome in (*row.words.values(), row) if outcome.kind]
    order = {"set": "set", "launcher": "launcher", "refuse": "refused", "ignore": "ignored"}
    return next(word for kind, word in order.items() if kind in kinds)


def _words(row: KeyRow) -> str:
    by_text: dict[str, list[str]] = {}
    for word, outcome in row.words.items():
        by_text.setdefault(_outcome(outcome), []).append(word)
    parts = [f"{', '.join(words)}: {text}" for text, words in by_text.items()]
    if row.kind:
        parts.append("else: " * bool(parts) + _outcome(row, says_refused=bool(parts)))
    return "; ".join(parts).replace("|", "\\|")


def _outcome(outcome: KeyOutcome, says_refused: bool = True) -> str:
    match outcome.kind:
        case "set":
            settings = (f"`{n}`" if v == "it" else f"`{n}={yaml_value(v)}`" for n, v in outcome.options.items())
            return " and ".join(settings) + (f" ({outcome.remark})" if outcome.remark else "")
        case "ignore":
            return str(outcome.ignore)
        case "launcher":
            return str(outcome.launcher)
        case _:
            override = f", or override {outcome.override}" if outcome.override else ""
            fix = "" if outcome.fix == "leave it out" else f"; {outcome.fix}"
            return "refused: " * says_refused + f"{outcome.refuse}{fix}{override}"


if __name__ == "__main__":
    Path(__file__).with_suffix(".md").write_text(render(), encoding="utf-8")
