"""The table of foreign keys, `keys.yaml`: what a row says, and how a key of a file finds its row."""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator

ACCELERATE, TRAINER, FSDP, SCRIPT = "accelerate", "TrainingArguments", "fsdp_config", "script arguments"
MIXED, DEEPSPEED, MEGATRON = "mixed_precision_policy", "deepspeed_config", "megatron_lm_config"
SAGEMAKER, ENVIRONMENT = "SageMaker", "environment"

TOP = (ACCELERATE, TRAINER, FSDP, SCRIPT)
"""Places whose keys stand at the top of a file: an accelerate YAML, a Trainer's arguments, an fsdp_config alone."""


_NO_MAPPINGS = (ACCELERATE, TRAINER, SCRIPT, SAGEMAKER, ENVIRONMENT)


class _Checked(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class KeyOutcome(_Checked):
    """What becomes of a key with a certain value: exactly one of `set`, `ignore`, `launcher` and `refuse`."""

    settings: Mapping[str, Any] | str | None = Field(default=None, alias="set")
    """Options of ours, or facts (`~name`) for the rules; in a row the name of the one that takes the value."""
    remark: str = ""
    ignore: str | None = None  # why nothing follows
    launcher: str | None = None  # what the launcher decides here
    fact: str = ""  # which of the launcher's facts the value is compared with
    refuse: str | None = None  # why no engine can honour it
    way: str = "leave it out"  # the way out in the file
    about: str = ""  # the option that, overridden, makes the refusal pointless

    @property
    def kind(self) -> str:
        """One of the four; empty for a row whose words answer for all values."""
        kinds = {"set": self.settings, "ignore": self.ignore, "launcher": self.launcher, "refuse": self.refuse}
        return next((kind for kind, value in kinds.items() if value is not None), "")

    @property
    def options(self) -> Mapping[str, Any]:
        """What is set; in a row, `it` for the value."""
        return {self.settings: "it"} if isinstance(self.settings, str) else self.settings or {}

    @property
    def ways(self) -> str:
        """All ways out of a refusal."""
        return f"{self.way}, or override {self.about}" if self.about else self.way


class Answers(KeyOutcome):
    """A row: the outcome of each value of its keys. `words` come first, then the row's own outcome."""

    keys: str
    words: Mapping[str, KeyOutcome] = {}
    values: Literal["any", "flag", "text", "names", "dtype", "several", "number", "whole"] | tuple[str, ...] | None = (
        Field(default=None, alias="as")
    )
    """How the row's own outcome reads a value; a list is a menu of words, which numbers from 1 stand for as well."""
    least: float = -math.inf
    most: float = math.inf
    also: str = ""  # a word that is as good as off

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


class VariableFamily(_Checked):
    """Variables that answer like the keys of a place."""

    place: str
    switch: str = ""
    flag: str = ""
    names: str
    renamed: dict[str, str] = {}


@dataclass(frozen=True, eq=False)
class ForeignKey:
    """One key of one place, or one variable, which answers like the key of a file."""

    place: str
    name: str  # with the prefix that the tool writes
    answers: Answers
    aliases: tuple[str, ...] = ()
    like: "ForeignKey | None" = None

    @property
    def in_file(self) -> "ForeignKey":
        return self.like or self


@dataclass(frozen=True)
class KeyTable:
    """keys.yaml as it is read."""

    keys: tuple[ForeignKey, ...]
    prefixes: Mapping[str, str]  # of the keys of a place
    families: Mapping[str, VariableFamily]  # by prefix
    reads: Mapping[str, frozenset[str]]  # tool -> the keys of fsdp_config that it reads
    documented: Mapping[str, frozenset[str]]  # tool -> the keys of fsdp_config that only its manual has
    decides: Mapping[str, str]  # the beginning of a fact's name -> the option
    unused: Mapping[str, str]  # fact or option -> why it may set nothing

    @property
    def nested(self) -> list[str]:
        """Mappings within a file that hold the keys of the place of that name."""
        places = dict.fromkeys(key.place for key in self.keys)
        return [place for place in places if place not in _NO_MAPPINGS]


@cache
def key_table() -> KeyTable:
    """The table; raises pydantic.ValidationError for a row that isn't well formed."""
    text = Path(__file__).with_name("keys.yaml").read_text(encoding="utf-8")
    document = cast(dict[str, Any], yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    families = {prefix: VariableFamily.model_validate(family) for prefix, family in document["families"].items()}
    reads, documented = (
        {tool: frozenset(names.split()) for tool, names in document[of].items()} for of in ("reads", "documented")
    )
    keys: list[ForeignKey] = []
    for place, row in ((place, row) for place, rows in document.items() if isinstance(rows, list) for row in rows):
        answers = Answers.model_validate(row)
        names = (word.split("=") for word in answers.keys.split())
        keys += [ForeignKey(place, name, answers, tuple(aliases)) for name, *aliases in names]
    prefixes = document["prefixes"]
    by_name = {(key.place, key.name.removeprefix(prefixes.get(key.place, ""))): key for key in keys}
    for prefix, family in families.items():
        for name, key in ({name: name.lower() for name in family.names.split()} | family.renamed).items():
            like = by_name[family.place, key]
            keys.append(ForeignKey(ENVIRONMENT, f"{prefix}{name}", like.answers, like=like))
    return KeyTable(tuple(keys), prefixes, families, reads, documented, document["decides"], document["unused"])


@cache
def _by_place() -> dict[str, dict[str, ForeignKey]]:
    """place -> every name of a key, in full and without its prefix; of two keys the earlier one has the name."""
    by_place: dict[str, dict[str, ForeignKey]] = {}
    for key in key_table().keys:
        names = by_place.setdefault(key.place, {})
        for name in (key.name, *key.aliases):
            bare = bare_name(key.place, name)
            for spelling in (plain_name(name), f"{key_table().prefixes.get(key.place, '')}{bare}", bare):
                names.setdefault(spelling, key)
    return by_place


def find(place: str, key: str) -> ForeignKey | None:
    """The row of a key as written in that place: with the prefix or without, in any case. None where there is none."""
    names = _by_place().get(place, {})
    return names.get(plain_name(key)) or names.get(bare_name(place, key))


def find_anywhere(place: str, key: str) -> ForeignKey | None:
    """As `find`, or else the first other place that has the key in full. No key of a file is a variable."""
    if (row := find(place, key)) or place == ENVIRONMENT:
        return row
    others = (names for other, names in _by_place().items() if other != ENVIRONMENT)
    return next((names[plain_name(key)] for names in others if plain_name(key) in names), None)


def option_meant(key: str) -> str:
    """The option (`section.key`) that a key of Trainer's or accelerate's sets by itself; empty where there is none."""
    rows = [row for place in TOP if (row := find(place, key)) is not None]
    outcomes = [outcome for row in rows for outcome in (*row.answers.words.values(), row.answers)]
    return next((name for outcome in outcomes for name in outcome.options if not name.startswith("~")), "")


def nested_place(place: str, key: str) -> str | None:
    """The place that a mapping under this key holds the keys of."""
    plain = plain_name(key)
    if plain in (f"fsdp_{MIXED}", MIXED):
        return MIXED
    return next(
        (name for name in key_table().nested if plain in (name, f"{key_table().prefixes.get(place, '')}{name}")), None
    )


def nearest_key(place: str, key: str) -> str:
    """The key of the same section that an unknown one probably means; of two that are as near, the place's own."""
    places = TOP if place in TOP else (place,)
    rows = [row for row in key_table().keys if row.place in places]
    names = {(row.place, name): name for row in rows for name in (row.name, *row.aliases)}
    if place in TOP:
        names |= {(ACCELERATE, name): name for name in key_table().nested}
    if place == ENVIRONMENT:  # what fsdp_config calls in another way than its variable
        of_fsdp = [row for row in rows if row.in_file.place == FSDP]
        names |= {(place, f"FSDP_{alias}".upper()): row.name for row in of_fsdp for alias in row.in_file.aliases}
    likeness = {name: _likeness(key, *name) for name in sorted(names)}
    best = max(likeness, key=lambda name: likeness[name] + (_OWN if name[0] == place else 0))
    return names[best] if likeness[best] >= _NEAR else ""


_OWN = 0.05  # a letter of twenty
_NEAR = 0.8  # a letter of five, as lrr for lr; farther ones were mostly other keys


def _likeness(key: str, place: str, name: str) -> float:
    """0 to 1; a prefix may be left out, that of variables makes none alike, and pp_size is no cp_size."""
    if place == ENVIRONMENT:
        (family, _, key), (other, _, name) = key.partition("_"), name.partition("_")
        if family.lower() != other.lower():
            return 0
    pairs = [(plain_name(key), plain_name(name)), (bare_name(place, key), bare_name(place, name))]
    ours, theirs = ({word for word in text.split("_") if len(word) == 2} for text in pairs[1])
    if ours - theirs and theirs - ours:
        return 0
    return max(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)


def plain_name(key: str) -> str:
    """In lower case, with underscores."""
    return key.strip().lower().replace("-", "_")


def bare_name(place: str, key: str) -> str:
    """As `plain_name`, without the prefix of its place."""
    return plain_name(key).removeprefix(key_table().prefixes.get(place, ""))
