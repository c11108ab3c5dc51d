"""Rows hold every token, predict each once, and shift labels by one; their order is the same for ever."""

import time
from collections.abc import Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from portable_fsdp.data.document_rows import DocumentRows, best_fit, cut
from portable_fsdp.data.packing import IGNORED, MixedRows, PackedRows, sample_indices, share_of_numbers, shares_of


def test_labels_are_the_next_tokens_and_each_token_is_predicted_once() -> None:
    stream = np.random.default_rng(0).integers(0, 2**16, size=1000).astype(np.uint16)
    assert [len(PackedRows(stream[:count], 4)) for count in (0, 4, 5, 8, 9)] == [0, 0, 1, 1, 2]
    packed = PackedRows(stream, 7)
    batch = packed.rows(np.arange(len(packed)))
    counted = len(packed) * 7
    assert batch["input_ids"].flatten().tolist() == stream[:counted].tolist()
    assert batch["labels"].flatten().tolist() == stream[1 : counted + 1].tolist()
    assert not (batch["labels"] == IGNORED).any()
    batch = PackedRows(np.arange(200, dtype=np.uint8), 3).rows(np.array([40, 0, 40]))
    assert batch["input_ids"].tolist() == [[120, 121, 122], [0, 1, 2], [120, 121, 122]]
    assert batch["labels"].tolist() == [[121, 122, 123], [1, 2, 3], [121, 122, 123]]
    for tensor in batch.values():
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()
    alone = PackedRows(np.arange(20, dtype=np.uint8), 4).rows(np.array([1]))
    alone["labels"].fill_(IGNORED)  # as an evaluation does in rows that only fill its last batch
    assert alone["input_ids"].tolist() == [[4, 5, 6, 7]]


def documents(*lengths: int, seq_len: int, counted: NDArray[np.bool_] | None = None, **keys: Any) -> DocumentRows:
    """Tokens count up from 100 through all documents; padding is 7."""
    sizes = np.array(lengths, np.int64)
    ends = np.cumsum(sizes, dtype=np.int64)
    tokens = np.arange(100, 100 + ends[-1], dtype=np.uint16)
    pieces = cut(ends - sizes, sizes, seq_len)
    given: dict[str, Any] = {"several": True, **keys}
    return DocumentRows(tokens, counted, pieces, seq_len=seq_len, padding=7, **given)


def test_documents_share_a_row_each_with_positions_and_a_segment_of_its_own() -> None:
    """Or has one alone, padded; only tokens that count are labels."""
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
    batch = documents(3, 4, 2, seq_len=5, several=False).rows(np.array([2, 0]))
    assert batch["input_ids"].tolist() == [[107, 108, 7, 7, 7], [100, 101, 102, 7, 7]]
    assert batch["segments"].tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]
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


def test_a_documents_last_token_is_no_piece_of_its_own() -> None:
    for length, lengths in {1: [1], 4: [4], 5: [4], 6: [4, 2], 9: [4, 4], 10: [4, 4, 2]}.items():
        pieces = cut(np.array([7]), np.array([length]), 4)
        starts = list(range(7, 7 + 4 * len(lengths), 4))
        assert (pieces.lengths.tolist(), pieces.starts.tolist()) == (lengths, starts), length


def test_a_row_does_not_depend_on_those_asked_with_it_and_a_fingerprint_on_all_that_rows_are_made_of() -> None:
    rows = documents(*np.random.default_rng(0).integers(2, 9, size=100).tolist(), seq_len=10)
    all_rows = rows.rows(np.arange(len(rows)))
    for index in range(len(rows)):
        alone = rows.rows(np.array([index]))
        assert all(torch.equal(alone[name][0], all_rows[name][index]) for name in all_rows)
    assert rows.rows(np.array([], dtype=np.int64))["labels"].shape == (0, 10)
    others = [documents(3, 4, 2, seq_len=7), documents(4, 3, 2, seq_len=6), documents(3, 4, 2, seq_len=6)]
    others += [documents(3, 4, 2, seq_len=6, counted=each) for each in (np.full(9, True), np.arange(9) != 3)]
    others.append(documents(3, 4, 2, seq_len=6, several=False))
    assert len({each.fingerprint() for each in others}) == 6
    assert documents(3, 4, 2, seq_len=6).fingerprint() == others[2].fingerprint()


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


@pytest.mark.parametrize(("capacity", "count"), [*product((1, 7, 16, 100), (0, 1, 5, 300))])
def test_rows_are_those_of_the_definition(capacity: int, count: int) -> None:
    random = np.random.default_rng(capacity + count)
    for highest in {1, max(1, capacity // 3), capacity}:
        lengths = random.integers(1, highest, size=count, endpoint=True)
        expected = plain(lengths.tolist(), capacity)
        order, starts = best_fit(lengths, capacity)
        packed = [lengths[order[begin:end]].tolist() for begin, end in pairwise(starts.tolist())]
        # Which of two rows with equal room takes a document is nobody's choice: it changes no row's sum.
        assert sorted(map(sum, packed)) == sorted(map(sum, expected))
        assert sorted(length for row in packed for length in row) == sorted(lengths.tolist())


def test_a_million_documents_take_seconds_and_waste_less_than_a_percent() -> None:
    for capacity in (2048, 8192):
        lengths = np.random.default_rng(1).lognormal(5.5, 1.0, size=1_000_000).astype(np.int64).clip(2, capacity)
        began = time.process_time()
        _, starts = best_fit(lengths, capacity)
        assert time.process_time() - began < 20
        assert 1 - lengths.sum() / ((len(starts) - 1) * capacity) < 0.01


WORD = 2**64 - 1


def scalar_mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & WORD
    return value ^ (value >> 31)


def scalar_index(seed: int, position: int, rows: int) -> int:
    """A second implementation, one sample at a time with Python's integers: the definition of the order."""
    epoch, value = divmod(position, rows)
    half = 1
    while 4**half < rows:
        half += 1
    key = scalar_mix(scalar_mix(seed) ^ epoch)
    while True:
        left, right = divmod(value, 2**half)
        for number in range(8):
            left, right = right, left ^ scalar_mix(scalar_mix(key ^ number) ^ right) % 2**half
        value = left * 2**half + right
        if value < rows:
            return value


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 15, 16, 17, 1000, 4096, 4097, 65537])
def test_an_epoch_visits_every_row_once(rows: int) -> None:
    for epoch in (0, 1, 7):
        order = sample_indices(3, np.arange(epoch * rows, (epoch + 1) * rows), rows)
        assert np.array_equal(np.sort(order), np.arange(rows))


