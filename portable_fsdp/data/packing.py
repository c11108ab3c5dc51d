"""Packing: tokenized documents become rows of equal length, so a whole run has one shape.

    stream     all documents concatenated, then cut into rows; attention crosses documents
    documents  whole documents, as many per row as fit (`document_rows.py`)
    none       one document per row (`document_rows.py` too)

Labels are shifted here, once: for models, losses and engines, `labels[r, t]` is the token after `input_ids[r, t]`.

The row at a position is a pure function of (seed, position), in O(1) time and memory per sample. Position = samples
consumed since the start of the run. Each epoch visits every row once, in its own pseudo-random order: a Feistel network
permutes the next power of four, and permutes values outside the rows again until they fall inside (cycle-walking: Black
and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, section 4). World size, device and engine don't
matter, so any run can resume anywhere from its position alone.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple, Protocol

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
"""The length of a stream's rows: their position stays in one epoch."""


class MicroBatch(NamedTuple):
    places: Int64s
    """Indices of its rows in the argument of `micro_batches`, int64 `[rows]`."""
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class StepRows:
    """The rows that one data shard feeds in a step."""

    micro_batches: list[dict[str, Tensor]]
    count: int
    """Number of losses in all its rows; the sum over the data shards is the count of the global batch. 0 if only the
    task can count."""


class Rows(Protocol):
    """A corpus cut into rows, and the order in which they come."""

    may_draw: bool = False
    """True if reading runs the user's code, which may draw from the generators of the process."""

    def __len__(self) -> int: ...

    def rows(self, indices: Int64s) -> dict[str, Tensor]:
        """Return the tensors of these rows, dimension 0 = rows. Rows of text have `input_ids` and `labels`, int64
        `[len(indices), seq_len]`. Rows of documents also have `positions`, which restart at 0 in each document, and
        `segments`: 1, 2, ... by document, 0 for padding. Not thread-safe."""
        ...

    def micro_batches(self, indices: Int64s, count: int) -> "list[MicroBatch]":
        """Return these rows in `count` batches of equal size."""
        batch, size = self.rows(indices), len(indices) // count
        parts = [slice(begin, begin + size) for begin in range(0, len(indices), size)]
        places = np.arange(len(indices))
        return [MicroBatch(places[part], {name: value[part] for name, value in batch.items()}) for part in parts]

    def place(self, number: int) -> str:
        """Name a row in messages."""
        return f"row {number}"

    def of_each_shape(self, indices: Int64s) -> list[dict[str, Tensor]]:
        """Return these rows in every shape that batches of a run may have, the largest last."""
        return [self.rows(indices)]

    def order(self, seed: int, positions: Int64s) -> Int64s:
        """Return the row of each position: a pure function."""
        return sample_indices(seed, positions, len(self))

    def fingerprint(self) -> str:
        """Return the 128-bit XXH3 hash, in hexadecimal, of everything that determines the rows."""
        ...


def tokens_of(batch: Mapping[str, Tensor]) -> int:
    """Return the tokens of each row: the length of `input_ids`, or 1 without them."""
    ids = batch.get("input_ids")
    return ids.shape[1] if ids is not None and ids.dim() == 2 else 1


def count_labels(batch: Mapping[str, Tensor]) -> int:
    """Count the labels of a batch that enter the loss."""
    return int((batch["labels"] != IGNORED).sum())


def count_values(batch: Mapping[str, Tensor]) -> int:
    """Count the labels of a batch that are numbers: not NaN."""
    return int((~batch["labels"].isnan()).sum())


