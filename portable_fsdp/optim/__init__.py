"""Optimizers and the learning rate: what an update does, apart from where it runs.

May import `config` and `runtime`, and torch; knows nothing of processes, devices or engines.
Read first: `optimizer.py` (groups, which optimizer, the learning rate of each step), `counting.py` (the numbers of a
step), then `own.py` (the optimizers that torch lacks).
"""
