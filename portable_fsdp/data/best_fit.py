"""Best-fit decreasing: which documents share a row, so that little of it stays empty.

Documents come in the order of their lengths, the longest first, each into the fullest row that has room for it, or
else into a new one (arXiv 2404.10830 trains language models on such rows). What fits k times into a row goes there k
times at once, so the work is done by length and not by document.
"""

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


def best_fit(lengths: Int64s, capacity: int) -> tuple[Int64s, Int64s]:
    """Rows of at most `capacity` tokens: a pure function.

    Args:
        lengths: 1-D, each from 1 to `capacity`.

    Returns: `order`, the documents row by row, and `starts` [rows + 1]: row r is `order[starts[r] : starts[r + 1]]`.
    """
    by_length = np.argsort(-lengths, kind="stable")
    rows = _rows_of(lengths[by_length], capacity)
    order = by_length[np.argsort(rows, kind="stable")]
    starts = np.zeros(int(rows.max(initial=-1)) + 2, np.int64)
    np.cumsum(np.bincount(rows), out=starts[1:])
    return order, starts


def _rows_of(lengths: Int64s, capacity: int) -> Int64s:
    """The row of each document; `lengths` descend."""
    rows = np.empty(len(lengths), np.int64)
    room = _Room()
    opened = 0
    values, counts = np.unique(-lengths, return_counts=True)
    ends = np.cumsum(counts)
    for length, begin, end in zip((-values).tolist(), (ends - counts).tolist(), ends.tolist(), strict=True):
        while begin < end:
            found = room.take(length)
            if found is None:
                times = capacity // length
                count = -(-(end - begin) // times)
                found = capacity, np.arange(opened, opened + count)
                opened += count
            space, open_rows = found
            times = space // length
            placed = min(end - begin, times * len(open_rows))
            filled, rest = divmod(placed, times)
            rows[begin : begin + placed] = np.repeat(open_rows, times)[:placed]
            room.put(space - times * length, open_rows[:filled])
            if rest:
                room.put(space - rest * length, open_rows[filled : filled + 1])
            room.put(space, open_rows[filled + bool(rest) :])
            begin += placed
    return rows


class _Room:
    """The rows that have room left, by how much."""

    def __init__(self) -> None:
        self._rows: dict[int, list[Int64s]] = {}
        self._spaces: list[int] = []  # ascending

    def take(self, length: int) -> tuple[int, Int64s] | None:
        """All rows of the smallest space that holds `length`, with that space; None where none does."""
        at = bisect_left(self._spaces, length)
        if at == len(self._spaces):
            return None
        space = self._spaces.pop(at)
        return space, np.concatenate(self._rows.pop(space))

    def put(self, space: int, rows: Int64s) -> None:
        if space == 0 or len(rows) == 0:
            return
        if space not in self._rows:
            self._rows[space] = []
            insort(self._spaces, space)
        self._rows[space].append(rows)
