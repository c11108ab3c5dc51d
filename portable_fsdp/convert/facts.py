"""Keys of a foreign file, and the options that follow (`read.py` and `rules.py` fill them in); the launcher's facts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from portable_fsdp.convert.table import (
    ENVIRONMENT,
    FSDP,
    NO,
    OFF,
    TRAINER,
    YES,
    KeyOutcome,
    KeyRow,
    Raw,
    in_words,
    key_table,
)
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.launchers import tpu_workers

BY_ACCELERATE, BY_TRAINER = "accelerate", "Trainer"
_AXOLOTL = ("base_model", "sequence_len", "micro_batch_size", "num_epochs", "lr_scheduler")


class KeyEntry(NamedTuple):
    """One key of a file or one variable, where it stands, and what becomes of it."""

    place: str
    key: str  # as written
    raw: Raw
    line: int  # 0: a variable
    where: str  # file:line, or the launcher
    option: str = ""  # ours, or a fact (`~name`), that it sets
    value: object = None  # of that option
    remark: str = ""  # on the option; why a key sets nothing
    fact: str = ""  # of the launcher's: num_processes, num_machines, use_cpu, device

    @property
    def text(self) -> str:
        return in_words(self.raw)

    @property
    def origin(self) -> str:
        """`accelerate.yaml:12`, or `accelerate launch: FSDP_SHARDING_STRATEGY`."""
        return self.where if self.line else f"{self.where}: {self.key}"

    @property
    def quote(self) -> str:
        """`accelerate.yaml:12: mixed_precision: bf16`."""
        return f"{self.where}: {self.key}: {self.text}"


@dataclass
class Import:
    """What a foreign file sets."""

    path: Path
    kind: str = ""  # the place that most of its keys belong to
    settings: dict[str, KeyEntry] = field(default_factory=lambda: {})  # by option
    launcher: list[KeyEntry] = field(default_factory=lambda: [])
    not_needed: list[KeyEntry] = field(default_factory=lambda: [])
    total: tuple[KeyEntry, int] | None = None  # devices by dp_replicate_size * dp_shard_size, and the key of them
    problems: list[tuple[int, str]] = field(default_factory=lambda: [])

    def add_problem(self, at: KeyEntry, text: str) -> None:
        self.problems.append((at.line, f"{at.where}: {at.key}: {text}"))

    def ignore(self, entry: KeyEntry, reason: str) -> None:
        self.not_needed.append(entry._replace(remark=reason))

    def number(self, fact: str) -> int | None:
        """A fact of the launcher's as a number; None where the file doesn't set it, or sets auto."""
        texts = [entry.text.strip() for entry in self.launcher if entry.fact == fact]
        return int(texts[0]) if texts and texts[0].isdecimal() else None


@dataclass
class ForeignFacts:
    """What the keys of a file set one by one (`keys`); the rules write the options that follow into `result`."""

    result: Import
    given: Mapping[str, object]  # options that our own file or an override sets
    overridden: set[str]  # options that an override settles: refusals and contradictions about them are gone
    numbers: Mapping[str, int]  # num_processes and num_machines, as others state them
    tool: str = ""  # that the file is for; empty: the keys don't tell, or tell axolotl's, which reads every name
    words: Mapping[str, str] = field(default_factory=lambda: {})  # of keys by their names in the table, or the tool's
    keys: dict[str, KeyEntry] = field(default_factory=lambda: {})  # by option or fact
    failed: set[str] = field(default_factory=set[str])  # keys of the table whose values were refused or can't be read
    rows: list[tuple[KeyRow, KeyEntry]] = field(default_factory=lambda: [])  # that were read

    def choose_tool(self, keys: Sequence[tuple[KeyRow, KeyEntry]]) -> None:
        """Tell the tool, and the words on which a row's `read_by` may depend, by all keys of the file."""
        names = {entry.key for _, entry in keys}
        if self.result.kind == ENVIRONMENT or not names.isdisjoint(("distributed_type", "compute_environment")):
            self.tool = BY_ACCELERATE
        elif self.result.kind == FSDP or any(row.place == TRAINER for row, _ in keys):
            self.tool = BY_TRAINER if names.isdisjoint(_AXOLOTL) else ""
        words = {row.name: entry.text.strip().lower() for row, entry in reversed(keys)}  # of two, the first
        set_words = {key: word for key, word in words.items() if word not in ("", "none", "null")}
        self.words = {**key_table().defaults.get(self.tool, {}), **set_words}

    def unread(self, row: KeyRow, outcome: KeyOutcome) -> str:
        """Why a key sets nothing; empty where its tool reads it."""
        read_by = outcome.read_by or row.read_by
        is_read = any(all(map(self._holds, who.split(" with "))) for who in read_by.split(" or "))
        return "" if is_read else f"it counts only for {read_by}"

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
        """Each place that the file has keys of, and the first of them."""
        return {row.place: entry for row, entry in reversed(self.rows)}

    def value(self, name: str) -> Any:
        return self.keys[name].value if name in self.keys else None

    def can_read(self, *keys: str) -> bool:
        """True if none of `keys` already has an error (avoids follow-up errors)."""
        return self.failed.isdisjoint(keys)

    @property
    def steps(self) -> object:
        """The steps of the run, as far as a file or an override sets them."""
        return self.given.get("train.steps", self.value("train.steps"))

    def set(self, option: str, value: object, source: KeyEntry, remark: str = "") -> None:
        """An option that follows from `source`; a contradiction where another key already set another value."""
        setting = source._replace(option=option, value=value, remark="; ".join(filter(None, (source.remark, remark))))
        first = self.options.setdefault(option, setting)
        if first.value != value:
            self.contradiction(option, first, setting)

    def contradiction(self, option: str, first: KeyEntry, second: KeyEntry) -> None:
        """Two keys that set one option to different values; an override of it settles them."""
        if option not in self.overridden:
            text = f"{second.text} contradicts {first.key}: {first.text} ({first.where}); keep one."
            self.result.add_problem(second, text)


