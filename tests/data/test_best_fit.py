"""Rows by length are the rows of the plain definition, and little of them is empty."""

import time
from itertools import pairwise

import numpy as np
import pytest

from portable_fsdp.data.packing import Int64s, best_fit


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


def rows_of(lengths: Int64s, capacity: int) -> list[list[int]]:
    order, starts = best_fit(lengths, capacity)
    return [lengths[order[begin:end]].tolist() for begin, end in pairwise(starts.tolist())]


@pytest.mark.parametrize("capacity", [1, 7, 16, 100])
@pytest.mark.parametrize("count", [0, 1, 5, 300])
def test_rows_are_those_of_the_definition(capacity: int, count: int) -> None:
    random = np.random.default_rng(capacity + count)
    for highest in {1, max(1, capacity // 3), capacity}:
        lengths = random.integers(1, highest, size=count, endpoint=True)
        expected = plain(lengths.tolist(), capacity)
        found = rows_of(lengths, capacity)
        # Which of two rows with equal room takes a document is nobody's choice: it changes no row's sum.
        assert sorted(map(sum, found)) == sorted(map(sum, expected))
        assert sorted(length for row in found for length in row) == sorted(lengths.tolist())


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
