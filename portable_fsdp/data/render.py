"""Rendering: a document becomes ids, with a mark on those that count in the loss.

    text               the tokenizer's special tokens around the text, the end of text after it; all count
    prompt_completion  texts: as above, both texts as one; messages: the chat template. Ids that the prompt alone begins
                       with too don't count
    chat               the chat template; the assistant's turns count
    instruction        alpaca's columns as prompt and completion

As TRL's SFTTrainer (1.16, `SFTTrainer._prepare_dataset`). In a stream (`data.packing`) a text has no special tokens but
the end of text.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from portable_fsdp.config.data import FORMAT_COLUMNS, Format
from portable_fsdp.data.examples import Broken, Example, Rendered, broken
from portable_fsdp.data.meaning import LEFT_OUT, kind, meaningful_columns, trains
from portable_fsdp.data.tokenize import Tokenizer, ended

_NO_WEIGHT = "weight 0 (or train: false), left out"

Render = Callable[[Sequence[Example | Broken]], list[Rendered | Broken]]
"""Several documents at once, each to its ids or its problem; several threads may call it."""


def renderer(
    form: Format,
    tokenizer: Tokenizer,
    *,
    stream: bool,
    arguments: Mapping[str, Any] = MappingProxyType({}),
    ignore: Collection[str] = (),
) -> Render:
    """The function of this format; `arguments`: of the chat template; `ignore`: `data.ignore`. Raises DataError where
    the tokenizer lacks a template that the format needs."""
    if form == "text":
        return partial(_render, form, _text, partial(_texts, tokenizer, stream=stream))
    from portable_fsdp.data.render_chat import preparation  # a run on text needs none of it

    return partial(_render, form, *preparation(form, tokenizer, arguments, ignore))


def _render(
    form: Format,
    prepare: Callable[[Example], Any],
    encode: Callable[[Sequence[tuple[Example, Any]]], list[Rendered | Broken]],
    examples: Sequence[Example | Broken],
) -> list[Rendered | Broken]:
    """`prepare` returns the text to tokenize, or raises ValueError with the reason; `encode` makes the results of all
    others at once."""
    results: list[Any] = []
    for example in examples:
        try:
            if isinstance(example, Broken):
                results.append(example)
            elif not trains(example.fields, "row"):
                counted = None if form == "text" else np.empty(0, np.bool_)
                results.append(Rendered(example.number, np.empty(0, np.uint8), counted, notes=(_NO_WEIGHT,)))
            else:
                results.append((example, prepare(example)))
        except ValueError as error:
            results.append(broken(example, str(error)))
    encoded = iter(encode([item for item in results if not isinstance(item, (Broken, Rendered))]))
    results = [item if isinstance(item, (Broken, Rendered)) else next(encoded) for item in results]
    return [_with_notes(item, example, form) for item, example in zip(results, examples, strict=True)]


def _with_notes(item: Rendered | Broken, example: Example | Broken, form: Format) -> Rendered | Broken:
    if isinstance(item, Broken) or isinstance(example, Broken):
        return item
    read = {*FORMAT_COLUMNS[form], *meaningful_columns(form)}
    unread = [f"{LEFT_OUT}{key[:64]}" for key in example.fields if key not in read]
    return item._replace(notes=(*example.notes, *unread, *item.notes))


# ------------------------------------------------------------------------------------------------------------ text


def _text(example: Example) -> str:
    text = example.fields["text"]
    if not isinstance(text, str):
        raise ValueError(f"expected text, found {kind(text)}")
    return text


def _texts(tokenizer: Tokenizer, items: Sequence[tuple[Example, str]], *, stream: bool) -> list[Rendered | Broken]:
    encoded = tokenizer.encode_all([text for _, text in items], special_tokens=not stream)
    return [
        Rendered(example.number, ended(ids, tokenizer.end_of_text))
        for (example, _), ids in zip(items, encoded, strict=True)
    ]
