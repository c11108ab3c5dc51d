"""Data: from a corpus to the micro batches of a step, in an order that no device count changes.

May import `config` and `runtime`, numpy and torch; knows nothing of processes, devices or engines.
Read first: `build.py` (renders a source's documents, tokenizes them into a cache, packs them into rows), then
`packing.py` (the only place that shifts labels; which row comes at which position) and `batches.py` (the slice of a
step that one data shard feeds).
"""
