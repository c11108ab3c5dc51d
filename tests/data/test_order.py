"""The order is a permutation of each epoch, shuffled, keyed by seed and epoch, and the same for ever."""

from math import factorial

import numpy as np
import pytest

from portable_fsdp.data.packing import Mixture, sample_indices, share_of_numbers

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


def epoch_order(seed: int, epoch: int, rows: int) -> np.ndarray:
    return sample_indices(seed, np.arange(epoch * rows, (epoch + 1) * rows), rows)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 15, 16, 17, 1000, 4096, 4097, 65537])
def test_an_epoch_visits_every_row_once(rows: int) -> None:
    for epoch in (0, 1, 7):
        assert np.array_equal(np.sort(epoch_order(3, epoch, rows)), np.arange(rows))


def test_values_never_change() -> None:
    """Pinned: another order here would silently give every saved run other data after its resume."""
    assert scalar_mix(0) == 0xE220A8397B1DCDAF  # the first output of splitmix64 with seed 0, as published
    assert epoch_order(0, 0, 10).tolist() == [8, 0, 4, 7, 5, 2, 1, 6, 9, 3]
    assert epoch_order(0, 1, 10).tolist() == [6, 8, 2, 4, 0, 3, 5, 7, 9, 1]


@pytest.mark.parametrize(("seed", "rows"), [(0, 1), (1, 2), (2, 3), (7, 100), (2**63 + 5, 257), (2**64 - 1, 10**12)])
def test_the_arrays_equal_the_definition(seed: int, rows: int) -> None:
    positions = np.array([0, 1, 2, 55, 99, 100, 10**6, 10**9 + 7, 2**62])
    assert sample_indices(seed, positions, rows).tolist() == [scalar_index(seed, int(p), rows) for p in positions]
    assert sample_indices(seed, positions, rows).dtype == np.int64


def test_another_seed_or_epoch_is_another_order() -> None:
    orders = [epoch_order(seed, epoch, 1000) for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 0))]
    for i, order in enumerate(orders):
        for other in orders[:i]:
            assert (order == other).sum() < 20  # two random orders of 1000 agree in 1 place on average


def test_an_order_is_shuffled() -> None:
    rows = 4096
    for seed in range(20):
        order = epoch_order(seed, 0, rows)
        by_rank = np.corrcoef(order, np.arange(rows))[0, 1]
        neighbours = np.corrcoef(order[:-1], order[1:])[0, 1]
        assert abs(by_rank) < 5 / rows**0.5
        assert abs(neighbours) < 5 / rows**0.5


@pytest.mark.parametrize("rows", [2, 3, 4, 5])
def test_all_orders_of_a_few_rows_are_about_as_likely(rows: int) -> None:
    epochs = 200 * factorial(rows)
    orders = sample_indices(0, np.arange(epochs * rows), rows).reshape(epochs, rows)
    _, counts = np.unique(orders, axis=0, return_counts=True)
    assert len(counts) == factorial(rows)
    assert counts.min() > 130
    assert counts.max() < 270


# --------------------------------------------------------------------------------------------------------- mixture


def test_weights_become_whole_shares_in_lowest_terms() -> None:
    assert Mixture.of([5, 5], [1, 1]).shares == (1, 1)
    assert Mixture.of([5, 5], [0.7, 0.3]).shares == (7, 3)
    assert Mixture.of([5, 5, 5], [1, 1, 1]).shares == (334, 333, 333)
    assert Mixture.of([5, 5], [1, 1e-9]).shares == (999, 1)  # never none at all


@pytest.mark.parametrize("weights", [(1, 1), (0.7, 0.3), (5, 0.001), (3, 2, 1), (1,)])
def test_each_source_of_a_mixture_goes_through_its_own_epochs(weights: tuple[float, ...]) -> None:
    """Row by row: after any number of whole epochs of a source, each of its rows has come equally often."""
    sizes = (50, 7, 20)[: len(weights)]
    mixture = Mixture.of(sizes, weights)
    block = sum(mixture.shares)
    blocks = 3 * max(-(-size // share) for size, share in zip(sizes, mixture.shares, strict=True))
    indices = mixture.indices(4, np.arange(blocks * block))
    counts = np.bincount(indices, minlength=sum(sizes))
    for number, (size, share) in enumerate(zip(sizes, mixture.shares, strict=True)):
        own = counts[sum(sizes[:number]) : sum(sizes[: number + 1])]
        assert len(own) == size
        assert own.sum() == blocks * share
        assert own.min() == blocks * share // size >= 3
        assert own.max() == -(-blocks * share // size)


def test_a_mixture_keeps_its_shares_at_any_position() -> None:
    mixture = Mixture.of([1000, 500], [0.637, 0.363])
    assert mixture.shares == (637, 363)
    for first in (0, 5000, 10**9):
        indices = mixture.indices(0, np.arange(first, first + 1000))
        assert (indices < 1000).sum() == 637
        assert 0 < (indices[:100] < 1000).sum() < 100  # not one source after the other


def test_a_mixtures_position_does_not_depend_on_what_is_asked_with_it() -> None:
    mixture = Mixture.of([50, 7], [0.9, 0.1])
    positions = np.array([0, 999, 3, 2**40, 12345, 0])
    alone = [int(mixture.indices(1, positions[i : i + 1])[0]) for i in range(len(positions))]
    assert mixture.indices(1, positions).tolist() == alone
    assert mixture.indices(2, np.arange(1000)).tolist() != mixture.indices(1, np.arange(1000)).tolist()


def test_a_mixtures_values_never_change() -> None:
    assert Mixture.of([10, 4], [3, 1]).indices(0, np.arange(12)).tolist() == [0, 6, 7, 11, 2, 12, 9, 8, 10, 4, 1, 5]


def test_a_share_of_numbers_is_that_share_and_the_same_for_ever() -> None:
    chosen = [number for number in range(20_000) if share_of_numbers(number, 0.05)]
    assert 900 < len(chosen) < 1100
    assert chosen[:5] == [10, 21, 48, 68, 83]
    assert all(share_of_numbers(number, 0.06) for number in chosen)
