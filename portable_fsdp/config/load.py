"""YAML and overrides to a `Config`, or one message that names every problem by file, line and key.

The file is composed into nodes first, so that each key keeps its line; overrides are laid over the values, pydantic
checks the whole, and what it finds is said again in the words of the schema: expected, found, where.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
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
    option_names,
    shortened,
    typing_hint,
    yaml_value,
)
from portable_fsdp.config.foreign.keys_accelerate import ACCELERATE
from portable_fsdp.config.foreign.read import Import, is_foreign, read_foreign
from portable_fsdp.config.foreign.table import find, nested_place
from portable_fsdp.config.schema import Config
from portable_fsdp.config.yaml_text import MERGE_TAG, Dumper, first_comment, line_of, parse, problem_of, scalar_text
from portable_fsdp.runtime.errors import ConfigError


class Loaded(NamedTuple):
    """A config, where each of its options was set, and what files of other tools said."""

    config: Config
    origins: Mapping[str, str]  # `section.key` -> file:line or the override; no entry for a default
    imports: tuple[Import, ...]


def load_config(path: str | Path, overrides: Sequence[str] = (), imports: Sequence[str | Path] = ()) -> Config:
    """Read a YAML file and lay `section.key=value` overrides over it; of two for one key the later one counts.

    Values of overrides are YAML; `model.architecture.hidden_size=64` sets inside that mapping. A section without keys
    is all defaults. `imports` are files of accelerate's or Trainer's, laid under ours, with which they may not differ;
    `path` may be one itself. Raises ConfigError with all problems of files and overrides in one message.
    """
    return read_config(path, overrides, imports).config


def read_config(path: str | Path, overrides: Sequence[str] = (), imports: Sequence[str | Path] = ()) -> Loaded:
    """As `load_config`, with the origin of each option and the imports."""
    source, foreign = _read_file(Path(path))
    roots = [*foreign, *(root for name in imports for root in _read_import(Path(name)))]
    for text in overrides:
        source.override(text)
    read = tuple(source.lay_under(place, root) for place, root in roots)
    config = _validated(source)
    options = {name: tuple(name.split(".")) for name in option_names()}
    origins = {name: source.origin(key).where for name, key in options.items() if source.is_set(key)}
    return Loaded(config, origins, read)


def _validated(source: "_Source") -> Config:
    try:
        config = Config.model_validate(source.values)
    except ValidationError as error:
        source.add_schema_problems(error)
        raise source.error() from None
    if source.problems:
        raise source.error()
    return config


def config_text(config: Config) -> str:
    """The resolved config as YAML that `load_config` reads back to an equal Config."""
    return yaml.dump(config.model_dump(), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


def check_batch(config: Config, data_parallel_size: int) -> int:
    """Micro batches per step (gradient accumulation): global_batch / (micro_batch * data_parallel_size devices).

    Raises ConfigError when that leaves a remainder, and names the nearest batch sizes that fit.
    """
    train = config.train
    rows = train.micro_batch * data_parallel_size
    if train.global_batch % rows == 0:
        return train.global_batch // rows
    below = train.global_batch // rows * rows
    global_batches = [str(size) for size in (below, below + rows) if size > 0]
    fits = f"train.global_batch={' or '.join(global_batches)}"
    if micro_batches := _micro_batches_that_fit(train.global_batch, train.micro_batch, data_parallel_size):
        fits += f", or train.micro_batch={' or '.join(map(str, micro_batches))}"
    raise ConfigError(
        f"train.global_batch: expected a multiple of train.micro_batch * devices = {train.micro_batch} * "
        f"{data_parallel_size} = {rows} sequences, found {train.global_batch}.\n  Set {fits}. Nothing was started."
    )


def replicas_of_model(config: Config, devices: int, hosts: int) -> int:
    """Copies of the model, each sharded over devices / copies: one a host under HYBRID_SHARD* if it doesn't say."""
    match config.sharding.strategy:
        case "FULL_SHARD" | "SHARD_GRAD_OP":
            return 1
        case "NO_SHARD":
            return devices
        case "HYBRID_SHARD" | "HYBRID_SHARD_ZERO2":
            return config.sharding.replicas or hosts


