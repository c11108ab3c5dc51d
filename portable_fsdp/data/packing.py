"""Documents packed into rows of one length, with no token lost between rows, and the one place that shifts labels."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from portable_fsdp.config.schema import Data
from portable_fsdp.data.sources import read_documents
from portable_fsdp.data.tokenize import Tokenizer, load_tokenizer
from portable_fsdp.runtime.errors import DataError


class PackedRows:
    """A stream of tokens cut into rows: row i predicts tokens i * seq_len + 1 to (i + 1) * seq_len."""

    def __init__(self, tokens: NDArray[Any], seq_len: int) -> None:
        self._tokens = tokens
        self._seq_len = seq_len

    def __len__(self) -> int:
        return max(0, (len(self._tokens) - 1) // self._seq_len)

    def rows(self, indices: NDArray[Any]) -> dict[str, Tensor]:
        """`input_ids` and `labels`, int64 `[len(indices), seq_len]`; labels[r, t] follows input_ids[r, t]."""
        starts = indices.astype(np.int64)[:, None] * self._seq_len
        tokens = self._tokens[starts + np.arange(self._seq_len + 1)].astype(np.int64)
        return {
            "input_ids": torch.from_numpy(tokens[:, :-1].copy()),
            "labels": torch.from_numpy(tokens[:, 1:].copy()),
        }


@dataclass(frozen=True)
class Corpus:
    """The rows of a run and the tokenizer that made them."""

    rows: PackedRows
    tokenizer: Tokenizer


def pack(documents: Iterable[str], tokenizer: Tokenizer) -> NDArray[Any]:
    """One stream of ids `[tokens]`, each document followed by the end of text where the tokenizer has one."""
    parts: list[NDArray[Any]] = []
    for document in documents:
        ids = tokenizer.encode(document)
        parts.append(ids)
        if tokenizer.end_of_text is not None:
            parts.append(np.array([tokenizer.end_of_text], dtype=ids.dtype))
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.uint8)


def build_data(data: Data) -> Corpus:
    """Read, tokenize and pack the config's corpus. Raises DataError where it doesn't fill one row."""
    tokenizer = load_tokenizer(data.tokenizer)
    tokens = pack(read_documents(data), tokenizer)
    rows = PackedRows(tokens, data.seq_len)
    if len(rows) == 0:
        raise DataError(
            f"data: expected at least {data.seq_len + 1} tokens (data.seq_len + 1), found {len(tokens)} in "
            f"{data.path or data.source}.\n  Lower data.seq_len, or give more text. Nothing was started."
        )
    return Corpus(rows, tokenizer)
