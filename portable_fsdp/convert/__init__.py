"""Configs of other tools: `accelerate config` files, Trainer's fsdp_config, TrainingArguments, `accelerate launch`.

`keys.yaml` answers for each of their keys: options of ours, a refusal with the way out, or nothing, with the reason.
Commands read configs by `read.read_config`; `launch` only where such a file or environment is there. May import:
config, runtime. Read first: `table.py` (a row, and a value's outcome), then `read.py` (files and the environment
beneath our own keys), then `rules.py` (keys that act together); `facts.py` compares with the actual start.
"""
