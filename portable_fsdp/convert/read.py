"""A foreign file to an `Import`: settings of ours, what the launcher decides, and every problem by file:line.

The file is walked key by key; each key meets its row of the table. A key that its own tool doesn't read sets nothing
(`tools.py`); one outside its section is used, with a remark; an unknown one is a problem that names the nearest key.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from portable_fsdp.config.yaml_text import NULL_TAG
from portable_fsdp.convert.facts import ForeignFacts, ImportContext, Setting
from portable_fsdp.convert.rules import combine, unused
from portable_fsdp.convert.table import (
    ENVIRONMENT,
    FSDP,
    MIXED,
    SCRIPT,
    TOP,
    TRAINER,
    ForeignKey,
    KeyOutcome,
    find,
    find_anywhere,
    nearest_key,
    nested_place,
)
from portable_fsdp.convert.tools import BY_TRAINER, Tool, tool_of
from portable_fsdp.convert.values import Raw, UnreadableValue, in_words, outcome_of

_SECRET = ("hub_token", "aws_access_key_id", "aws_secret_access_key")  # messages and translations repeat values
_NUMBERS = ("num_processes", "num_machines")
_DEEP = 8  # mappings within mappings; more is an alias of a mapping in itself
_NULL = KeyOutcome(ignore="null")


class KeyEntry(NamedTuple):
    """One key of a file, or one variable, and where it stands."""

    place: str
    key: str
    raw: Raw
    line: int
    where: str  # file:line

    @property
    def text(self) -> str:
        return in_words(self.raw)


class Note(NamedTuple):
    """A key that sets nothing, and why."""

    key: str
    text: str
    where: str
    reason: str
    fact: str = ""  # of the launcher's: num_processes, num_machines, machine_rank, use_cpu, device

    def as_json(self) -> dict[str, str]:
        return {"key": self.key, "typed": self.text, "where": self.where, "reason": self.reason, "fact": self.fact}


@dataclass
class Import:
    """What a foreign file sets."""

    path: Path
    kind: str = ""  # the place that most of its keys belong to
    settings: dict[str, Setting] = field(default_factory=lambda: {})
    launcher: list[Note] = field(default_factory=lambda: [])
    not_needed: list[Note] = field(default_factory=lambda: [])
    total: tuple[Setting, int] | None = None  # devices by dp_replicate_size * dp_shard_size, and the key of them
    problems: list[tuple[int, str]] = field(default_factory=lambda: [])

    def number(self, fact: str) -> int | None:
        """A fact of the launcher's as a number; None where the file doesn't set it, or sets auto."""
        texts = [note.text.strip() for note in self.launcher if note.fact == fact]
        return int(texts[0]) if texts and texts[0].isdecimal() else None


def is_foreign(node: MappingNode) -> bool:
    """Whether the table knows a key of a file that has no section of ours."""
    keys = [str(key.value) for key, _ in _pairs(node) if isinstance(key, ScalarNode)]
    return any(nested_place("", key) or any(find(place, key) for place in TOP) for key in keys)


def stated_numbers(node: MappingNode) -> dict[str, int]:
    """The launcher's facts that are numbers, by the keys at the top of a file."""
    values = {str(key.value): value.value for key, value in _pairs(node) if isinstance(value, ScalarNode)}
    return {fact: int(values[fact]) for fact in _NUMBERS if str(values.get(fact, "")).isdecimal()}


def read_foreign(path: Path, node: MappingNode, context: ImportContext) -> Import:
    """Translate the file whose root is `node`. Raises nothing: problems are in the result."""
    keys = [str(key.value) for key, _ in _pairs(node)]
    kind = max(TOP, key=lambda place: sum(find(place, key) is not None for key in keys))
    result = Import(path, kind)
    read_entries(_entries(node, kind, result), result, context)
    return result


