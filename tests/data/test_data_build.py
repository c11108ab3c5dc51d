"""From the config's section to rows and tokenizer."""

from pathlib import Path

import numpy as np
import pytest

from portable_fsdp.config.schema import Data
from portable_fsdp.data.build import build_data
from portable_fsdp.runtime.errors import DataError


def test_python_docs_become_rows_of_bytes() -> None:
    corpus = build_data(Data(seq_len=256))
    assert corpus.tokenizer.vocab_size == 256
    assert len(corpus.rows) > 400_000 // 256
    last = corpus.rows.rows(np.array([len(corpus.rows) - 1]))
    assert last["input_ids"].shape == (1, 256)


def test_a_corpus_shorter_than_a_row_is_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("x" * 256)
    data = Data(source="text", path=str(tmp_path / "short.txt"), seq_len=257)
    with pytest.raises(DataError, match=r"expected at least 258 tokens .*, found 257 in .*short\.txt\.\n  Lower"):
        build_data(data)
    assert len(build_data(data.model_copy(update={"seq_len": 256})).rows) == 1
