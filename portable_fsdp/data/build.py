"""Builds the data of a run from the config's `data` section: sources, tokenizer, tokenized documents, rows."""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from portable_fsdp.config import data as keys
from portable_fsdp.config.schema import Model
from portable_fsdp.data.cache import Documents, Recipe, entry_key, refusal, tokenized
from portable_fsdp.data.chat import DATE
from portable_fsdp.data.examples import Broken, Source
from portable_fsdp.data.hashes import Remember, remembered
from portable_fsdp.data.held_out import open_apart
from portable_fsdp.data.order import share_of_numbers
from portable_fsdp.data.packing import DocumentRows, MixedRows, PackedRows, Rows, cut, whole
from portable_fsdp.data.render import renderer
from portable_fsdp.data.sources import open_source
from portable_fsdp.data.tokenize import Tokenizer, load_tokenizer, token_dtype
from portable_fsdp.runtime.errors import DataError
from portable_fsdp.runtime.files import cache_folder

log = logging.getLogger("portable_fsdp")


@dataclass(frozen=True)
class Corpus:
    """The rows to train on, those held out, and the tokenizer that made them."""

    rows: Rows
    tokenizer: Tokenizer
    eval_rows: Rows | None = None
    """None without `data.eval_split`."""

    @property
    def fingerprint(self) -> tuple[str, str]:
        """128-bit XXH3 hashes in hexadecimal: of the rows to train on (tokens, in their order, and the cut), of the
        tokenizer."""
        return self.rows.fingerprint(), xxhash.xxh3_128_hexdigest(self.tokenizer.description.encode())


def build_data(data: keys.Data, model: Model | None = None) -> Corpus:
    """Read, tokenize and pack the corpus. Every process calls it; one of a host tokenizes, the others map its files.

    `model`: the section whose tokenizer `data.tokenizer: auto` means; without it that is `bytes`. Raises DataError if a
    file or the tokenizer can't be read, for a document that `data.on_error` doesn't skip, or if a part is shorter than
    one row.
    """
    pretrained, gguf_file = (model.pretrained, model.gguf_file) if model else (None, None)
    tokenizer = load_tokenizer(data.tokenizer, pretrained, gguf_file)
    build = _Build(data, tokenizer)
    rows, held_out = build.trained(), build.held_out()
    for name, found in (("data", rows), ("data.eval_split", held_out)):
        if found is not None:
            _require_rows(found, data, name)
    return Corpus(rows, tokenizer, held_out)


def _require_rows(rows: Rows, data: keys.Data, name: str) -> None:
    if len(rows):
        return
    where = data.path or ("data.mixture" if data.mixture else data.source)
    if isinstance(rows, PackedRows):
        raise DataError(
            f"{name}: expected at least {data.seq_len + 1:,} tokens (data.seq_len + 1, one row), found "
            f"{len(rows.tokens):,} in {where}.\n  Lower data.seq_len, or give more text."
        )
    raise DataError(f"{name}: expected at least one document of two tokens, found none in {where}.\n  Give more text.")


class _Build:
    """One pass from sources to rows, with what all parts of it need."""

    def __init__(self, data: keys.Data, tokenizer: Tokenizer) -> None:
        self._data = data
        self._tokenizer = tokenizer
        self._parts: Sequence[keys.Documents] = data.mixture or (data,)
        self._share = None if data.eval_split is None else keys.share_held_out(data.eval_split)
        self._held_out: Source | None = None
        """What is held out by a name of its own."""
        if data.eval_split is None or self._share is not None:
            self._sources = [open_source(part) for part in self._parts]
        else:
            trained, self._held_out = open_apart(data, data.eval_split)
            self._sources = [trained]
        self._packing = data.resolved_packing
        self._folder = Path(data.cache_dir) if data.cache_dir else cache_folder(os.environ) / "tokens"

    def trained(self) -> Rows:
        share = self._share
        takes = _every if share is None else lambda number: not share_of_numbers(number, share)
        rows = self._rows(takes, "" if share is None else f"all but {share}")
        if len(rows) == 1:
            return rows[0]
        for part, found in zip(self._parts, rows, strict=True):
            _require_rows(found, self._data, f"data.mixture ({part.path or part.source})")
        return MixedRows(rows, [part.weight for part in self._data.mixture])

    def held_out(self) -> Rows | None:
        if self._held_out is not None:
            return self._rows_of(self._data, self._held_out, _every, "")
        share = self._share
        if share is None:
            return None
        rows = self._rows(lambda number: share_of_numbers(number, share), f"{share}")
        return rows[0] if len(rows) == 1 else MixedRows(rows, [max(1, len(one)) for one in rows])

    def _rows(self, takes: Callable[[int], bool], taken: str) -> list[Rows]:
        return [
            self._rows_of(part, source, takes, taken) for part, source in zip(self._parts, self._sources, strict=True)
        ]

    def _rows_of(self, part: keys.Documents, source: Source, takes: Callable[[int], bool], taken: str) -> Rows:
        is_stream = self._packing == "stream"
        recipe = Recipe(
            key=self._key(part, source, taken),
            source=source,
            takes=takes,
            render=renderer(part.format, self._tokenizer, stream=is_stream, arguments=part.chat_template_kwargs),
            dtype=token_dtype(self._tokenizer.vocab_size),
            skip_broken=self._data.on_error == "skip",
        )
        documents = tokenized(self._folder, recipe)
        _say_what_was_skipped(documents, source)
        if is_stream:
            return PackedRows(documents.tokens, self._data.seq_len, self._remember(documents))
        return self._document_rows(part, source, documents)

    def _key(self, part: keys.Documents, source: Source, taken: str) -> str:
        template = self._tokenizer.chat_template
        # Only where there are some: entries of earlier releases keep their names.
        arguments: dict[str, object] = {}
        if part.chat_template_kwargs:
            arguments["chat_template_kwargs"] = part.chat_template_kwargs
        if template is not None and template.asks_for_time and part.format != "text":
            arguments["date"] = DATE.isoformat()
        return entry_key(
            content=source.content(self._folder),
            kind=part.source,
            taken=taken,
            format=part.format,
            columns=sorted(part.columns.items()),
            is_stream=self._packing == "stream",
            on_error=self._data.on_error,
            tokenizer=self._tokenizer.description,
            chat_template="" if template is None or part.format == "text" else template.text,
            libraries=[version("tokenizers"), version("transformers")],
            **arguments,
        )

    def _document_rows(self, part: keys.Documents, source: Source, documents: Documents) -> DocumentRows:
        """Without the documents that have nothing to predict."""
        seq_len, starts = self._data.seq_len, documents.starts
        keep = predicts(documents)
        if (~keep).any():
            log.info(
                "data: %s documents of %s have nothing to predict and are left out", f"{(~keep).sum():,}", source.name
            )
        lengths = np.diff(starts)
        too_long = keep & (lengths > seq_len)
        if part.format == "text":
            if too_long.any():
                log.info(
                    "data: %s documents of %s are longer than data.seq_len=%s and are cut into pieces",
                    *(f"{too_long.sum():,}", source.name, seq_len),
                )
            pieces = cut(starts[:-1][keep], lengths[keep], seq_len)
        else:
            self._check_lengths(source, documents, too_long)
            keep &= ~too_long
            pieces = whole(starts[:-1][keep], lengths[keep])
        rows = DocumentRows(
            documents.tokens,
            documents.counted,
            pieces,
            seq_len=seq_len,
            padding=self._tokenizer.padding,
            several=self._packing == "documents",
            remember=self._remember(documents),
        )
        log.info("data: %s: %s rows, %.2f %% of their tokens padding", source.name, f"{len(rows):,}", 100 * rows.padded)
        return rows

    def _remember(self, documents: Documents) -> Remember:
        # An entry never changes, so nothing has to settle.
        return partial(remembered, self._folder / "hashes", documents.files, settled_s=0)

    def _check_lengths(self, source: Source, documents: Documents, too_long: NDArray[np.bool_]) -> None:
        if not too_long.any():
            return
        first = int(np.flatnonzero(too_long)[0])
        found = (
            f"{_place(source, int(documents.numbers[first]))}: expected at most {self._data.seq_len:,} tokens "
            f"(data.seq_len), found {int(np.diff(documents.starts)[first]):,}"
        )
        if self._data.on_error == "stop":
            raise DataError(
                f"data: {found}; {too_long.sum():,} documents are too long.\n"
                f"  Raise data.seq_len (the longest has {int(np.diff(documents.starts)[too_long].max()):,}), shorten "
                "them, or set data.on_error=skip to go on without them."
            )
        log.info(
            "data: %s documents of %s are too long and are left out; the first: %s", too_long.sum(), source.name, found
        )


def _every(number: int) -> bool:
    return True


def predicts(documents: Documents) -> NDArray[np.bool_]:
    """Which documents have a token behind their first that counts."""
    lengths = np.diff(documents.starts)
    if documents.counted is None:
        return lengths > 1
    found = lengths > 1
    # [begin, end) behind the first token of each; what lies between two of them is reduced too, and dropped.
    bounds = np.stack([documents.starts[:-1][found] + 1, documents.starts[1:][found]], axis=1).ravel()
    if len(bounds):
        inside = bounds[bounds < len(documents.counted)]  # without the last end, where that is the end of all
        found[found] = np.logical_or.reduceat(documents.counted, inside)[::2]
    return found


def _place(source: Source, number: int) -> str:
    """Read again for an error alone: an entry doesn't keep places."""
    return next((one.place for one in source.read() if one.number == number), source.name)


def _say_what_was_skipped(documents: Documents, source: Source) -> None:
    facts = documents.facts
    if facts.skipped and not facts.documents:
        place, _, problem = facts.first_skipped.partition(": ")
        raise DataError(
            f"data: expected at least one document that can be read, found {facts.skipped:,} that can't in "
            f"{source.name}; the first:\n  {refusal(Broken(0, place, 0, problem))}"
        )
    if facts.skipped:
        log.info(
            "data: %s documents of %s are skipped; the first: %s",
            f"{facts.skipped:,}",
            source.name,
            facts.first_skipped,
        )
    if facts.prompts_that_differ:
        log.info(
            "data: the tokens of %s prompts of %s are others at their end when the completion follows; what differs "
            "counts as completion. End prompts where a token ends (a space belongs to the completion).",
            *(f"{facts.prompts_that_differ:,}", source.name),
        )
