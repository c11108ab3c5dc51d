"""YAML and overrides to a `Config`, or one message that names every problem by file, line and key.

The file is parsed into nodes first, so that each key keeps its line. Overrides replace values, pydantic checks the
whole, and each of its errors is rewritten in the words of the schema: expected, found, where.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import yaml
from pydantic import ValidationError
from yaml.nodes import MappingNode, Node, ScalarNode

from portable_fsdp.config.describe import option_names
from portable_fsdp.config.layers import LayeredValues
from portable_fsdp.config.schema import Config, Model, Train
from portable_fsdp.config.yaml_text import NULL_TAG, Dumper, line_of, parse, problem_of
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.factory import search_folder
from portable_fsdp.runtime.files import read_regular
from portable_fsdp.runtime.process import detect_launch, is_by_accelerate

if TYPE_CHECKING:
    from portable_fsdp.convert.facts import Import

_MAX_BYTES = 1 << 20
_DEEPSPEED_KEYS = {"zero_optimization", "train_micro_batch_size_per_gpu"}
"""Keys that only DeepSpeed's own file has."""


class Loaded(NamedTuple):
    """A config, where each of its options was set, and the imported files of other tools."""

    config: Config
    origins: Mapping[str, str]  # `section.key` -> file:line or the override; no entry for a default
    imports: "tuple[Import, ...]"


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    imports: Sequence[str | Path] = (),
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Read a YAML file and apply `section.key=value` overrides; the later of two overrides counts.

    Values of overrides are YAML; `model.architecture.hidden_size=64` sets a key inside that mapping. A section without
    keys has all defaults. `imports` are accelerate or Trainer configs that supply defaults and may not contradict our
    file; `path` may be one itself. `environ` (os.environ, or None) supplies defaults beneath these where
    `accelerate launch` started this process; it may not contradict an accelerate file, and the processes and hosts
    that files name must be the launcher's. Raises ConfigError with all problems in one message.
    """
    loaded = read_config(path, overrides, imports, environ)
    if environ is not None and loaded.imports:
        from portable_fsdp.convert.launcher import check_launcher_facts

        count = detect_launch(environ).world_size  # one process may drive any number of devices
        check_launcher_facts(loaded.imports, processes=count if count > 1 else None, environ=environ)
    return loaded.config


def make_config(**sections: Mapping[str, Any]) -> Config:
    """The config of a Python loop, without a file: `make_config(optim={"lr": 1e-3}, train={"steps": 100})`.

    A class or function at the top of a module may stand where a config has `module:function` (model.factory,
    data.factory, train.task, optim.factory). Two sections may be left out: `model` by a loop that lays out its own
    (`shard`), and `train` by one that makes its own batches, each step of which has one micro batch. Raises ConfigError
    with all problems in one message.
    """
    layers = LayeredValues(Path("make_config"))
    for section, values in sections.items():
        if not isinstance(cast(object, values), Mapping):
            raise ConfigError(
                f'make_config: {section}: expected a dict of keys, found {values!r:.80}.\n  As optim={{"lr": 1e-3}}.'
            )
        for key, value in values.items():
            name = f"{section}.{key}"
            text = yaml.dump(_named(name, value), Dumper=Dumper, default_flow_style=True, width=10**6)
            layers.override(f"{name}={text.removesuffix('...' + chr(10)).strip()}")
    stand_ins: dict[str, Any] = {"model": {"factory": "none:none"}, "train": {"steps": 1}}
    layers.values = stand_ins | layers.values
    config = _validated(layers)
    absent: dict[str, Any] = {"model": Model.model_construct(), "train": Train.model_construct(global_batch=0)}
    return config.model_copy(update={name: section for name, section in absent.items() if name not in sections})


def _named(option: str, value: object) -> object:
    """`module:function` of a class or function; what else stands in a config as it is."""
    if isinstance(value, Mapping):
        return {key: _named(option, inner) for key, inner in cast(Mapping[str, object], value).items()}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        return [_named(option, inner) for inner in cast(Sequence[object], value)]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    name = getattr(value, "__qualname__", "")
    if not isinstance(value, type | FunctionType | BuiltinFunctionType) or not name.isidentifier():
        raise ConfigError(
            f"make_config: {option}: expected a value of YAML, or a class or function at the top of a module, found "
            f"{value!r:.80}.\n  Other processes import it by its name: move it out of what it stands in."
        )
    return f"{value.__module__}:{name}"


def read_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    imports: Sequence[str | Path] = (),
    environ: Mapping[str, str] | None = None,
) -> Loaded:
    """As `load_config`, with the origin of each option and the imports."""
    layers, foreign = _read_file(Path(path))
    roots = [*foreign, *(_read_import(Path(name)) for name in imports)]
    for text in overrides:
        layers.override(text)
    imported: tuple[Import, ...] = ()
    if roots or is_by_accelerate(environ or {}):
        from portable_fsdp.convert.merge import lay_under

        imported = lay_under(layers, roots, environ or {}, is_config=bool(foreign))
    config = _validated(layers)
    names = (config.model.factory, config.data.factory, config.optim.factory)
    if any(names) or ":" in config.train.task:
        search_folder(Path(path).parent)
    options = {name: tuple(name.split(".")) for name in option_names()}
    origins = {name: layers.origin(key).where for name, key in options.items() if layers.is_set(key)}
    return Loaded(config, origins, imported)


def _validated(layers: LayeredValues) -> Config:
    try:
        config = Config.model_validate(layers.values)
    except ValidationError as error:
        layers.add_schema_problems(error)
        raise layers.error() from None
    if layers.problems:
        raise layers.error()
    return config


def config_text(config: Config) -> str:
    """The resolved config as YAML that `load_config` reads back to an equal Config."""
    return yaml.dump(config.model_dump(), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


def _read_file(path: Path) -> tuple[LayeredValues, list[tuple[Path, MappingNode]]]:
    """The file's values; or no values and the root node, where its keys show that it is another tool's file."""
    node, values = _parsed(path, f"expected a mapping of sections ({', '.join(Config.model_fields)})")
    layers = LayeredValues(path)
    if not _is_ours(node):
        from portable_fsdp.convert.read import is_foreign

        if is_foreign(node):
            return layers, [(path, node)]
    layers.record(node, (), None)
    layers.values = {k: {} if v is None and k in Config.model_fields else v for k, v in values.items()}
    return layers, []


def _is_ours(node: MappingNode) -> bool:
    """Whether a key is one of our sections; in `optim: adamw_torch` it is Trainer's."""
    return any(
        str(key.value) in Config.model_fields and (not isinstance(value, ScalarNode) or value.tag == NULL_TAG)
        for key, value in cast(list[tuple[Node, Node]], node.value)
    )


