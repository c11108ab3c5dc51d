"""Configs of other tools: `accelerate config` files, Trainer's fsdp_config, TrainingArguments, `accelerate launch`.

`keys.yaml` maps each of their keys to our options, to a refusal with a fix, or to nothing, with the reason.
Commands read configs with `read.read_config`; `launch` only if there is such a file or environment. May import:
config, runtime. Read first: `table.py` (a row, and a value's outcome), then `read.py` (files and the environment
beneath our own keys), then `rules.py` (keys that act together); `facts.py` has a file's keys and warnings.
"""
