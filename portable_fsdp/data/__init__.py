"""Data: text to tokens to rows, and which row comes when.

May import `config` and `runtime`; knows nothing of processes, devices or engines. Read `order.py` first (a pure
function), then `packing.py` (rows and their labels) and `batches.py` (a step's rows, built ahead).
"""
