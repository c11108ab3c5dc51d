"""Packing: tokenized documents become rows of equal length, which is the one shape of a whole run.

    stream     all documents one after the other, cut into rows; attention crosses documents
    documents  whole documents, several in a row where they fit (`document_rows.py`)
    none       one document in a row (there too)

Labels are shifted here, once; models, losses and engines take `labels[r, t]` as the token after `input_ids[r, t]`.

Which row comes at which position is a pure function of (seed, position), in O(1) time and memory a sample. Position =
samples consumed since the start of the run. Each epoch visits every row once, in its own pseudo-random order: a
Feistel network permutes the next power of four, and permutes values outside the rows again until they fall inside
(cycle-walking: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, section 4). World size, device
and engine don't enter, so any run can resume anywhere by its position alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple, Protocol, Self

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from portable_fsdp.data.compressed import Remember
from portable_fsdp.data.tokenize import Tokens

Int64s = NDArray[np.int64]

IGNORED = -100
"""The label that no loss counts."""

_HASHED = 1 << 22  # elements of an array at a time

ENDLESS = 2**62
"""The length of rows that come as a stream: their position stays in one epoch."""


class MicroBatch(NamedTuple):
    numbers: Int64s
    """The numbers of its rows."""
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class StepRows:
    """What one data shard feeds in a step."""

    micro_batches: list[dict[str, Tensor]]
    count: int
    """Losses of all its rows; their sum over the data shards is the count of the global batch. 0 where only the task
    itself can count."""


class Rows(Protocol):
    """A corpus cut into rows, and the order in which they come."""

    def __len__(self) -> int: ...

    def rows(self, indices: Int64s) -> dict[str, Tensor]:
        """The tensors of these rows, dimension 0 first. Of text: `input_ids` and `labels`, int64 `[len(indices),
        seq_len]`; rows of documents also have `positions`, which restart at 0 in each, and `segments`: 1, 2, ... by
        document, 0 for padding. One thread calls it."""
        ...

    def micro_batches(self, indices: Int64s, count: int) -> "list[MicroBatch]":
        """These rows in `count` batches of one number of rows."""
        batch, size = self.rows(indices), len(indices) // count
        parts = [slice(begin, begin + size) for begin in range(0, len(indices), size)]
        return [MicroBatch(indices[part], {name: value[part] for name, value in batch.items()}) for part in parts]

    def place(self, number: int) -> str:
        """What messages call a row."""
        return f"row {number}"

    def of_each_shape(self, indices: Int64s) -> list[dict[str, Tensor]]:
        """These rows in every shape that batches of a run may have, the largest last."""
        return [self.rows(indices)]

    def order(self, seed: int, positions: Int64s) -> Int64s:
        """The row of each position: a pure function."""
        return sample_indices(seed, positions, len(self))

    def fingerprint(self) -> str:
        """128-bit XXH3 hash in hexadecimal of everything that determines the rows."""
        ...


def count_labels(batch: Mapping[str, Tensor]) -> int:
    """The labels of a batch that a loss counts."""
    return int((batch["labels"] != IGNORED).sum())


def count_values(batch: Mapping[str, Tensor]) -> int:
    """All labels of a batch, which are numbers."""
    return batch["labels"].numel()


def make_again(purpose: str, make: Callable[[], str]) -> str:
    return make()


def hash_of(*parts: NDArray[np.generic] | bytes) -> str:
    digest = xxhash.xxh3_128()
    for part in parts:
        for begin in range(0, len(part), _HASHED):  # in pieces: a corpus may be larger than memory
            piece = part[begin : begin + _HASHED]
            digest.update(piece if isinstance(piece, bytes) else np.ascontiguousarray(piece).data)
    return digest.hexdigest()


class PackedRows(Rows):
    """Rows of `seq_len` positions, cut from a stream of tokens.

    Row r predicts the tokens r * seq_len + 1 to (r + 1) * seq_len: exactly one row predicts each token but the first. A
    rest shorter than a row is left out.
    """

    def __init__(self, tokens: Tokens, seq_len: int, remember: Remember = make_again) -> None:
        """`remember`: gives a hash over all tokens without reading them each time."""
        self.tokens = tokens
        self.seq_len = seq_len
        self._remember = remember

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.seq_len

    def rows(self, indices: Int64s) -> dict[str, Tensor]:
        """`input_ids` and `labels`, int64 `[len(indices), seq_len]`, of the rows with these indices."""
        window = np.arange(self.seq_len + 1)
        tokens = torch.tensor(self.tokens[indices[:, None] * self.seq_len + window].astype(np.int64))
        return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    def fingerprint(self) -> str:
        cut = f"{self.tokens.dtype} {self.seq_len}"
        return self._remember(f"stream {cut}", lambda: hash_of(self.tokens, cut.encode()))


class MixedRows(Rows):
    """The rows of several corpora, drawn by weight; row numbers count through them, one after the other."""

    def __init__(self, parts: Sequence[Rows], weights: Sequence[float]) -> None:
        self._parts = parts
        self._firsts = np.cumsum([0, *map(len, parts)])
        self._mixture = Mixture.of([len(part) for part in parts], weights)

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def rows(self, indices: Int64s) -> dict[str, Tensor]:
        part = np.searchsorted(self._firsts, indices, side="right") - 1
        batch: dict[str, Tensor] = {}
        for number in np.unique(part):
            places = np.flatnonzero(part == number)
            for name, values in self._parts[number].rows(indices[places] - self._firsts[number]).items():
                batch.setdefault(name, values.new_empty((len(indices), *values.shape[1:])))[places] = values
        return batch

    def order(self, seed: int, positions: Int64s) -> Int64s:
        return self._mixture.indices(seed, positions)

    def fingerprint(self) -> str:
        parts = [part.fingerprint() for part in self._parts]
        return xxhash.xxh3_128_hexdigest(f"mixture {parts} {self._mixture.shares}".encode())


# --------------------------------------------------------------------------------------------------------------- order


ROUNDS = 8  # with 6, some orders of five rows came three times as often as others
WORD = 2**64 - 1

UInt64s = NDArray[np.uint64]


def sample_indices(seed: int, positions: Int64s, rows: int) -> Int64s:
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
    through its own rows, in its own epochs.
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

    def indices(self, seed: int, positions: Int64s) -> Int64s:
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
