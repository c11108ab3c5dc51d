"""The values of a config file, overrides laid over them and imports under them: where each came from, and problems."""

import itertools
from collections.abc import Mapping, Sequence
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
    yaml_value,
)
from portable_fsdp.config.foreign.environment import read_environment
from portable_fsdp.config.foreign.found import Setting
from portable_fsdp.config.foreign.keys_accelerate import ACCELERATE, SCRIPT
from portable_fsdp.config.foreign.keys_fsdp import FSDP
from portable_fsdp.config.foreign.keys_trainer import TRAINER
from portable_fsdp.config.foreign.read import Import, Said, read_foreign
from portable_fsdp.config.foreign.table import find, nested_place, option_meant
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

_INSTEAD = (
    ("train.steps", "train.epochs"),
    ("train.epochs", "train.steps"),
    ("model.architecture", "model.pretrained"),
    ("model.pretrained", "model.architecture"),
)
"""Options that go instead of one another: an override of the first takes the place of an imported second."""

_NEEDED = (("model.pretrained", "model.architecture", "FOLDER"), ("train.steps", "train.epochs", 100))
"""Options without a default, what goes instead of each, and an example."""

_DATA = (("data.source", "text"), ("data.path", "FILES"), ("data.tokenizer", "FOLDER"))
"""What the data is, and examples: the defaults are those of a first try, and hardly what another tool's file meant."""

_WHOSE = {
    ACCELERATE: "a file of accelerate's",
    TRAINER: "a file of Trainer's arguments",
    FSDP: "an fsdp_config",
    SCRIPT: "a file of a script's arguments",
}


@dataclass
class Source:
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

    def lay_under(self, path: Path, root: MappingNode, numbers: Mapping[str, int]) -> Import:
        """Add what a foreign file says where nothing is said yet; where our file says something else, a problem.

        `numbers` are processes and machines as the other files or the launcher state them.
        """
        given = self._given()
        overridden = {".".join(key[:2]) for key, origin in self.origins.items() if origin.is_override}
        overridden |= {other for one, other in _INSTEAD if one in overridden}
        imported = read_foreign(path, root, given, overridden, numbers)
        self._add(imported, given, overridden)
        return imported

    def lay_environment_under(self, environ: Mapping[str, str], imports: Sequence[Import]) -> list[Import]:
        """Add what `accelerate launch` says where nothing is said yet; a problem where an imported file differs.

        Our own file and overrides go first, and so do a Trainer's arguments, as in Trainer itself.
        """
        given = self._given()
        theirs = {
            option
            for imported in imports
            for option, setting in imported.settings.items()
            if imported.kind != TRAINER and self.origin(tuple(option.split("."))).where == setting.origin
        }
        first = {option for option in given if option not in theirs}
        first |= {other for one, other in _INSTEAD if one in first}
        imported = read_environment(environ, given, first)
        if imported is None:
            return []
        for option in [option for option in imported.settings if option in first]:
            setting = imported.settings.pop(option)
            said = f"{self.origin(tuple(option.split('.'))).where} goes first"
            imported.not_needed.append(Said(setting.key, setting.typed, setting.where, said))
        self._add(imported, given, first)
        return [imported]

    def _add(self, imported: Import, given: Mapping[str, object], overridden: set[str]) -> None:
        for line, text in imported.problems:
            self.problems.setdefault(text, Origin(False, line, "", None))
        for option, setting in imported.settings.items():
            key = tuple(option.split("."))
            if option in overridden:
                continue
            other = next((other for one, other in _INSTEAD if one == option and given.get(other) is not None), option)
            if other != option:
                self._add_difference(setting, other, given)
            elif option not in given:
                self.values[key[0]] = {**self.values.get(key[0], {}), key[1]: setting.value}
                self.origins[key] = Origin(False, setting.line, setting.origin, setting.typed)
            elif given[option] != setting.value:
                self._add_difference(setting, option, given)

    def _add_difference(self, setting: Setting, option: str, given: Mapping[str, object]) -> None:
        """A foreign key says something else than `option`, which is its own or goes instead of it."""
        here = f"{setting.said} says {setting.option}={yaml_value(setting.value)}"
        ours = f"{self.origin(tuple(option.split('.'))).where} says {option}={yaml_value(given[option])}"
        text = f"{here}, and {ours}.\n  Keep one, or override it: {option}=..."
        self.problems.setdefault(text, Origin(False, setting.line, "", None))

    def require_the_rest(self, imported: Import) -> None:
        """A problem where a file of another tool is the config, and nothing says the model or the length of the run."""
        missing = [
            (option, other, example)
            for option, other, example in _NEEDED
            if not any(self.is_set(tuple(name.split("."))) for name in (option, other))
        ]
        if not missing:
            return
        for option, _, example in missing:  # in the place of it, or the schema would miss it once more
            section, key = option.split(".")
            if isinstance(self.values.setdefault(section, {}), dict):
                self.values[section] = {**self.values[section], key: example}
        wanted = " and ".join(f"{option} (or {other})" for option, other, _ in missing)
        says = ", ".join(f"{name}={yaml_value(setting.value)}" for name, setting in imported.settings.items())
        examples = " ".join(f"{option}={example}" for option, _, example in missing)
        examples += "".join(
            f" {option}={example}" for option, example in _DATA if not self.is_set(tuple(option.split(".")))
        )
        if "train.eval_every" in imported.settings and not self.is_set(("data", "eval_split")):
            examples += " data.eval_split=5%"
        self.add_problem(
            Origin(False, 0, str(imported.path), None),
            (),
            f"{_WHOSE[imported.kind]}; a run needs {wanted} too.\n  It says {says or 'nothing that we need'}.\n"
            f"  Add: python -m portable_fsdp.launch --config={imported.path} {examples}\n"
            "  Without data.source a run trains on CPython's documentation, byte by byte.\n"
            f"  Or lay it under yours: --config=YOURS.yaml --import={imported.path} (explain shows what comes of it).",
        )

    def _given(self) -> dict[str, object]:
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
