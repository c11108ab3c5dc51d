"""Backends: how a model is sharded, stepped and read back on an engine.

May import `layout`, `config`, `runtime` and `optim.counting`, and each engine's own packages inside its own module;
never models, data, checkpoint, or another engine.

Read `contract.py` first. `open.py` picks the engine and imports it lazily, `refusals.py` lists what it refuses.
"""