def read_entries(entries: Iterable[KeyEntry], result: Import, context: ImportContext) -> None:
    """Read the keys one by one, then combine them: the options that they set, and which keys set none."""
    rows = [(find_anywhere(entry.place, entry.key), entry) for entry in entries]
    tool = tool_of(result.kind, ((row, entry.key, entry.text) for row, entry in rows if row))
    reader = _KeyReader(result, context.overridden, tool)
    for row, entry in rows:
        reader.read(row, entry)
    reader.check_rank()
    sections = {row.place: (entry.line, entry.where) for row, entry in reversed(reader.read_rows)}
    own = {fact: number for fact in _NUMBERS if (number := result.number(fact))}
    context = context._replace(numbers={**context.numbers, **own})
    facts = ForeignFacts(reader.settings, sections, context, tool, result.problems, reader.failed)
    result.settings = combine(facts)
    result.total = facts.total
    result.not_needed += [Note(by.key, by.text, by.where, reason) for by, reason in unused(facts)]


def _entries(node: MappingNode, place: str, result: Import, depth: int = 0) -> Iterator[KeyEntry]:
    for key_node, value in _pairs(node):
        line = cast(int, key_node.start_mark.line) + 1
        key = str(key_node.value) if isinstance(key_node, ScalarNode) else "?"
        entry = KeyEntry(place, key, _raw(value), line, f"{result.path}:{line}")
        inside = nested_place(place, key)
        if key == "<<" or depth > _DEEP:
            text = "expected plain keys, found a YAML merge or a mapping within itself; write the keys out."
            _add_problem(result, entry, text)
        elif inside and isinstance(value, MappingNode):
            yield from _entries(value, inside, result, depth + 1)
        elif inside and inside != MIXED:
            _read_section_without_keys(entry, result)
        elif entry.raw and key in _SECRET:
            # TrainingArguments.to_dict writes <HUB_TOKEN>, whether there is one or not.
            yield entry._replace(raw=None if entry.raw == f"<{key.upper()}>" else "(hidden)")
        else:
            yield entry


def _read_section_without_keys(entry: KeyEntry, result: Import) -> None:
    """A section that is null or empty sets nothing; Trainer takes JSON in quotes and the path of a file, too."""
    if not entry.raw:
        result.not_needed.append(Note(entry.key, entry.text, entry.where, "empty"))
        return
    problem = f"expected a mapping, found {entry.text}."
    if entry.text.lstrip().startswith("{"):
        problem = "expected a mapping, found JSON in quotes.\n  Take the quotes away."
    elif entry.text.endswith((".json", ".yaml", ".yml")):
        problem += f"\n  Import that file by itself, --import={entry.text}, and leave {entry.key} out."
    _add_problem(result, entry, problem)


def _add_problem(result: Import, entry: KeyEntry, text: str) -> None:
    result.problems.append((entry.line, f"{entry.where}: {entry.key}: {text}"))


def _pairs(node: MappingNode) -> list[tuple[Node, Node]]:
    return cast(list[tuple[Node, Node]], node.value)


def _raw(node: Node, depth: int = 0) -> Raw:
    if depth > _DEEP:
        return "..."
    if isinstance(node, ScalarNode):
        return None if node.tag == NULL_TAG else str(node.value)
    if isinstance(node, SequenceNode):
        return [_raw(item, depth + 1) for item in cast(list[Node], node.value)]
    return {str(key.value): _raw(value, depth + 1) for key, value in _pairs(cast(MappingNode, node))}


