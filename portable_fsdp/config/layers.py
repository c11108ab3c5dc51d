"""The values of a config file, with overrides above and imports beneath: where each came from, and all problems."""

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
    expected_key,
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
    text: str | None  # the scalar as written, without quotes; None for mappings and lists


_MAX_PROBLEMS = 20
"""In one message; a hostile file has thousands."""


@dataclass
class LayeredValues:
    """The values of a file and overrides, where each came from, and the problems so far."""

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
        return ConfigError("\n".join(messages))

    def record(self, node: Node, key: Key, origin: Origin | None) -> None:
        """Store the origin of all keys below `key` (`origin`, or their line in the file), and report duplicates."""
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
            line = cast(int, key_node.start_mark.line) + 1
            here = (origin or Origin(False, line, f"{self.path}:{line}", None))._replace(text=scalar_text(value_node))
            if inner[-1] in seen:
                first = "" if origin else f" (first on line {seen[inner[-1]].place})"
                self.add_problem(here, inner, f"expected once, found twice{first}; keep one.")
            seen[inner[-1]] = self.origins[inner] = here
            self.record(value_node, inner, origin)

    def override(self, text: str) -> None:
        """Apply `section.key=value`."""
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
            text = f"expected a value without a YAML comment, found {comment!r}, which YAML would drop"
            self.add_problem(origin, key, f"{text}.\n  Leave it out, or quote the whole: \"{name}='{quoted}'\".")
            return
        self._set(key, value, origin._replace(text=scalar_text(node)))
        if node is not None:
            self.record(node, key, origin)

    def _set(self, key: Key, value: object, origin: Origin) -> None:
        inside = self.values
        for depth, part in enumerate(key[:-1], start=1):
            outer = inside.get(part)
            if outer is not None and not isinstance(outer, dict):
                actual = self.value_text(key[:depth], outer)
                self.add_problem(origin, key, f"expected {key_name(key[:depth])} to be a mapping, found {actual}.")
                return
            inside[part] = dict(cast(dict[str, Any], outer or {}))  # a copy: a YAML alias may share it with other keys
            inside = inside[part]
        inside[key[-1]] = value
        self.origins = {k: o for k, o in self.origins.items() if k[: len(key)] != key} | {key: origin}

    def is_set(self, key: Key) -> bool:
        """Whether a file, an import or an override sets this option."""
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
        """Where `key` was set: itself, else the last override inside it, else its mapping, else the file."""
        if not key:
            return Origin(False, 0, str(self.path), None)
        return self.origins.get(key) or self.override_inside(key) or self.origin(key[:-1])

    def override_inside(self, key: Key) -> Origin | None:
        inside = [origin for k, origin in self.origins.items() if k[: len(key)] == key and origin.is_override]
        return inside[-1] if inside else None

    def value_text(self, key: Key, value: object) -> str:
        """A value for a message, a number as it was written."""
        if isinstance(value, dict):
            return "a mapping"
        if isinstance(value, list):
            return f"the list {shortened(repr(cast(object, value)))}"
        if value is None:
            return "null"
        if isinstance(value, str):
            return shortened(repr(value))
        text = self.origins[key].text if key in self.origins else None
        return str(value) if text is None else text

    def add_schema_problems(self, error: ValidationError) -> None:
        for detail in itertools.islice(error.errors(include_url=False), _MAX_PROBLEMS + 1):
            key, schema = deepest_field(detail["loc"])
            if detail["type"] in ("extra_forbidden", "invalid_key"):
                key = tuple(str(part) for part in detail["loc"] if part != "[key]")
                self.add_problem(self.origin(key), key, f"unknown key.\n  {_unknown_key_hint(key)}.")
            elif detail["type"] == "missing" and len(key) == len(detail["loc"]):  # else a list that is too short
                self.add_problem(self.origin(key), key, f"expected {expected(schema)}, found no such key.")
            elif detail["loc"][-1] == "[key]":
                name = detail["loc"][-2]
                text = f"expected {expected_key(schema)} as each key, found the key {shortened(repr(name))}."
                self.add_problem(self.origin((*key, str(name))), key, text)
            elif detail["type"] == "value_error":
                # A rule over several keys: an override in the section is the likely cause.
                text = detail["msg"].removeprefix("Value error, ")
                self.add_problem(self.override_inside(key) or self.origin(key), key, f"{text}.")
            else:
                value = _value_at(self.values, key)
                actual = self.value_text(key, value) + typing_hint(schema, value)
                self.add_problem(self.origin(key), key, f"expected {expected(schema)}, found {actual}.")


def _unknown_key_hint(key: Key) -> str:
    from portable_fsdp.convert.table import ACCELERATE, find, nested_place, option_meant

    if len(key) == 1 and (find(ACCELERATE, key[0]) or nested_place(ACCELERATE, key[0])):
        return "a key of accelerate's: give its file by --import=FILE"
    if (len(key) == 1 or len(key) == 2) and (option := option_meant(key[-1])):
        return nearest(tuple(option.split(".")))
    return nearest(key)


def _bounded(message: str) -> str:
    """Cut out the middle of a long message, which quotes a file or an override."""
    return message if len(message) <= 3000 else f"{message[:2000]} [...] {message[-900:]}"


def _value_at(values: object, key: Key) -> object:
    for part in key:
        named = enumerate(cast(list[object], values)) if isinstance(values, list) else cast(Any, values).items()
        values = next(value for name, value in named if str(name) == part)
    return values
