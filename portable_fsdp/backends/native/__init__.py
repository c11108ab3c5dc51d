"""Native: FSDP2 (`fully_shard`), one process per device. gloo on CPU, NCCL on CUDA.

Read `engine.py` first (the contract), then `units.py` (in which order things are applied to a model) and `prefetch.py`
(which unit is gathered when).
"""
