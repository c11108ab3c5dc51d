"""What an engine declares about itself: devices, packages, and what it does with each option. Imports no engine."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from pydantic import BaseModel

from portable_fsdp.config.describe import value_of, yaml_value
from portable_fsdp.config.rules import Deployment, Effect, Kind, Rule
from portable_fsdp.config.schema import Config


class Package(NamedTuple):
    """What must be installed for an engine on a device."""

    name: str
    way: str  # to get it, a sentence
    is_ours: bool = True  # one of our extras installs it


@dataclass(frozen=True)
class EngineOptions:
    """One engine. `support.py` adds the rules and effects that all engines share (`config/rules.py`)."""

    name: str
    engine: str  # "module:class", imported when the engine is opened
    packages: Mapping[str, Package]  # device -> what it needs there; the devices that it has
    made_for: tuple[str, ...]  # devices for which it is the default engine
    example_device: str  # `explain` shows its options on this device by default
    rules: tuple[Rule, ...]
    effects: Mapping[str, str]
    """`section.key`, `section.key|key` or `section.key=value|value` -> what the engine does with it."""
    processes: Callable[[str, int | None, Callable[[str], int]], int]
    """(device, requested devices, count of a device on this host) -> processes of a plain start on one host."""
    launcher_counts_devices: bool  # the launcher starts one process a device; else only the engine knows the number
    delegated: Mapping[str, str] = field(default_factory=dict[str, str])  # as `effects`; the engine decides by itself
    other_devices: Mapping[str, str] = field(default_factory=dict[str, str])  # device -> why not, and the way out


def section_model(section: str) -> type[BaseModel]:
    """The schema of a section of the config."""
    return cast(type[BaseModel], Config.model_fields[section].annotation)


def default_of(option: str) -> Any:
    """The schema's default of `section.key`."""
    section, _, key = option.partition(".")
    return section_model(section).model_fields[key].default


class Refused(Rule):
    """A rule whose first way out is the option's default; without `when` it refuses every other value."""

    def __init__(
        self,
        option: str,
        case: str,
        reason: str,
        *other_ways: str,
        when: Callable[[Config, Deployment], bool] | None = None,
    ) -> None:
        default = default_of(option)
        is_refused = when or (lambda config, _: value_of(config, option) != default)
        super().__init__(option, case, is_refused, reason, (f"{option}={yaml_value(default)}", *other_ways))


def effects(table: Mapping[str, str], kind: Kind) -> Iterator[Effect]:
    """The rows of an `EngineOptions` table, spelled out."""
    for options, what in table.items():
        section, _, rest = options.partition(".")
        keys, equals, values = rest.partition("=")
        names = [f"{section}.{key}{equals}{value}" for key in keys.split("|") for value in values.split("|")]
        yield Effect(tuple(names), what, kind)
