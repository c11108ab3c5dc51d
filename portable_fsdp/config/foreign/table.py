"""The table: every key of every place, and how a key of a file finds its row."""

import difflib
from functools import cache

from portable_fsdp.config.foreign.keys_accelerate import (
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
from portable_fsdp.config.foreign.keys_engines import DEEPSPEED, DEEPSPEED_ROWS, MEGATRON, MEGATRON_ROWS
from portable_fsdp.config.foreign.keys_fsdp import FSDP, FSDP_ROWS, MIXED, PARALLEL, PARALLEL_ROWS, XLA, XLA_ROWS
from portable_fsdp.config.foreign.keys_trainer import TRAINER, TRAINER_ROWS
from portable_fsdp.config.foreign.keys_variables import ENVIRONMENT, VARIABLE_ROWS
from portable_fsdp.config.foreign.rows import Row

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


def nested_place(place: str, key: str) -> str | None:
    """The place that a mapping under this key holds the keys of."""
    plain = _plain(key)
    if plain in (f"fsdp_{MIXED}", MIXED):
        return MIXED
    return next((name for name in NESTED if plain in (name, f"{PREFIXES.get(place, '')}{name}")), None)


def nearest_key(place: str, key: str) -> str:
    """The key of the table that an unknown one probably means; of two that are as near, the place's own."""
    is_variable = place == ENVIRONMENT
    names = {(row.place, name) for row in TABLE for name in (row.key, *row.aliases)}
    names |= {(ACCELERATE, name) for name in NESTED}
    likeness = {name: _likeness(key, *name) for name in sorted(names) if (name[0] == ENVIRONMENT) == is_variable}
    best = max(likeness, key=lambda name: likeness[name] + (_OWN if name[0] == place else 0))
    return best[1] if likeness[best] > (0.5 if is_variable else 0.6) else ""


_OWN = 0.05  # a letter of twenty


def _likeness(typed: str, place: str, name: str) -> float:
    """0 to 1; the prefix of the place may be left out."""
    spellings = {_plain(name), _bare(place, name)}
    return max(difflib.SequenceMatcher(None, _plain(typed), spelling).ratio() for spelling in spellings)


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
