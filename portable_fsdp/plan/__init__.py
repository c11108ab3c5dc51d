"""Plans: what the trainer's own step needs on hardware that isn't there.

May import everything below `train`. Read `tpu.py` first: it traces the step and reads what the TPU compiler, started
by `tpu_compiler.py` in a process of its own, makes of it. `cuda.py` runs the step on fake tensors: `live.py` records
what lives, `kernels.py` knows what a GPU's kernels add, `allocator.py` what torch's allocator makes of it. Both give
the values of `result.py`.
"""
