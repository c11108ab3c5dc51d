"""Checkpoints that travel: written by all processes, committed at one instant, read by any number of processes.

May import: `backends.contract` (and no engine), the rooms below (`models`, `data`, `config`, `runtime`).
Read first: `format.py` (what a folder holds), `commit.py` and `storage.py` (how it gets there whole, in a folder or an
object store), then `store.py` (the tensors), `manager.py`.
"""
