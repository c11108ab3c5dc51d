"""The config of a run, identical on all devices.

May import: runtime; pydantic and yaml, never torch (`--help` and `explain` answer in a fraction of a second).
Read first: `schema.py` (every key, its meaning and unit), then `load.py` (YAML and overrides to a `Config`).
"""
