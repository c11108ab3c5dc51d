"""Optimizers and the learning rate: the computation of an update, independent of the engine.

May import `config` and `runtime`, and torch; knows nothing of processes, devices or engines.
Read first: `optimizer.py` (groups, the choice of optimizer, the learning rate of each step), `counting.py` (the numbers
of a step), then `own.py` (the optimizers that torch lacks).
"""
