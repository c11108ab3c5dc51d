"""YAML and overrides to a `Config`, or one message that names every problem by file, line and key.

The file is composed into nodes first, so that each key keeps its line; overrides are laid over the values, pydantic
checks the whole, and what it finds is said again in the words of the schema: expected, found, where.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import yaml
from pydantic import ValidationError
from yaml.nodes import MappingNode, Node, ScalarNode

from portable_fsdp.config.describe import option_names
from portable_fsdp.config.layers import LayeredValues
from portable_fsdp.config.schema import Config
from portable_fsdp.config.yaml_text import NULL_TAG, Dumper, line_of, parse, problem_of
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.process import detect_launch, is_by_accelerate

if TYPE_CHECKING:
    from portable_fsdp.convert.read import Import


_OF_DEEPSPEED = {"zero_optimization", "train_micro_batch_size_per_gpu"}
"""Keys that only DeepSpeed's own file has."""


class Loaded(NamedTuple):
    """A config, where each of its options was set, and what files of other tools said."""

    config: Config
    origins: Mapping[str, str]  # `section.key` -> file:line or the override; no entry for a default
    imports: "tuple[Import, ...]"


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    imports: Sequence[str | Path] = (),
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Read a YAML file and lay `section.key=value` overrides over it; of two for one key the later one counts.

    Values of overrides are YAML; `model.architecture.hidden_size=64` sets inside that mapping. A section without keys
    is all defaults. `imports` are files of accelerate's or Trainer's, laid under ours, with which they may not differ;
    `path` may be one itself. `environ` (os.environ, or nothing) is read where `accelerate launch` started this
    process, and laid under all of these; with an accelerate file among them it may not differ, and the processes and
    hosts that files name must be those of whoever started this process.
    Raises ConfigError with all problems of files, overrides and environment in one message.
    """
    loaded = read_config(path, overrides, imports, environ)
    if environ is not None and loaded.imports:
        from portable_fsdp.convert.launcher import check_launcher_facts

        count = detect_launch(environ).world_size  # of one process nobody knows here how many devices it drives
        check_launcher_facts(loaded.imports, processes=count if count > 1 else None, environ=environ)
    return loaded.config


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
    """The file's values; or none, and the root of a file of another tool, which its keys tell."""
    node, values = _parsed(path, f"expected a mapping of sections ({', '.join(Config.model_fields)})")
    if not _is_ours(node):
        from portable_fsdp.convert.read import is_foreign

        if is_foreign(node):
            return LayeredValues(path), [(path, node)]
    layers = LayeredValues(path)
    layers.record(node, (), None)
    layers.values = {k: {} if v is None and k in Config.model_fields else v for k, v in values.items()}
    return layers, []


def _is_ours(node: MappingNode) -> bool:
    """Whether a key is a section of ours; `optim: adamw_torch` is none, but Trainer's."""
    return any(
        str(key.value) in Config.model_fields and (not isinstance(value, ScalarNode) or value.tag == NULL_TAG)
        for key, value in cast(list[tuple[Node, Node]], node.value)
    )


def _read_import(path: Path) -> tuple[Path, MappingNode]:
    theirs = "expected a mapping of accelerate's or Trainer's keys (distributed_type, fsdp_config, learning_rate, ...)"
    node, values = _parsed(path, f"nothing to import: {theirs}")
    if not values:
        raise ConfigError(f"{path}: nothing to import: {theirs}, found an empty one. Nothing was started.")
    if _is_ours(node):
        raise ConfigError(
            f"{path}: {theirs}, found sections of ours.\n  A file of ours is named by --config. Nothing was started."
        )
    return path, node


def _parsed(path: Path, wanted: str) -> tuple[MappingNode, dict[str, Any]]:
    """The node and the values of a file. Raises ConfigError when there is no mapping to go on with, as `wanted`."""
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
        found = LayeredValues(path).found((), values) if node is not None else "nothing"
        raise ConfigError(f"{path}: {wanted}, found {found}. Nothing was started.")
    root = cast(MappingNode, node)
    if not _OF_DEEPSPEED.isdisjoint(cast(dict[str, Any], values)):
        raise ConfigError(
            f"{path}: DeepSpeed's own JSON is not read.\n  Give an accelerate file with its zero_stage and offload "
            "keys in deepspeed_config, and what else it says by our own keys or Trainer's. Nothing was started."
        )
    return root, cast(dict[str, Any], values)
