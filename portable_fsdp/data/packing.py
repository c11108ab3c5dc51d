"""Packing: all documents become one stream of tokens, and the stream is cut into rows of equal length.

Labels are shifted here, once; models, losses and engines take `labels[r, t]` as the token after `input_ids[r, t]`.
"""

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from portable_fsdp.data.tokenize import Tokenizer, Tokens, token_dtype

IGNORED = -100
"""The label that no loss counts. Packed rows have none."""


def pack(documents: Iterable[str], tokenizer: Tokenizer) -> Tokens:
    """The ids of all documents in one 1-D array, each document ended by `end_of_text` (where there is one)."""
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([] if tokenizer.end_of_text is None else [tokenizer.end_of_text], dtype=dtype)
    parts = [np.array([], dtype=dtype)]
    for document in documents:
        parts += [tokenizer.encode(document), end]
    return np.concatenate(parts)


class PackedRows:
    """Rows of `seq_len` positions, cut from a stream of tokens.

    Row r predicts the tokens r * seq_len + 1 to (r + 1) * seq_len: each token but the first is predicted in exactly one
    row, and a rest shorter than a row is left out.
    """

    def __init__(self, tokens: Tokens, seq_len: int) -> None:
        self.tokens = tokens
        self.seq_len = seq_len

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.seq_len

    def rows(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        """`input_ids` and `labels`, int64 `[len(indices), seq_len]`, of the rows with these indices."""
        window = np.arange(self.seq_len + 1)
        tokens = torch.tensor(self.tokens[indices[:, None] * self.seq_len + window].astype(np.int64))
        return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
