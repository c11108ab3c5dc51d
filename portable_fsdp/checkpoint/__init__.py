"""Checkpoints that travel: written by all processes, committed by one rename, read by any number of processes.

May import: `backends.base` (and no engine), the rooms below (`models`, `data`, `config`, `runtime`).
Read first: `format.py` (what lies in a folder, and how it is committed), then `store.py`, `manager.py`, `foreign/`.
"""
