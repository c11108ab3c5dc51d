"""A training run. Read `loop.py` first: it is the run from top to bottom. `run.py` opens what the loop uses,
`preflight.py` checks before the first step, `build.py` makes the model and its step, `step.py` is the step, and
`control.py` decides after each step whether to evaluate, save or stop.
"""
