"""Tokenizers: the bytes of the text, or a tokenizer of transformers from a folder or the hub.

`bytes` needs no file and no transformers. Its `save` still writes a folder that transformers opens, with the same ids,
so an exported model comes with its tokenizer.

A model may grow its embedding for a tokenizer that adds tokens to the model's own (`keeps_ids`). Another model's
tokenizer also fits, with more ids if the model grows, but its ids mean other tokens: `require_own_ids` refuses it.
"""

import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from portable_fsdp.config import schema
from portable_fsdp.config.describe import yaml_value
from portable_fsdp.runtime.errors import ConfigError, DataError
from portable_fsdp.runtime.hub import TOKENIZER_FILES, import_transformers, is_hub_id, local_folder, panic_as_error

if TYPE_CHECKING:
    from portable_fsdp.data.chat import ChatTemplate

Tokens = NDArray[np.unsignedinteger[Any]]
"""Ids, 1-D, in the smallest unsigned dtype that holds the vocabulary."""

log = logging.getLogger("portable_fsdp")

_KEY = "data.tokenizer"  # in model.allow too
NUL = "\0"


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """Return the smallest unsigned dtype that holds the ids below `vocab_size`."""
    return np.min_scalar_type(vocab_size - 1)


def ended(ids: Tokens, end: int | None) -> Tokens:
    """Append the end of text, unless the ids end with it or there is none."""
    if end is None or (len(ids) and ids[-1] == end):
        return ids
    return np.append(ids, np.array([end], dtype=ids.dtype))


class ByteTokenizer:
    """256 ids, one per UTF-8 byte. NUL, which text doesn't contain, ends a document and pads a row."""

    vocab_size = 256
    """Largest id + 1: the number of rows that the model's embedding must have."""
    end_of_text: int | None = 0
    """The id that ends a document; None if the tokenizer has none."""
    padding = 0
    """The id that pads a row; no loss counts it."""
    description = "bytes"
    """Everything that determines the ids, as text, without the chat template."""
    chat_template: "ChatTemplate | None" = None
    """Renders messages as text; None if the tokenizer has no template."""

    @property
    def ids(self) -> dict[str, int]:
        """Token -> id, as in an export."""
        return _bytes_as_bpe().get_vocab()

    def encode(self, text: str) -> Tokens:
        """Return the ids of the text, without special tokens around it."""
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def encode_all(self, texts: Sequence[str], *, special_tokens: bool) -> list[Tokens]:
        """Return the ids of each text; `special_tokens`: with those that the tokenizer puts around a text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """Return the text of `ids`; `special_tokens`: with these, NUL as `<NUL>`."""
        text = bytes(number for number in ids if number < 256).decode(errors="replace")
        return text.replace(NUL, "<NUL>" if special_tokens else "")

    def save(self, folder: Path) -> None:
        """Write a folder that transformers' `AutoTokenizer.from_pretrained` opens; `folder` may exist."""
        transformers = import_transformers()
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=_bytes_as_bpe(), eos_token=NUL, pad_token=NUL, clean_up_tokenization_spaces=False
        )
        tokenizer.save_pretrained(folder)


