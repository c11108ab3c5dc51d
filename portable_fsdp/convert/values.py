"""The value of a foreign key as it is written, and the outcome that its row has for it.

Values arrive as text (None for null, lists and mappings of these): so an unquoted `NO` is the word that its author
meant, and `"true"`, `yes` and `1` are one value.
"""

import math
import re
from typing import cast

from portable_fsdp.convert.table import KeyOutcome, KeyRow

YES = ("true", "yes", "y", "t", "on", "1")
NO = ("false", "no", "n", "f", "off", "0")
OFF = (*NO, "", "none", "null", "0.0", "-1", "disable", "disabled")

_DIGITS = re.compile(r"-?[0-9]+")
_ENUM = re.compile(r"^([A-Za-z_]\w*\.)+")  # ShardingStrategy.FULL_SHARD, torch.float32; not the 0. of 0.3
_DTYPES = {"float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16"}

Raw = str | None | list["Raw"] | dict[str, "Raw"]


class UnreadableValue(Exception):
    """The value that was expected, in words."""


def outcome_of(row: KeyRow, raw: Raw) -> KeyOutcome:
    """What becomes of a key with this value. Raises UnreadableValue where its row reads no such value."""
    match row.reads:
        case "any":
            return row
        case "off":
            is_off = raw.lower() in (*OFF, row.as_off) if isinstance(raw, str) else not raw
            return KeyOutcome(ignore="turned off") if is_off else row
        case "names":
            names = _names(raw)
            return (row.words.get(names[0].lower()) if len(names) == 1 else None) or _setting(row, names)
        case "several":
            return _several(row, raw)
        case _:
            return _of_scalar(row, scalar(raw))


def _of_scalar(row: KeyRow, text: str) -> KeyOutcome:
    menu = row.reads if isinstance(row.reads, tuple) else ()
    if text.isdecimal() and 1 <= int(text) <= len(menu):
        return _setting(row, menu[int(text) - 1])
    word, number = _ENUM.sub("", text).lower().replace("-", "_"), number_of(text)
    flag = "true" if text.lower() in YES else "false" if text.lower() in NO else ""
    by_word = {name.lower(): outcome for name, outcome in row.words.items()}
    numeral = f"{number:g}" if row.reads in ("number", "whole") else word
    for spelling in (word, flag if "true" in by_word else word, numeral):
        if spelling in by_word:
            return by_word[spelling]
    match row.reads:
        case "text" if text or row.kind == "set":
            return _setting(row, text)
        case "flag" if flag:
            return _setting(row, flag == "true")
        case "dtype" if word in _DTYPES:
            return _setting(row, _DTYPES[word])
        case "dtype" if word in ("float16", "fp16"):
            return float16(row)
        case "number" if row.min <= number <= row.max:
            return _setting(row, number)
        # A count that sets nothing is digits alone: its own tool takes no 2.0 for it.
        case "whole" if row.min <= number <= row.max and (
            number.is_integer() if row.kind == "set" else _DIGITS.fullmatch(text)
        ):
            return _setting(row, int(number))
        case _ if word in (names := {name.lower(): name for name in menu}):
            return _setting(row, names[word])
        case _:
            raise UnreadableValue(expected(row))


def _setting(row: KeyRow, value: object) -> KeyOutcome:
    """The row's own outcome, with the value for the option that takes it."""
    if not isinstance(row.settings, str):
        return row
    return KeyOutcome(set={row.settings: value}, remark=row.remark)


def float16(row: KeyRow) -> KeyOutcome:
    """That dtype, for an option of any."""
    [option] = row.options
    if option == "precision.compute":
        return KeyOutcome(set={option: "float16"}, remark=row.remark)
    return KeyOutcome(refuse="only products are computed in float16", way="set it to float32", override=str(option))


def expected(row: KeyRow) -> str:
    """The values that a row reads, in words."""
    numbers = row.reads in ("number", "whole")
    words = [word for word in row.words if not (numbers and math.isfinite(number_of(word)))]
    if row.reads == "several":
        return f"true | false, or of {', '.join(words[2:])}"
    if isinstance(row.reads, tuple):
        return " | ".join([*words, *row.reads]) + f", or 1 to {len(row.reads)}"
    own = {
        "flag": "true | false",
        "dtype": " | ".join((*_DTYPES, "float16", "fp16")),
        "names": "names with commas between them, or a list of names",
        "number": f"a number{_bounds(row)}",
        "whole": f"a whole number{_bounds(row)}",
        "text": "text",
    }
    return ", or ".join(filter(None, (own.get(row.reads, ""), " | ".join(words))))


def _bounds(row: KeyRow) -> str:
    if row.max < math.inf:
        return f" from {row.min:g} to {row.max:g}"
    return f" >= {row.min:g}" if row.min > -math.inf else ""


def _names(raw: Raw) -> list[str]:
    items = raw if isinstance(raw, list) else [scalar(raw)]
    names = [name.strip() for item in items for name in scalar(item).split(",")]
    if not all(names):
        raise UnreadableValue("names with commas between them, or a list of names")
    return names


def _several(row: KeyRow, raw: Raw) -> KeyOutcome:
    """Several words, each with settings of its own, in one text with spaces or a list; or true or false."""
    items = raw if isinstance(raw, list) else [scalar(raw)]
    words = [word for item in items for word in scalar(item).lower().replace(",", " ").split()]
    if not words or words[0] in (*NO, "none"):
        return row.words["false"]
    if len(words) == 1 and words[0] in YES:
        return row.words["true"]
    settings: dict[str, object] = {}
    for word in words:
        if word not in row.words or word in ("true", "false"):
            raise UnreadableValue(expected(row))
        for name, value in row.words[word].options.items():
            if settings.setdefault(name, value) != value:
                raise UnreadableValue("one strategy")
    return KeyOutcome(set=settings)


def scalar(raw: Raw) -> str:
    """The text of a scalar. Raises UnreadableValue for lists, mappings and null."""
    if isinstance(raw, str):
        return raw.strip()
    kind = "null" if raw is None else "a list" if isinstance(raw, list) else "a mapping"
    raise UnreadableValue(f"one value, not {kind}")


def in_words(raw: Raw) -> str:
    """A value as it could be written on one line."""
    if isinstance(raw, list):
        return "[" + ", ".join(map(in_words, cast(list[Raw], raw))) + "]"
    if isinstance(raw, dict):
        return "{" + ", ".join(f"{name}: {in_words(value)}" for name, value in raw.items()) + "}"
    return "null" if raw is None else raw


def number_of(text: str) -> float:
    """NaN for what is no number, and for what no option can be: it is within no bounds."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan
