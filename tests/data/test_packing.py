"""Rows hold every token, predict each once, and shift labels by one; documents stay apart, and fill rows well."""

import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from portable_fsdp.data.packing import IGNORED, DocumentRows, Int64s, MixedRows, PackedRows, best_fit, cut


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


# ------------------------------------------------------------------------------------------------------- documents


def documents(*lengths: int, seq_len: int, counted: NDArray[np.bool_] | None = None, **keys: Any) -> DocumentRows:
    """Tokens count up from 100 through all documents; padding is 7."""
    sizes = np.array(lengths, np.int64)
    ends = np.cumsum(sizes, dtype=np.int64)
    tokens = np.arange(100, 100 + ends[-1], dtype=np.uint16)
    pieces = cut(ends - sizes, sizes, seq_len)
    given: dict[str, Any] = {"several": True, **keys}
    return DocumentRows(tokens, counted, pieces, seq_len=seq_len, padding=7, **given)


def test_documents_share_a_row_each_with_positions_and_a_segment_of_its_own() -> None:
    rows = documents(3, 4, 2, seq_len=6)
    assert len(rows) == 2
    batch = rows.rows(np.array([0, 1]))
    assert {name: values.tolist() for name, values in batch.items()} == {
        "input_ids": [[103, 104, 105, 106, 107, 108], [100, 101, 102, 7, 7, 7]],
        "labels": [[104, 105, 106, -100, 108, -100], [101, 102, -100, -100, -100, -100]],
        "positions": [[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 0, 0]],
        "segments": [[1, 1, 1, 1, 2, 2], [1, 1, 1, 0, 0, 0]],
    }
    for tensor in batch.values():
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()


def test_one_document_a_row_is_padded() -> None:
    batch = documents(3, 4, 2, seq_len=5, several=False).rows(np.array([2, 0]))
    assert batch["input_ids"].tolist() == [[107, 108, 7, 7, 7], [100, 101, 102, 7, 7]]
    assert batch["segments"].tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]


def test_only_tokens_that_count_are_labels() -> None:
    counted = np.array([True, False, True, True, False, True, True])
    batch = documents(4, 3, seq_len=4, counted=counted).rows(np.array([0, 1]))
    assert batch["labels"].tolist() == [[-100, 102, 103, -100], [105, 106, -100, -100]]


@pytest.mark.parametrize("seq_len", [1, 2, 3, 5, 8, 100])
def test_each_token_but_a_documents_first_is_predicted_once_however_it_is_cut(seq_len: int) -> None:
    lengths = np.random.default_rng(seq_len).integers(2, 30, size=50)
    rows = documents(*lengths.tolist(), seq_len=seq_len)
    batch = rows.rows(np.arange(len(rows)))
    first = set((100 + np.cumsum(lengths) - lengths).tolist())
    seen = batch["labels"][batch["labels"] != IGNORED].tolist()
    assert sorted(seen) == [token for token in range(100, 100 + lengths.sum()) if token not in first]
    within = batch["labels"] != IGNORED
    assert torch.equal(batch["labels"][within], batch["input_ids"][within] + 1)
    assert torch.equal(batch["segments"] == 0, batch["input_ids"] == 7)


@pytest.mark.parametrize(
    ("length", "lengths"), [(1, [1]), (4, [4]), (5, [4]), (6, [4, 2]), (9, [4, 4]), (10, [4, 4, 2])]
)
def test_a_documents_last_token_is_no_piece_of_its_own(length: int, lengths: list[int]) -> None:
    pieces = cut(np.array([7]), np.array([length]), 4)
    assert pieces.lengths.tolist() == lengths
    assert pieces.starts.tolist() == list(range(7, 7 + 4 * len(lengths), 4))


def test_a_row_does_not_depend_on_those_asked_with_it() -> None:
    rows = documents(*np.random.default_rng(0).integers(2, 9, size=100).tolist(), seq_len=10)
    all_rows = rows.rows(np.arange(len(rows)))
    for index in range(len(rows)):
        alone = rows.rows(np.array([index]))
        assert all(torch.equal(alone[name][0], all_rows[name][index]) for name in all_rows)
    assert rows.rows(np.array([], dtype=np.int64))["labels"].shape == (0, 10)


