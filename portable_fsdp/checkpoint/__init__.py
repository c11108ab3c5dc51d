"""Checkpoints that travel: written by all processes, committed by one rename, read by any number of processes.

May import: `backends.base` (and no engine), the rooms below (`models`, `data`, `config`, `runtime`).
Read first: `format.py` (what a folder holds), `commit.py` (how it gets there whole), then `store.py`, `manager.py`.
"""
