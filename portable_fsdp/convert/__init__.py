"""Configs of other tools: `accelerate config` files, Trainer's fsdp_config, TrainingArguments, `accelerate launch`.

`keys.yaml` answers for each of their keys: options of ours, a refusal with the way out, or nothing, with the reason.
A config loads this package only where such a file or environment is there. May import: config, runtime.
Read first: `table.py` (the fields of a row), then `read.py` (a file to an `Import`), then `rules.py` (keys
that act together), then `merge.py` (an import under our own values).
"""