def total_steps(config: Config, rows: int) -> int:
    """Optimizer updates of the whole run: train.steps, or the whole steps in train.epochs over `rows` sequences.

    Raises ConfigError when the epochs don't fill one step.
    """
    train = config.train
    if train.epochs is None:
        return cast(int, train.steps)
    # The decimal as written: 0.29 epochs of 100 rows are 29 rows, which binary floats would make 28.
    steps = math.floor(Fraction(str(train.epochs)) * rows / train.global_batch)
    if steps < 1:
        raise ConfigError(
            f"train.epochs: expected at least one step of train.global_batch={train.global_batch} sequences, "
            f"found {train.epochs:g} epochs of {rows} sequences.\n"
            "  Raise train.epochs, lower train.global_batch or data.seq_len, or give more text. Nothing was started."
        )
    return steps


def _micro_batches_that_fit(global_batch: int, micro_batch: int, devices: int) -> list[int]:
    """The divisors of a device's share of the global batch next below and above `micro_batch`."""
    share, rest = divmod(global_batch, devices)
    if rest:
        return []
    small = [size for size in range(1, math.isqrt(share) + 1) if share % size == 0]
    divisors = sorted({*small, *(share // size for size in small)})
    below = [size for size in divisors if size < micro_batch]
    above = [size for size in divisors if size > micro_batch]
    return below[-1:] + above[:1]


class _Origin(NamedTuple):
    """Where a value was written."""

    is_override: bool
    place: int  # line in the file, or number of the override; messages come in the order of these two
    where: str
    written: str | None  # the scalar as typed, without quotes; None for mappings and lists


_INSTEAD = (
    ("train.steps", "train.epochs"),
    ("train.epochs", "train.steps"),
    ("model.architecture", "model.pretrained"),
    ("model.pretrained", "model.architecture"),
)
"""Options that go instead of one another: an override of the first takes the place of an imported second."""


@dataclass
class _Source:
    """The values of a file with overrides laid over them, where each came from, and what is wrong so far."""

    path: Path
    values: dict[str, Any] = field(default_factory=lambda: {})
    origins: dict[Key, _Origin] = field(default_factory=lambda: {})
    problems: dict[str, _Origin] = field(default_factory=lambda: {})  # by message, so that each stands once
    overrides: int = 0

    def add_problem(self, origin: _Origin, key: Key, text: str) -> None:
        name = f" {key_name(key)}:" if key else ""
        self.problems.setdefault(f"{origin.where}:{name} {text}", origin)

    def error(self) -> ConfigError:
        messages = sorted(self.problems, key=lambda message: self.problems[message][:2])
        return ConfigError("\n".join(messages) + " Nothing was started.")

    def record(self, node: Node, key: Key, origin: _Origin | None, above: tuple[Node, ...] = ()) -> None:
        """Note where `key` and all below it were written (`origin`, or the line in the file), and keys given twice."""
        if isinstance(node, SequenceNode):
            for index, item in enumerate(cast(list[Node], node.value)):
                if item not in above:
                    self.record(item, (*key, str(index)), origin, (*above, node))
        if not isinstance(node, MappingNode):
            return
        seen: dict[str, _Origin] = {}
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
            if value_node in above:
                self.add_problem(here, inner, "expected a value, found an alias of the mapping that it stands in.")
                continue
            self.record(value_node, inner, origin, (*above, node))

    def override(self, text: str) -> None:
        """Lay `section.key=value` over the values."""
        self.overrides += 1
        origin = _Origin(True, self.overrides, f"override '{text}'", None)
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

    def _set(self, key: Key, value: object, origin: _Origin) -> None:
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

    def lay_under(self, path: Path, root: Node) -> Import:
        """Add what a foreign file says where nothing is said yet; where our file says something else, a problem."""
        sections = {k: cast(dict[str, Any], v) for k, v in self.values.items() if isinstance(v, dict)}
        given = {f"{name}.{key}": value for name, inside in sections.items() for key, value in inside.items()}
        overridden = {".".join(key[:2]) for key, origin in self.origins.items() if origin.is_override}
        overridden |= {other for one, other in _INSTEAD if one in overridden}
        imported = read_foreign(path, root, given, overridden)
        for line, text in imported.problems:
            self.problems.setdefault(text, _Origin(False, line, "", None))
        for option, setting in imported.settings.items():
            key = tuple(option.split("."))
            if option in overridden:
                continue
            if option not in given:
                self.values[key[0]] = {**sections.get(key[0], {}), **self.values.get(key[0], {}), key[1]: setting.value}
                self.origins[key] = _Origin(False, setting.line, setting.where, setting.typed)
            elif given[option] != setting.value:
                here = f"{setting.where}: {setting.key}: {setting.typed} says {option}={yaml_value(setting.value)}"
                ours = f"{self.origin(key).where} says {option}={yaml_value(given[option])}"
                text = f"{here}, and {ours}.\n  Keep one, or override it: {option}=..."
                self.problems.setdefault(text, _Origin(False, setting.line, "", None))
        return imported

    def origin(self, key: Key) -> _Origin:
        """Where `key` was written: itself, else the last override inside it, else what it stands in, else the file."""
        if not key:
            return _Origin(False, 0, str(self.path), None)
        return self.origins.get(key) or self.override_inside(key) or self.origin(key[:-1])

    def override_inside(self, key: Key) -> _Origin | None:
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
        for detail in error.errors(include_url=False):
            key, schema = deepest_field(detail["loc"])
            if detail["type"] in ("extra_forbidden", "invalid_key"):
                key = tuple(str(part) for part in detail["loc"] if part != "[key]")
                theirs = len(key) == 1 and (find(ACCELERATE, key[0]) or nested_place(ACCELERATE, key[0]))
                way = "a key of accelerate's: give its file by --import=FILE" if theirs else nearest(key)
                self.add_problem(self.origin(key), key, f"unknown key.\n  {way}.")
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


def _read_file(path: Path) -> tuple[_Source, list[tuple[Path, Node]]]:
    """The file's values; or none, and the root of a file of another tool, which its keys tell."""
    node, values = _parsed(path)
    if is_foreign(node, set(Config.model_fields)):
        return _Source(path), [(path, node)]
    source = _Source(path)
    source.record(node, (), None)
    source.values = {k: {} if v is None and k in Config.model_fields else v for k, v in values.items()}
    return source, []


def _read_import(path: Path) -> list[tuple[Path, Node]]:
    node, _ = _parsed(path)
    if not is_foreign(node, set(Config.model_fields)):
        raise ConfigError(
            f"{path}: expected a file of accelerate's or Trainer's to import, found none of their keys.\n"
            "  A file of ours is named by --config. Nothing was started."
        )
    return [(path, node)]


def _parsed(path: Path) -> tuple[Node, dict[str, Any]]:
    """The node and the values of a file. Raises ConfigError when there is no mapping to go on with."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        # JSON may be indented with tabs, which YAML doesn't take.
        node, values = parse(text.replace("\t", " ") if text.lstrip().startswith("{") else text)
    except FileNotFoundError:
        raise ConfigError(f"{path}: expected a YAML config file, found no such file. Nothing was started.") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: expected a YAML config file, found a folder. Nothing was started.") from None
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}. Nothing was started.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected UTF-8 text, found {error.reason}. Nothing was started.") from None
    except yaml.YAMLError as error:
        where = f"{path}{line_of(error)}"
        raise ConfigError(f"{where}: expected YAML: {problem_of(error)}. Nothing was started.") from None
    if node is None or not isinstance(values, dict):
        found = _Source(path).found((), values) if node is not None else "nothing"
        sections = ", ".join(Config.model_fields)
        raise ConfigError(f"{path}: expected a mapping of sections ({sections}), found {found}. Nothing was started.")
    return node, cast(dict[str, Any], values)


def _origin_of_node(path: Path, key_node: Node, value_node: Node) -> _Origin:
    line = cast(int, key_node.start_mark.line) + 1
    return _Origin(False, line, f"{path}:{line}", scalar_text(value_node))


def _value_at(values: object, key: Key) -> object:
    for part in key:
        named = enumerate(cast(list[object], values)) if isinstance(values, list) else cast(Any, values).items()
        values = next(value for name, value in named if str(name) == part)
    return values
