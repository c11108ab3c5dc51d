"""What an engine says of itself without being imported: devices, packages, and what it does with each option."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from portable_fsdp.config.rules import Effect, Rule


class Package(NamedTuple):
    """What must be installed for an engine on a device."""

    name: str
    way: str  # to get it, a sentence
    is_ours: bool = True  # one of our extras installs it


@dataclass(frozen=True)
class EngineOptions:
    """One engine. `support.py` adds to its rules and effects those of all engines (`config/rules.py`)."""

    name: str
    engine: str  # "module:class", imported when the engine is opened
    packages: Mapping[str, Package]  # device -> what it needs there; the devices that it has
    made_for: tuple[str, ...]  # devices of which it is the engine where no other is asked for
    example_device: str  # where its options are shown if no device is named
    rules: tuple[Rule, ...]
    effects: tuple[Effect, ...]
    processes: Callable[[str, int | None, Callable[[str], int]], int]
    """(device, devices wanted, how many this host has of a device) -> processes of a plain start on one host."""
    launcher_counts_devices: bool  # its number of processes is that of devices; else only the engine knows
    section: str | None = None  # of the config, that no other engine has
    other_devices: Mapping[str, str] = field(default_factory=dict[str, str])  # device -> why not, and the way out
