"""What an engine declares about itself: devices, packages, and what it does with each option. Imports no engine."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from portable_fsdp.config.rules import Rule
from portable_fsdp.runtime.process import Hosts

ProcessCount = Callable[[str, int | None, Callable[[str], int]], int]
"""(device, requested devices, count of a device on this host) -> processes of a plain start on one host."""

PlanMethod = Literal["fake step", "compiled step"]
"""How `plan` plans a step: it runs the step on fake tensors, or has its program compiled."""


class Package(NamedTuple):
    """What must be installed for an engine on a device."""

    name: str
    way: str  # to get it, a sentence
    is_usual: bool = True  # a plan or a way out may assume it; users of the other engines of a device know them
    check: Callable[[], None] = lambda: None  # raises BackendError where it can't work as it is installed


@dataclass(frozen=True)
class EngineOptions:
    """One engine. `support.py` adds the rules that all engines share (`config/rules.py`)."""

    engine: str  # "module:class", imported when the engine is opened
    packages: Mapping[str, Package]  # device -> what it needs there; the devices that it has
    example_device: str  # `explain` shows its options on this device by default
    rules: tuple[Rule, ...]
    processes: ProcessCount
    launcher_counts_devices: bool  # the launcher starts one process a device; else only the engine knows the number
    prepare_start: Callable[[str, int, Mapping[str, str]], Hosts | None] = lambda device, processes, environ: None
    """(device, processes of this host, environment), in the process that starts them -> where several hosts meet."""
    planned_by: Mapping[str, PlanMethod] = field(default_factory=dict[str, PlanMethod])
    """By device; without one where nothing plans for the engine."""
    notes: Mapping[str, str] = field(default_factory=dict[str, str])
    """`section.key` or `section.key=value` -> what the engine does, where the schema's description doesn't tell it."""
    delegated: Mapping[str, str] = field(default_factory=dict[str, str])  # `section.key` -> what decides in its place
    other_devices: Mapping[str, str] = field(default_factory=dict[str, str])  # device -> why not, and the way out
