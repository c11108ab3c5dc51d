"""Whether a tokenizer is the model's own, perhaps with tokens added to it: then the model may grow with it.

A tokenizer of another model with more ids would fit as well once the model had grown, and would mean nothing to it; one
with fewer fits as it is, and is refused.
"""

import logging
from pathlib import Path
from typing import Any

from portable_fsdp.config import schema
from portable_fsdp.config.describe import yaml_value
from portable_fsdp.data.tokenize import Tokenizer
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.hub import TOKENIZER_FILES, local_folder

log = logging.getLogger("portable_fsdp")

_KEY = "data.tokenizer"  # in model.allow too


def keeps_ids(model: schema.Model, name: str, tokenizer: Tokenizer) -> bool:
    """Whether `tokenizer`, which `data.tokenizer` names, has all tokens of `model.pretrained`'s own, by their ids.

    False where the model's own can't be opened.
    """
    if model.pretrained is None or name == "bytes":
        return False
    if name in ("auto", model.pretrained):
        return True
    try:
        own = _own_ids(model, model.pretrained)
    except ConfigError:
        return False
    return bool(own) and own.items() <= tokenizer.ids.items()


def require_own_ids(model: schema.Model, name: str, tokenizer: Tokenizer) -> None:
    """Raises ConfigError where `tokenizer` has another token by an id of `model.pretrained`'s own.

    An id that only one of them has is no problem. The log names a model whose own tokenizer can't be opened.
    """
    if model.pretrained is None or name in ("auto", model.pretrained) or _KEY in model.allow:
        return
    own = _own_ids(model, model.pretrained)
    if not own:
        log.info("model.pretrained: %s: no tokenizer to compare data.tokenizer=%s with", model.pretrained, name)
        return
    tokens = {number: token for token, number in own.items()}
    others = [(number, token) for token, number in tokenizer.ids.items() if tokens.get(number, token) != token]
    if others:
        number, token = min(others)
        raise ConfigError(
            f"{_KEY}: expected tokens by the ids that they have in {model.pretrained} (model.pretrained), found "
            f"another model's: of {len(others):,}\n  ids the first is {number}, {tokens[number]!r} to the model and "
            f"{token!r} in {name}. Set {_KEY}=auto, the model's own.\n  If the model should learn the other "
            f"tokens: model.allow='{yaml_value([*model.allow, _KEY])}'."
        )


def _own_ids(model: schema.Model, pretrained: str) -> dict[str, int]:
    wanted = TOKENIZER_FILES if model.gguf_file is None else (model.gguf_file,)
    return _ids(local_folder("model.pretrained", pretrained, wanted), model.gguf_file)


def _ids(folder: Path, gguf_file: str | None) -> dict[str, int]:
    """Token -> id; empty where transformers finds no tokenizer."""
    from transformers import AutoTokenizer

    options: dict[str, Any] = {} if gguf_file is None else {"gguf_file": gguf_file}
    try:
        opened: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
    except Exception:  # of many classes, all about these files
        return {}
    return dict(opened.get_vocab())
