"""The list of keys and columns that mean something for training, and what is empty, dropped or found in a text.

A column in `meaningful_columns`, or a key of a message in `MEANINGFUL`, is used or rendered, or the row is refused. A
note that begins with `LEFT_OUT` names each other one.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from types import NoneType
from typing import Any, cast

from portable_fsdp.config.data import FORMAT_COLUMNS, OPTIONAL_COLUMNS, Column, Format

WEIGHTS = ("weight", "train", "training", "trainable")
"""Keys of a row or a message: 0 or false keeps it out of the loss."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""transformers fills the first from the others, and `thinking` from any, for templates that read one of them."""
_ANSWER = (*REASONING, "refusal", "tool_plan", "tool_calls", "function_call")
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")
_CONTEXT = ("system", "system_prompt", "tools", "functions", "documents", "chat_template_kwargs")

MEANINGFUL = (*WEIGHTS, "loss", "train_detail", "training_detail", *_ANSWER, *_MEDIA, "tools", "functions", "documents")
"""Keys of a message, beside role and content."""

LEFT_OUT = "left out, since nothing reads it: "
"""A note that begins so ends with the name of a column, or of a message's key as `messages[].name`."""


def format_of(columns: Collection[Column]) -> Format:
    """The format that reads these columns."""
    return next(form for form, needed in FORMAT_COLUMNS.items() if set(needed) <= set(columns))


def meaningful_columns(form: Format) -> tuple[str, ...]:
    """Columns beside the format's own that mean something for training. A text is whole by itself."""
    if form == "text":
        return WEIGHTS
    parts = ("input", "context", "history") if form in ("prompt_completion", "instruction") else ()
    keys = (*OPTIONAL_COLUMNS[form], *WEIGHTS, *_ANSWER, *_MEDIA, *_CONTEXT, *parts)
    return tuple(dict.fromkeys(keys))


def contains(text: str, value: Any) -> bool:
    """Whether the value's texts are in `text`, and so long that this is no accident."""
    return sum(map(len, texts_in(value))) >= 16 and holds(text, value)


def is_empty(value: Any) -> bool:
    """Nothing is lost with it: null, blank text, an empty list or mapping, also as JSON text."""
    return value is None or value in ([], {}) or (isinstance(value, str) and value.strip() in ("", "[]", "{}", "null"))


def texts_in(value: Any) -> Iterator[str]:
    """All texts in it, keys of mappings too."""
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
    """Whether `text` has all texts of the value, as they are or as JSON writes them."""
    return all(
        any(form in text for form in (part, json.dumps(part, ensure_ascii=False)[1:-1], json.dumps(part)[1:-1]))
        for part in map(str.strip, texts_in(value))
    )


def trains(values: Mapping[str, Any], what: str) -> bool:
    """Whether this row or message enters the loss. Raises ValueError for a weight that is neither 0 nor 1."""
    result = True
    for key in WEIGHTS if what == "row" else (*WEIGHTS, "loss"):
        weight = values.get(key)
        if weight is not None and (isinstance(weight, str) or weight not in (0, 1)):
            raise ValueError(
                f"the {what}'s {key} is {'the text ' * isinstance(weight, str)}{weight!r:.40}: 1 or true trains it, "
                f"0 or false doesn't, no other value is supported.\n  Correct it, or set data.ignore=[{key}]"
            )
        result &= weight is None or bool(weight)
    return result


_KINDS: dict[type, str] = {
    **{NoneType: "null", str: "text", bool: "true or false", int: "a number", float: "a number"},
    **{list: "a list", dict: "a mapping"},
}


def kind(value: object) -> str:
    """The value's type in JSON's words, for messages."""
    return _KINDS.get(type(value), type(value).__name__)


def without_nulls(value: Any) -> Any:
    """The value without the null entries of its mappings: Arrow gives each row the keys of all."""
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {key: without_nulls(item) for key, item in items if item is not None}
    return [without_nulls(item) for item in cast("list[Any]", value)] if isinstance(value, list) else value