def test_a_fingerprint_follows_everything_that_rows_are_made_of() -> None:
    counted = np.ones(9, np.bool_)
    fewer = counted.copy()
    fewer[3] = False
    others = [documents(3, 4, 2, seq_len=7), documents(4, 3, 2, seq_len=6)]
    others += [documents(3, 4, 2, seq_len=6, counted=each) for each in (counted, fewer)]
    rows = [documents(3, 4, 2, seq_len=6), *others, documents(3, 4, 2, seq_len=6, several=False)]
    assert len({each.fingerprint() for each in rows}) == 6
    assert documents(3, 4, 2, seq_len=6).fingerprint() == rows[0].fingerprint()


# --------------------------------------------------------------------------------------------------------- mixture


def test_a_mixture_numbers_the_rows_of_its_parts_one_after_the_other() -> None:
    parts = [PackedRows(np.arange(first, first + 9, dtype=np.uint8), 2) for first in (0, 100, 200)]
    mixed = MixedRows(parts, [1, 1, 2])
    assert len(mixed) == 12
    batch = mixed.rows(np.array([11, 0, 4, 7, 8]))
    assert batch["input_ids"].tolist() == [[206, 207], [0, 1], [100, 101], [106, 107], [200, 201]]
    assert batch["labels"].tolist() == [[207, 208], [1, 2], [101, 102], [107, 108], [201, 202]]
    others = MixedRows(parts, [1, 1, 1]), MixedRows(parts[::-1], [1, 1, 2])
    assert len({mixed.fingerprint(), *(other.fingerprint() for other in others)}) == 3


# -------------------------------------------------------------------------------------------------------- best fit


def plain(lengths: list[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing, one document at a time: the lengths in each row, in the order of the rows."""
    rows: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        rooms = [(capacity - sum(row), number) for number, row in enumerate(rows) if capacity - sum(row) >= length]
        if rooms:
            rows[min(rooms)[1]].append(length)
        else:
            rows.append([length])
    return rows


def packed_lengths(lengths: Int64s, capacity: int) -> list[list[int]]:
    order, starts = best_fit(lengths, capacity)
    return [lengths[order[begin:end]].tolist() for begin, end in pairwise(starts.tolist())]


@pytest.mark.parametrize("capacity", [1, 7, 16, 100])
@pytest.mark.parametrize("count", [0, 1, 5, 300])
def test_rows_are_those_of_the_definition(capacity: int, count: int) -> None:
    random = np.random.default_rng(capacity + count)
    for highest in {1, max(1, capacity // 3), capacity}:
        lengths = random.integers(1, highest, size=count, endpoint=True)
        expected = plain(lengths.tolist(), capacity)
        packed = packed_lengths(lengths, capacity)
        # Which of two rows with equal room takes a document is nobody's choice: it changes no row's sum.
        assert sorted(map(sum, packed)) == sorted(map(sum, expected))
        assert sorted(length for row in packed for length in row) == sorted(lengths.tolist())


def test_every_document_is_in_one_row_and_no_row_is_too_long() -> None:
    lengths = np.random.default_rng(0).integers(1, 512, size=20_000, endpoint=True)
    order, starts = best_fit(lengths, 512)
    assert sorted(order.tolist()) == list(range(20_000))
    sums = np.add.reduceat(lengths[order], starts[:-1])
    assert sums.max() <= 512
    assert sums.sum() == lengths.sum()
    again = best_fit(lengths.copy(), 512)
    assert np.array_equal(again[0], order)
    assert np.array_equal(again[1], starts)


@pytest.mark.parametrize("capacity", [2048, 8192])
def test_a_million_documents_take_seconds_and_waste_less_than_a_percent(capacity: int) -> None:
    lengths = np.random.default_rng(1).lognormal(5.5, 1.0, size=1_000_000).astype(np.int64).clip(2, capacity)
    began = time.process_time()
    _, starts = best_fit(lengths, capacity)
    assert time.process_time() - began < 20
    assert 1 - lengths.sum() / ((len(starts) - 1) * capacity) < 0.01
