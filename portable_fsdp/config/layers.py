"""The values of a config file, overrides laid over them and imports under them: where each came from, and problems."""

import itertools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import yaml
from pydantic import ValidationError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from portable_fsdp.config.describe import (
    Key,
    deepest_field,
    expected,
    key_name,
    nearest,
    shortened,
    typing_hint,
)
from portable_fsdp.config.yaml_text import MERGE_TAG, first_comment, parse, problem_of, scalar_text
from portable_fsdp.runtime.errors import ConfigError


class Origin(NamedTuple):
    """Where a value was written."""

    is_override: bool
    place: int  # line in the file, or number of the override; messages come in the order of these two
    where: str
    written: str | None  # the scalar as typed, without quotes; None for mappings and lists


_MAX_PROBLEMS = 20
"""Named in one message; a file that means harm has thousands."""


@dataclass
class LayeredValues:
    """The values of a file with overrides laid over them, where each came from, and what is wrong so far."""

    path: Path
    values: dict[str, Any] = field(default_factory=lambda: {})
    origins: dict[Key, Origin] = field(default_factory=lambda: {})
    problems: dict[str, Origin] = field(default_factory=lambda: {})  # by message, so that each stands once
    overrides: int = 0

    def add_problem(self, origin: Origin, key: Key, text: str) -> None:
        name = f" {key_name(key)}:" if key else ""
        self.problems.setdefault(f"{origin.where}:{name} {text}", origin)

    def error(self) -> ConfigError:
        messages = [_bounded(text) for text in sorted(self.problems, key=lambda text: self.problems[text][:2])]
        more = len(messages) - _MAX_PROBLEMS
        messages[_MAX_PROBLEMS:] = [f"... and {more} more problems."] if more > 0 else []
        return ConfigError("\n".join(messages) + " Nothing was started.")

    def record(self, node: Node, key: Key, origin: Origin | None) -> None:
        """Note where `key` and all below it were written (`origin`, or the line in the file), and keys given twice."""
        if isinstance(node, SequenceNode):
            for index, item in enumerate(cast(list[Node], node.value)):
                self.record(item, (*key, str(index)), origin)
        if not isinstance(node, MappingNode):
            return
        seen: dict[str, Origin] = {}
        for key_node, value_node in cast(list[tuple[Node, Node]], node.value):
            if not isinstance(key_node, ScalarNode) or key_node.tag == MERGE_TAG:
                continue
            inner = (*key, str(key_node.value))
            here = _origin_of_node(self.path, key_node, value_node) if origin is None else origin
            here = here._replace(written=scalar_text(value_node))
            if inner[-1] in seen:
                first = "" if origin else f" (first on line {seen[inner[-1]].place})"
                self.add_problem(here, inner, f"expected once, found twice{first}; keep one.")
            seen[inner[-1]] = self.origins[inner] = here
            self.record(value_node, inner, origin)

    def override(self, text: str) -> None:
        """Lay `section.key=value` over the values."""
        self.overrides += 1
        origin = Origin(True, self.overrides, f"override '{shortened(text, 200)}'", None)
        name, equals, value_text = text.partition("=")
        key = tuple(name.strip().split("."))
        if not equals or not all(key):
            self.add_problem(origin, (), "expected section.key=value (optim.lr=3e-4).")
            return
        try:
            node, value = parse(value_text)
        except yaml.YAMLError as error:
            self.add_problem(origin, key, f"expected YAML after `=`: {problem_of(error)}.")
            return
        if comment := first_comment(value_text):
            quoted = value_text.strip().replace("'", "''")
            found = f"expected a value without a YAML comment, found {comment!r}, which would count for nothing"
            self.add_problem(origin, key, f"{found}.\n  Leave it out, or quote the whole: \"{name}='{quoted}'\".")
            return
        self._set(key, value, origin._replace(written=scalar_text(node)))
        if node is not None:
            self.record(node, key, origin)

    def _set(self, key: Key, value: object, origin: Origin) -> None:
        inside = self.values
        for depth, part in enumerate(key[:-1], start=1):
            outer = inside.get(part)
            if outer is not None and not isinstance(outer, dict):
                found = self.found(key[:depth], outer)
                self.add_problem(origin, key, f"expected {key_name(key[:depth])} to be a mapping, found {found}.")
                return
            inside[part] = dict(cast(dict[str, Any], outer or {}))  # a copy: a YAML alias may share it with other keys
            inside = inside[part]
        inside[key[-1]] = value
        self.origins = {k: o for k, o in self.origins.items() if k[: len(key)] != key} | {key: origin}

    def is_set(self, key: Key) -> bool:
        """Whether a file, an import or an override says this option."""
        section = self.values.get(key[0])
        return isinstance(section, dict) and key[1] in section

    def add_default(self, option: str, value: object, origin: Origin | None) -> None:
        """Set `section.key`, which has no value yet; without an origin, to spare the schema's own message."""
        section, _, key = option.partition(".")
        if isinstance(self.values.setdefault(section, {}), dict):
            self.values[section] = {**self.values[section], key: value}
        if origin is not None:
            self.origins[section, key] = origin

    def given(self) -> dict[str, object]:
        """Every `section.key` that has a value so far."""
        sections = {k: cast(dict[str, Any], v) for k, v in self.values.items() if isinstance(v, dict)}
        return {f"{name}.{key}": value for name, inside in sections.items() for key, value in inside.items()}

    def origin(self, key: Key) -> Origin:
        """Where `key` was written: itself, else the last override inside it, else what it stands in, else the file."""
        if not key:
            return Origin(False, 0, str(self.path), None)
        return self.origins.get(key) or self.override_inside(key) or self.origin(key[:-1])

    def override_inside(self, key: Key) -> Origin | None:
        inside = [origin for k, origin in self.origins.items() if k[: len(key)] == key and origin.is_override]
        return inside[-1] if inside else None

    def found(self, key: Key, value: object) -> str:
        """A value in the words of a message, as it was typed."""
        if isinstance(value, dict):
            return "a mapping"
        if isinstance(value, list):
            return f"the list {shortened(repr(cast(object, value)))}"
        if value is None:
            return "null"
        if isinstance(value, str):
            return shortened(repr(value))
        written = self.origins[key].written if key in self.origins else None
        typed = str(value) if written is None else written
        return typed

    def add_schema_problems(self, error: ValidationError) -> None:
        for detail in itertools.islice(error.errors(include_url=False), _MAX_PROBLEMS + 1):
            key, schema = deepest_field(detail["loc"])
            if detail["type"] in ("extra_forbidden", "invalid_key"):
                key = tuple(str(part) for part in detail["loc"] if part != "[key]")
                self.add_problem(self.origin(key), key, f"unknown key.\n  {_way_from_unknown(key)}.")
            elif detail["type"] == "missing" and len(key) == len(detail["loc"]):  # else a list that is too short
                self.add_problem(self.origin(key), key, f"expected {expected(schema)}, found no such key.")
            elif detail["type"] == "value_error":
                self._add_section_problem(key, detail["msg"].removeprefix("Value error, "))
            else:
                value = _value_at(self.values, key)
                found = self.found(key, value) + typing_hint(schema, value)
                self.add_problem(self.origin(key), key, f"expected {expected(schema)}, found {found}.")

    def _add_section_problem(self, key: Key, text: str) -> None:
        """A rule over several keys: an override inside the section is the likely cause, so it is named first."""
        self.add_problem(self.override_inside(key) or self.origin(key), key, f"{text}.")


def _way_from_unknown(key: Key) -> str:
    from portable_fsdp.convert.keys_accelerate import ACCELERATE
    from portable_fsdp.convert.table import find, nested_place, option_meant

    if len(key) == 1 and (find(ACCELERATE, key[0]) or nested_place(ACCELERATE, key[0])):
        return "a key of accelerate's: give its file by --import=FILE"
    if len(key) == 2 and (option := option_meant(key[1])):
        return nearest(tuple(option.split(".")))
    return nearest(key)


def _bounded(message: str) -> str:
    """Without the middle of a long one, which quotes what a file or an override says."""
    return message if len(message) <= 3000 else f"{message[:2000]} [...] {message[-900:]}"


def _origin_of_node(path: Path, key_node: Node, value_node: Node) -> Origin:
    line = cast(int, key_node.start_mark.line) + 1
    return Origin(False, line, f"{path}:{line}", scalar_text(value_node))


def _value_at(values: object, key: Key) -> object:
    for part in key:
        named = enumerate(cast(list[object], values)) if isinstance(values, list) else cast(Any, values).items()
        values = next(value for name, value in named if str(name) == part)
    return values
