"""Build the data of a run from the config's `data` section: sources, tokenizer, tokenized documents, rows."""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from portable_fsdp.config import data as keys
from portable_fsdp.config.schema import Model
from portable_fsdp.data.cache import Recipe, TokenizedDocuments, entry_key, tokenized
from portable_fsdp.data.compressed import Remember, remembered
from portable_fsdp.data.examples import (
    LEFT_OUT,
    Broken,
    DocumentSource,
    Encode,
    Example,
    Render,
    Rendered,
    at_most_20,
    broken,
    kind,
    meaningful_columns,
    trains,
)
from portable_fsdp.data.packing import IGNORED, MixedRows, PackedRows, Rows, count_labels, share_of_numbers
from portable_fsdp.data.sources import open_apart, open_source
from portable_fsdp.data.tokenize import Tokenizer, ended, load_tokenizer, token_dtype
from portable_fsdp.runtime.errors import DataError, printable
from portable_fsdp.runtime.files import cache_folder

log = logging.getLogger("portable_fsdp")

_FEW = 256  # rows; each may be the first to read a block of the cache, which is hashed then


@dataclass(frozen=True)
class Corpus:
    """The training rows, the rows held out for evaluation, and the tokenizer that made them."""

    rows: Rows
    tokenizer: Tokenizer | None
    """None with `data.factory`."""
    eval_rows: Rows | None = None
    """None without `data.eval_split`."""

    @property
    def fingerprint(self) -> tuple[str, str]:
        """128-bit XXH3 hashes in hexadecimal: one of the training rows (tokens in their order, and the cut), one of the
        tokenizer."""
        description = self.tokenizer.description if self.tokenizer else ""
        return self.rows.fingerprint(), xxhash.xxh3_128_hexdigest(description.encode())


def build_data(data: keys.Data, model: Model | None = None) -> Corpus:
    """Read, tokenize and pack the corpus, or open the dataset of `data.factory`. Every process calls it; one process
    per host tokenizes, the rest map its files.

    `model`: its tokenizer is used for `data.tokenizer: auto`; None: `bytes`. Raises DataError for an unreadable file or
    tokenizer, for a document that `data.on_error` doesn't skip, and for a part without rows.
    """
    if data.factory is not None:
        from portable_fsdp.data.datasets import open_datasets

        rows, held_out = open_datasets(data)
        return Corpus(rows, None, held_out)
    pretrained, gguf_file = (model.pretrained, model.gguf_file) if model else (None, None)
    tokenizer = load_tokenizer(data.tokenizer, pretrained, gguf_file)
    if data.end or data.chat_template:
        from portable_fsdp.data.templates import adapt  # a run without them needs none

        adapt(tokenizer, data.end, data.chat_template)
    if tokenizer.end_of_text is None:
        log.warning(
            "data.tokenizer: %s has no end of text (eos_token in tokenizer_config.json): texts are joined with nothing "
            "between them, and completions of text don't learn to stop",
            data.tokenizer,
        )
    builder = _Builder(data, tokenizer)
    return Corpus(builder.trained(), tokenizer, builder.held_out())


class _SourceRows(NamedTuple):
    rows: Rows
    source: str
    documents: TokenizedDocuments
    kept: int  # documents that rows hold


