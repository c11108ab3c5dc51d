"""JSON as the standard has it, from files that somebody else may have written."""

import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

MAX_OBJECTS = 500_000
"""In one text. An object takes two bytes of the text and at least 64 bytes of memory."""

_LISTS = 10_000
# An unterminated string takes the rest of the text, so that each character is looked at once.
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"expected numbers as JSON has them, found {name}")


def parse_json(
    text: str | bytes,
    max_objects: int = MAX_OBJECTS,
    constant: Callable[[str], Any] = _refuse_constant,
    max_lists: int = _LISTS,
) -> Any:
    """The value. Raises ValueError for text that is no JSON in UTF-8, for a key that an object has twice, and for more
    than `max_objects` objects, or `max_lists` lists and five more for each object.

    `constant`: gives the value of `NaN`, `Infinity` and `-Infinity`; by default they raise ValueError too.
    """
    text = text.decode() if isinstance(text, bytes) else text
    if _too_many(text, max_objects, max_lists):
        outside = _STRING.sub("", text)
        if _too_many(outside, max_objects, max_lists):
            objects, lists = outside.count("{"), outside.count("[")
            raise ValueError(
                f"expected at most {max_objects:,} objects and {max_lists + 5 * objects:,} lists, found {objects:,} "
                f"and {lists:,}"
            )
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=constant)
    except RecursionError:
        raise ValueError("expected fewer levels of objects and lists") from None


def _too_many(text: str, max_objects: int, max_lists: int) -> bool:
    objects = text.count("{")
    return objects > max_objects or (len(text) > max_lists and text.count("[") > 5 * objects + max_lists)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        key, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {key[:80]!r} stands twice")
    return result
