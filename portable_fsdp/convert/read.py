"""A foreign file to an `Import`: settings of ours, what is the launcher's business, and every problem by file:line.

The file is walked key by key; each key meets its row of the table. A key that its own tool doesn't read sets nothing
(`tools.py`); one that stands where that tool would not look is taken at its word, with a remark; one that no row knows
is a problem, with the nearest key.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from portable_fsdp.config.yaml_text import NULL_TAG
from portable_fsdp.convert.found import Found, Setting
from portable_fsdp.convert.keys_fsdp import FSDP, MIXED
from portable_fsdp.convert.keys_trainer import TRAINER
from portable_fsdp.convert.keys_variables import ENVIRONMENT
from portable_fsdp.convert.rows import (
    Answer,
    Launcher,
    Refuse,
    Row,
    Set,
    Skip,
    Typed,
    UnreadableValue,
    in_words,
)
from portable_fsdp.convert.rules import combine, silent
from portable_fsdp.convert.table import SCRIPT, TOP, find, find_anywhere, nearest_key, nested_place
from portable_fsdp.convert.tools import BY_TRAINER, Tool, original, tool_of

_SECRET = ("hub_token", "aws_access_key_id", "aws_secret_access_key")  # messages and translations repeat values
_NUMBERS = ("num_processes", "num_machines")
_DEEP = 8  # mappings within mappings; more is an alias of a mapping in itself


class Entry(NamedTuple):
    """One key, and where it stands."""

    place: str
    key: str
    typed: Typed
    line: int
    where: str  # file:line


class Said(NamedTuple):
    """A key that sets nothing, and why."""

    key: str
    typed: str
    where: str
    reason: str
    fact: str = ""  # of the launcher's: num_processes, num_machines, machine_rank


@dataclass
class Import:
    """What a foreign file says."""

    path: Path
    kind: str = ""  # the place that most of its keys belong to
    settings: dict[str, Setting] = field(default_factory=lambda: {})
    launcher: list[Said] = field(default_factory=lambda: [])
    not_needed: list[Said] = field(default_factory=lambda: [])
    total: tuple[Setting, int] | None = None  # devices by dp_replicate_size * dp_shard_size, and who says so
    problems: list[tuple[int, str]] = field(default_factory=lambda: [])

    def number(self, fact: str) -> int | None:
        """A fact of the launcher's as a number; None where the file doesn't say it, or says auto."""
        said = [item.typed.strip() for item in self.launcher if item.fact == fact]
        return int(said[0]) if said and said[0].isdecimal() else None


def is_foreign(node: MappingNode) -> bool:
    """Whether the table knows a key of a file that has no section of ours."""
    keys = [str(key.value) for key, _ in _pairs(node) if isinstance(key, ScalarNode)]
    return any(nested_place("", key) or any(find(place, key) for place in TOP) for key in keys)


def stated_numbers(node: MappingNode) -> dict[str, int]:
    """The launcher's facts that are numbers, as the keys at the top of a file say them."""
    said = {str(key.value): value.value for key, value in _pairs(node) if isinstance(value, ScalarNode)}
    return {fact: int(said[fact]) for fact in _NUMBERS if str(said.get(fact, "")).isdecimal()}


def read_foreign(
    path: Path,
    node: MappingNode,
    given: Mapping[str, object],
    overridden: set[str],
    numbers: Mapping[str, int],
) -> Import:
    """Translate the file whose root is `node`; `given` are the options that our own file and overrides set.

    `numbers` are the launcher's facts as others state them, for a file that doesn't itself.
    What an override says is not asked of the file: its refusals of that option, and contradictions about it, are gone.
    Raises nothing: problems are in the result.
    """
    result = Import(path, _kind(node))
    read_entries(_entries(node, result.kind, result), result, given, overridden, numbers)
    return result


