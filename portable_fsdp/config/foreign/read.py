"""A foreign file to an `Import`: settings of ours, what is the launcher's business, and every problem by file:line.

The file is walked key by key; each key meets its row of the table. A key that stands where its own tool would not look
is taken at its word, with a remark; one that no row knows is a problem, with the nearest key.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, cast

from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from portable_fsdp.config.foreign.keys_fsdp import FSDP, MIXED
from portable_fsdp.config.foreign.keys_trainer import TRAINER
from portable_fsdp.config.foreign.keys_variables import ENVIRONMENT
from portable_fsdp.config.foreign.rows import (
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
from portable_fsdp.config.foreign.rules import Found, Setting, combine, silent
from portable_fsdp.config.foreign.table import SCRIPT, TOP, find, find_anywhere, nearest_key, nested_place

_NULL_TAG = "tag:yaml.org,2002:null"
_SECRET = ("hub_token", "aws_access_key_id", "aws_secret_access_key")  # messages and translations repeat values
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
    problems: list[tuple[int, str]] = field(default_factory=lambda: [])

    def number(self, fact: str) -> int | None:
        """A fact of the launcher's as a number; None where the file doesn't say it, or says auto."""
        said = [item.typed for item in self.launcher if item.fact == fact]
        return int(said[0]) if said and said[0].isdecimal() else None


def is_foreign(node: Node, sections: set[str]) -> bool:
    """Whether a file is another tool's, by its keys: one that the table knows, and no section of ours."""
    if not isinstance(node, MappingNode):
        return False
    pairs = cast(list[tuple[Node, Node]], node.value)
    keys = [str(key.value) for key, _ in pairs if isinstance(key, ScalarNode)]
    ours = any(
        str(key.value) in sections and not (isinstance(value, ScalarNode) and value.tag != _NULL_TAG)
        for key, value in pairs
    )
    return not ours and any(nested_place("", key) or any(find(place, key) for place in TOP) for key in keys)


def read_foreign(path: Path, node: Node, given: Mapping[str, object], overridden: set[str]) -> Import:
    """Translate the file whose root is `node`; `given` are the options that our own file and overrides set.

    What an override says is not asked of the file: its refusals of that option, and contradictions about it, are gone.
    Raises nothing: problems are in the result.
    """
    result = Import(path)
    if not isinstance(node, MappingNode):
        result.problems.append((0, f"{path}: expected a mapping, of accelerate's or Trainer's keys."))
        return result
    result.kind = _kind(node)
    settings, sections = read_entries(_entries(node, result.kind, result), result, overridden)
    numbers = {fact: number for fact in ("num_processes", "num_machines") if (number := result.number(fact))}
    settle(result, Found(settings, numbers, sections, given, overridden, result.problems))
    return result


def read_entries(
    entries: Iterable[Entry], result: Import, overridden: set[str]
) -> tuple[dict[str, Setting], dict[str, tuple[int, str]]]:
    """What the keys say one by one, and the places that they belong to: line and where of the first key of each."""
    reader = _Reader(result, overridden)
    for entry in entries:
        reader.read(entry)
    return reader.settings, {row.place: (entry.line, entry.where) for row, entry in reversed(reader.read_rows)}


def settle(result: Import, found: Found) -> None:
    """What the keys say together: the options that they set, and which keys set none."""
    result.settings = combine(found)
    for setting, reason in silent(found, result.settings):
        result.not_needed.append(Said(setting.key, setting.typed, setting.where, reason))


def _kind(node: MappingNode) -> str:
    """The place that most keys at the top belong to."""
    keys = [str(key.value) for key, _ in cast(list[tuple[Node, Node]], node.value)]
    return max(TOP, key=lambda place: sum(find(place, key) is not None for key in keys))


def _entries(node: MappingNode, place: str, result: Import, depth: int = 0) -> Iterator[Entry]:
    for key_node, value in cast(list[tuple[Node, Node]], node.value):
        line = cast(int, key_node.start_mark.line) + 1
        key = str(key_node.value) if isinstance(key_node, ScalarNode) else "?"
        inside = nested_place(place, key)
        if key == "<<" or depth > _DEEP:
            text = "expected plain keys, found a YAML merge or a mapping within itself; write the keys out."
            result.problems.append((line, f"{result.path}:{line}: {key}: {text}"))
        elif inside and isinstance(value, MappingNode):
            yield from _entries(value, inside, result, depth + 1)
        elif inside and inside != MIXED:
            yield from _not_a_mapping(key, value, line, result)
        else:
            typed = _typed(value)
            hidden = "(hidden)" if typed and key in _SECRET else typed
            yield Entry(place, key, hidden, line, f"{result.path}:{line}")


