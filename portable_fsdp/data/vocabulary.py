"""Whether a tokenizer is the model's own, perhaps with tokens added to it: then the model may grow with it.

A tokenizer of another model with more ids would fit as well once the model had grown, and would mean nothing to it; one
with fewer fits as it is, and is refused.
"""

import logging
import tempfile
from pathlib import Path
from typing import Any

from portable_fsdp.config import schema
from portable_fsdp.config.describe import yaml_value
from portable_fsdp.data.tokenize import load_tokenizer
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.hub import TOKENIZER_FILES, local_folder

log = logging.getLogger("portable_fsdp")

_KEY = "data.tokenizer"  # in model.allow too


def keeps_ids(model: schema.Model, tokenizer: str) -> bool:
    """Whether `tokenizer`, as `data.tokenizer` has it, has all tokens of `model.pretrained`'s own, by their ids.

    False where either can't be opened: then it can't be told.
    """
    if model.pretrained is None or tokenizer == "bytes":
        return False
    if tokenizer in ("auto", model.pretrained):
        return True
    try:
        own, theirs = _own_ids(model, model.pretrained), _their_ids(tokenizer)
    except ConfigError:
        return False
    return bool(own) and own.items() <= theirs.items()


def require_own_ids(model: schema.Model, tokenizer: str) -> None:
    """Raises ConfigError where `tokenizer` names another token by an id of `model.pretrained`'s own.

    An id that only one of them has says nothing. A line of the log tells of a model whose own can't be opened.
    """
    if model.pretrained is None or tokenizer in ("auto", model.pretrained) or _KEY in model.allow:
        return
    own = _own_ids(model, model.pretrained)
    if not own:
        log.info("model.pretrained: %s: no tokenizer to compare data.tokenizer=%s with", model.pretrained, tokenizer)
        return
    tokens = {number: token for token, number in own.items()}
    others = [(number, token) for token, number in _their_ids(tokenizer).items() if tokens.get(number, token) != token]
    if others:
        number, token = min(others)
        raise ConfigError(
            f"{_KEY}: expected tokens by the ids that they have in {model.pretrained} (model.pretrained), found "
            f"another model's: of {len(others):,}\n  ids the first is {number}, {tokens[number]!r} to the model and "
            f"{token!r} in {tokenizer}. Set {_KEY}=auto, the model's own.\n  If the model should learn the other "
            f"tokens: model.allow='{yaml_value([*model.allow, _KEY])}'. Nothing was started."
        )


def _own_ids(model: schema.Model, pretrained: str) -> dict[str, int]:
    wanted = TOKENIZER_FILES if model.gguf_file is None else (model.gguf_file,)
    return _ids(local_folder("model.pretrained", pretrained, wanted), model.gguf_file)


def _their_ids(tokenizer: str) -> dict[str, int]:
    if tokenizer != "bytes":
        return _ids(local_folder(_KEY, tokenizer, TOKENIZER_FILES), None)
    with tempfile.TemporaryDirectory() as folder:  # as an export has it, which may be the model
        load_tokenizer(tokenizer).save(Path(folder))
        return _ids(Path(folder), None)


def _ids(folder: Path, gguf_file: str | None) -> dict[str, int]:
    """Token -> id; empty where transformers finds no tokenizer."""
    from transformers import AutoTokenizer

    options: dict[str, Any] = {} if gguf_file is None else {"gguf_file": gguf_file}
    try:
        opened: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
    except Exception:  # of many classes, all about these files
        return {}
    return dict(opened.get_vocab())
