"""An engine of eager torch on gloo: what a new one takes. Registered by tests alone, and by no other file."""

SPEC = "toy.options:SPEC"
"""The engine's entry in the table of `backends/open.py`."""
