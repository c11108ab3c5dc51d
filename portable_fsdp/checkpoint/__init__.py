"""Checkpoints that travel: written by all processes, committed at one instant, read by any number of processes.

May import: `backends.contract` (and no engine), the packages below (`models`, `data`, `config`, `runtime`).
Read first: `manifests.py` (what a folder holds), `commit.py` and `storage.py` (how a commit makes it appear whole, in a
folder or an object store), then `store.py` (the tensors), `manager.py`.
"""