def read_entries(
    entries: Iterable[Entry],
    result: Import,
    given: Mapping[str, object],
    overridden: set[str],
    numbers: Mapping[str, int],
) -> None:
    """What the keys say one by one, then together: the options that they set, and which keys set none."""
    entries = list(entries)
    rows = ((find_anywhere(entry.place, entry.key), entry) for entry in entries)
    tool = tool_of(result.kind, ((row, entry.key, in_words(entry.typed)) for row, entry in rows if row))
    reader = _Reader(result, overridden, tool)
    for entry in entries:
        reader.read(entry)
    reader.check_rank()
    sections = {row.place: (entry.line, entry.where) for row, entry in reversed(reader.read_rows)}
    own = {fact: number for fact in _NUMBERS if (number := result.number(fact))}
    failed = frozenset(reader.failed)
    found = Found(reader.settings, {**numbers, **own}, sections, given, overridden, result.problems, tool, failed)
    result.settings = combine(found)
    result.total = found.total
    for setting, reason in silent(found):
        result.not_needed.append(Said(setting.key, setting.typed, setting.where, reason))


def _kind(node: MappingNode) -> str:
    """The place that most keys at the top belong to."""
    keys = [str(key.value) for key, _ in _pairs(node)]
    return max(TOP, key=lambda place: sum(find(place, key) is not None for key in keys))


def _entries(node: MappingNode, place: str, result: Import, depth: int = 0) -> Iterator[Entry]:
    for key_node, value in _pairs(node):
        line = cast(int, key_node.start_mark.line) + 1
        key = str(key_node.value) if isinstance(key_node, ScalarNode) else "?"
        inside = nested_place(place, key)
        if key == "<<" or depth > _DEEP:
            text = "expected plain keys, found a YAML merge or a mapping within itself; write the keys out."
            result.problems.append((line, f"{result.path}:{line}: {key}: {text}"))
        elif inside and isinstance(value, MappingNode):
            yield from _entries(value, inside, result, depth + 1)
        elif inside and inside != MIXED:
            _not_a_mapping(key, value, line, result)
        else:
            typed = _typed(value)
            if typed and key in _SECRET:  # TrainingArguments.to_dict writes <HUB_TOKEN>, whether there is one or not
                typed = None if typed == f"<{key.upper()}>" else "(hidden)"
            yield Entry(place, key, typed, line, f"{result.path}:{line}")


def _not_a_mapping(key: str, value: Node, line: int, result: Import) -> None:
    """A section that is null or empty says nothing; Trainer takes JSON in quotes and the path of a file, too."""
    typed, where = in_words(_typed(value)), f"{result.path}:{line}"
    if not _typed(value):
        result.not_needed.append(Said(key, typed, where, "empty"))
        return
    text = f"expected a mapping, found {typed}."
    if typed.lstrip().startswith("{"):
        text = "expected a mapping, found JSON in quotes.\n  Take the quotes away."
    elif typed.endswith((".json", ".yaml", ".yml")):
        text += f"\n  Give that file by itself, --import={typed}, and leave {key} out."
    result.problems.append((line, f"{where}: {key}: {text}"))


def _pairs(node: MappingNode) -> list[tuple[Node, Node]]:
    return cast(list[tuple[Node, Node]], node.value)


def _typed(node: Node, depth: int = 0) -> Typed:
    if depth > _DEEP:
        return "..."
    if isinstance(node, ScalarNode):
        return None if node.tag == NULL_TAG else str(node.value)
    if isinstance(node, SequenceNode):
        return [_typed(item, depth + 1) for item in cast(list[Node], node.value)]
    return {str(key.value): _typed(value, depth + 1) for key, value in _pairs(cast(MappingNode, node))}


