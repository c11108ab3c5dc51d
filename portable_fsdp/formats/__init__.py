"""Checkpoints in the formats of other tools: a module and a row of `FORMATS` for each.

May import `checkpoint` and what that may. `checkpoint import|export` loads the format that a user names; a training run
loads `huggingface` or `peft` when it exports, and no other. Read first: `base.py`, `importing.py`, `exporting.py`, then
any format.
"""

from pathlib import Path

from portable_fsdp.runtime.errors import CheckpointError

FORMATS = ("huggingface", "dcp", "gguf", "safetensors", "torch", "xla_fsdp1")
"""The formats that we import, in the order in which `--format auto` tries them."""

EXPORTS = {"huggingface": "model/", "dcp": "", "torch": "model/", "safetensors": "model/", "peft": "model/"}
"""The formats that we export: what the names of the files begin with that each needs of a checkpoint."""

SINGLE_FILE = ("torch", "safetensors")
"""Exports that are one file; the others are folders."""

OF_TRANSFORMERS = {"huggingface": "transformers", "peft": "peft"}
"""Exports with a place for adapters, a tokenizer and a model card -> the library that opens them."""

MODULES = {"safetensors": "safetensors_file", "torch": "torch_file"}
"""Format -> its module in this package, where that has another name."""

WITHOUT_CHECKSUM = {
    "safetensors": "the format",
    "huggingface": "the format",
    "gguf": "the format",
    "dcp": "its .metadata",
}
"""Formats, or parts of them, in which damage that stays readable goes unnoticed. Zips of torch.save have CRC-32s."""


def require_source(path: Path) -> None:
    """Raises CheckpointError where there is nothing to import."""
    if not path.exists():
        raise CheckpointError(f"import {path}: expected a file or a folder, found none")
