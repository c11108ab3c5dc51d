"""Checkpoints in the formats of other tools: each is a `ForeignFormat` in a module, and a name in `FORMATS`.

May import `checkpoint` and the packages that it may. `checkpoint import|export` loads the format that a user names; a
training run loads `huggingface` or `peft` when it exports, and no other. Read first: `base.py`,
`importing.py`, `exporting.py`, then any format.
"""

from pathlib import Path

from portable_fsdp.runtime.errors import CheckpointError

FORMATS = ("huggingface", "dcp", "gguf", "safetensors", "torch", "xla_fsdp1")
"""The formats that we import, in the order in which `--format auto` tries them."""

EXPORTS = {"huggingface": "model/", "dcp": "", "torch": "model/", "safetensors": "model/", "peft": "model/"}
"""Format that we export -> prefix of the checkpoint's files that it needs."""

SINGLE_FILE = ("torch", "safetensors")
"""Exports that are one file; the others are folders."""

OF_TRANSFORMERS = ("huggingface", "peft")
"""Exports with a place for adapters and a tokenizer."""

MODULES = {"gguf": "single_file", "peft": "huggingface", "safetensors": "single_file", "torch": "single_file"}
"""Format -> its module in this package, where that has another name."""

WITHOUT_CHECKSUM = ("safetensors", "huggingface", "gguf", "dcp")
"""Formats in which damage that stays readable goes unnoticed (dcp: in its .metadata). torch.save's have CRC-32s."""


def require_source(path: Path) -> None:
    """Check that `path` exists. Raises CheckpointError."""
    if not path.exists():
        raise CheckpointError(f"import {path}: no such file or folder")
