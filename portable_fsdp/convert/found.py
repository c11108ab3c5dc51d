"""What a rule over several keys reads and writes: what they said one by one, and the options that follow."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from portable_fsdp.convert.tools import Tool


class Setting(NamedTuple):
    """One option of ours (or `~name`), and the foreign key that sets it."""

    option: str
    value: object
    place: str
    key: str  # as typed
    typed: str
    line: int  # 0: a variable
    where: str  # file:line, or the launcher
    remark: str

    @property
    def origin(self) -> str:
        """`accelerate.yaml:12`, or `accelerate launch: FSDP_SHARDING_STRATEGY`."""
        return self.where if self.line else f"{self.where}: {self.key}"

    @property
    def said(self) -> str:
        return f"{self.where}: {self.key}: {self.typed}"


@dataclass
class Found:
    """What the keys of a file said one by one, and the options that follow."""

    said: Mapping[str, Setting]  # by option or ~name
    numbers: Mapping[str, int]  # the launcher's facts that are numbers: num_processes, num_machines
    sections: Mapping[str, tuple[int, str]]  # place -> line and where of its first key
    given: Mapping[str, object]  # options that our own file or an override sets
    overridden: set[str]
    problems: list[tuple[int, str]]
    tool: Tool
    failed: frozenset[str]  # keys, by their names in the table, whose values were refused or couldn't be read
    total: tuple[Setting, int] | None = None  # the devices that the sizes of parallelism_config make together
    options: dict[str, Setting] = field(init=False)

    def __post_init__(self) -> None:
        self.options = {name: setting for name, setting in self.said.items() if not name.startswith("~")}

    def value(self, name: str) -> object:
        return self.said[name].value if name in self.said else None

    def number(self, name: str) -> float | None:
        value = self.value(name)
        return value if isinstance(value, int | float) else None

    def whole(self, name: str) -> int | None:
        value = self.value(name)
        return value if isinstance(value, int) else None

    def set(self, option: str, value: object, source: Setting, remark: str = "") -> None:
        """An option that follows from `source`; what another key already said must be the same."""
        setting = source._replace(option=option, value=value, remark="; ".join(filter(None, (source.remark, remark))))
        first = self.options.setdefault(option, setting)
        if first.value != value:
            self.contradiction(option, first, setting)

    def contradiction(self, option: str, first: Setting, second: Setting) -> None:
        """Two keys that say different things of one option, which an override of it settles."""
        if option not in self.overridden:
            self.problem(second, f"{second.typed} contradicts {first.key}: {first.typed} ({first.where}); keep one.")

    def problem(self, at: Setting, text: str) -> None:
        self.problems.append((at.line, f"{at.where}: {at.key}: {text}"))
