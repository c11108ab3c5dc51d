"""The config: what a run does, the same on every device.

May import: runtime; pydantic and yaml, never torch (`--help` and `explain` answer in a fraction of a second).
Read first: `schema.py` (every key, its meaning and unit), then `load.py` (YAML and overrides to a `Config`).
"""
