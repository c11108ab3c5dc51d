"""Checkpoints in the formats of other tools: a module and a row of `FORMATS` for each.

May import `checkpoint` and what that may. `checkpoint import|export` loads the format that a user names; a training run
loads `huggingface` or `peft` when it exports, and no other. Read first: `base.py`, then `importing.py`, `streams.py`.
"""

from pathlib import Path

from portable_fsdp.runtime.errors import CheckpointError

FORMATS = {
    "huggingface": "portable_fsdp.formats.huggingface",
    "dcp": "portable_fsdp.formats.dcp",
    "gguf": "portable_fsdp.formats.gguf",
    "safetensors": "portable_fsdp.formats.safetensorsfile",
    "torch": "portable_fsdp.formats.torchfile",
    "xla_fsdp1": "portable_fsdp.formats.xla_fsdp1",
}
"""Name of a format -> its module, in the order in which `--format auto` asks them."""

EXPORTS = {name: FORMATS[name] for name in ("huggingface", "dcp", "torch", "safetensors")} | {
    "peft": "portable_fsdp.formats.peft",
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
