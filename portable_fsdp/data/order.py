"""Which row comes when: a pure function of (seed, position), the same for every number of processes.

A position counts the samples consumed since the run began. Each epoch visits every row once, in an order of its own:
a keyed permutation that is computed for the positions asked for and never stored, so that a resume costs nothing.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

U64 = np.uint64
_ROUNDS = 6
_MASK = 2**64 - 1


@dataclass(frozen=True)
class Position:
    """Where a run stands in its data: two integers, written into each checkpoint."""

    epoch: int  # counted from 0
    index: int  # samples consumed in this epoch

    @classmethod
    def of(cls, samples: int, rows: int) -> Self:
        """The position after `samples` of a corpus of `rows`."""
        return cls(*divmod(samples, rows))

    def samples(self, rows: int) -> int:
        """Samples consumed since the run began."""
        return self.epoch * rows + self.index


def sample_indices(seed: int, positions: NDArray[Any], rows: int) -> NDArray[np.int64]:
    """Row of each position, int64 `[len(positions)]`: position // rows is the epoch, each a permutation of all rows.

    A Feistel network over the smallest even number of bits that holds `rows`, walked again where it leads outside
    (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). O(1) time and memory a position.
    """
    wide = positions.astype(U64)
    epochs, places = wide // U64(rows), wide % U64(rows)
    half = max(1, (int(rows - 1).bit_length() + 1) // 2)
    keys = _mix(epochs ^ _mix(np.full_like(epochs, seed & _MASK)))
    outside = np.ones(len(places), dtype=bool)
    while outside.any():  # under four walks on average: the domain is at most four times `rows`
        places[outside] = _feistel(places[outside], keys[outside], half)
        outside = places >= U64(rows)
    return places.astype(np.int64)


def _feistel(values: NDArray[U64], keys: NDArray[U64], half: int) -> NDArray[U64]:
    """One permutation of the numbers below 2 ** (2 * half)."""
    mask = U64((1 << half) - 1)
    left, right = values >> U64(half), values & mask
    for number in range(_ROUNDS):
        left, right = right, left ^ (_mix(right ^ _mix(keys + U64(number))) & mask)
    return (left << U64(half)) | right


def _mix(values: NDArray[U64]) -> NDArray[U64]:
    """splitmix64's output function (Steele, Lea and Flood, OOPSLA 2014): every bit depends on every bit."""
    mixed = values + U64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> U64(30))) * U64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> U64(27))) * U64(0x94D049BB133111EB)
    return mixed ^ (mixed >> U64(31))