def _not_a_mapping(key: str, value: Node, line: int, result: Import) -> Iterator[Entry]:
    """A section that is null or empty says nothing; a path in its place is a file of its own."""
    typed = _typed(value)
    where = f"{result.path}:{line}"
    if not typed:
        result.not_needed.append(Said(key, in_words(typed), where, "empty"))
    else:
        text = f"expected a mapping, found {in_words(typed)}.\n  If it is a file, give it by itself: --import=FILE."
        result.problems.append((line, f"{where}: {key}: {text}"))
    yield from ()


def _typed(node: Node, depth: int = 0) -> Typed:
    if depth > _DEEP:
        return "..."
    if isinstance(node, ScalarNode):
        return None if node.tag == _NULL_TAG else str(node.value)
    if isinstance(node, SequenceNode):
        return [_typed(item, depth + 1) for item in cast(list[Node], node.value)]
    pairs = cast(list[tuple[Node, Node]], node.value)
    return {str(key.value): _typed(value, depth + 1) for key, value in pairs}


@dataclass
class _Reader:
    """Answers entry by entry; what several keys say of one option must agree."""

    result: Import
    overridden: set[str]
    settings: dict[str, Setting] = field(default_factory=lambda: {})
    read_rows: list[tuple[Row, Entry]] = field(default_factory=lambda: [])

    def read(self, entry: Entry) -> None:
        row = find_anywhere(entry.place, entry.key)
        where = entry.where
        typed = in_words(entry.typed)
        if row is None:
            self._unknown(entry, where)
            return
        is_null = entry.typed is None or (isinstance(entry.typed, str) and entry.typed.lower() in ("", "none", "null"))
        try:
            answer = Skip("null") if entry.typed is None else row.takes.answer(entry.typed)
        except UnreadableValue as problem:
            if not is_null:
                self._problem(entry.line, where, entry.key, f"expected {problem}, found {typed}.")
                return
            answer = Skip("null")
        self._twice(row, entry, answer, where)
        self.read_rows.append((row, entry))
        self._take(row, entry, answer, where)

    def _take(self, row: Row, entry: Entry, answer: Answer, where: str) -> None:
        typed = in_words(entry.typed)
        match answer:
            case Set(settings, remark):
                remarks = [remark, _misplaced(row, entry)]
                remarks += [f"in its own tool: {row.dead}; taken at its word"] if row.dead else []
                for option, value in settings.items():
                    text = "; ".join(filter(None, remarks))
                    self._set(Setting(option, value, row.place, entry.key, typed, entry.line, where, text))
            case Skip(reason):
                self.result.not_needed.append(Said(entry.key, typed, where, reason))
            case Launcher(reason, fact):
                self.result.launcher.append(Said(entry.key, typed, where, reason, fact))
            case Refuse(reason, way, about):
                if not self.overridden.intersection(about):
                    text = f"{typed} can't be honoured: {reason}.\n  Way out: {way}."
                    self._problem(entry.line, where, entry.key, text)

    def _set(self, setting: Setting) -> None:
        first = self.settings.setdefault(setting.option, setting)
        if first is not setting and first.value == setting.value:
            self._quiet(setting, f"agrees with {first.key} ({first.where})")
        elif first.value != setting.value and setting.option not in self.overridden:
            text = f"{setting.typed} contradicts {first.key}: {first.typed} ({first.where}); keep one."
            self._problem(setting.line, setting.where, setting.key, text)

    def _quiet(self, setting: Setting, reason: str) -> None:
        self.result.not_needed.append(Said(setting.key, setting.typed, setting.where, reason))

    def _twice(self, row: Row, entry: Entry, answer: Answer, where: str) -> None:
        """One key again, perhaps under another name: settings are compared one by one, the rest here."""
        for earlier, first in self.read_rows:
            if earlier is row and first.place == entry.place and not isinstance(answer, Set):
                if in_words(first.typed).lower() != in_words(entry.typed).lower():
                    text = (
                        f"{in_words(entry.typed)} contradicts {first.key}: {in_words(first.typed)} (line {first.line})"
                    )
                    self._problem(entry.line, where, entry.key, f"{text}; keep one.")
                return

    def _unknown(self, entry: Entry, where: str) -> None:
        if entry.key.startswith(("_", "#", "//", "$")) or entry.key.lower() in ("comment", "comments", "notes"):
            self.result.not_needed.append(Said(entry.key, in_words(entry.typed), where, "a comment"))
            return
        near = nearest_key(entry.place, entry.key)
        what = "variable" if entry.place == ENVIRONMENT else f"key of {entry.place}"
        text = f"unknown {what}.\n  " + (f"nearest: {near}." if near else "None is like it; leave it out.")
        self._problem(entry.line, where, entry.key, text)

    def _problem(self, line: int, where: str, key: str, text: str) -> None:
        self.result.problems.append((line, f"{where}: {key}: {text}"))


def _misplaced(row: Row, entry: Entry) -> str:
    if row.place == entry.place or row.place == SCRIPT or (entry.place, row.place) == (TRAINER, FSDP):
        return ""
    return f"a key of {row.place}, found in {entry.place}"
