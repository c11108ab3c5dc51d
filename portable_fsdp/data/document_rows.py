"""Rows of whole documents: as many per row as fit, or one per row (`data.packing`)."""

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from portable_fsdp.data.compressed import Remember
from portable_fsdp.data.packing import IGNORED, Int64s, Rows, hash_of, make_again
from portable_fsdp.data.tokenize import Tokens

_TRIED = 256  # rows


class Pieces(NamedTuple):
    """The contents of rows: documents, or parts of documents longer than a row."""

    starts: Int64s
    """Index of each piece's first token in `tokens`."""
    lengths: Int64s
    continues: NDArray[np.bool_]
    """The document continues after this piece: its last token predicts the first of the next piece."""


def cut(starts: Int64s, lengths: Int64s, seq_len: int) -> Pieces:
    """Cut documents into pieces of `seq_len`; exactly one piece predicts each token but a document's first.

    The last token of a document predicts nothing, so no piece consists of it alone.
    """
    counts = np.maximum(1, -(-(lengths - 1) // seq_len))
    document = np.repeat(np.arange(len(counts)), counts)
    offsets = _ranges(np.zeros(len(counts), np.int64), counts) * seq_len
    rest = lengths[document] - offsets
    return Pieces(starts[document] + offsets, np.minimum(rest, seq_len), rest > seq_len)


class DocumentRows(Rows):
    """Rows of `seq_len` positions that hold whole documents (or pieces), each separate, padded at the end."""

    def __init__(
        self,
        tokens: Tokens,
        counted: NDArray[np.bool_] | None,
        pieces: Pieces,
        *,
        seq_len: int,
        padding: int,
        several: bool,
        remember: Remember = make_again,
    ) -> None:
        """`tokens`, `counted`: see `cache.TokenizedDocuments`; `pieces`: none longer than `seq_len`; `several`: as many
        in a row as fit, else one; `padding`: the id that fills the end of a row; `remember`: see `PackedRows`."""
        self.seq_len, self._remember = seq_len, remember
        self._tokens, self._counted, self._pieces, self._padding = tokens, counted, pieces, padding
        self._several, count = several, len(pieces.lengths)
        self._order, self._starts = (
            best_fit(pieces.lengths, seq_len) if several else (np.arange(count), np.arange(count + 1))
        )

    def __len__(self) -> int:
        return len(self._starts) - 1

    @property
    def note(self) -> str:
        """A sentence for rows that are padding for the greater part; else empty."""
        total, longest = len(self) * self.seq_len, int(self._pieces.lengths.max(initial=0))
        padding = 1 - int(self._pieces.lengths.sum()) / max(1, total)
        if padding <= 0.5 or not longest:
            return ""
        several = (
            ""
            if self._several
            else ", and data.packing=documents puts several documents in a row, if the model keeps them apart"
        )
        return f"{100 * padding:.0f}% of all tokens are padding: data.seq_len={longest} would do{several}"

    def rows(self, indices: Int64s) -> dict[str, Tensor]:
        """Return `input_ids`, `labels`, `positions` and `segments`, int64 `[len(indices), seq_len]`."""
        first, count = self._starts[indices], self._starts[indices + 1] - self._starts[indices]
        pieces = self._order[_ranges(first, count)]
        lengths = self._pieces.lengths[pieces]
        row = np.repeat(np.arange(len(indices)), count)
        before = np.cumsum(lengths) - lengths
        offset = before - before[np.cumsum(count) - count][row]  # of each piece in its row
        within = _ranges(np.zeros_like(lengths), lengths)
        place = np.repeat(row * self.seq_len + offset, lengths) + within
        token = np.repeat(self._pieces.starts[pieces], lengths) + within
        ends = (within == np.repeat(lengths - 1, lengths)) & ~np.repeat(self._pieces.continues[pieces], lengths)
        columns = {
            "input_ids": (self._padding, self._tokens[token]),
            "labels": (IGNORED, self._labels(token, ends)),
            "positions": (0, within),
            "segments": (0, np.repeat(_ranges(np.ones_like(count), count), lengths)),
        }
        return {name: self._placed(place, len(indices), *column) for name, column in columns.items()}

    def _labels(self, token: Int64s, ends: NDArray[np.bool_]) -> Int64s:
        following = np.where(ends, token, token + 1)
        ignored = ends if self._counted is None else ends | ~self._counted[following]
        return np.where(ignored, IGNORED, self._tokens[following].astype(np.int64))

    def _placed(self, place: Int64s, count: int, empty: int, values: NDArray[np.generic]) -> Tensor:
        filled = np.full(count * self.seq_len, empty, np.int64)
        filled[place] = values
        return torch.from_numpy(filled).view(count, self.seq_len)

    def fingerprint(self) -> str:
        cut = f"documents {self._tokens.dtype} {self.seq_len} {self._padding}"
        counted = [] if self._counted is None else [self._counted]
        places = (*self._pieces, self._order, self._starts)
        return self._remember(
            f"{cut} {hash_of(*places)}", lambda: hash_of(cut.encode(), self._tokens, *counted, *places)
        )


def padding_in_words(rows: Rows, seed: int) -> str:
    """Say which share of the tokens is padding, in rows of documents; that of a run's first rows, if there are many."""
    places = rows.order(seed, np.arange(min(len(rows), _TRIED), dtype=np.int64))
    share = 100 * (rows.rows(places)["segments"] == 0).float().mean().item()
    return f"{'about ' if len(rows) > _TRIED else ''}{share:.0f}% of all tokens are padding"


def _ranges(starts: Int64s, lengths: Int64s) -> Int64s:
    """Concatenate for each i the `lengths[i]` numbers `starts[i], starts[i] + 1, ...`."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(int(ends[-1]) if len(ends) else 0)


# ------------------------------------------------------------------------------------------------------- best fit


def best_fit(lengths: Int64s, capacity: int) -> tuple[Int64s, Int64s]:
    """Assign documents to rows so that little padding is left: a pure function.

    Best-fit decreasing (arXiv 2404.10830 trains language models on such rows): documents are placed by length, the
    longest first, each into the fullest row that has room, else into a new one. A length that fits k times into a row
    is placed there k times at once, so the work grows with the number of lengths, not of documents.

    `lengths`: 1-D, each from 1 to `capacity`. Returns `order`, the documents row by row, and `starts` `[rows + 1]`:
    row r is `order[starts[r] : starts[r + 1]]`.
    """
    by_length = np.argsort(-lengths, kind="stable")
    rows = _rows_of(lengths[by_length], capacity)
    order = by_length[np.argsort(rows, kind="stable")]
    starts = np.zeros(int(rows.max(initial=-1)) + 2, np.int64)
    np.cumsum(np.bincount(rows), out=starts[1:])
    return order, starts


def _rows_of(lengths: Int64s, capacity: int) -> Int64s:
    """Return the row of each document; `lengths` descend."""
    rows = np.empty(len(lengths), np.int64)
    with_room: dict[int, list[Int64s]] = {}  # free tokens -> the rows that have them
    spaces: list[int] = []  # its keys, ascending

    def put(space: int, open_rows: Int64s) -> None:
        if space and len(open_rows):
            if space not in with_room:
                insort(spaces, space)
            with_room.setdefault(space, []).append(open_rows)

    opened = 0
    values, counts = np.unique(-lengths, return_counts=True)
    ends = np.cumsum(counts)
    for length, begin, end in zip((-values).tolist(), (ends - counts).tolist(), ends.tolist(), strict=True):
        while begin < end:
            at = bisect_left(spaces, length)
            if at < len(spaces):
                space = spaces.pop(at)
                open_rows = np.concatenate(with_room.pop(space))
            else:
                count = -(-(end - begin) // (capacity // length))
                space, open_rows = capacity, np.arange(opened, opened + count)
                opened += count
            times = space // length
            placed = min(end - begin, times * len(open_rows))
            filled, rest = divmod(placed, times)
            rows[begin : begin + placed] = np.repeat(open_rows, times)[:placed]
            put(space - times * length, open_rows[:filled])
            if rest:
                put(space - rest * length, open_rows[filled : filled + 1])
            put(space, open_rows[filled + bool(rest) :])
            begin += placed
    return rows
