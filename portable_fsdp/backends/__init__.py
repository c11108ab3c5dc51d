"""Backends: how a model is sharded, stepped and read back on an engine.

May import `config` and `runtime`, and each engine's own packages inside its own module; never models, data,
checkpoint, nor one another. Read `base.py` first: the contract. `open.py` picks the engine and imports it lazily;
`pjrt.py` is what the two engines of torch_xla share.
"""
