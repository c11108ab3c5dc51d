"""Data: from a corpus to the micro batches of a step, in an order that no device count changes.

May import `config` and `runtime`, numpy and torch; knows nothing of processes, devices or engines.
Read first: `build.py` (a source's documents are rendered, tokenized into a cache, packed into rows), then `packing.py`
(labels are shifted there, and only there; which row comes at which position) and `batches.py` (the slice of a step that
one data shard feeds).
"""
