"""Frozen weights in 4 or 8 bits: tables of bytes (`tables.py`, to read first), and layers that use them (`layers.py`).

A table takes its weight's place under the weight's FQN. `models/quantised.py` fills it. A plain run imports
none of this.
"""
