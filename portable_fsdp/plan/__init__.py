"""Plans: memory and time of the trainer's own step on absent hardware. A tool: no training run imports it.

May import everything below `train`, and `train`. Read `result.py` first, then `planner.py`, which joins the parts:
- `fake_step.py` runs the step on fake tensors: `memory_trace.py` records live storages, `device_rules.py` has the rules
  for the memory that a device's kernels and torch's allocator add, `repeated_layers.py` traces few of equal layers.
- `tpu_compiler.py` traces the step (`tpu_trace.py`) and compiles it, each in a process of its own; `tpu_program.py` and
  `hlo.py` read the TPU compiler's output.
- `target.py` parses `--on` and knows the hardware's figures, `time.py` computes the expected time.
"""
