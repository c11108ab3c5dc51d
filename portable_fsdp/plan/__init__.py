"""Plans: what the trainer's own step needs on hardware that isn't there.

May import everything below `train`. Read `tpu.py` first: it traces the step and reads what the TPU compiler, started
by `tpu_compiler.py` in a process of its own, makes of it.
"""
