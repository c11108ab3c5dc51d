"""An engine of eager torch on gloo: what a new one takes. Registered by tests alone, and by no other file."""

SPEC = "toy.options:SPEC"
"""Its line in the table of `backends/open.py`."""
