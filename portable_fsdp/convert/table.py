"""The table of foreign keys, `keys.yaml`: what a row says, and how a key of a file finds its row."""

import difflib
import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator

ACCELERATE, TRAINER, FSDP, SCRIPT = "accelerate", "TrainingArguments", "fsdp_config", "script arguments"
MIXED, DEEPSPEED, MEGATRON = "mixed_precision_policy", "deepspeed_config", "megatron_lm_config"
SAGEMAKER, ENVIRONMENT = "SageMaker", "environment"

TOP = (ACCELERATE, TRAINER, FSDP, SCRIPT)
"""Places whose keys stand at the top of a file: an accelerate YAML, a Trainer's arguments, an fsdp_config alone."""


_NO_MAPPINGS = (ACCELERATE, TRAINER, SCRIPT, SAGEMAKER, ENVIRONMENT)


class KeyOutcome(BaseModel):
    """The result of a key with a certain value: exactly one of `set`, `ignore`, `launcher` and `refuse`."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    settings: Mapping[str, Any] | str | None = Field(default=None, alias="set")
    """Options of ours, or facts (`~name`) for the rules; in a row the name of the one that takes the value."""
    remark: str = ""
    ignore: str | None = None  # why nothing follows
    launcher: str | None = None  # what the launcher decides here
    fact: str = ""  # which of the launcher's facts the value is compared with
    refuse: str | None = None  # why no engine can honour it
    way: str = "leave it out"  # the way out in the file
    override: str = ""  # the option that, overridden, makes the refusal pointless
    read_by: str = ""  # `tool with key=value or ...`; elsewhere the key sets nothing. Empty: all tools read it

    @property
    def kind(self) -> str:
        """One of the four; empty for a row whose words answer for all values."""
        kinds = {"set": self.settings, "ignore": self.ignore, "launcher": self.launcher, "refuse": self.refuse}
        return next((kind for kind, value in kinds.items() if value is not None), "")

    @property
    def options(self) -> Mapping[str, Any]:
        """The options that are set; in a row, `it` stands for the value."""
        return {self.settings: "it"} if isinstance(self.settings, str) else self.settings or {}

    @property
    def ways(self) -> str:
        """All ways out of a refusal."""
        return f"{self.way}, or override {self.override}" if self.override else self.way


class KeyRow(KeyOutcome):
    """A row, for one of its keys: the outcome of each value. `words` come first, then the row's own outcome."""

    keys: str
    place: str = ""
    name: str = ""  # with the prefix that the tool writes
    aliases: tuple[str, ...] = ()
    words: Mapping[str, KeyOutcome] = {}
    values: Literal["any", "flag", "text", "names", "dtype", "several", "number", "whole"] | tuple[str, ...] | None = (
        Field(default=None, alias="as")
    )
    """How the row's own outcome reads a value; a list is a menu of words, which numbers from 1 stand for as well."""
    min: float = -math.inf
    max: float = math.inf
    as_off: str = ""  # a word that is as good as off

    @field_validator("words", mode="before")
    @classmethod
    def _single_words(cls, words: dict[object, object]) -> dict[str, object]:
        """`a=b: outcome` is two words; YAML reads `true` as no text."""
        texts = {str(name).lower() if isinstance(name, bool) else str(name): value for name, value in words.items()}
        return {word: value for name, value in texts.items() for word in name.split("=")}

    @property
    def reads(self) -> str | tuple[str, ...]:
        """`as`, or its default: a refusal is of what isn't off; words alone leave nothing else to read."""
        default = {"": "words", "refuse": "off"}
        return self.values or default.get(self.kind, "any")


class KeyTable(NamedTuple):
    """The content of keys.yaml."""

    keys: tuple[KeyRow, ...]
    prefixes: Mapping[str, str]  # of the keys of a place
    families: Mapping[str, str]  # prefix of variables -> the place whose keys they answer like
    defaults: Mapping[str, Mapping[str, str]]  # tool -> the values of keys that its files don't set
    unused: Mapping[str, str]  # fact or option -> why it may set nothing
    nested: list[str]  # mappings within a file that hold the keys of the place of that name


