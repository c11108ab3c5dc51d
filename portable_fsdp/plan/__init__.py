"""Plans: what the trainer's own step needs on hardware that isn't there.

May import everything below `train`. Read `result.py` first: what a plan says. Then `tpu.py`: it has the step traced
(`tpu_trace.py`) and compiled (`tpu_compiler.py`) in processes of their own, and reads what the TPU compiler wrote.
"""
