"""Tokenizers: bytes, which needs no file, or a folder in Hugging Face format."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from portable_fsdp.runtime.errors import DataError


class Tokenizer(ABC):
    """Text to ids. `end_of_text` stands after each document, where there is such an id."""

    vocab_size: int  # largest id + 1
    end_of_text: int | None

    @abstractmethod
    def encode(self, text: str) -> NDArray[Any]:
        """Ids of a document, `[tokens]`, in the smallest unsigned dtype that holds the vocabulary."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write what `AutoTokenizer.from_pretrained` opens."""


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes are the ids; 0, which text doesn't hold, ends a document."""

    vocab_size = 256
    end_of_text = 0

    def encode(self, text: str) -> NDArray[Any]:
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def save(self, folder: Path) -> None:
        """Write the equal tokenizer of the tokenizers library: byte-level BPE without merges."""
        from tokenizers import Tokenizer as Fast
        from tokenizers import decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        vocabulary = {character: byte for byte, character in enumerate(_characters_of_bytes())}
        fast: Any = Fast(models.BPE(vocab=vocabulary, merges=[]))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        fast.decoder = decoders.ByteLevel()
        end = _characters_of_bytes()[0]
        PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=end, pad_token=end).save_pretrained(str(folder))


class FolderTokenizer(Tokenizer):
    """A transformers tokenizer of a local folder. Special tokens are not added; `end_of_text` is its eos."""

    def __init__(self, folder: str) -> None:
        if not Path(folder).is_dir():
            raise DataError(
                f"data.tokenizer: expected `bytes` or a folder with a tokenizer, found no such folder: {folder}"
            )
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        try:
            if (Path(folder) / "tokenizer_config.json").is_file():
                self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            else:
                self._tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(Path(folder) / "tokenizer.json"))
        except Exception as error:  # transformers and tokenizers raise many classes, all about this folder
            raise DataError(
                f"data.tokenizer: {folder}: expected tokenizer.json or a transformers tokenizer, found none that "
                f"opens: {str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}"
            ) from error
        self.vocab_size = max(self._tokenizer.get_vocab().values()) + 1
        self.end_of_text = self._tokenizer.eos_token_id
        self._dtype = np.min_scalar_type(self.vocab_size - 1)

    def encode(self, text: str) -> NDArray[Any]:
        # verbose=False: a document longer than the model's context is what packing is for, and no reason to warn.
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False, verbose=False), dtype=self._dtype)

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(str(folder))


def load_tokenizer(name: str) -> Tokenizer:
    """`bytes`, or the tokenizer of a folder. Raises DataError where there is none."""
    return ByteTokenizer() if name == "bytes" else FolderTokenizer(name)


def _characters_of_bytes() -> list[str]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's table, encoder.py of openai/gpt-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]
