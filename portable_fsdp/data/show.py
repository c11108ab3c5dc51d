"""Rows as they are trained, in text: which tokens count, where documents end, how much is padding."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby

import numpy as np
from torch import Tensor

from portable_fsdp.data.build import Corpus
from portable_fsdp.data.packing import IGNORED
from portable_fsdp.runtime.errors import printable

COUNTS, CONTEXT = "+ ", "  "
"""Prefixes of lines whose tokens count in the loss, and of all others."""


def rows_in_text(corpus: Corpus, seed: int, count: int) -> Iterator[str]:
    """Yield the first rows of a run: a title, then lines of text that count (`+ `) or don't.

    Rows of `data.factory` have no text; their tensors are described.
    """
    decode = partial(corpus.tokenizer.decode, special_tokens=True) if corpus.tokenizer else None
    numbers = corpus.rows.order(seed, np.arange(min(count, len(corpus.rows)), dtype=np.int64))
    for place, number in enumerate(numbers, start=1):
        row = {name: values[0] for name, values in corpus.rows.rows(numbers[place - 1 : place]).items()}
        if decode is None:
            yield f"row {place}: " + ", ".join(f"{name} {value.dtype} {[*value.shape]}" for name, value in row.items())
            continue
        yield from _of_text(f"row {place} (index {number} of {len(corpus.rows)})", row, decode)


def _of_text(title: str, row: dict[str, Tensor], decode: Callable[[list[int]], str]) -> Iterator[str]:
    ids, labels = row["input_ids"].tolist(), row["labels"].tolist()
    has_documents = "segments" in row
    segments = row["segments"].tolist() if has_documents else [1] * len(ids)
    counts = [label != IGNORED for label in labels]
    documents = f", {max(segments)} document(s), {segments.count(0)} padding" if has_documents else ""
    yield f"{title}: {len(ids)} tokens, {sum(counts)} count{documents}"
    # labels[t] is the token after input_ids[t]: a token counts where the label before it does
    tokens = [(segment, place > 0 and counts[place - 1], ids[place]) for place, segment in enumerate(segments)]
    for (segment, does_count), run in groupby(tokens, key=lambda token: token[:2]):
        if segment > 0:
            text = printable(decode([token for _, _, token in run]))
            yield from ((COUNTS if does_count else CONTEXT) + line for line in text.split("\n"))
