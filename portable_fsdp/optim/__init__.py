"""Optimizers and the learning rate: what an update does, apart from where it runs.

May import `config` and `runtime`, and torch; knows nothing of processes, devices or engines.
Read first: `optimizer.py` (groups, and which optimizer), `counting.py` (the numbers of a step), `own.py` (those that
torch lacks), then `schedule.py` (the learning rate of each step).
"""