@cache
def key_table() -> KeyTable:
    """The table; raises pydantic.ValidationError for a row that isn't well formed."""
    text = Path(__file__).with_name("keys.yaml").read_text(encoding="utf-8")
    parsed = cast(dict[str, Any], yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    rows = {place: rows for place, rows in parsed.items() if isinstance(rows, list)}
    keys: list[KeyRow] = []
    for place, fields in ((place, fields) for place, fields_of_rows in rows.items() for fields in fields_of_rows):
        row = KeyRow.model_validate({"read_by": parsed["read_by"].get(place, ""), **fields, "place": place})
        names = (word.split("=") for word in row.keys.split())
        keys += [row.model_copy(update={"name": name, "aliases": tuple(aliases)}) for name, *aliases in names]
    nested = [place for place in rows if place not in _NO_MAPPINGS]
    return KeyTable(tuple(keys), parsed["prefixes"], parsed["families"], parsed["defaults"], parsed["unused"], nested)


@cache
def _by_place() -> dict[str, dict[str, KeyRow]]:
    """place -> every name of a key, in full and without its prefix; of two keys the earlier one has the name."""
    by_place: dict[str, dict[str, KeyRow]] = {}
    for row in key_table().keys:
        names = by_place.setdefault(row.place, {})
        for name in (row.name, *row.aliases):
            bare = bare_name(row.place, name)
            for spelling in (plain_name(name), f"{key_table().prefixes.get(row.place, '')}{bare}", bare):
                names.setdefault(spelling, row)
    return by_place


def find(place: str, key: str) -> KeyRow | None:
    """The row of a key as written in that place: with the prefix or without, in any case. None where there is none."""
    names = _by_place().get(place, {})
    row = names.get(plain_name(key)) or names.get(bare_name(place, key))
    if row is None and place == ENVIRONMENT:
        prefix, family = family_of(key)
        row = find(family, key.removeprefix(prefix)) if family else None
        others = ("Trainer", "other tools")
        return row if row and not all(who.startswith(others) for who in row.read_by.split(" or ")) else None
    return row


def family_of(variable: str) -> tuple[str, str]:
    """The prefix of a variable's family, and the place whose keys its variables answer like; empty if it has none."""
    families = key_table().families.items()
    return next(((prefix, place) for prefix, place in families if variable.startswith(prefix)), ("", ""))


def find_anywhere(place: str, key: str) -> KeyRow | None:
    """As `find`, or else the first other place that has the key in full. No key of a file is a variable."""
    if (row := find(place, key)) or place == ENVIRONMENT:
        return row
    others = (names for other, names in _by_place().items() if other != ENVIRONMENT)
    return next((names[plain_name(key)] for names in others if plain_name(key) in names), None)


def option_meant(key: str) -> str:
    """The option (`section.key`) that a key of Trainer's or accelerate's sets by itself; empty where there is none."""
    rows = [row for place in TOP if (row := find(place, key)) is not None]
    outcomes = [outcome for row in rows for outcome in (*row.words.values(), row)]
    return next((name for outcome in outcomes for name in outcome.options if not name.startswith("~")), "")


def nested_place(place: str, key: str) -> str | None:
    """The place that a mapping under this key holds the keys of."""
    prefix = key_table().prefixes.get(place, "")
    return next((name for name in key_table().nested if plain_name(key) in (name, f"{prefix}{name}")), None)


def nearest_key(place: str, key: str) -> str:
    """The key of the same section, or variable of the same family, that an unknown one probably means."""
    prefix, family = family_of(key) if place == ENVIRONMENT else ("", "")
    if family:
        near = nearest_key(family, key.removeprefix(prefix))
        return prefix + bare_name(family, near).upper() if near and find(place, prefix + near) else ""
    places = TOP if place in TOP else (place,)
    rows = [row for row in key_table().keys if row.place in places]
    names = {plain_name(name): name for row in rows for name in (row.name, *row.aliases)}
    names |= {bare_name(row.place, row.name): row.name for row in rows if row.place == place}
    names |= {name: name for name in key_table().nested if place in TOP}
    close = difflib.get_close_matches(plain_name(key), names, 1, cutoff=0.8)  # a letter of five, as lrr for lr
    return names[close[0]] if close else ""


def plain_name(key: str) -> str:
    """In lower case, with underscores."""
    return key.strip().lower().replace("-", "_")


def bare_name(place: str, key: str) -> str:
    """As `plain_name`, without the prefix of its place."""
    return plain_name(key).removeprefix(key_table().prefixes.get(place, ""))