@dataclass
class _Reader:
    """Answers entry by entry; what several keys say of one option must agree."""

    result: Import
    overridden: set[str]
    tool: Tool
    settings: dict[str, Setting] = field(default_factory=lambda: {})
    failed: set[str] = field(default_factory=set[str])
    read_rows: list[tuple[Row, Entry]] = field(default_factory=lambda: [])

    def read(self, entry: Entry) -> None:
        row = find_anywhere(entry.place, entry.key)
        if row is None:
            self._unknown(entry)
            return
        try:
            answer = Skip("null") if entry.typed is None else row.takes.answer(entry.typed)
        except UnreadableValue as problem:
            if not (isinstance(entry.typed, str) and entry.typed.lower() in ("", "none", "null")):
                self._problem(entry, f"expected {problem}, found {in_words(entry.typed)}.")
                self.failed.add(original(row)[1])
                return
            answer = Skip("null")
        if reason := self.tool.unread(row, entry.key):
            self._says_nothing(entry, reason)
            return
        self._twice(row, entry, answer)
        self.read_rows.append((row, entry))
        self._take(row, entry, answer)

    def check_rank(self) -> None:
        """Hosts are counted from 0."""
        rank, hosts = self.result.number("machine_rank"), self.result.number("num_machines")
        if rank is not None and hosts is not None and rank >= hosts:
            entry = next(entry for row, entry in self.read_rows if row.key == "machine_rank")
            self._problem(entry, f"expected a number from 0 to num_machines - 1 = {hosts - 1}, found {rank}.")

    def _take(self, row: Row, entry: Entry, answer: Answer) -> None:
        typed = in_words(entry.typed)
        match answer:
            case Set(settings, remark):
                remarks = (remark, self._misplaced(row, entry), self.tool.remark(row, entry.key))
                remark = "; ".join(filter(None, remarks))
                for option, value in settings.items():
                    self._set(
                        entry, Setting(option, value, row.place, entry.key, typed, entry.line, entry.where, remark)
                    )
            case Skip(reason):
                self._says_nothing(entry, reason)
            case Launcher(reason, fact):
                self.result.launcher.append(Said(entry.key, typed, entry.where, reason, fact))
            case Refuse(reason, _, about):
                if about not in self.overridden:
                    self._problem(entry, f"{typed} can't be honoured: {reason}.\n  Way out: {answer.ways}.")
                    self.failed.add(original(row)[1])

    def _set(self, entry: Entry, setting: Setting) -> None:
        first = self.settings.setdefault(setting.option, setting)
        if first is not setting and first.value == setting.value:
            self._says_nothing(entry, f"agrees with {first.key} ({first.where})")
        elif first.value != setting.value and setting.option not in self.overridden:
            self._contradicts(entry, f"{first.key}: {first.typed} ({first.where})")

    def _twice(self, row: Row, entry: Entry, answer: Answer) -> None:
        """One key again, perhaps under another name: settings are compared one by one, the rest here."""
        if isinstance(answer, Set):
            return
        firsts = (first for earlier, first in self.read_rows if earlier is row and first.place == entry.place)
        first = next(firsts, None)
        if first is not None and in_words(first.typed).lower() != in_words(entry.typed).lower():
            self._contradicts(entry, f"{first.key}: {in_words(first.typed)} ({first.where})")

    def _misplaced(self, row: Row, entry: Entry) -> str:
        is_axolotls = (entry.place, row.place) == (TRAINER, FSDP) and self.tool.name != BY_TRAINER
        if row.place in (entry.place, SCRIPT) or is_axolotls:
            return ""
        return f"a key of {row.place}, found in {entry.place}"

    def _unknown(self, entry: Entry) -> None:
        if entry.key.startswith(("_", "#", "//", "$")) or entry.key.lower() in ("comment", "comments", "notes"):
            self._says_nothing(entry, "a comment")
            return
        near = nearest_key(entry.place, entry.key)
        what = "variable" if entry.place == ENVIRONMENT else f"key of {entry.place}"
        way = f"nearest: {near}." if near else "None is like it; leave it out."
        self._problem(entry, f"unknown {what}.\n  {way}")

    def _contradicts(self, entry: Entry, first: str) -> None:
        self._problem(entry, f"{in_words(entry.typed)} contradicts {first}; keep one.")

    def _says_nothing(self, entry: Entry, reason: str) -> None:
        self.result.not_needed.append(Said(entry.key, in_words(entry.typed), entry.where, reason))

    def _problem(self, entry: Entry, text: str) -> None:
        self.result.problems.append((entry.line, f"{entry.where}: {entry.key}: {text}"))