class FolderTokenizer:
    """A tokenizer of transformers, of a GGUF file, or a bare tokenizer.json, which has no end of text. `ByteTokenizer`
    documents the members.

    As in transformers, special tokens spelled in the text count as special tokens.
    """

    def __init__(self, folder: Path, key: str = "data.tokenizer", gguf_file: str | None = None) -> None:
        """`key`: the config key, for errors. `gguf_file`: a file in the folder."""
        self._tokenizer = _open(folder, key, gguf_file)
        self.vocab_size: int = max(self._tokenizer.get_vocab().values()) + 1
        self.end_of_text: int | None = self._tokenizer.eos_token_id
        candidates = (self._tokenizer.pad_token_id, self.end_of_text, 0)
        self.padding: int = next(number for number in candidates if number is not None)
        self.chat_template: ChatTemplate | None = None
        if self._tokenizer.chat_template:
            from portable_fsdp.data import chat  # a run on bytes needs none

            try:
                self._tokenizer.get_chat_template()
            except ValueError as error:  # several, and none is the default
                raise DataError(f"{key}: {folder}: {str(error).partition('!')[0]:.200}.") from None
            self.chat_template = chat.ChatTemplate(self._tokenizer)
        self._fast = getattr(self._tokenizer, "backend_tokenizer", None)
        if self._fast is not None:  # as transformers does before each call
            self._fast.no_truncation()
            self._fast.no_padding()
            self._fast.encode_special_tokens = self._tokenizer.split_special_tokens

    @property
    def ids(self) -> dict[str, int]:
        return dict(self._tokenizer.get_vocab())

    @cached_property
    def description(self) -> str:  # a slow tokenizer is described by its vocabulary
        ids = str(sorted(self._tokenizer.get_vocab().items())) if self._fast is None else self._fast.to_str()
        return f"{ids} {self.end_of_text}"

    def encode(self, text: str) -> Tokens:
        return self.encode_all([text], special_tokens=False)[0]

    def encode_all(self, texts: Sequence[str], *, special_tokens: bool) -> list[Tokens]:
        """Return the ids of each text; special tokens that the text itself spells are not added twice."""
        encoded = self._encoded(texts, special_tokens=special_tokens)
        return [self._once(ids) for ids in encoded] if special_tokens else encoded

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The special tokens before and after a text."""
        bare, whole = (self._encoded(["a"], special_tokens=special)[0].tolist() for special in (False, True))
        at = next((at for at in range(len(whole)) if whole[at : at + len(bare)] == bare), 0)
        return whole[:at], whole[at + len(bare) :]

    def _once(self, ids: Tokens) -> Tokens:
        before, behind = map(len, self._around)
        if before and np.array_equal(ids[:before], ids[before : 2 * before]):
            ids = ids[before:]
        if behind and np.array_equal(ids[-behind:], ids[-2 * behind : -behind]):
            ids = ids[:-behind]
        return ids

    def _encoded(self, texts: Sequence[str], *, special_tokens: bool) -> list[Tokens]:
        dtype = token_dtype(self.vocab_size)
        if self._fast is not None:  # its threads run without the GIL; encode_batch_fast computes no offsets
            encodings = self._fast.encode_batch_fast(list(texts), add_special_tokens=special_tokens)
            return [np.array(encoding.ids, dtype=dtype) for encoding in encodings]
        # verbose=False: no warning that a document is longer than the model's context; packing cuts it.
        encoded = self._tokenizer(
            list(texts), add_special_tokens=special_tokens, return_attention_mask=False, verbose=False
        )
        return [np.array(ids, dtype=dtype) for ids in encoded["input_ids"]]

    def decode(self, ids: Sequence[int], *, special_tokens: bool = False) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=not special_tokens)

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder)


Tokenizer = ByteTokenizer | FolderTokenizer
"""The tokenizer that packing and export use; `ByteTokenizer` documents the members."""


def load_tokenizer(name: str, pretrained: str | None = None, gguf_file: str | None = None) -> Tokenizer:
    """Open the tokenizer that `data.tokenizer` names: `bytes`, a folder, a hub id, or `auto`. `auto` opens that of
    `pretrained` (`model.pretrained`, in its `gguf_file` if set), else `bytes`. Raises DataError if there is none."""
    key = _KEY
    if name == "auto" and pretrained is not None:
        name, key = pretrained, "data.tokenizer (auto: that of model.pretrained)"
    elif name in ("auto", "bytes"):
        return ByteTokenizer()
    else:
        gguf_file = None
    if not is_hub_id(name):
        require_tokenizer_folder(Path(name), key)
    try:
        folder = local_folder(key, name, (gguf_file,) if gguf_file else TOKENIZER_FILES)
    except ConfigError as error:
        raise DataError(str(error)) from error
    return FolderTokenizer(folder, key, gguf_file)


def require_tokenizer_folder(folder: Path, key: str) -> None:
    """Raise DataError if there is no such folder; `key` is the config key."""
    if not folder.is_dir():
        raise DataError(
            f"{key}: no such folder: {folder}\n  Name bytes, a folder with a tokenizer, or a hub id (org/name).\n"
            "  Download the tokenizer first; the path is relative to the folder that the run starts in."
        )


def _open(folder: Path, key: str, gguf_file: str | None) -> Any:
    transformers, local = import_transformers(), {"local_files_only": True, "trust_remote_code": False}
    try:
        with panic_as_error(f"{key}: {folder}"):
            if gguf_file is not None:
                return transformers.AutoTokenizer.from_pretrained(folder, gguf_file=gguf_file, **local)
            if (folder / "tokenizer_config.json").is_file() or (folder / "config.json").is_file():
                opened = transformers.AutoTokenizer.from_pretrained(folder, **local)
                # From config.json alone, transformers opens some tokenizers that have only special tokens.
                if opened.get_vocab().keys() - opened.added_tokens_encoder.keys() - set(opened.all_special_tokens):
                    return opened
            elif (folder / "tokenizer.json").is_file():
                return transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    except DataError:
        raise
    except Exception as error:  # tokenizers raises bare Exception, transformers many classes: all concern these files
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(f"{key}: {folder}: transformers can't open it: {reason[0]}") from error
    raise DataError(
        f"{key}: {folder} has no tokenizer: neither tokenizer.json nor other files with a vocabulary.\n"
        "  Write one with transformers' save_pretrained, or set data.tokenizer=bytes."
    )


def _bytes_as_bpe() -> Any:
    """Build a byte-level BPE without merges: the ids are the bytes.

    The token of NUL is NUL itself, not its letter in the byte alphabet (U+0100): tokenizers searches the raw text for
    special tokens, and there that letter is an ordinary one.
    """
    import_transformers()
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {NUL if byte == 0 else letter: byte for byte, letter in bytes_to_unicode().items()}
    tokenizer: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(NUL, special=True, normalized=False)])
    return tokenizer


# ------------------------------------------------------------------------------------------- the model's own tokenizer


def keeps_ids(model: schema.Model, name: str, tokenizer: Tokenizer) -> bool:
    """True if `tokenizer` (`data.tokenizer`, `name`) has all tokens of `model.pretrained`'s own, with the same ids;
    False also if that one can't be opened."""
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
    """Raise ConfigError if an id means another token in `tokenizer` than in `model.pretrained`'s own. Ids that only one
    of them has are fine. Logs a model whose own tokenizer can't be opened."""
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
            f"{_KEY}: the same ids are other tokens in {name} than in {model.pretrained} (model.pretrained).\n"
            f"  Ids that differ: {len(others):,}; the first is {number}, {tokens[number]!r} to the model and {token!r} "
            f"in {name}. Set {_KEY}=auto, the model's own.\n"
            f"  If the model should learn the other tokens: model.allow='{yaml_value([*model.allow, _KEY])}'."
        )


def _own_ids(model: schema.Model, pretrained: str) -> dict[str, int]:
    """Return token -> id; empty if transformers finds no tokenizer."""
    patterns = TOKENIZER_FILES if model.gguf_file is None else (model.gguf_file,)
    try:
        tokenizer = _open(local_folder("model.pretrained", pretrained, patterns), "model.pretrained", model.gguf_file)
    except DataError:
        return {}
    return dict(tokenizer.get_vocab())