@dataclass
class _KeyReader:
    """Reads entry by entry; keys that set one option must agree."""

    result: Import
    overridden: set[str]
    tool: Tool
    settings: dict[str, Setting] = field(default_factory=lambda: {})
    failed: set[str] = field(default_factory=set[str])
    read_rows: list[tuple[ForeignKey, KeyEntry]] = field(default_factory=lambda: [])

    def read(self, row: ForeignKey | None, entry: KeyEntry) -> None:
        if row is None:
            self._unknown(entry)
            return
        try:
            outcome = _NULL if entry.raw is None else outcome_of(row.answers, entry.raw)
        except UnreadableValue as expected:
            if not (isinstance(entry.raw, str) and entry.raw.lower() in ("", "none", "null")):
                _add_problem(self.result, entry, f"expected {expected}, found {entry.text}.")
                self.failed.add(row.in_file.name)
                return
            outcome = _NULL
        if reason := self.tool.unread(row, entry.key):
            self._ignore(entry, reason)
            return
        if outcome.kind != "set":
            self._compare_with_earlier(row, entry)
        self.read_rows.append((row, entry))
        self._apply(row, entry, outcome)

    def check_rank(self) -> None:
        """Hosts are counted from 0."""
        rank, hosts = self.result.number("machine_rank"), self.result.number("num_machines")
        if rank is not None and hosts is not None and rank >= hosts:
            entry = next(entry for row, entry in self.read_rows if row.name == "machine_rank")
            expected = f"expected a number from 0 to num_machines - 1 = {hosts - 1}"
            _add_problem(self.result, entry, f"{expected}, found {rank}.")

    def _apply(self, row: ForeignKey, entry: KeyEntry, outcome: KeyOutcome) -> None:
        match outcome.kind:
            case "set":
                remarks = (outcome.remark, self._misplaced(row, entry), self.tool.remark(row, entry.key))
                remark = "; ".join(filter(None, remarks))
                for option, value in outcome.options.items():
                    setting = (option, value, row.place, entry.key, entry.text, entry.line, entry.where, remark)
                    self._set(entry, Setting(*setting))
            case "ignore":
                self._ignore(entry, str(outcome.ignore))
            case "launcher":
                note = Note(entry.key, entry.text, entry.where, str(outcome.launcher), outcome.fact)
                self.result.launcher.append(note)
            case _ if outcome.about not in self.overridden:
                problem = f"{entry.text} can't be honoured: {outcome.refuse}.\n  Way out: {outcome.ways}."
                _add_problem(self.result, entry, problem)
                self.failed.add(row.in_file.name)
            case _:
                pass

    def _set(self, entry: KeyEntry, setting: Setting) -> None:
        first = self.settings.setdefault(setting.option, setting)
        if first is not setting and first.value == setting.value:
            self._ignore(entry, f"agrees with {first.key} ({first.where})")
        elif first.value != setting.value and setting.option not in self.overridden:
            self._contradict(entry, first.key, first.text, first.where)

    def _compare_with_earlier(self, row: ForeignKey, entry: KeyEntry) -> None:
        """One key twice, perhaps under another name; keys that set options are compared by option."""
        firsts = (first for earlier, first in self.read_rows if earlier is row and first.place == entry.place)
        first = next(firsts, None)
        if first is not None and first.text.lower() != entry.text.lower():
            self._contradict(entry, first.key, first.text, first.where)

    def _contradict(self, entry: KeyEntry, key: str, text: str, where: str) -> None:
        _add_problem(self.result, entry, f"{entry.text} contradicts {key}: {text} ({where}); keep one.")

    def _misplaced(self, row: ForeignKey, entry: KeyEntry) -> str:
        is_axolotls = (entry.place, row.place) == (TRAINER, FSDP) and self.tool.name != BY_TRAINER
        if row.place in (entry.place, SCRIPT) or is_axolotls:
            return ""
        return f"a key of {row.place}, found in {entry.place}"

    def _unknown(self, entry: KeyEntry) -> None:
        if entry.key.startswith(("_", "#", "//", "$")) or entry.key.lower() in ("comment", "comments", "notes"):
            self._ignore(entry, "a comment")
            return
        near = nearest_key(entry.place, entry.key)
        kind = "variable" if entry.place == ENVIRONMENT else f"key of {entry.place}"
        way = f"nearest: {near}." if near else "No known name is similar; leave it out."
        _add_problem(self.result, entry, f"unknown {kind}.\n  {way}")

    def _ignore(self, entry: KeyEntry, reason: str) -> None:
        self.result.not_needed.append(Note(entry.key, entry.text, entry.where, reason))
