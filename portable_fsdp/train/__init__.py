"""A run: `loop.py` builds it, steps it and saves it, top to bottom; `step.py` is the step, `records.py` what a run says
of itself, `save_triggers.py` when it saves besides every n steps.

May import everything below: checkpoint, backends, models, data, optim, metrics, config, runtime. Never asks a backend
for its type. Read `loop.py` first.
"""
