"""The table of foreign keys, `keys.yaml`: the content of a row, the lookup of a key, and the outcome of a value.

Values are text (None for null; lists and mappings of these), so an unquoted `NO` is the word that its author meant, and
`"true"`, `yes` and `1` are one value.
"""

import difflib
import math
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator

from portable_fsdp.config.describe import option_names, yaml_value

ACCELERATE, TRAINER, FSDP, SCRIPT = "accelerate", "TrainingArguments", "fsdp_config", "script arguments"
MIXED, DEEPSPEED, MEGATRON = "mixed_precision_policy", "deepspeed_config", "megatron_lm_config"
SAGEMAKER, ENVIRONMENT = "SageMaker", "environment"
AXOLOTL, TRL = "axolotl", "TRL SFT"

TOP = (ACCELERATE, TRAINER, FSDP, SCRIPT)
"""Places whose keys are at the top level of a file: an accelerate YAML, TrainingArguments, an fsdp_config by itself."""


YES = ("true", "yes", "y", "t", "on", "1")
NO = ("false", "no", "n", "f", "off", "0")
OFF = (*NO, "", "none", "null", "0.0", "-1", "disable", "disabled")

_DIGITS = re.compile(r"-?[0-9]+")
_ENUM = re.compile(r"^([A-Za-z_]\w*\.)+")  # ShardingStrategy.FULL_SHARD, torch.float32; not the 0. of 0.3
_DTYPES = {"float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16"}

Raw = str | None | list["Raw"] | dict[str, "Raw"]

_NO_MAPPINGS = (ACCELERATE, TRAINER, SCRIPT, SAGEMAKER, ENVIRONMENT, AXOLOTL, TRL)


class KeyOutcome(BaseModel):
    """The result of a key with a certain value: exactly one of `set`, `ignore`, `launcher` and `refuse`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    settings: Mapping[str, Any] | str | None = Field(default=None, alias="set")
    """Our options, or facts (`~name`) for the rules; in a row `it` stands for the value, as a bare name does."""
    remark: str = ""
    ignore: str | None = None  # why the key has no effect
    launcher: str | None = None  # what the launcher decides here
    fact: str = ""  # the launcher's number that other keys are combined with
    refuse: str | None = None  # why no engine can honour it
    fix: str = "leave it out"  # the fix in the file
    override: str = ""  # an override of this option also resolves the refusal
    read_by: str = ""  # `tool with key=value or ...`; elsewhere the key sets nothing. Empty: all tools read it

    @property
    def kind(self) -> str:
        """`set`, `ignore`, `launcher` or `refuse`; empty for a row whose `words` cover all values."""
        kinds = {"set": self.settings, "ignore": self.ignore, "launcher": self.launcher, "refuse": self.refuse}
        return next((kind for kind, value in kinds.items() if value is not None), "")

    @property
    def options(self) -> Mapping[str, Any]:
        """The options to set; in a row, `it` stands for the value."""
        return {self.settings: "it"} if isinstance(self.settings, str) else self.settings or {}

    @property
    def fixes(self) -> str:
        """All fixes of a refusal, as text."""
        return f"{self.fix}, or override {self.override}" if self.override else self.fix


class KeyRow(KeyOutcome):
    """A row for one of its keys: the outcome of each value. `words` come first, then the row's own outcome."""

    keys: str
    place: str = ""
    name: str = ""  # with the prefix that the tool writes
    aliases: tuple[str, ...] = ()
    words: Mapping[str, KeyOutcome] = {}
    values: (
        Literal["any", "flag", "text", "names", "dtype", "several", "number", "numbers", "whole", "raw"]
        | tuple[str, ...]
        | None
    ) = Field(default=None, alias="as")
    """How the row's own outcome reads a value; a list is a menu of words, also selected by numbers from 1."""
    min: float = -math.inf
    max: float = math.inf
    as_off: str = ""  # a word that means off

    @field_validator("words", mode="before")
    @classmethod
    def _single_words(cls, words: dict[object, object]) -> dict[str, object]:
        """Split `a=b: outcome` into two words; convert `true`, which YAML reads as a boolean, to text."""
        texts = {str(name).lower() if isinstance(name, bool) else str(name): value for name, value in words.items()}
        return {word: value for name, value in texts.items() for word in name.split("=")}

    @property
    def reads(self) -> str | tuple[str, ...]:
        """`as`, or its default: a refusal applies to all values but off; a row with only words reads only these."""
        default = {"": "words", "refuse": "off"}
        return self.values or default.get(self.kind, "any")


