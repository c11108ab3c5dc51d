"""Optimizers: what torch's are made of for a config (`optimizer.py`), and the learning rate of a step (`schedule.py`).

May import `config` and `runtime`; knows nothing of processes, devices or engines.
"""