def ignore_rows(batch: dict[str, Tensor], ignored: NDArray[np.bool_], *, numbers: bool) -> None:
    """Have no loss count the rows `ignored`, bool `[rows]`. With `numbers` any label counts but NaN, in float32."""
    if numbers:
        batch["labels"] = batch["labels"].float()
    batch["labels"][torch.from_numpy(ignored)] = math.nan if numbers else IGNORED


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
    remainder shorter than a row is dropped.
    """

    def __init__(self, tokens: Tokens, seq_len: int, remember: Remember = make_again) -> None:
        """`remember`: caches the hash over all tokens, see `compressed.remembered`."""
        self.tokens, self.seq_len, self._remember = tokens, seq_len, remember

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.seq_len

    def rows(self, indices: Int64s) -> dict[str, Tensor]:
        places = indices[:, None] * self.seq_len + np.arange(self.seq_len + 1)
        tokens = torch.tensor(self.tokens[places].astype(np.int64))
        # Of one row both are contiguous parts of one tensor; an evaluation writes into the labels.
        labels = tokens[:, 1:].clone(memory_format=torch.contiguous_format)
        return {"input_ids": tokens[:, :-1].contiguous(), "labels": labels}

    def fingerprint(self) -> str:
        cut = f"{self.tokens.dtype} {self.seq_len}"
        return self._remember(f"stream {cut}", lambda: hash_of(self.tokens, cut.encode()))


SHARES = 1000  # weights are rounded to thousandths of their sum


class MixedRows(Rows):
    """The rows of several corpora, drawn by weight; row numbers continue from one corpus to the next.

    Positions form blocks of `sum(shares)`. Each block holds every part as often as its share, in its own order. So the
    number of a part's samples before a block is a product, and no earlier position matters. Each part visits its rows
    in its own epochs. Without weights all rows are one corpus, and an epoch has each once.
    """

    def __init__(self, parts: Sequence[Rows], weights: Sequence[float]) -> None:
        self._parts = parts
        self._firsts = np.cumsum([0, *map(len, parts)])
        self.shares = shares_of(weights)
        """Positions of each part in a block, in lowest terms."""

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
        if not self.shares:
            return super().order(seed, positions)
        block = positions // sum(self.shares)
        slot = sample_indices(seed_of(seed, 0), positions, sum(self.shares))
        starts = np.cumsum([0, *self.shares])
        source = np.searchsorted(starts, slot, side="right") - 1
        rows = np.empty_like(slot)
        for number, (part, share) in enumerate(zip(self._parts, self.shares, strict=True)):
            own = source == number
            own_positions = block[own] * share + slot[own] - starts[number]
            rows[own] = self._firsts[number] + sample_indices(seed_of(seed, number + 1), own_positions, len(part))
        return rows

    def fingerprint(self) -> str:
        parts = [part.fingerprint() for part in self._parts]
        return xxhash.xxh3_128_hexdigest(f"mixture {parts} {self.shares}".encode())


def shares_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Return shares in thousandths of the sum of the weights, at least one each, in lowest terms. The remainder goes to
    those that rounding reduced most. Without weights: none."""
    if not weights:
        return ()
    exact = [weight * SHARES / sum(weights) for weight in weights]
    shares = [max(1, int(share)) for share in exact]
    by_loss = sorted(range(len(exact)), key=lambda number: shares[number] - exact[number])
    for number in by_loss[: max(0, SHARES - sum(shares))]:
        shares[number] += 1
    return tuple(share // gcd(*shares) for share in shares)


# --------------------------------------------------------------------------------------------------------------- order


ROUNDS = 8  # with 6, some orders of five rows were three times as frequent as others
WORD = 2**64 - 1

UInt64s = NDArray[np.uint64]


def sample_indices(seed: int, positions: Int64s, rows: int) -> Int64s:
    """Return the row of each position: 1-D int64, each in [0, rows).

    `seed`: modulo 2**64; `positions`: 1-D, each at least 0, perhaps in different epochs; `rows`: at least 1.
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


def share_of_numbers(number: int, share: float) -> bool:
    """True if `number` is in a share (0 to 1) of all numbers, chosen by its hash alone."""
    return int(_mix(np.array([number], np.uint64))[0]) < share * 2**64


def seed_of(seed: int, number: int) -> int:
    """Derive the seed of one of several orders in a run."""
    return int(_mix(_mix(np.array([seed & WORD], np.uint64)) + np.uint64(number))[0])


def _permute(values: UInt64s, key: UInt64s, half_bits: int) -> UInt64s:
    """Permute [0, 4**half_bits) by a Feistel network with two halves of `half_bits` bits."""
    shift = np.uint64(half_bits)
    mask = np.uint64(2**half_bits - 1)
    left, right = values >> shift, values & mask
    for number in range(ROUNDS):
        left, right = right, left ^ (_mix(_mix(key ^ np.uint64(number)) ^ right) & mask)
    return (left << shift) | right


def _mix(values: UInt64s) -> UInt64s:
    """Apply one step of splitmix64 (Steele, Lea, Flood, OOPSLA 2014) to each value, modulo 2**64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