class _Builder:
    """One pass from sources to rows."""

    def __init__(self, data: keys.Data, tokenizer: Tokenizer) -> None:
        self._data = data
        self._tokenizer = tokenizer
        self._parts: Sequence[keys.Documents] = data.mixture or (data,)
        self._share = None if data.eval_split is None else keys.share_held_out(data.eval_split)
        if data.eval_split is None or self._share is not None:
            self._sources = self._held_out = [open_source(part) for part in self._parts]
        else:  # files or a split
            trained, held_out = open_apart(data, data.eval_split)
            self._sources, self._held_out = [trained], [held_out]
        self._packing = data.resolved_packing
        self._folder = Path(data.cache_dir) if data.cache_dir else cache_folder(os.environ) / "tokens"

    def trained(self) -> Rows:
        parts = self._tokenized(self._sources, is_held_out=False)
        for part in parts:
            self._require_rows([part], "data.mixture" if self._data.mixture else "data")
        return _joined(parts, [part.weight for part in self._data.mixture if part.weight != "rows"])

    def held_out(self) -> Rows | None:
        if self._data.eval_split is None:
            return None
        parts = self._tokenized(self._held_out, is_held_out=True)
        self._require_rows(parts, "data.eval_split")
        return _joined(parts, [max(1, len(part.rows)) for part in parts])

    def _tokenized(self, sources: Sequence[DocumentSource], *, is_held_out: bool) -> list[_SourceRows]:
        share = self._share

        def takes(number: int) -> bool:
            return share is None or share_of_numbers(number, share) == is_held_out

        taken = None if share is None else f"{'' if is_held_out else 'all but '}{share}"
        parts = [self._part(part, source, takes, taken) for part, source in zip(self._parts, sources, strict=True)]
        for part in parts:
            _log_rows("validation" if is_held_out else "training", part, self._data.seq_len)
        return parts

    def _require_rows(self, parts: Sequence[_SourceRows], name: str) -> None:
        """Raise DataError if no part has a row; the message names the key that is the cause."""
        if any(len(part.rows) for part in parts):
            return
        seq_len, share, fix = self._data.seq_len, "", ""
        if self._share is not None:
            side, fix = ("in", ", or hold more out") if name == "data.eval_split" else ("outside", ", or hold less out")
            share = f" {side} the share that is held out (data.eval_split={self._data.eval_split})"
        where = ", ".join(part.source for part in parts)
        lengths = np.concatenate([np.diff(part.documents.starts) for part in parts])
        actual, advice = f"none among {len(lengths):,} in {where}", "Add text"
        if not len(lengths):
            expected, actual, advice = "at least one document", f"none in {where}", "Add documents"
        elif isinstance(parts[0].rows, PackedRows):
            expected = f"at least {seq_len + 1:,} tokens (data.seq_len + 1, one row)"
            actual = ", ".join(f"{len(part.documents.tokens):,} in {part.source}" for part in parts)
            advice = "Lower data.seq_len, or add text"
        elif (lengths > seq_len).any():
            expected = f"at least one document of at most {seq_len:,} tokens (data.seq_len) with something to predict"
            advice = f"Raise data.seq_len (the longest has {lengths.max():,})"
        else:
            expected = "at least one document of two tokens"
        raise DataError(f"{name}: expected {expected}, found {actual}{share}.\n  {advice}{fix}.")

    def _part(
        self, part: keys.Documents, source: DocumentSource, takes: Callable[[int], bool], taken: str | None
    ) -> _SourceRows:
        is_stream = self._packing == "stream"
        recipe = Recipe(
            key=self._key(part, source, taken),
            source=source,
            takes=takes,
            render=renderer(part, self._tokenizer, stream=is_stream),
            dtype=token_dtype(self._tokenizer.vocab_size),
            skip_broken=self._data.on_error == "skip",
        )
        documents = tokenized(self._folder, recipe)
        _log_skipped(documents, source)
        # An entry never changes, so nothing has to settle.
        remember = partial(remembered, self._folder / "hashes", documents.files, settled_s=0)
        if is_stream:
            rows = PackedRows(documents.tokens, self._data.seq_len, remember)
            return _SourceRows(rows, source.name, documents, len(documents))
        rows, kept = self._document_rows(part, source, documents, remember)
        return _SourceRows(rows, source.name, documents, kept)

    def _key(self, part: keys.Documents, source: DocumentSource, taken: str | None) -> str:
        template = None if part.format == "text" or part.prompt else self._tokenizer.chat_template
        return entry_key(
            content=source.content(self._folder),
            kind=part.source,
            taken=taken,
            format=part.format,
            columns=sorted(part.columns.items()),
            is_stream=self._packing == "stream",
            on_error=self._data.on_error,
            tokenizer=self._tokenizer.description,
            chat_template=template and (template.text, template.date, part.chat_template_kwargs),
            prompt=part.prompt,
            train_on=part.train_on,
            ignore=sorted(part.ignore),
            libraries=[version("tokenizers"), version("transformers")],
        )

    def _document_rows(
        self, part: keys.Documents, source: DocumentSource, documents: TokenizedDocuments, remember: Remember
    ) -> tuple[Rows, int]:
        """Pack the documents that have something to predict, and return their number."""
        from portable_fsdp.data.document_rows import DocumentRows, cut  # a stream needs neither

        seq_len, starts = self._data.seq_len, documents.starts
        lengths, cuts = np.diff(starts), self._data.long_rows == "cut"
        too_long = lengths > seq_len
        lengths = np.minimum(lengths, seq_len) if cuts else lengths
        keep = predicts(documents, starts[:-1] + lengths)
        _log_count((~keep).sum(), f"{source.name} left out: nothing to predict")
        too_long &= keep
        if cuts:
            _log_count(too_long.sum(), f"{source.name}: the end cut off: longer than data.seq_len={seq_len}")
        elif part.format == "text":
            _log_count(too_long.sum(), f"{source.name} cut into pieces: longer than data.seq_len={seq_len}")
        else:
            self._check_lengths(source, documents, too_long)
            keep &= ~too_long
        rows = DocumentRows(
            documents.tokens,
            documents.counted,
            cut(starts[:-1][keep], lengths[keep], seq_len),
            seq_len=seq_len,
            padding=self._tokenizer.padding,
            several=self._packing == "documents",
            remember=remember,
        )
        if rows.note:
            log.info("data: %s: %s", source.name, rows.note)
        return rows, int(keep.sum())

    def _check_lengths(
        self, source: DocumentSource, documents: TokenizedDocuments, too_long: NDArray[np.bool_]
    ) -> None:
        if not too_long.any():
            return
        lengths, first = np.diff(documents.starts), int(np.flatnonzero(too_long)[0])
        number = int(documents.numbers[first])
        # Read the source again: a cache entry doesn't store places.
        place = next((document.place for document in source.read() if document.number == number), source.name)
        problem = f"{place}: expected at most {self._data.seq_len:,} tokens (data.seq_len), found {lengths[first]:,}"
        if self._data.long_rows == "stop":
            raise DataError(
                f"data: {problem}; too long: {_documents(too_long.sum())}.\n"
                f"  Raise data.seq_len (the longest has {lengths[too_long].max():,}), or set data.long_rows=skip to "
                "leave them out, data.long_rows=cut to cut their ends off."
            )
        _log_count(too_long.sum(), f"{source.name} left out: too long; the first: {problem}")


