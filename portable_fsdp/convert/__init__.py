"""Configs of other tools: `accelerate config` files, Trainer's fsdp_config, TrainingArguments.

Each key of theirs is a row of a table (`keys_*.py`, joined in `table.py`) that says what becomes of it: settings of
ours, a refusal with the way out, or nothing, with the reason. May import: what config may.
Read first: `rows.py` (what a row is), then `read.py` (a file to an `Import`), `rules.py` and `rules_training.py` (keys
that act together).
"""
