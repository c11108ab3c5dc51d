"""A document as read from its source and as rendered, and which of its keys and columns matter for training.

A column in `meaningful_columns`, or a key of a message in `MEANINGFUL`, is used or rendered, else the row is refused.
All other columns and keys are ignored; a note that begins with `LEFT_OUT` names each.
"""

import importlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from portable_fsdp.config.data import FORMAT_COLUMNS, OPTIONAL_COLUMNS, Column, Format
from portable_fsdp.runtime.errors import DataError
from portable_fsdp.runtime.host import pip_install


@dataclass(frozen=True)
class Example:
    """One document as read from its source."""

    number: int
    """Index among all documents of its source, unreadable ones included."""
    place: str
    """Location for messages: `corpus.jsonl:12`."""
    size: int
    """Size in the source's unit."""
    fields: Mapping[str, Any]
    """The format's columns under the format's names, and other columns that matter for training."""
    notes: tuple[str, ...] = ()
    """Warnings for the user, logged once with the count of documents: `data: 3 documents of FILE: <note>`."""


@dataclass(frozen=True)
class Broken:
    """A document that can't be read or rendered; `problem` is the reason."""

    number: int
    place: str
    size: int
    problem: str


class Rendered(NamedTuple):
    """A document's ids, and for each whether it counts in the loss; `counted` None: all do."""

    number: int
    ids: NDArray[np.unsignedinteger[Any]]
    counted: NDArray[np.bool_] | None = None
    notes: tuple[str, ...] = ()
    """See `Example.notes`."""


Render = Callable[[Sequence[Example | Broken]], list[Rendered | Broken]]
"""Render several documents at once, each to its ids or its problem. Thread-safe."""

Encode = Callable[[Sequence[tuple[Example, Any]]], list[Rendered | Broken]]


def broken(example: Example | Broken, problem: str) -> Broken:
    return Broken(example.number, example.place, example.size, problem)


ChatMessage = dict[str, Any]


class Conversation(NamedTuple):
    """Messages, the functions that the assistant may call in them (JSON schemas), and whether each message trains."""

    messages: Sequence[ChatMessage]
    tools: Sequence[dict[str, Any]] | None = None
    trains: Sequence[bool] = ()
    """Empty: all do."""

    @property
    def silent(self) -> list[int]:
        """The assistant's messages that don't train."""
        pairs = zip(self.messages, self.trains, strict=False)
        return [number for number, (message, trains) in enumerate(pairs) if is_answer(message) and not trains]


