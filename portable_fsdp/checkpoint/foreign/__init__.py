"""Checkpoints in other people's formats: a module and a row of `FORMATS` for each.

May import what `checkpoint` may; the libraries of a format are imported in its own module, and that when it is asked
for. Read first: `base.py` (what a format gives), then `importing.py`, `streams.py`, and any one format.
"""

from pathlib import Path

from portable_fsdp.runtime.errors import CheckpointError

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

WITHOUT_CHECKSUM = {
    "safetensors": "the format",
    "huggingface": "the format",
    "gguf": "the format",
    "dcp": "its .metadata",
}
"""Formats, or what of them, in which damage that can still be read goes unnoticed. Zips of torch.save have CRC-32s."""


def require_source(path: Path) -> None:
    """Raises CheckpointError where there is nothing to import."""
    if not path.exists():
        raise CheckpointError(f"import {path}: expected a file or a folder, found none")
