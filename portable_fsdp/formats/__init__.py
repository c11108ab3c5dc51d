"""Checkpoints in the formats of other tools: each is a `ForeignFormat` in a module, and a name in `FORMATS`.

May import `checkpoint` and the packages that it may. `checkpoint import|export` loads the format that a user names; a
training run loads `huggingface` or `peft` when it exports, and no other. Read first: `base.py`,
`importing.py`, `exporting.py`, then any format.
"""

FORMATS = ("huggingface", "dcp", "gguf", "safetensors", "torch")
"""The formats that we import, in the order in which `--format auto` tries them."""

EXPORTS = {"huggingface": "model/", "dcp": "", "safetensors": "model/", "peft": "model/"}
"""Format that we export -> prefix of the checkpoint's files that it needs."""

OF_TRANSFORMERS = ("huggingface", "peft")
"""Exports with a place for adapters and a tokenizer."""

MODULES = {"gguf": "single_file", "peft": "huggingface", "safetensors": "single_file", "torch": "single_file"}
"""Format -> its module in this package, where that has another name."""