def is_answer(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "assistant"


class DocumentSource(Protocol):
    """Documents in an order that is the same each time."""

    name: str
    """Path, for messages."""
    total: int
    """Sum of the documents' sizes, for a progress bar; 0: unknown."""
    unit: str
    """The unit of sizes: `B`, or `rows`."""

    def content(self, cache: Path) -> str:
        """Hash everything that determines the documents. Reads all of it unless `cache` holds the hash."""
        ...

    def read(self) -> Iterator[Example | Broken]: ...


AS_A_SHARE = "A share of the documents is written 5%."
"""Hint for a `data.eval_split` that nothing matches."""


def extra(module: str, needed_by: str = "this source") -> Any:
    """Import an optional package; raises DataError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise DataError(
            f"data.source: {needed_by} needs the package {name}, which isn't installed.\n"
            f"  Install it: {pip_install('data')}."
        ) from error


def name_of(files: Sequence[Path]) -> str:
    return str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1:,} more"


def at_most_20(names: Sequence[str]) -> str:
    return ", ".join([*names[:20], *([f"{len(names) - 20} more"] if len(names) > 20 else [])])


def not_utf8(error: UnicodeDecodeError) -> str:
    source = "utf-16" if error.object[:2] in (b"\xff\xfe", b"\xfe\xff") else "latin1"
    here = f"found 0x{error.object[error.start]:02x} at byte {error.start}"
    return f"expected UTF-8, {here}; `iconv -f {source} -t utf-8` may convert it"


# -------------------------------------------------------------------------------------------- keys that mean something


MASKED = "masked"
WEIGHTS = ("weight", "train", "training", "trainable", "loss_mask", "loss_weight", MASKED)
"""Keys of a row or a message: 0 or false keeps it out of the loss; 1 or true does for `masked`."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of reasoning: transformers fills the first from the rest, and `thinking` from any, as templates read one."""
_ANSWER = (*REASONING, "refusal", "tool_plan", "tool_calls", "function_call")
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_CONTEXT = ("system", "system_prompt", "tools", "functions", "documents", "chat_template_kwargs")

MEANINGFUL = (*WEIGHTS, "loss", "train_detail", "training_detail", *_ANSWER, *_MEDIA, "tools", "functions", "documents")
"""Keys of a message, in addition to role and content."""

LEFT_OUT = "left out, since nothing reads it: "
"""Prefix of a note; the rest is the name of a column, or of a message's key as `messages[].name`."""


def format_of(columns: Collection[Column]) -> Format:
    """Return the format that reads these columns."""
    return next(form for form, needed in FORMAT_COLUMNS.items() if set(needed) <= set(columns))


def meaningful_columns(form: Format) -> tuple[str, ...]:
    """Return the columns that matter for training in addition to the format's own. A text needs only its weights."""
    if form == "text":
        return WEIGHTS
    parts = ("input", "context", "history") if form in ("prompt_completion", "instruction") else ()
    return tuple(dict.fromkeys((*OPTIONAL_COLUMNS[form], *WEIGHTS, *_ANSWER, *_MEDIA, *_CONTEXT, *parts)))


def contains(text: str, value: Any) -> bool:
    """True if the value's texts are in `text` and long enough that this is no accident."""
    return sum(map(len, texts_in(value))) >= 16 and holds(text, value)


def is_empty(value: Any) -> bool:
    """True for null, blank text, an empty list or mapping, also as JSON text: dropping it loses nothing."""
    return value is None or value in ([], {}) or (isinstance(value, str) and value.strip() in ("", "[]", "{}", "null"))


def texts_in(value: Any) -> Iterator[str]:
    """Yield all texts in a value, keys of mappings included."""
    if isinstance(value, Mapping):
        for key, item in cast("Mapping[str, Any]", value).items():
            yield key
            yield from texts_in(item)
    elif isinstance(value, list):
        for item in cast("list[Any]", value):
            yield from texts_in(item)
    elif value is not None and not isinstance(value, bool):
        yield str(value)


def holds(text: str, value: Any) -> bool:
    """True if `text` has all texts of the value, verbatim or as JSON writes them."""
    return all(
        any(form in text for form in (part, json.dumps(part, ensure_ascii=False)[1:-1], json.dumps(part)[1:-1]))
        for part in map(str.strip, texts_in(value))
    )


def trains(values: Mapping[str, Any], what: str) -> bool:
    """True if this row or message counts in the loss. Raises ValueError for a weight that is neither 0 nor 1."""
    result = True
    for key in WEIGHTS if what == "row" else (*WEIGHTS, "loss"):
        weight = values.get(key)
        if weight is not None and (isinstance(weight, str) or weight not in (0, 1)):
            does, does_not = ("0 or false", "1 or true") if key == MASKED else ("1 or true", "0 or false")
            raise ValueError(
                f"the {what}'s {key} is {'the text ' * isinstance(weight, str)}{weight!r:.40}: {does} trains it, "
                f"{does_not} doesn't; no other value is supported.\n  Correct it, or set data.ignore=[{key}]"
            )
        result &= weight is None or in_loss(key, weight)
    return result


def in_loss(key: str, weight: object) -> bool:
    """Return whether a value of one of `WEIGHTS` keeps the row or message in the loss."""
    return bool(weight) != (key == MASKED)


def kind(value: object) -> str:
    """Name the value's type in JSON's terms, for messages."""
    kinds = {"NoneType": "null", "str": "text", "bool": "true or false", "int": "a number", "float": "a number"}
    name = type(value).__name__
    return {**kinds, "list": "a list", "dict": "a mapping"}.get(name, name)


def without_nulls(value: Any, feature: Any = None) -> Any:
    """Drop the null entries of mappings: Arrow gives each row the keys of all rows. `feature`: its type in `datasets`,
    whose `Json` values stay as they are."""
    if type(feature).__name__ == "Json":
        return value
    if isinstance(value, dict):
        items, types = cast("dict[str, Any]", value).items(), feature if isinstance(feature, dict) else {}
        return {key: without_nulls(item, types.get(key)) for key, item in items if item is not None}
    inner = getattr(feature, "feature", None)
    return [without_nulls(item, inner) for item in cast("list[Any]", value)] if isinstance(value, list) else value
