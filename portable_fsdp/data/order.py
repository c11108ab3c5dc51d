"""Which row comes at which position: a pure function of (seed, position), in O(1) time and memory a sample.

Position = samples consumed since the start of the run. Each epoch visits every row once, in a pseudo-random order of
its own: a Feistel network permutes the next power of four, and permutes values outside the rows again until they fall
inside (cycle-walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, section 4). World size,
device and engine don't enter, so any run can resume anywhere by its position alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Self

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8  # with 6, some orders of five rows came three times as often as others
WORD = 2**64 - 1

UInt64s = NDArray[np.uint64]


def sample_indices(seed: int, positions: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    """The row of each position.

    Args:
        seed: of the order; taken modulo 2**64.
        positions: 1-D, each at least 0; they may lie in different epochs.
        rows: rows in the corpus, at least 1.

    Returns: 1-D int64, each in [0, rows).
    """
    epoch, index = np.divmod(positions.astype(np.uint64), np.uint64(rows))
    half_bits = max(1, ((rows - 1).bit_length() + 1) // 2)
    key = _mix(_mix(np.full_like(epoch, seed & WORD)) ^ epoch)
    index = _permute(index, key, half_bits)
    outside = index >= rows
    while outside.any():
        index[outside] = _permute(index[outside], key[outside], half_bits)
        outside = index >= rows
    return index.astype(np.int64)


SHARES = 1000  # weights are rounded to thousandths of their sum


@dataclass(frozen=True)
class Mixture:
    """Several corpora, each with its share of the positions.

    Positions come in blocks of `sum(shares)`. Each block holds every source as often as its share, in an order of its
    own. So the samples of a source before a block are a product, and no earlier position matters. Each source goes
    through its own rows in epochs of its own.
    """

    sizes: tuple[int, ...]
    """Rows of each source."""
    shares: tuple[int, ...]
    """Positions of each source in a block, in lowest terms."""

    @classmethod
    def of(cls, sizes: Sequence[int], weights: Sequence[float]) -> Self:
        """Shares in thousandths of the sum of the weights, at least one each; the remainder of rounding goes to those
        that lost most by it."""
        exact = [weight * SHARES / sum(weights) for weight in weights]
        shares = [max(1, int(share)) for share in exact]
        by_loss = sorted(range(len(exact)), key=lambda number: shares[number] - exact[number])
        for number in by_loss[: max(0, SHARES - sum(shares))]:
            shares[number] += 1
        common = gcd(*shares)
        return cls(tuple(sizes), tuple(share // common for share in shares))

    def indices(self, seed: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The row of each position, numbered through all sources: 1-D int64, as `sample_indices`."""
        block = positions // sum(self.shares)
        slot = sample_indices(seed_of(seed, 0), positions, sum(self.shares))
        ends = np.cumsum(np.array(self.shares, np.int64))
        source = np.searchsorted(ends, slot, side="right")
        rank = slot - (ends - np.array(self.shares, np.int64))[source]
        first_rows = np.cumsum(np.array((0, *self.sizes), np.int64))
        rows = np.empty_like(slot)
        for number, (size, share) in enumerate(zip(self.sizes, self.shares, strict=True)):
            own = source == number
            given = block[own] * share + rank[own]
            rows[own] = first_rows[number] + sample_indices(seed_of(seed, number + 1), given, size)
        return rows


def share_of_numbers(number: int, share: float) -> bool:
    """Whether `number` is in a share (0 to 1) of all numbers, chosen by its hash alone."""
    return int(_mix(np.array([number], np.uint64))[0]) < share * 2**64


def seed_of(seed: int, number: int) -> int:
    """A seed for each of several orders of one run."""
    return int(_mix(_mix(np.array([seed & WORD], np.uint64)) + np.uint64(number))[0])


def _permute(values: UInt64s, key: UInt64s, half_bits: int) -> UInt64s:
    """A permutation of [0, 4**half_bits): a Feistel network with two halves of `half_bits` bits."""
    shift = np.uint64(half_bits)
    mask = np.uint64(2**half_bits - 1)
    left, right = values >> shift, values & mask
    for number in range(ROUNDS):
        left, right = right, left ^ (_mix(_mix(key ^ np.uint64(number)) ^ right) & mask)
    return (left << shift) | right


def _mix(values: UInt64s) -> UInt64s:
    """splitmix64 (Steele, Lea, Flood, OOPSLA 2014): the output after one step from each value, modulo 2**64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
