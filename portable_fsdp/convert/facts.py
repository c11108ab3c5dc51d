"""What a rule over several keys reads and writes: what they set one by one, and the options that follow."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from portable_fsdp.convert.tools import Tool


class Setting(NamedTuple):
    """One option of ours (or fact, `~name`), and the foreign key that sets it."""

    option: str
    value: object
    place: str
    key: str  # as written
    text: str  # the value, as written
    line: int  # 0: a variable
    where: str  # file:line, or the launcher
    remark: str

    @property
    def origin(self) -> str:
        """`accelerate.yaml:12`, or `accelerate launch: FSDP_SHARDING_STRATEGY`."""
        return self.where if self.line else f"{self.where}: {self.key}"

    @property
    def quote(self) -> str:
        """`accelerate.yaml:12: mixed_precision: bf16`."""
        return f"{self.where}: {self.key}: {self.text}"


class ImportContext(NamedTuple):
    """What is set beside a foreign file."""

    given: Mapping[str, object]  # options that our own file or an override sets
    overridden: set[str]  # options that an override settles: refusals and contradictions about them are gone
    numbers: Mapping[str, int]  # num_processes and num_machines, as others state them


@dataclass
class ForeignFacts:
    """What the keys of a file set one by one (`keys`), and the options that follow."""

    keys: Mapping[str, Setting]  # by option or fact
    sections: Mapping[str, tuple[int, str]]  # place -> line and where of its first key
    context: ImportContext
    tool: Tool
    problems: list[tuple[int, str]]
    failed: set[str]  # keys, by their names in the table, whose values were refused or couldn't be read
    total: tuple[Setting, int] | None = None  # the devices that the sizes of parallelism_config make together

    def __post_init__(self) -> None:
        self.given, self.overridden, self.numbers = self.context
        self.options = {name: setting for name, setting in self.keys.items() if not name.startswith("~")}

    def value(self, name: str) -> object:
        return self.keys[name].value if name in self.keys else None

    def number(self, name: str) -> float | None:
        value = self.value(name)
        return value if isinstance(value, int | float) else None

    def integer(self, name: str) -> int | None:
        value = self.value(name)
        return value if isinstance(value, int) else None

    def can_read(self, *keys: str) -> bool:
        """Whether no problem with these keys was reported, of which a rule's own would be a consequence."""
        return self.failed.isdisjoint(keys)

    @property
    def steps(self) -> object:
        """The steps of the run, as far as a file or an override sets them."""
        return self.given.get("train.steps", self.value("train.steps"))

    def set(self, option: str, value: object, source: Setting, remark: str = "") -> None:
        """An option that follows from `source`; a contradiction where another key already set another value."""
        setting = source._replace(option=option, value=value, remark="; ".join(filter(None, (source.remark, remark))))
        first = self.options.setdefault(option, setting)
        if first.value != value:
            self.contradiction(option, first, setting)

    def contradiction(self, option: str, first: Setting, second: Setting) -> None:
        """Two keys that set one option to different values; an override of it settles them."""
        if option not in self.overridden:
            self.problem(second, f"{second.text} contradicts {first.key}: {first.text} ({first.where}); keep one.")

    def problem(self, at: Setting, text: str) -> None:
        self.problems.append((at.line, f"{at.where}: {at.key}: {text}"))
