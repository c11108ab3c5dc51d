"""A foreign file to an `Import`: settings of ours, what the launcher decides, and every problem by file:line.

Each key of the file meets its row of the table. A key that its own tool doesn't read (`read_by`) sets nothing; one
outside its section is used, with a remark; an unknown one is a problem that names the nearest key.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from portable_fsdp.config.yaml_text import NULL_TAG
from portable_fsdp.convert.facts import ConfigTool, ForeignFacts, Import, ImportContext, KeyEntry
from portable_fsdp.convert.rules import combine
from portable_fsdp.convert.table import (
    ENVIRONMENT,
    MIXED,
    SCRIPT,
    TOP,
    KeyOutcome,
    KeyRow,
    find,
    find_anywhere,
    key_table,
    nearest_key,
    nested_place,
)
from portable_fsdp.convert.values import Raw, UnreadableValue, outcome_of

_SECRET = ("hub_token", "aws_access_key_id", "aws_secret_access_key")  # messages and translations repeat values
_NUMBERS = ("num_processes", "num_machines")
_NULL = KeyOutcome(ignore="null")
_DECIDED_ELSEWHERE = "another key or an override decides, or says the same"


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
    facts = ForeignFacts(result, context, ConfigTool.of_file(result.kind, [(row, e) for row, e in rows if row]))
    for row, entry in rows:
        if row is None:
            _read_unknown(entry, result)
        else:
            _read(facts, row, entry)
    facts.numbers = {**facts.numbers, **{fact: number for fact in _NUMBERS if (number := result.number(fact))}}
    facts.options |= {name: setting for name, setting in facts.keys.items() if not name.startswith("~")}
    combine(facts)
    used = {(setting.line, setting.key) for setting in facts.options.values()}
    for setting in facts.keys.values():
        if (setting.line, setting.key) not in used:
            result.ignore(setting, key_table().unused.get(setting.option, _DECIDED_ELSEWHERE))


def _entries(node: MappingNode, place: str, result: Import) -> Iterator[KeyEntry]:
    for key_node, value in _pairs(node):
        line = cast(int, key_node.start_mark.line) + 1
        key = str(key_node.value) if isinstance(key_node, ScalarNode) else "?"
        entry = KeyEntry(place, key, _raw(value), line, f"{result.path}:{line}")
        inside = nested_place(place, key)
        if key == "<<":
            result.add_problem(entry, "expected plain keys, found a YAML merge; write the keys out.")
        elif inside and isinstance(value, MappingNode):
            yield from _entries(value, inside, result)
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
        return result.ignore(entry, "empty")
    text = f"expected a mapping, found {entry.text}.\n  Write JSON without quotes around it; import a file by itself"
    return result.add_problem(entry, f"{text}, by --import, and leave {entry.key} out.")


def _pairs(node: MappingNode) -> list[tuple[Node, Node]]:
    return cast(list[tuple[Node, Node]], node.value)


def _raw(node: Node) -> Raw:
    if isinstance(node, ScalarNode):
        return None if node.tag == NULL_TAG else str(node.value)
    if isinstance(node, SequenceNode):
        return [_raw(item) for item in cast(list[Node], node.value)]
    return {str(key.value): _raw(value) for key, value in _pairs(cast(MappingNode, node))}


def _read(facts: ForeignFacts, row: KeyRow, entry: KeyEntry) -> None:
    """One key; keys that set one option must agree."""
    try:
        outcome = _NULL if entry.raw is None else outcome_of(row, entry.raw)
    except UnreadableValue as expected:
        if not (isinstance(entry.raw, str) and entry.raw.lower() in ("", "none", "null")):
            facts.result.add_problem(entry, f"expected {expected}, found {entry.text}.")
            facts.failed.add(row.name)
            return
        outcome = _NULL
    if reason := facts.tool.unread(row, outcome):
        facts.result.ignore(entry, reason)
        return
    if outcome.kind != "set":
        _compare_with_earlier(facts, row, entry)
    facts.rows.append((row, entry))
    match outcome.kind:
        case "set":
            in_place = row.place in (entry.place, SCRIPT) or entry.place == ENVIRONMENT
            remarks = (outcome.remark, "" if in_place else f"a key of {row.place}, found in {entry.place}")
            setting = entry._replace(place=row.place, remark="; ".join(filter(None, remarks)))
            for option, value in outcome.options.items():
                _set(facts, setting._replace(option=option, value=value))
        case "ignore":
            facts.result.ignore(entry, str(outcome.ignore))
        case "launcher":
            facts.result.launcher.append(entry._replace(remark=str(outcome.launcher), fact=outcome.fact))
        case _ if outcome.override not in facts.overridden:
            problem = f"{entry.text} can't be honoured: {outcome.refuse}.\n  Way out: {outcome.ways}."
            facts.result.add_problem(entry, problem)
            facts.failed.add(row.name)
        case _:
            pass


def _set(facts: ForeignFacts, setting: KeyEntry) -> None:
    first = facts.keys.setdefault(setting.option, setting)
    if first is not setting and first.value == setting.value:
        facts.result.ignore(setting, f"agrees with {first.key} ({first.where})")
    elif first.value != setting.value:
        facts.contradiction(setting.option, first, setting)


def _compare_with_earlier(facts: ForeignFacts, row: KeyRow, entry: KeyEntry) -> None:
    """One key twice, perhaps under another name; keys that set options are compared by option."""
    first = next((first for earlier, first in facts.rows if earlier is row and first.place == entry.place), None)
    if first is not None and first.text.lower() != entry.text.lower():
        facts.contradiction("", first, entry)


def _read_unknown(entry: KeyEntry, result: Import) -> None:
    if entry.key.startswith(("_", "#", "//", "$")) or entry.key.lower() in ("comment", "comments", "notes"):
        result.ignore(entry, "a comment")
        return
    near = nearest_key(entry.place, entry.key)
    kind = "variable" if entry.place == ENVIRONMENT else f"key of {entry.place}"
    way = f"nearest: {near}." if near else "No known name is similar; leave it out."
    result.add_problem(entry, f"unknown {kind}.\n  {way}")
