"""Checkpoints in other people's formats: a module and a row of `FORMATS` for each.

May import what `checkpoint` may; the libraries of a format are imported in its own module, and that when it is asked
for. Read first: `base.py` (what a format gives), then `importing.py`, `streams.py`, and any one format.
"""

FORMATS = {
    "huggingface": "portable_fsdp.checkpoint.foreign.huggingface",
    "dcp": "portable_fsdp.checkpoint.foreign.dcp",
    "gguf": "portable_fsdp.checkpoint.foreign.gguf",
    "safetensors": "portable_fsdp.checkpoint.foreign.safetensorsfile",
    "torch": "portable_fsdp.checkpoint.foreign.torchfile",
    "xla_fsdp1": "portable_fsdp.checkpoint.foreign.xla_fsdp1",
}
"""Name of a format -> its module, in the order in which `--format auto` asks them."""

EXPORTS = {name: FORMATS[name] for name in ("huggingface", "dcp", "torch", "safetensors")} | {
    "peft": "portable_fsdp.checkpoint.foreign.peft",
}
"""Those that are written: four of them, and adapters alone."""
