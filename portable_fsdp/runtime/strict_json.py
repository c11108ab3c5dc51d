"""JSON as the standard has it, from files that somebody else may have written."""

import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

MAX_NESTED = 1_000_000
"""Lists in one text, an object counting as four. Each takes two bytes of the text, and up to 72 bytes of memory."""

# An unterminated string takes the rest of the text, so that each character is looked at once.
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"expected numbers as JSON has them, found {name}")


def parse_json(
    text: str | bytes, constant: Callable[[str], Any] = _refuse_constant, max_nested: int = MAX_NESTED
) -> Any:
    """Parse one value. Raises ValueError for text that is no JSON in UTF-8, for a key that an object has twice, and for
    more objects and lists than `max_nested`.

    `constant`: gives the value of `NaN`, `Infinity` and `-Infinity`; by default they raise ValueError too.
    """
    text = text.decode() if isinstance(text, bytes) else text
    if _nested(text) > max_nested and _nested(outside := _STRING.sub("", text)) > max_nested:
        objects, lists = outside.count("{"), outside.count("[")
        raise ValueError(f"expected fewer objects and lists, found {objects:,} and {lists:,}")
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=constant)
    except RecursionError:
        raise ValueError("expected fewer levels of objects and lists") from None


def _nested(text: str) -> int:
    return 4 * text.count("{") + text.count("[")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        key, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {key[:80]!r} stands twice")
    return result
