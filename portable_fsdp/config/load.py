"""Turn YAML and overrides into a `Config`, or raise one error that names every problem by file, line and key.

The file is parsed into nodes first, so that each key keeps its line. Overrides replace values, pydantic validates the
result, and each of its errors is rewritten with the schema's terms: expected, found, where. `convert` adds defaults
from the files of other tools (`LayeredValues.add_default`).
"""

import difflib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import yaml
from pydantic import ValidationError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from portable_fsdp.config.describe import (
    Key,
    deepest_field,
    each_value,
    expected,
    expected_key,
    key_name,
    nearest,
    shortened,
    typing_hint,
    yaml_value,
)
from portable_fsdp.config.schema import REMOVED, Config, Model, Train
from portable_fsdp.config.yaml_text import MERGE_TAG, Dumper, first_comment, parse, problem_of
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.factory import search_folder

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from portable_fsdp.convert.facts import Import

ProblemsOf = Callable[[Config], Iterable[str]]
"""Function that returns further problems of a valid config, as messages."""

STAND_INS: dict[str, Any] = {"model": {"factory": "stand_in:model"}, "train": {"steps": 10**9}}
"""What stands for a missing model and a missing number of steps."""
_OF_STAND_INS = (r"model\.factory", r"stand_in:\w+", "1000000000")  # patterns

MAX_PROBLEMS = 20
"""Limit per message."""


class Loaded(NamedTuple):
    """A config, where each of its options was set, and the imported files of other tools."""

    config: Config
    origins: Mapping[str, str]  # `section.key` -> file:line or the override; no entry for a default
    imports: "tuple[Import, ...]"  # of `convert.read.read_config`