def _log_rows(purpose: str, part: _SourceRows, seq_len: int) -> None:
    """Log what a part trains or evaluates; the share of tokens that count is that of a few rows, if there are many."""
    if (count := len(part.rows)) and log.isEnabledFor(logging.INFO):  # process 0
        tried = part.rows.rows(np.arange(count if count <= _FEW else _FEW // 16, dtype=np.int64))["labels"]
        share = 100 * count_labels({"labels": tried}) / tried.numel()
        about = "" if len(tried) == count or share == 100 else "about "
        documents = f"{_documents(part.kept)} of {part.source}"
        log.info(
            f"data: {purpose}: {documents} in {count:,} rows of {seq_len:,} tokens; {about}{share:.0f}% of tokens count"
        )


def _documents(count: int) -> str:
    return f"{count:,} document{'' if count == 1 else 's'}"


def _log_count(count: int, event: str, level: int = logging.INFO) -> None:
    if count:
        log.log(level, "data: %s of %s", _documents(count), event)


def _joined(parts: Sequence[_SourceRows], weights: Sequence[float]) -> Rows:
    return parts[0].rows if len(parts) == 1 else MixedRows([part.rows for part in parts], weights)


def predicts(documents: TokenizedDocuments, ends: NDArray[np.int64] | None = None) -> NDArray[np.bool_]:
    """Return a mask of the documents that have a counted token after their first, before these `ends`."""
    ends = documents.starts[1:] if ends is None else ends
    predicted = ends - documents.starts[:-1] > 1
    if documents.counted is None:
        return predicted
    # [begin, end) after the first token of each. reduceat also reduces the tokens between two of them: dropped.
    bounds = np.stack([documents.starts[:-1][predicted] + 1, ends[predicted]], axis=1).ravel()
    if len(bounds):
        inside = bounds[bounds < len(documents.counted)]  # without the last end if it is the end of all tokens
        predicted[predicted] = np.logical_or.reduceat(documents.counted[:], inside)[::2]
    return predicted


def _log_skipped(documents: TokenizedDocuments, source: DocumentSource) -> None:
    facts = documents.facts
    if facts.skipped and not facts.documents:
        raise DataError(
            f"data: none of the {facts.skipped:,} documents in {source.name} can be read, and data.on_error=skip "
            f"leaves them out; the first:\n  {facts.first_skipped}"
        )
    _log_count(facts.skipped, f"{source.name} skipped; the first: {facts.first_skipped}")
    left_out = {note.removeprefix(LEFT_OUT): n for note, n in facts.notes.items() if note.startswith(LEFT_OUT)}
    if left_out:
        names = [f"{name} ({count:,})" for name, count in left_out.items()]
        columns = "columns and keys that nothing reads (with their number of rows)"
        log.info("data: %s: ignoring %s: %s", source.name, columns, at_most_20(names))
    for note, count in facts.notes.items():
        if not note.startswith(LEFT_OUT):
            _log_count(count, f"{source.name}: {note}", logging.WARNING)


# ---------------------------------------------------------------------------------------------------------- rendering


def renderer(part: keys.Documents, tokenizer: Tokenizer, *, stream: bool) -> Render:
    """Return the render function of these documents. Raises DataError if their format needs a chat template and the
    tokenizer has none.

    All ids of a text count. The tokenizer's special tokens surround it and the end of text follows; in a `stream`
    (`data.packing`) only the end of text is added.
    """
    if part.format == "text":
        return partial(render_documents, part.format, _text, partial(_texts, tokenizer, stream=stream))
    from portable_fsdp.data.render import preparation  # a run on text needs none

    return partial(render_documents, part.format, *preparation(part, tokenizer))


def render_documents(
    form: keys.Format,
    prepare: Callable[[Example], Any],
    encode: Encode,
    examples: Sequence[Example | Broken],
) -> list[Rendered | Broken]:
    """Render several documents. `prepare` returns the text to tokenize, or raises ValueError with the reason; `encode`
    tokenizes all prepared documents at once."""

    def prepared(example: Example | Broken) -> Any:
        if isinstance(example, Broken):
            return example
        try:
            if trains(example.fields, "row"):
                return example, prepare(example)
        except ValueError as error:
            return broken(example, str(error))
        counted = None if form == "text" else np.empty(0, np.bool_)
        return Rendered(example.number, np.empty(0, np.uint8), counted, notes=("weight 0 (or train: false), left out",))

    results: list[Any] = [prepared(example) for example in examples]
    encoded = iter(encode([item for item in results if not isinstance(item, (Broken, Rendered))]))
    results = [item if isinstance(item, (Broken, Rendered)) else next(encoded) for item in results]
    return [_with_notes(item, example, form) for item, example in zip(results, examples, strict=True)]


def _with_notes(item: Rendered | Broken, example: Example | Broken, form: keys.Format) -> Rendered | Broken:
    if isinstance(item, Broken) or isinstance(example, Broken):
        return item
    read = {*keys.FORMAT_COLUMNS[form], *meaningful_columns(form)}
    unread = [f"{LEFT_OUT}{key[:64]}" for key in example.fields if key not in read]
    return item._replace(notes=(*example.notes, *unread, *item.notes))


def _text(example: Example) -> str:
    text = example.fields["text"]
    if not isinstance(text, str):
        raise ValueError(f"expected text, found {kind(text)}")
    return text


def _texts(tokenizer: Tokenizer, items: Sequence[tuple[Example, str]], *, stream: bool) -> list[Rendered | Broken]:
    encoded = zip(items, tokenizer.encode_all([text for _, text in items], special_tokens=not stream), strict=True)
    return [Rendered(example.number, ended(ids, tokenizer.end_of_text)) for (example, _), ids in encoded]


# ------------------------------------------------------------------------------------------------------- rows as text

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