# ------------------------------------------------------------------------------------------------ the launcher's facts


def check_launcher_facts(
    imports: Iterable[Import],
    *,
    processes: int | None,
    environ: Mapping[str, str],
    device: str = "",
    counted_by: str = "the launcher",
    by_hand: bool = False,
) -> None:
    """Raise ConfigError where num_processes, num_machines or use_cpu differs from the actual start.

    `processes` counts those of all hosts, one for each device (under xla, the devices themselves); None where only the
    engine knows. torchrun counts the hosts. `device` is the one that `--device` selects; `by_hand`: nobody else starts
    processes on other hosts.
    """
    machines = _integer(environ, "GROUP_WORLD_SIZE") or (1 if by_hand else None)
    if tpu_workers(environ):  # `accelerate config` never asks for the hosts of a TPU: it writes 1 on each of them
        machines = None
    actual = {"num_processes": processes, "num_machines": machines}
    problems: list[str] = []
    for imported in imports:
        for note in imported.launcher:
            number, expected = imported.number(note.fact), actual.get(note.fact)
            if number is not None and expected is not None and number != expected:
                problems.append(f"{note.where}: {note.key}: expected {expected} ({counted_by}), found {note.text}.")
            if device and _device(note) not in ("", device):
                problems.append(f"{note.where}: {note.key}: expected device {device} (--device), found {note.text}.")
        if imported.total is not None and processes is not None and imported.total[1] != processes:
            by = imported.total[0]
            problems.append(f"{by.where}: {by.key}: expected {processes} devices ({counted_by}), found {by.text}.")
    if problems:
        flags = "--num_devices, torchrun's --nproc-per-node, --nnodes" + ", --device" * bool(device)
        raise ConfigError("\n".join(problems) + f"\n  Change the file, or start as it says ({flags}).")


def _device(note: KeyEntry) -> str:
    """The device that a key selects: `use_cpu: true`, ACCELERATE_TORCH_DEVICE=cuda:0. Else an empty text."""
    if note.fact == "use_cpu":
        return "cpu"
    return note.text.partition(":")[0] if note.fact == "device" and note.text.lower() not in NO else ""


def _integer(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else None
