"""Rows hold every token of the stream, predict each exactly once, and shift labels by one."""

import numpy as np
import pytest
import torch

from portable_fsdp.data.packing import IGNORED, PackedRows, pack
from portable_fsdp.data.tokenize import ByteTokenizer


class Endless(ByteTokenizer):
    """A tokenizer that has no end of text."""

    end_of_text = None


def test_documents_become_one_stream_with_an_end_after_each() -> None:
    stream = pack(["ab", "", "c"], ByteTokenizer())
    assert stream.tolist() == [97, 98, 0, 0, 99, 0]
    assert stream.dtype == np.uint8


def test_without_an_end_of_text_documents_touch() -> None:
    assert pack(iter(["ab", "c"]), Endless()).tolist() == [97, 98, 99]


def test_no_documents_are_an_empty_stream() -> None:
    assert len(PackedRows(pack([], ByteTokenizer()), 4)) == 0


@pytest.mark.parametrize(
    ("tokens", "seq_len", "rows"), [(0, 4, 0), (4, 4, 0), (5, 4, 1), (8, 4, 1), (9, 4, 2), (3, 1, 2)]
)
def test_a_row_needs_one_token_more_than_its_length(tokens: int, seq_len: int, rows: int) -> None:
    assert len(PackedRows(np.arange(tokens, dtype=np.uint16), seq_len)) == rows


def test_labels_are_the_next_tokens_and_each_token_is_predicted_once() -> None:
    stream = np.random.default_rng(0).integers(0, 2**16, size=1000).astype(np.uint16)
    packed = PackedRows(stream, 7)
    batch = packed.rows(np.arange(len(packed)))
    counted = len(packed) * 7
    assert batch["input_ids"].flatten().tolist() == stream[:counted].tolist()
    assert batch["labels"].flatten().tolist() == stream[1 : counted + 1].tolist()
    assert not (batch["labels"] == IGNORED).any()


def test_rows_come_as_asked_in_int64() -> None:
    batch = PackedRows(np.arange(200, dtype=np.uint8), 3).rows(np.array([40, 0, 40]))
    assert batch["input_ids"].tolist() == [[120, 121, 122], [0, 1, 2], [120, 121, 122]]
    assert batch["labels"].tolist() == [[121, 122, 123], [1, 2, 3], [121, 122, 123]]
    for tensor in batch.values():
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()