def test_values_never_change() -> None:
    """Pinned: another order here would silently give every saved run other data after its resume."""
    assert scalar_mix(0) == 0xE220A8397B1DCDAF  # the first output of splitmix64 with seed 0, as published
    epochs = [8, 0, 4, 7, 5, 2, 1, 6, 9, 3], [6, 8, 2, 4, 0, 3, 5, 7, 9, 1]
    assert sample_indices(0, np.arange(20), 10).tolist() == [*epochs[0], *epochs[1]]


@pytest.mark.parametrize(("seed", "rows"), [(0, 1), (1, 2), (2, 3), (7, 100), (2**63 + 5, 257), (2**64 - 1, 10**12)])
def test_the_arrays_equal_the_definition(seed: int, rows: int) -> None:
    positions = np.array([0, 1, 2, 55, 99, 100, 10**6, 10**9 + 7, 2**62])
    assert sample_indices(seed, positions, rows).tolist() == [scalar_index(seed, int(p), rows) for p in positions]
    assert sample_indices(seed, positions, rows).dtype == np.int64


def mixed(sizes: Sequence[int], weights: Sequence[float]) -> MixedRows:
    return MixedRows([PackedRows(np.zeros(size + 1, np.uint8), 1) for size in sizes], weights)


@pytest.mark.parametrize("weights", [(1, 1), (0.7, 0.3), (5, 0.001), (3, 2, 1), (1,)])
def test_each_source_of_a_mixture_goes_through_its_own_epochs(weights: tuple[float, ...]) -> None:
    """Row by row: after any number of whole epochs of a source, each of its rows has come equally often."""
    sizes = (50, 7, 20)[: len(weights)]
    mixture = mixed(sizes, weights)
    block = sum(mixture.shares)
    blocks = 3 * max(-(-size // share) for size, share in zip(sizes, mixture.shares, strict=True))
    indices = mixture.order(4, np.arange(blocks * block))
    counts = np.bincount(indices, minlength=sum(sizes))
    for number, (size, share) in enumerate(zip(sizes, mixture.shares, strict=True)):
        own = counts[sum(sizes[:number]) : sum(sizes[: number + 1])]
        assert len(own) == size
        assert own.sum() == blocks * share
        assert own.min() == blocks * share // size >= 3
        assert own.max() == -(-blocks * share // size)


def test_a_mixture_keeps_its_shares_at_any_position_and_its_values_for_ever() -> None:
    """Whatever is asked with them. The rows of the parts have numbers one after the other. Weights become whole shares
    in lowest terms, never none at all."""
    parts = [PackedRows(np.arange(first, first + 9, dtype=np.uint8), 2) for first in (0, 100, 200)]
    mixture, *others = (MixedRows(p, w) for p, w in ((parts, [1, 1, 2]), (parts, [1, 1, 1]), (parts[::-1], [1, 1, 2])))
    batch = mixture.rows(np.array([11, 0, 4, 7, 8]))
    assert batch["input_ids"].tolist() == [[206, 207], [0, 1], [100, 101], [106, 107], [200, 201]]
    assert batch["labels"].tolist() == [[207, 208], [1, 2], [101, 102], [107, 108], [201, 202]]
    assert (len(mixture), len({each.fingerprint() for each in (mixture, *others)})) == (12, 3)
    whole = {(1, 1): (1, 1), (0.7, 0.3): (7, 3), (1, 1, 1): (334, 333, 333), (1, 1e-9): (999, 1)}
    assert {weights: shares_of(weights) for weights in whole} == whole
    mixture = mixed([1000, 500], [0.637, 0.363])
    assert mixture.shares == (637, 363)
    for first in (0, 5000, 10**9):
        indices = mixture.order(0, np.arange(first, first + 1000))
        assert (indices < 1000).sum() == 637
        assert 0 < (indices[:100] < 1000).sum() < 100  # not one source after the other
    mixture, expected = mixed([10, 4], [3, 1]), [0, 6, 7, 11, 2, 12, 9, 8, 10, 4, 1, 5]
    assert mixture.order(0, np.arange(12)).tolist() == expected
    positions = np.array([11, 2**40, 3, 0])
    assert mixture.order(0, positions).tolist() == [5, int(mixture.order(0, positions[1:2])[0]), 11, 0]
    assert mixture.order(1, np.arange(12)).tolist() != expected


def test_a_share_of_numbers_is_that_share_and_the_same_for_ever() -> None:
    chosen = [number for number in range(20_000) if share_of_numbers(number, 0.05)]
    assert 900 < len(chosen) < 1100
    assert chosen[:5] == [10, 21, 48, 68, 83]
    assert all(share_of_numbers(number, 0.06) for number in chosen)
