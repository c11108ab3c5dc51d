"""XLA FSDP1: torch_xla's XlaFullyShardedDataParallel. One process drives one device; each holds its part of a unit.

Read `engine.py` first (the contract, and how a unit replaces its module's forward), then `shards.py` (which elements of
which parameter a device holds).
"""