def _read_import(path: Path) -> tuple[Path, MappingNode]:
    expected = "expected a mapping of accelerate's or Trainer's keys (distributed_type, fsdp_config, ...)"
    node, values = _parsed(path, f"nothing to import: {expected}")
    if not values:
        raise ConfigError(f"{path}: nothing to import: {expected}, found an empty one.")
    if _is_ours(node):
        raise ConfigError(f"{path}: {expected}, found sections of ours.\n  Give a file of ours to --config.")
    return path, node


def _parsed(path: Path, expected: str) -> tuple[MappingNode, dict[str, Any]]:
    """The root node and the values of a file. Raises ConfigError, beginning with `expected`, unless it is a mapping."""
    try:
        text = read_regular(path, max_bytes=_MAX_BYTES).decode("utf-8-sig")
        # JSON may be indented with tabs, which YAML doesn't take.
        node, values = parse(text.replace("\t", " ") if text.lstrip().startswith("{") else text)
    except (FileNotFoundError, IsADirectoryError) as error:
        actual = "a folder" if isinstance(error, IsADirectoryError) else "no such file"
        raise ConfigError(f"{path}: expected a YAML config file, found {actual}.") from None
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected UTF-8 text, found {error.reason}.") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}{line_of(error)}: expected YAML: {problem_of(error)}.") from None
    if node is None or not isinstance(values, dict):
        actual = "nothing" if node is None else LayeredValues(path).value_text((), values)
        raise ConfigError(f"{path}: {expected}, found {actual}.")
    if not _DEEPSPEED_KEYS.isdisjoint(cast(dict[str, Any], values)):
        raise ConfigError(
            f"{path}: DeepSpeed's own JSON is not supported.\n  Give an accelerate file with zero_stage and offload "
            "keys in deepspeed_config, and set the rest by our own keys or Trainer's."
        )
    return cast(MappingNode, node), cast(dict[str, Any], values)
