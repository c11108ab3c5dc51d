"""Builds the data of a run: documents, tokenizer and packed rows, from the config's `data` section."""

from dataclasses import dataclass

import numpy as np
import xxhash

from portable_fsdp.config import schema
from portable_fsdp.data.packing import PackedRows, pack
from portable_fsdp.data.sources import read_documents
from portable_fsdp.data.tokenize import Tokenizer, load_tokenizer
from portable_fsdp.runtime.errors import DataError


@dataclass(frozen=True)
class Corpus:
    """The rows to train on, and the tokenizer that made them."""

    rows: PackedRows
    tokenizer: Tokenizer

    @property
    def fingerprint(self) -> tuple[str, str]:
        """128-bit XXH3 hashes in hexadecimal: of the rows (tokens, in their order, and the cut), of the tokenizer."""
        rows = xxhash.xxh3_128(np.ascontiguousarray(self.rows.tokens).data)
        rows.update(f"{self.rows.tokens.dtype} {self.rows.seq_len}".encode())
        return rows.hexdigest(), xxhash.xxh3_128_hexdigest(self.tokenizer.description.encode())


def build_data(data: schema.Data) -> Corpus:
    """Read, tokenize and pack the corpus; every process does so for itself and holds all of its tokens.

    Raises DataError if a file or the tokenizer can't be read, or if the corpus is shorter than one row.
    """
    tokenizer = load_tokenizer(data.tokenizer)
    rows = PackedRows(pack(read_documents(data), tokenizer), data.seq_len)
    if len(rows) == 0:
        raise DataError(
            f"data: expected at least {data.seq_len + 1:,} tokens (data.seq_len + 1, one row), found "
            f"{len(rows.tokens):,} in {data.path or data.source}.\n  Lower data.seq_len, or give more text."
        )
    return Corpus(rows, tokenizer)
