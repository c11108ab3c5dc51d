"""Keys of a foreign file and the options they set (`read.py` and `rules.py` fill them in); the warnings of a run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from portable_fsdp.config.describe import value_of
from portable_fsdp.config.schema import Config
from portable_fsdp.convert.table import (
    ENVIRONMENT,
    FSDP,
    OFF,
    TRAINER,
    YES,
    KeyOutcome,
    KeyRow,
    Raw,
    find_anywhere,
    in_words,
    key_table,
)

BY_ACCELERATE, BY_TRAINER = "accelerate", "Trainer"
_DEFAULT = "default of "
_AXOLOTL = ("base_model", "sequence_len", "micro_batch_size", "num_epochs", "lr_scheduler")


class KeyEntry(NamedTuple):
    """One key of a file or one environment variable: its location and its outcome."""

    place: str
    key: str  # as written
    raw: Raw
    line: int  # 0: an environment variable
    where: str  # file:line, or the launcher
    option: str = ""  # our option, or the fact (`~name`), that it sets
    value: object = None  # the value of that option
    remark: str = ""  # about the option, or why the key sets nothing
    fact: str = ""  # the launcher's fact: num_processes, num_machines
    is_lost: bool = False  # without effect: a run warns

    @property
    def text(self) -> str:
        return in_words(self.raw)

    @property
    def origin(self) -> str:
        """`accelerate.yaml:12`, or `accelerate launch: FSDP_SHARDING_STRATEGY`."""
        return self.where if self.line else f"{self.where}: {self.key}"

    @property
    def is_default(self) -> bool:
        """Whether the file leaves the key out, and its tool has this default for it."""
        return self.where.startswith(_DEFAULT)

    @property
    def quote(self) -> str:
        """`accelerate.yaml:12: mixed_precision: bf16`."""
        return f"{self.where}: {self.key}: {self.text}"


@dataclass
class Import:
    """The settings and problems of one foreign file, or of the environment."""

    path: Path
    kind: str = ""  # the place that most of its keys belong to
    settings: dict[str, KeyEntry] = field(default_factory=lambda: {})  # by option
    launcher: list[KeyEntry] = field(default_factory=lambda: [])
    not_needed: list[KeyEntry] = field(default_factory=lambda: [])
    problems: list[tuple[int, str]] = field(default_factory=lambda: [])

    def add_problem(self, at: KeyEntry, text: str) -> None:
        self.problems.append((at.line, f"{at.where}: {at.key}: {text}"))

    def ignore(self, entry: KeyEntry, reason: str, is_lost: bool = False) -> None:
        """List a key that sets nothing; `is_lost`: no other key sets its option either."""
        nearest = f"; nearest key of ours: {entry.option}" if is_lost and entry.option else ""
        self.not_needed.append(entry._replace(remark=reason + nearest, is_lost=is_lost))

    def number(self, fact: str) -> int | None:
        """Return a launcher's fact as a number; None if the file doesn't set it, or sets auto."""
        texts = [entry.text.strip() for entry in self.launcher if entry.fact == fact]
        return int(texts[0]) if texts and texts[0].isdecimal() else None

    def warnings(self, config: Config, devices: int | None) -> Iterator[str]:
        """Yield a sentence for num_processes other than the run's devices, and for each key of a file without effect.

        `devices`: on all hosts; None if only the engine knows them. No variable has a warning: it may be a default of
        `accelerate launch`.
        """
        if devices is not None and self.number("num_processes") not in (None, devices):
            note = next(note for note in self.launcher if note.fact == "num_processes")
            batch = config.train.global_batch
            yield f"{note.quote}, but the run has {devices} device(s); train.global_batch is {batch} all the same"
        for note in (note for note in self.not_needed if note.line and note.is_lost):
            if not note.option or value_of(config, note.option) != note.value:
                yield f"{note.quote} has no effect: {note.remark}"


@dataclass
class ForeignFacts:
    """The facts that single keys of a file set (`keys`); the rules write the resulting options into `result`."""

    result: Import
    given: Mapping[str, object]  # options that our own file or an override sets
    overridden: set[str]  # options set by an override: refusals and contradictions about them don't apply
    numbers: Mapping[str, int]  # num_processes and num_machines according to other files and the launcher
    tool: str = ""  # the tool of the file; empty: unknown, or axolotl, which reads every name
    words: Mapping[str, str] = field(default_factory=lambda: {})  # key of the table -> its value, or the tool's default
    keys: dict[str, KeyEntry] = field(default_factory=lambda: {})  # by option or fact
    failed: set[str] = field(default_factory=set[str])  # keys of the table with refused or unreadable values
    rows: list[tuple[KeyRow, KeyEntry]] = field(default_factory=lambda: [])  # the keys that were read

    def choose_tool(self, keys: Sequence[tuple[KeyRow, KeyEntry]]) -> None:
        """Set `tool`, and the `words` on which a row's `read_by` depends, from all keys of the file."""
        names = {entry.key for _, entry in keys}
        if self.result.kind == ENVIRONMENT or not names.isdisjoint(("distributed_type", "compute_environment")):
            self.tool = BY_ACCELERATE
        elif self.result.kind == FSDP or any(row.place == TRAINER for row, _ in keys):
            self.tool = BY_TRAINER if names.isdisjoint(_AXOLOTL) else ""
        words = {row.name: entry.text.strip().lower() for row, entry in reversed(keys)}  # the first of two counts
        set_words = {key: word for key, word in words.items() if word not in ("", "none", "null")}
        self.words = {**key_table().defaults.get(self.tool, {}), **set_words}

    def absent_defaults(self) -> list[KeyEntry]:
        """Return the keys of a recipe, or of TrainingArguments, that the file leaves out, with their defaults."""
        kind, defaults = TRAINER, key_table().training_defaults
        if self.result.kind in key_table().recipes:
            kind, defaults = self.result.kind, key_table().recipes[self.result.kind].defaults
        elif self.tool != BY_TRAINER or all(row.place != TRAINER for row, _ in self.rows):
            return []
        read = {row.name for row, entry in self.rows if entry.raw is not None}
        where = f"{_DEFAULT}{'Trainer' if kind == TRAINER else kind}"
        rows = [(find_anywhere(kind, key), key, text) for key, text in defaults.items()]
        absent = [(key, text) for row, key, text in rows if row is not None and row.name not in read | self.failed]
        return [KeyEntry(kind, key, text, 0, where) for key, text in absent]

    def is_read(self, row: KeyRow, outcome: KeyOutcome) -> bool:
        """Return whether the tool reads a key, as `read_by` says."""
        read_by = outcome.read_by or row.read_by
        return any(all(map(self._holds, who.split(" with "))) for who in read_by.split(" or "))

    def _holds(self, term: str) -> bool:
        key, is_value, word = term.partition("=")
        if not is_value:
            return self.tool in (term, "") or not term
        actual = self.words.get(key.removesuffix("!"))
        words = {"true": YES, "false": OFF}.get(word, (word.lower(),))
        return actual is None or (actual in words) != key.endswith("!")

    @property
    def options(self) -> dict[str, KeyEntry]:
        return self.result.settings

    @property
    def sections(self) -> dict[str, KeyEntry]:
        """Each place with keys in the file, and the first of these keys."""
        return {row.place: entry for row, entry in reversed(self.rows)}

    def value(self, name: str) -> Any:
        return self.keys[name].value if name in self.keys else None

    def can_read(self, *keys: str) -> bool:
        """Return whether none of `keys` has an error so far (avoids follow-up errors)."""
        return self.failed.isdisjoint(keys)

    @property
    def steps(self) -> object:
        """The steps of the run, if a file or an override sets them."""
        return self.given.get("train.steps", self.value("train.steps"))

    def set(self, option: str, value: object, source: KeyEntry, remark: str = "") -> None:
        """Set an option because of `source`. Another value from an earlier key is a contradiction."""
        setting = source._replace(option=option, value=value, remark="; ".join(filter(None, (source.remark, remark))))
        first = self.options.setdefault(option, setting)
        if first.value != value:
            self.contradiction(option, first, setting)

    def contradiction(self, option: str, first: KeyEntry, second: KeyEntry) -> None:
        """Add a problem: two keys set one option to different values. An override of the option resolves it."""
        if option not in self.overridden:
            text = f"{second.text} contradicts {first.key}: {first.text} ({first.where}); keep one."
            self.result.add_problem(second, text)
