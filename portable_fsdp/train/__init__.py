"""A run: `loop.py` builds it, steps it and saves it, top to bottom; `step.py` is the step.

May import everything below: checkpoint, backends, models, data, optim, metrics, config, runtime. Never asks a backend
for its type. Read `loop.py` first.
"""
