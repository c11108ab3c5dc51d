"""Which row comes at which position: a pure function of (seed, position), in O(1) time and memory a sample.

Position = samples consumed since the start of the run. Each epoch visits every row once, in a pseudo-random order of
its own: a Feistel network permutes the next power of four, and what falls outside the rows is permuted again until it
falls inside (cycle-walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, section 4).
No world size, device or engine enters, so any run can be continued anywhere by its position alone.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8  # with 6, some orders of five rows came three times as often as others
WORD = 2**64 - 1

UInt64s = NDArray[np.uint64]


@dataclass(frozen=True)
class Position:
    """Where a run is in its data: the two integers that a checkpoint holds."""

    epoch: int
    index: int  # samples consumed within the epoch

    @classmethod
    def after(cls, samples: int, rows: int) -> Self:
        """The position after `samples` samples of a corpus of `rows` rows."""
        return cls(*divmod(samples, rows))

    def samples(self, rows: int) -> int:
        """Samples consumed since the start of the run."""
        return self.epoch * rows + self.index


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