class KeyTable(NamedTuple):
    """The content of keys.yaml."""

    keys: tuple[KeyRow, ...]
    prefixes: Mapping[str, str]  # place -> prefix of its keys
    families: Mapping[str, str]  # prefix of environment variables -> the place whose keys they equal
    defaults: Mapping[str, Mapping[str, str]]  # tool -> the values of keys that its files don't set
    training_defaults: Mapping[str, str]  # key of TrainingArguments -> its default
    flags: Mapping[str, str]  # `name=alias` -> what to write here; {} stands for the value
    unused: Mapping[str, str]  # fact or option -> why it may set nothing
    torch: Mapping[str, str]  # `word=alias` of torch's FSDP -> what to write here
    nested: list[str]  # names of mappings in a file; each is also the place of its keys
    recipes: Mapping[str, "WholeRun"]  # tool -> how its files of whole runs are recognised


class WholeRun(NamedTuple):
    """A tool whose file stands for a whole run."""

    tells: list[str]  # keys that such a file has together, with spaces between them
    defaults: Mapping[str, str]  # of keys that a file leaves out
    refuse: str  # why its files aren't read


@cache
def key_table() -> KeyTable:
    """Return the table. Raises pydantic.ValidationError for a malformed row."""
    parsed: dict[str, Any] = {}
    for name in ("keys.yaml", "recipes.yaml"):
        text = Path(__file__).with_name(name).read_text(encoding="utf-8")
        parsed |= cast(dict[str, Any], yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    rows = {place: rows for place, rows in parsed.items() if isinstance(rows, list)}
    keys: list[KeyRow] = []
    for place, fields in ((place, fields) for place, fields_of_rows in rows.items() for fields in fields_of_rows):
        row = KeyRow.model_validate({"read_by": parsed["read_by"].get(place, ""), **fields, "place": place})
        names = (word.split("=") for word in row.keys.split())
        keys += [row.model_copy(update={"name": name, "aliases": tuple(aliases)}) for name, *aliases in names]
    nested = [place for place in rows if place not in _NO_MAPPINGS]
    mappings = {
        name: parsed[name]
        for name in ("prefixes", "families", "defaults", "training_defaults", "flags", "unused", "torch")
    }
    recipes = {
        tool: WholeRun(each["tells"], each.get("defaults", {}), each.get("refuse", ""))
        for tool, each in parsed["recipes"].items()
    }
    return KeyTable(keys=tuple(keys), nested=nested, recipes=recipes, **mappings)


def recipe_of(keys: Collection[str]) -> str:
    """Return the tool whose whole run a file with these top-level keys is, or an empty string."""
    names = {plain_name(key) for key in keys}
    tools = key_table().recipes.items()
    return next((tool for tool, recipe in tools if any(names.issuperset(t.split()) for t in recipe.tells)), "")


@cache
def _by_place() -> dict[str, dict[str, KeyRow]]:
    """Map place -> spelling of a key, with and without the place's prefix -> row; the first row of a name counts.

    A variable is spelled like the key of its family's place, with the family's prefix.
    """
    table, by_place = key_table(), dict[str, dict[str, KeyRow]]()
    for row in table.keys:
        names = by_place.setdefault(row.place, {})
        for name in (row.name, *row.aliases):
            bare = bare_name(row.place, name)
            for spelling in (f"{table.prefixes.get(row.place, '')}{bare}", bare):
                names.setdefault(spelling, row)
    others = ("Trainer", "other tools")
    for prefix, place in table.families.items():
        for name, row in by_place[place].items():
            if name == bare_name(place, name) and not all(who.startswith(others) for who in row.read_by.split(" or ")):
                by_place[ENVIRONMENT].setdefault(plain_name(prefix + name), row)
    return by_place


def find(place: str, key: str) -> KeyRow | None:
    """Return the row of a key as written in that place (with or without prefix, in any case), or None."""
    names, key = _by_place().get(place, {}), plain_name(key)
    if (row := names.get(key)) is not None or place not in key_table().recipes:
        return row
    return next((names[name] for name in names if "*" in name and fnmatchcase(key, name)), None)


def find_anywhere(place: str, key: str) -> KeyRow | None:
    """Like `find`, then search the other places for the full key. A file's key is never a variable."""
    if (row := find(place, key)) or place == ENVIRONMENT:
        return row
    others = (names for other, names in _by_place().items() if other != ENVIRONMENT)
    return next((names[plain_name(key)] for names in others if plain_name(key) in names), None)


def option_meant(key: str) -> str:
    """Return the option (`section.key`) that a key of Trainer or accelerate sets by itself, or an empty string."""
    rows = [row for place in TOP if (row := find(place, key)) is not None]
    outcomes = [outcome for row in rows for outcome in (*row.words.values(), row)]
    return next((name for outcome in outcomes for name in outcome.options if not name.startswith("~")), "")


_OPTIONS_OF_FACTS = {"~strategy": "sharding.strategy", "~mixed": "precision.compute"}


def torch_hint(name: str) -> str:
    """Return what to write for a word of torch's FSDP, in any case, or an empty string."""
    word = plain_name(name).replace("_", "")
    table = key_table().torch.items()
    return next((hint for words, hint in table if word in words.lower().replace("_", "").split("=")), "")


def flag_hint(name: str, value: str) -> str:
    """Return the override, or the reason, for a flag of the Trainer, accelerate, or an option without its section.

    Empty for an unknown flag. `value`: as given; empty: none.
    """
    for names, hint in key_table().flags.items():
        if plain_name(name) in names.split("="):
            return hint.format(*[value or "..."] * 2)
    row = next((row for place in TOP if (row := find(place, name)) is not None), None)
    if row is None:
        ours = [option for option in option_names() if option.partition(".")[2] == plain_name(name)]
        if not ours and nested_place("", name):
            return "a file of accelerate or the Trainer: --import=FILE"
        overrides = [f"{option}={value or '...'}" for option in ours]
        return f"here an override: {' or '.join(overrides)}" if ours else torch_hint(name)
    for spelling in (value or "true", value.replace(" ", "_")):
        with suppress(UnreadableValue):
            outcome = outcome_of(row, spelling)
            options = [(_OPTIONS_OF_FACTS.get(key, key), setting) for key, setting in outcome.options.items()]
            overrides = [f"{key}={yaml_value(setting)}" for key, setting in options if not key.startswith("~")]
            if overrides:
                return f"here an override: {' '.join(overrides)}"
            if hint := torch_hint(name):
                return hint
            if outcome.kind == "refuse":
                return f"{outcome.refuse}; {outcome.fixes}"
            if outcome.kind in ("ignore", "launcher"):
                return f"leave it out: {outcome.ignore or outcome.launcher}"
    return torch_hint(name) or "a key of accelerate or the Trainer: write it into a file for --import"


def nested_place(place: str, key: str) -> str | None:
    """Return the place whose keys a mapping under this key holds, or None."""
    prefix = key_table().prefixes.get(place, "")
    return next((name for name in key_table().nested if plain_name(key) in (name, f"{prefix}{name}")), None)


def nearest_key(place: str, key: str) -> str:
    """Return the nearest known key of the same section, or the nearest variable; empty if none is similar."""
    places = TOP if place in TOP else (place,)
    names = [name for other in places for name in _by_place()[other]] + (key_table().nested if place in TOP else [])
    near = "".join(difflib.get_close_matches(plain_name(key), names, 1, cutoff=0.8))  # one letter in five: lrr for lr
    return near.upper() if place == ENVIRONMENT else near


def plain_name(key: str) -> str:
    """Return the key in lower case with underscores."""
    return key.strip().lower().replace("-", "_")


def bare_name(place: str, key: str) -> str:
    """Return `plain_name` without the prefix of its place."""
    return plain_name(key).removeprefix(key_table().prefixes.get(place, ""))


# --------------------------------------------------------------------------------------------------------- values


class UnreadableValue(Exception):
    """A row can't read a value; the message describes the expected value."""


def outcome_of(row: KeyRow, raw: Raw) -> KeyOutcome:
    """Return the outcome of a key with this value. Raises UnreadableValue if its row can't read the value."""
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
        case "raw":
            return _setting(row, raw)
        case "numbers" if isinstance(raw, dict):
            numbers = {name: number_of(scalar(value)) for name, value in raw.items()}
            return _setting(row, {name: int(n) if n.is_integer() else n for name, n in numbers.items()})
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
        # A count that sets nothing must be digits: its own tool doesn't accept 2.0.
        case "whole" if row.min <= number <= row.max and (
            number.is_integer() if row.kind == "set" else _DIGITS.fullmatch(text)
        ):
            return _setting(row, int(number))
        case _ if word in (names := {name.lower(): name for name in menu}):
            return _setting(row, names[word])
        case _:
            raise UnreadableValue(expected(row))


def _setting(row: KeyRow, value: object) -> KeyOutcome:
    """Return the row's own outcome, with `value` for the options that use it."""
    if row.kind != "set":
        return row
    return KeyOutcome(set={name: value if own == "it" else own for name, own in row.options.items()}, remark=row.remark)


def float16(row: KeyRow) -> KeyOutcome:
    """Return the outcome of float16 for the dtype option of a row: set for precision.compute, else refused."""
    [option] = row.options
    if option == "precision.compute":
        return _setting(row, "float16")
    return KeyOutcome(refuse="only products are computed in float16", fix="set it to float32", override=str(option))


def expected(row: KeyRow) -> str:
    """Describe the values that a row reads."""
    numbers = row.reads in ("number", "whole")
    words = [word for word in row.words if not (numbers and math.isfinite(number_of(word)))]
    if row.reads == "several":
        return f"true | false, or of {', '.join(words[2:])}"
    if isinstance(row.reads, tuple):
        return " | ".join([*words, *row.reads]) + f", or 1 to {len(row.reads)}"
    own = {
        "flag": "true | false",
        "dtype": " | ".join((*_DTYPES, "float16", "fp16")),
        "numbers": "a mapping to numbers",
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
    """Read several words, each with its own settings, from text with spaces or a list; or true or false."""
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
    """Return the text of a scalar. Raises UnreadableValue for lists, mappings and null."""
    if isinstance(raw, str):
        return raw.strip()
    kind = "null" if raw is None else "a list" if isinstance(raw, list) else "a mapping"
    raise UnreadableValue(f"one value, not {kind}")


def in_words(raw: Raw) -> str:
    """Format a value on one line."""
    if isinstance(raw, list):
        return "[" + ", ".join(map(in_words, cast(list[Raw], raw))) + "]"
    if isinstance(raw, dict):
        return "{" + ", ".join(f"{name}: {in_words(value)}" for name, value in raw.items()) + "}"
    return "null" if raw is None else raw


def number_of(text: str) -> float:
    """Parse a number; NaN, which is within no bounds, if it is malformed or infinite."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan
