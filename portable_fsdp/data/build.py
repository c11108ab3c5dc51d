"""Builds the data of a run from the config's `data` section: sources, tokenizer, tokenized documents, rows."""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from portable_fsdp.config import data as keys
from portable_fsdp.config.schema import Model
from portable_fsdp.data.cache import Documents, Recipe, entry_key, tokenized
from portable_fsdp.data.chat import DATE
from portable_fsdp.data.examples import Source
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
    if tokenizer.end_of_text is None:
        log.warning(
            "data.tokenizer: %s names no end of text (eos_token in tokenizer_config.json): texts follow each other "
            "with nothing between them, and completions of text don't learn to stop",
            data.tokenizer,
        )
    build = _Build(data, tokenizer)
    return Corpus(build.trained(), tokenizer, build.held_out())


class _Part(NamedTuple):
    """What became of one source."""

    rows: Rows
    source: str
    documents: Documents


def _require_rows(parts: Sequence[_Part], data: keys.Data, name: str) -> None:
    """Of all parts together; the error says by which key there are none."""
    if any(len(part.rows) for part in parts):
        return
    share, way = "", ""
    if data.eval_split is not None and keys.share_held_out(data.eval_split) is not None:
        held_out = name == "data.eval_split"
        share = f" {'in' if held_out else 'beside'} the share that is held out (data.eval_split={data.eval_split})"
        way = f", or hold {'more' if held_out else 'less'} out"
    where = ", ".join(part.source for part in parts)
    lengths = np.concatenate([np.diff(part.documents.starts) for part in parts])
    if not len(lengths):
        expected, found, advice = "at least one document", f"none in {where}", "Give more of them"
    elif isinstance(parts[0].rows, PackedRows):
        expected = f"at least {data.seq_len + 1:,} tokens (data.seq_len + 1, one row)"
        found = ", ".join(f"{len(part.documents.tokens):,} in {part.source}" for part in parts)
        advice = "Lower data.seq_len, or give more text"
    elif (lengths > data.seq_len).any():
        expected = f"at least one document of at most {data.seq_len:,} tokens (data.seq_len) with something to predict"
        found, advice = (
            f"none among {len(lengths):,} in {where}",
            f"Raise data.seq_len (the longest has {lengths.max():,})",
        )
    else:
        expected, found = "at least one document of two tokens", f"none among {len(lengths):,} in {where}"
        advice = "Give more text"
    raise DataError(f"{name}: expected {expected}, found {found}{share}.\n  {advice}{way}.")


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
        found = self._each(takes, "" if share is None else f"all but {share}")
        for one in found:
            _require_rows([one], self._data, "data.mixture" if self._data.mixture else "data")
        if len(found) == 1:
            return found[0].rows
        return MixedRows([one.rows for one in found], [part.weight for part in self._data.mixture])

    def held_out(self) -> Rows | None:
        share = self._share
        if self._held_out is not None:
            found = [self._part(self._data, self._held_out, _every, "")]
        elif share is not None:
            found = self._each(lambda number: share_of_numbers(number, share), f"{share}")
        else:
            return None
        _require_rows(found, self._data, "data.eval_split")
        rows = [one.rows for one in found]
        return rows[0] if len(rows) == 1 else MixedRows(rows, [max(1, len(one)) for one in rows])

    def _each(self, takes: Callable[[int], bool], taken: str) -> list[_Part]:
        return [self._part(part, source, takes, taken) for part, source in zip(self._parts, self._sources, strict=True)]

    def _part(self, part: keys.Documents, source: Source, takes: Callable[[int], bool], taken: str) -> _Part:
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
            rows: Rows = PackedRows(documents.tokens, self._data.seq_len, self._remember(documents))
        else:
            rows = self._document_rows(part, source, documents)
        return _Part(rows, source.name, documents)

    def _key(self, part: keys.Documents, source: Source, taken: str) -> str:
        template = self._tokenizer.chat_template
        # Only where there are some: entries of earlier releases keep their names.
        arguments: dict[str, object] = {}
        if part.chat_template_kwargs:
            arguments["chat_template_kwargs"] = part.chat_template_kwargs
        if template is not None and template.asks_for_time and part.format != "text":
            arguments["date"] = DATE
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
            left_out = documents_in_words((~keep).sum())
            log.info("data: %s of %s left out: nothing to predict", left_out, source.name)
        lengths = np.diff(starts)
        too_long = keep & (lengths > seq_len)
        if part.format == "text":
            if too_long.any():
                log.info(
                    "data: %s of %s cut into pieces: longer than data.seq_len=%s",
                    *(documents_in_words(too_long.sum()), source.name, seq_len),
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
        if len(rows):
            log.info(
                "data: %s: %s rows, %.2f %% of their tokens padding", source.name, f"{len(rows):,}", 100 * rows.padded
            )
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
                f"data: {found}; too long: {documents_in_words(too_long.sum())}.\n"
                f"  Raise data.seq_len (the longest has {int(np.diff(documents.starts)[too_long].max()):,}), shorten "
                "them, or set data.on_error=skip to go on without them."
            )
        log.info(
            "data: %s of %s left out: too long; the first: %s",
            *(documents_in_words(too_long.sum()), source.name, found),
        )


def documents_in_words(count: int) -> str:
    return f"{count:,} document{'' if count == 1 else 's'}"


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
        raise DataError(
            f"data: expected at least one document that can be read, found {facts.skipped:,} that can't in "
            f"{source.name}, and data.on_error=skip leaves them out; the first:\n  {facts.first_skipped}"
        )
    if facts.skipped:
        log.info(
            "data: %s of %s skipped; the first: %s",
            documents_in_words(facts.skipped),
            source.name,
            facts.first_skipped,
        )
    for note, count in facts.notes.items():
        log.warning("data: %s of %s: %s", documents_in_words(count), source.name, note)
    if facts.prompts_that_differ:
        log.info(
            "data: the tokens of %s prompts of %s are others at their end when the completion follows; what differs "
            "counts as completion. End prompts where a token ends (a space belongs to the completion).",
            *(f"{facts.prompts_that_differ:,}", source.name),
        )
