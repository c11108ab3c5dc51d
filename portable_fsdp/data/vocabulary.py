"""Whether a tokenizer is the model's own, perhaps with tokens added to it: then the model may grow with it.

A tokenizer of another model with more ids would fit as well once the model had grown, and would mean nothing to it.
"""

from pathlib import Path
from typing import Any

from portable_fsdp.config import schema
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.hub import TOKENIZER_FILES, local_folder


def keeps_ids(model: schema.Model, tokenizer: str) -> bool:
    """Whether `tokenizer`, as `data.tokenizer` has it, has all tokens of `model.pretrained`'s own, by their ids.

    False where either can't be opened: then it can't be told.
    """
    if model.pretrained is None or tokenizer == "bytes":
        return False
    if tokenizer in ("auto", model.pretrained):
        return True
    try:
        wanted = TOKENIZER_FILES if model.gguf_file is None else (model.gguf_file,)
        own = _ids(local_folder("model.pretrained", model.pretrained, wanted), model.gguf_file)
        theirs = _ids(local_folder("data.tokenizer", tokenizer, TOKENIZER_FILES), None)
    except ConfigError:
        return False
    return bool(own) and own.items() <= theirs.items()


def _ids(folder: Path, gguf_file: str | None) -> dict[str, int]:
    """Token -> id; empty where transformers finds no tokenizer."""
    from transformers import AutoTokenizer

    options: dict[str, Any] = {} if gguf_file is None else {"gguf_file": gguf_file}
    try:
        opened: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
    except Exception:  # of many classes, all about these files
        return {}
    return dict(opened.get_vocab())