def read_file(path: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """Like `convert.read.load_config`, for our own YAML file alone; also returns the origins."""
    layers = LayeredValues(Path(path))
    layers.add_file(*parse_file(layers.path))
    for text in overrides:
        layers.override(text)
    return loaded(layers)


def make_config(**sections: Mapping[str, Any]) -> Config:
    """Make a config in Python, without a file: `make_config(optim={"lr": 1e-3}, train={"steps": 100})`.

    A class or function at the top level of a module can replace `module:function` (model.factory, data.factory,
    train.task, optim.factory). Two sections are optional: `model` for a loop that shards its own model (`shard`), and
    `train` for a loop that makes its own batches; its steps have one micro batch. Raises ConfigError with all problems
    in one message.
    """
    layers = LayeredValues(Path("make_config"))
    for section, values in sections.items():
        if not isinstance(cast(object, values), Mapping):
            raise ConfigError(
                f'make_config: {section}: expected a dict such as optim={{"lr": 1e-3}}, found {values!r:.80}.'
            )
        for key, value in values.items():
            name = f"{section}.{key}"
            layers.override(f"{name}={yaml_value(each_value(value, partial(_named, name)))}")
    layers.values = STAND_INS | layers.values
    config = layers.validated()
    absent: dict[str, Any] = {"model": Model.model_construct(), "train": Train.model_construct(global_batch=0)}
    return config.model_copy(update={name: section for name, section in absent.items() if name not in sections})


def _named(option: str, value: object) -> object:
    """Return the name of a class or function, `module:function`; another value as it is."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, Path):
        return str(value)
    name = getattr(value, "__qualname__", "")
    if not isinstance(value, type | FunctionType | BuiltinFunctionType) or not name.isidentifier():
        raise ConfigError(
            f"make_config: {option}: expected a YAML value, or a class or function at the top level of a module, found "
            f"{value!r:.80}.\n  Other processes import it by name: move it to the top level of its module."
        )
    return f"{value.__module__}:{name}"


def config_text(config: Config, *, only_set: bool = False) -> str:
    """Format the resolved config as YAML; `read_file` reads it back to an equal Config. `only_set`: without keys that
    nobody set."""
    return yaml.dump(
        config.model_dump(exclude_unset=only_set), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120
    )


def parse_file(path: Path, holds: str = "") -> tuple[MappingNode, dict[str, Any]]:
    """Return the root node and the values of a YAML or JSON file.

    Raises ConfigError if it can't be read or isn't a mapping; `holds` describes the expected content (default: our
    sections).
    """
    try:
        text = path.read_bytes().decode("utf-8-sig")
        if path.suffix in (".py", ".sh", ".ipynb"):
            raise ConfigError(
                f"{path}: a script, not a config: expected a YAML or JSON file.\n  Start the script itself, or write a "
                "config (docs/from_fsdp.md). Save TrainingArguments by args.to_json_string(), for --import."
            )
        # JSON may be indented with tabs, YAML may not.
        node, values = parse(text.replace("\t", " ") if text.lstrip().startswith("{") else text)
    except (FileNotFoundError, IsADirectoryError) as error:
        actual = "this is a folder" if isinstance(error, IsADirectoryError) else "no such file"
        files = {each.stem: each for each in path.parent.glob("*.y*ml")}
        near = difflib.get_close_matches(path.stem, files, n=1)
        fix = f"nearest: {files[near[0]]}" if near else "name a YAML config file"
        raise ConfigError(f"{path}: {actual}; {fix}.") from None
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error.reason}.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{line}: invalid YAML: {problem_of(error)}.") from None
    if not isinstance(node, MappingNode) or not isinstance(values, dict):
        actual = "nothing" if node is None else LayeredValues(path).value_text((), values)
        holds = holds or f"expected a mapping of sections ({', '.join(Config.model_fields)})"
        raise ConfigError(f"{path}: {holds}, found {actual}.")
    return node, cast(dict[str, Any], values)


# ------------------------------------------------------------------------------------------------------------- layers


class Origin(NamedTuple):
    """The place where a value was set."""

    is_override: bool
    place: int  # line in the file, or number of the override; messages are sorted by (is_override, place)
    where: str
    text: str | None  # the scalar as written, without quotes; None for mappings and lists


@dataclass
class LayeredValues:
    """The values of a file and of overrides, the origin of each, and the problems so far."""

    path: Path
    values: dict[str, Any] = field(default_factory=lambda: {})
    origins: dict[Key, Origin] = field(default_factory=lambda: {})
    problems: dict[str, Origin] = field(default_factory=lambda: {})  # by message, so that each appears once
    overrides: int = 0

    def add_file(self, node: MappingNode, values: dict[str, Any]) -> None:
        self._record(node, (), None)
        self.values = {k: {} if v is None and k in Config.model_fields else v for k, v in values.items()}

    def override(self, text: str) -> None:
        """Apply `section.key=value`."""
        self.overrides += 1
        origin = Origin(True, self.overrides, f"override '{shortened(text, 200)}'", None)
        name, equals, value_text = text.partition("=")
        key = tuple(name.strip().split("."))
        if not equals or not all(key):
            is_file = Path(name).suffix in (".yaml", ".yml", ".json")
            fix = f"\n  A config: --config={name}." if is_file else ""
            return self.add_problem(origin, (), f"expected section.key=value (optim.lr=3e-4).{fix}")
        if replacement := REMOVED.get(name.strip()):
            return self.add_problem(origin, key, f"{replacement}.\n  Leave it out.")
        try:
            node, value = parse(value_text)
        except yaml.YAMLError as error:
            return self.add_problem(origin, key, f"invalid YAML after `=`: {problem_of(error)}.")
        if comment := first_comment(value_text):
            quoted = value_text.strip().replace("'", "''")
            text = f"YAML would drop {comment!r} as a comment"
            return self.add_problem(origin, key, f"{text}.\n  Remove it, or quote the value: \"{name}='{quoted}'\".")
        self._set(key, value, origin._replace(text=_scalar_text(node)))
        return self._record(node, key, origin)

    def _record(self, node: Node | None, key: Key, origin: Origin | None) -> None:
        """Store the origin of all keys below `key` (`origin`, or their line in the file), and report duplicates."""
        if isinstance(node, SequenceNode):
            for index, item in enumerate(cast(list[Node], node.value)):
                self._record(item, (*key, str(index)), origin)
        if not isinstance(node, MappingNode):
            return
        seen: dict[str, Origin] = {}
        for key_node, value_node in cast(list[tuple[Node, Node]], node.value):
            if not isinstance(key_node, ScalarNode) or key_node.tag == MERGE_TAG:
                continue
            inner = (*key, str(key_node.value))
            line = cast(int, key_node.start_mark.line) + 1
            here = (origin or Origin(False, line, f"{self.path}:{line}", None))._replace(text=_scalar_text(value_node))
            if inner[-1] in seen:
                first = "" if origin else f" (first on line {seen[inner[-1]].place})"
                self.add_problem(here, inner, f"duplicate key{first}; keep one.")
            seen[inner[-1]] = self.origins[inner] = here
            self._record(value_node, inner, origin)

    def _set(self, key: Key, value: object, origin: Origin) -> None:
        inside = self.values
        for depth, part in enumerate(key[:-1], start=1):
            outer = inside.get(part)
            if outer is not None and not isinstance(outer, dict):
                actual = self.value_text(key[:depth], outer)
                text = f"expected {key_name(key[:depth])} to be a mapping, found {actual}."
                return self.add_problem(origin, key, text)
            inside[part] = dict(cast(dict[str, Any], outer or {}))  # copied: YAML aliases share mappings between keys
            inside = inside[part]
        inside[key[-1]] = value
        self.origins = {k: o for k, o in self.origins.items() if k[: len(key)] != key} | {key: origin}

    def add_default(self, option: str, value: object, origin: Origin | None) -> None:
        """Set `section.key`, which has no value yet; origin None: a placeholder that avoids a second error."""
        section, _, key = option.partition(".")
        if isinstance(self.values.setdefault(section, {}), dict):
            self.values[section] = {**self.values[section], key: value}
        if origin is not None:
            self.origins[section, key] = origin

    def given(self) -> dict[str, object]:
        """Return every `section.key` that has a value so far, with the value."""
        sections = {k: cast(dict[str, Any], v) for k, v in self.values.items() if isinstance(v, dict)}
        return {f"{name}.{key}": value for name, inside in sections.items() for key, value in inside.items()}

    def origin(self, key: Key) -> Origin:
        """Return where `key` was set: its own origin, else the last override inside it, its mapping's, or the file."""
        if not key:
            return Origin(False, 0, str(self.path), None)
        return self.origins.get(key) or self._override_inside(key) or self.origin(key[:-1])

    def where(self, option: str) -> str:
        return self.origin(tuple(option.split("."))).where

    def _override_inside(self, key: Key, named_in: str = "") -> Origin | None:
        """The last override inside `key`; with `named_in`, of a key that this text names."""
        inside = [(k, origin) for k, origin in self.origins.items() if k[: len(key)] == key and origin.is_override]
        overrides = [origin for k, origin in inside if not named_in or key_name(k) in named_in]
        return overrides[-1] if overrides else None

    def value_text(self, key: Key, value: object) -> str:
        """Format a value for a message; numbers as written by the user."""
        match value:
            case dict():
                return "a mapping"
            case list():
                return f"the list {shortened(repr(cast(object, value)))}"
            case None:
                return "null"
            case str():
                return shortened(repr(value))
            case _:
                text = self.origins[key].text if key in self.origins else None
                return str(value) if text is None else text

    # -------------------------------------------------------------------------------------------------- the result

    def validated(self, hint: Callable[[Key], str] = nearest, problems_of: ProblemsOf = lambda config: ()) -> Config:
        """Return the config; `hint` suggests a key for an unknown one. Raises ConfigError with all problems, and with
        those that `problems_of` finds in the rest of the config."""
        config, wrong = None, set[Key]()
        try:
            config = Config.model_validate(self.values)
        except ValidationError as error:
            details = error.errors(include_url=False)
            wrong = {tuple(str(part) for part in detail["loc"][:2]) for detail in details}
            for detail in itertools.islice(details, MAX_PROBLEMS + 1):
                self._add_schema_problem(detail, hint)
        if config is not None and not self.problems:
            return config
        messages = [_bounded(text) for text in sorted(self.problems, key=lambda text: self.problems[text][:2])]
        more = len(messages) - MAX_PROBLEMS
        messages[MAX_PROBLEMS:] = [f"... and {more} more problems."] if more > 0 else []
        if more <= 0 and (rest := config or self._without(wrong)) is not None:
            # Drop errors that a wrong key or a stand-in causes. Each line without indentation begins an error.
            names = [re.escape(key_name(key)) for key in wrong if len(key) > 1]
            follows = re.compile(rf"(?<![\w.])({'|'.join([*names, *_OF_STAND_INS])})(?![\w.])")
            found = (problem for text in problems_of(rest) for problem in re.split(r"\n(?! )", text))
            messages += [_bounded(problem) for problem in found if not follows.search(problem)]
        raise ConfigError("\n".join(messages))

    def _without(self, wrong: set[Key]) -> Config | None:
        """The config without the wrong keys, with stand-ins for what a run must have; None where that is wrong too."""
        values = {
            section: {key: value for key, value in cast(dict[str, Any], keys).items() if (section, key) not in wrong}
            for section, keys in self.values.items()
            if isinstance(keys, dict) and section in Config.model_fields and (section,) not in wrong
        }
        model, train = values.setdefault("model", {}), values.setdefault("train", {})
        if model.keys().isdisjoint(("architecture", "pretrained", "factory")):
            model |= STAND_INS["model"]
            train["task"] = "stand_in:loss"
        if train.keys().isdisjoint(("steps", "epochs")):
            train |= STAND_INS["train"]
        try:
            return Config.model_validate(values)
        except ValidationError:
            return None

    def add_problem(self, origin: Origin, key: Key, text: str) -> None:
        name = f" {key_name(key)}:" if key else ""
        self.problems.setdefault(f"{origin.where}:{name} {text}", origin)

    def _add_schema_problem(self, detail: "ErrorDetails", hint: Callable[[Key], str]) -> None:
        location = detail["loc"]
        key, schema = deepest_field(location)
        origin = None
        if detail["type"] in ("extra_forbidden", "invalid_key"):
            key = tuple(str(part) for part in location if part != "[key]")
            name, colon, value = key[-1].partition(":")
            fix = f"YAML needs a space after the colon: {{{name}: {value}}}" if colon else hint(key)
            text = f"unknown key.\n  {fix}."
        elif detail["type"] == "missing" and len(key) == len(location):  # else a list that is too short
            unknown = [name for name in self.values if name not in Config.model_fields]
            if len(key) == 1 and difflib.get_close_matches(key[0], unknown, n=1):
                return  # the unknown key is this one, misspelt
            text = "missing section." if len(key) == 1 else f"missing; expected {expected(schema)}."
        elif location[-1] == "[key]":
            origin = self.origin((*key, str(location[-2])))
            text = f"expected {expected_key(schema)} as each key, found the key {shortened(repr(location[-2]))}."
        elif detail["type"] == "value_error":
            # A rule about several keys: an override of a key that it names is the likely cause.
            origin = self._override_inside(key, detail["msg"]) or self.origins.get(key)
            text = f"{detail['msg'].removeprefix('Value error, ')}."
        else:
            value = _value_at(self.values, key)
            text = f"expected {expected(schema)}, found {self.value_text(key, value)}{typing_hint(schema, value)}."
        self.add_problem(origin or self.origin(key), key, text)


def loaded(
    layers: LayeredValues,
    imports: "tuple[Import, ...]" = (),
    hint: Callable[[Key], str] = nearest,
    problems_of: ProblemsOf = lambda config: (),
) -> Loaded:
    """Return the validated config with its origins. User modules (`model.factory`) can be imported from its folder."""
    config = layers.validated(hint, problems_of)
    names = (config.model.factory, config.data.factory, config.optim.factory)
    if any(names) or ":" in config.train.task:
        search_folder(layers.path.parent)
    return Loaded(config, {name: layers.where(name) for name in layers.given()}, imports)


def _scalar_text(node: Node | None) -> str | None:
    return str(node.value) if isinstance(node, ScalarNode) else None


def _bounded(message: str) -> str:
    """Cut the middle out of a long message, which quotes a file or an override."""
    return message if len(message) <= 3000 else f"{message[:2000]} [...] {message[-900:]}"


def _value_at(values: object, key: Key) -> object:
    for part in key:
        named = enumerate(cast(list[object], values)) if isinstance(values, list) else cast(Any, values).items()
        values = next(value for name, value in named if str(name) == part)
    return values
