"""The table: every key of every place, and how a key of a file finds its row."""

import difflib
from collections.abc import Iterator
from functools import cache

from portable_fsdp.convert.keys_accelerate import (
    ACCELERATE,
    ACCELERATE_ROWS,
    DYNAMO,
    DYNAMO_ROWS,
    FP8,
    FP8_ROWS,
    IPEX,
    MPIRUN,
    SAGEMAKER,
    SCRIPT,
    SCRIPT_ROWS,
)
from portable_fsdp.convert.keys_engines import DEEPSPEED, DEEPSPEED_ROWS, MEGATRON, MEGATRON_ROWS
from portable_fsdp.convert.keys_fsdp import FSDP, FSDP_ROWS, MIXED, PARALLEL, PARALLEL_ROWS, XLA, XLA_ROWS
from portable_fsdp.convert.keys_trainer import TRAINER, TRAINER_ROWS
from portable_fsdp.convert.keys_variables import ENVIRONMENT, VARIABLE_ROWS, VARIABLES
from portable_fsdp.convert.rows import Row, Set

TABLE: tuple[Row, ...] = (
    *ACCELERATE_ROWS,
    *FSDP_ROWS,
    *PARALLEL_ROWS,
    *XLA_ROWS,
    *DYNAMO_ROWS,
    *FP8_ROWS,
    *DEEPSPEED_ROWS,
    *MEGATRON_ROWS,
    *TRAINER_ROWS,
    *SCRIPT_ROWS,
    *VARIABLE_ROWS,
)

PREFIXES = {
    FSDP: "fsdp_",
    PARALLEL: "parallelism_config_",
    DYNAMO: "dynamo_",
    FP8: "fp8_",
    MPIRUN: "mpirun_",
    DEEPSPEED: "deepspeed_",
    MEGATRON: "megatron_lm_",
}
"""What a tool writes before the keys of a place, or leaves out."""

NESTED = (FSDP, PARALLEL, XLA, MIXED, DYNAMO, FP8, MPIRUN, IPEX, DEEPSPEED, MEGATRON)
"""Mappings within a file that hold the keys of the place of that name."""

TOP = (ACCELERATE, TRAINER, FSDP, SCRIPT)
"""Places whose keys stand at the top of a file: an accelerate YAML, a Trainer's arguments, an fsdp_config alone."""

ORDER = (
    ACCELERATE,
    TRAINER,
    FSDP,
    SCRIPT,
    PARALLEL,
    XLA,
    DYNAMO,
    DEEPSPEED,
    MEGATRON,
    SAGEMAKER,
    MPIRUN,
    IPEX,
    FP8,
    MIXED,
)
"""Where a key is looked for that its own place doesn't have."""


def find(place: str, key: str) -> Row | None:
    """The row of a key as typed in that place: with the prefix or without, in any case. None where there is none."""
    rows = _by_place().get(place, {})
    return rows.get(_plain(key)) or rows.get(_bare(place, key))


def find_anywhere(place: str, key: str) -> Row | None:
    """As `find`, or else the row of the first other place that has the key in full. A variable is none of a file's."""
    if (found := find(place, key)) or place == ENVIRONMENT:
        return found
    rows = (_by_place()[other].get(_plain(key)) for other in ORDER if other in _by_place())
    return next((row for row in rows if row), None)


def option_meant(key: str) -> str:
    """The option (`section.key`) that a key of Trainer's or accelerate's sets by itself; empty where there is none."""
    rows = [row for place in TOP if (row := find(place, key)) is not None]
    answers = [answer for row in rows for _, answer in row.takes.cases()]
    names = [name for answer in answers if isinstance(answer, Set) for name in answer.settings]
    return next((name for name in names if not name.startswith("~")), "")


def nested_place(place: str, key: str) -> str | None:
    """The place that a mapping under this key holds the keys of."""
    plain = _plain(key)
    if plain in (f"fsdp_{MIXED}", MIXED):
        return MIXED
    return next((name for name in NESTED if plain in (name, f"{PREFIXES.get(place, '')}{name}")), None)


def nearest_key(place: str, key: str) -> str:
    """The key of the same section that an unknown one probably means; of two that are as near, the place's own."""
    places = TOP if place in TOP else (place,)
    names = {(row.place, name): name for row in TABLE if row.place in places for name in (row.key, *row.aliases)}
    if place in TOP:
        names |= {(ACCELERATE, name): name for name in NESTED}
    if place == ENVIRONMENT:
        names |= {(place, f"FSDP_{name}".upper()): variable for name, variable in _names_of_variables()}
    likeness = {name: _likeness(key, *name) for name in sorted(names)}
    best = max(likeness, key=lambda name: likeness[name] + (_OWN if name[0] == place else 0))
    return names[best] if likeness[best] >= _NEAR else ""


_OWN = 0.05  # a letter of twenty
_NEAR = 0.8  # a letter of five, as lrr for lr; farther ones were mostly other keys


def _names_of_variables() -> Iterator[tuple[str, str]]:
    """What fsdp_config calls in another way than the variable that is for it."""
    rows = {row.key: row for row in TABLE if row.place == FSDP}
    for variable, (place, key) in VARIABLES.items():
        yield from ((name, variable) for name in (rows[key].aliases if place == FSDP else ()))


def _likeness(typed: str, place: str, name: str) -> float:
    """0 to 1; a prefix may be left out, that of variables makes none alike, and pp_size is no cp_size."""
    if place == ENVIRONMENT:
        (family, _, typed), (other, _, name) = typed.partition("_"), name.partition("_")
        if family.lower() != other.lower():
            return 0
    pairs = [(_plain(typed), _plain(name)), (_bare(place, typed), _bare(place, name))]
    mine, its = ({word for word in text.split("_") if len(word) == 2} for text in pairs[1])
    if mine - its and its - mine:
        return 0
    return max(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)


def _plain(key: str) -> str:
    return key.strip().lower().replace("-", "_")


def _bare(place: str, key: str) -> str:
    return _plain(key).removeprefix(PREFIXES.get(place, ""))


@cache
def _by_place() -> dict[str, dict[str, Row]]:
    """place -> every name of a key, in full and without its prefix -> its row; an earlier row keeps its name."""
    found: dict[str, dict[str, Row]] = {}
    for row in TABLE:
        rows = found.setdefault(row.place, {})
        prefix = PREFIXES.get(row.place, "")
        for name in (row.key, *row.aliases):
            for spelt in (_plain(name), f"{prefix}{_bare(row.place, name)}", _bare(row.place, name)):
                rows.setdefault(spelt, row)
    return found
