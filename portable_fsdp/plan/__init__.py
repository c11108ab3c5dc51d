"""Plans: what the trainer's own step needs on hardware that isn't there. A tool: no training run imports it.

May import everything below `train`, and `train`. Read `result.py` first, then `planner.py`, which joins the parts:
- `fake_step.py` runs the step on fake tensors: `memory_trace.py` records what lives, `device_rules.py` knows what a
  device's kernels and torch's allocator add.
- `tpu_compiler.py` has the step traced (`tpu_trace.py`) and compiled in processes of their own; `tpu_program.py` and
  `hlo.py` read what the TPU compiler wrote.
- `target.py` knows what `--on` names and what it can do, `time.py` bounds the step's time and expects one.
"""
