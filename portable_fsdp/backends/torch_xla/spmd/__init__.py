"""XLA: torch_xla SPMD. One process drives all devices of its host; the program is global, XLA partitions it.

Read `engine.py` first: the contract, and the order in which techniques are applied to a model's forwards. They are in
`forward.py` (casts, recompute), `tensors.py` (the mesh), `scan.py` (one program for all layers), `attention.py` and
`splash.py`; `sums.py` sums gradients over devices.
"""
