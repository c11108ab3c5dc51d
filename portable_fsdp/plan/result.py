"""Result of a plan: plain values, which `--json` prints with a stable schema, and as text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, JsonValue, computed_field

from portable_fsdp.config.describe import Settings, yaml_value
from portable_fsdp.runtime.errors import table

_BAR = 40  # characters
_MOST_BUFFERS = 5
_GIB = 2**30

Progress = Callable[[str], None]
"""Called with the name of each stage as it begins."""


@dataclass(frozen=True)
class Moved:
    """Traffic of one kind of collective in one run of the program."""

    calls: int = 0
    bytes: int = 0  # of the full tensors gathered or reduced; all-to-all, collective-permute: of one device's tensors
    sent_bytes: int = 0  # by one device, in a ring

    def __add__(self, other: "Moved") -> "Moved":
        return Moved(self.calls + other.calls, self.bytes + other.bytes, self.sent_bytes + other.sent_bytes)

    def __mul__(self, times: int) -> "Moved":
        return Moved(self.calls * times, self.bytes * times, self.sent_bytes * times)


class _Result(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelFacts(_Result):
    """Facts of a model that a plan needs in addition to its step."""

    parameters: int  # a tied weight counts once
    tokens_per_row: int  # 1 if rows have no tokens
    rows: str  # contents of rows of data.factory: `pixel_values float32 [3, 224, 224], ...`; empty: text
    flops_per_token: float | None  # of forward and backward, as MFU counts them; None for a mixture of experts


class Buffer(_Result):
    """One of the largest buffers that live at the peak."""

    name: str  # a tensor's FQN, an operator, or an instruction of the program
    bytes: int
    where: str  # module or source line that allocated it; empty if unknown


class DeviceMemory(_Result):
    """Memory of the fullest device in a step."""

    parts: dict[str, int]  # of the peak, in bytes, in the order of display: weights, optimizer, ...
    limit_bytes: int | None  # available to a program on the device; None: unknown
    at: str = ""  # moment and module of the peak; empty if unknown
    biggest: tuple[Buffer, ...] = ()  # the largest first
    host_bytes: int = 0  # offloaded to the host, for one device's process
    is_least: bool = False  # a lower bound: the device needs more, unknown how much
    rematerialised: int = 0  # instructions that the compiler repeats on its own because memory is short

    @computed_field
    @property
    def peak_bytes(self) -> int:
        """Sum of the parts, which must fit at once."""
        return sum(self.parts.values())

    @computed_field
    @property
    def verdict(self) -> Literal["fits", "fits by recomputing", "does not fit", "unknown"]:
        """Verdict on the fit; "by recomputing": the compiler made it fit on its own, at the cost of time."""
        if self.limit_bytes is None:
            return "unknown"
        if self.peak_bytes > self.limit_bytes:
            return "does not fit"
        if self.is_least:
            return "unknown"
        return "fits by recomputing" if self.rematerialised else "fits"


class Work(_Result):
    """One device's work in one step."""

    matmul_flops: dict[str, float]  # dtype of the factors -> FLOPs; a multiply-add counts two
    collectives: dict[str, Moved]
    """Kind and dtype (`all_gather bfloat16`) -> calls, bytes of full tensors, sent_bytes of one device in a ring."""
    sent_bytes: dict[str, float]  # link (`ici`, `nvlink`, `network`) -> bytes that one device sends over it


class Expected(_Result):
    """Expected time of a step, at the speeds that measured runs reach."""

    seconds: float
    # Seconds of the compute stream: products, attention, elementwise, copies, and exposed communication, when it waits.
    parts: dict[str, float]
    # Kind of collective -> bytes that one device sends while compute waits, because the program's schedule stops there.
    synchronous_bytes: dict[str, float]


class EnginePlan(_Result):
    """An engine's plan of a step."""

    model: ModelFacts
    memory: DeviceMemory
    work: Work
    method: str  # how the figures were computed, and what they don't cover
    notes: tuple[str, ...] = ()  # further facts for the user
    expected: Expected | None = None  # None: unknown, as `Plan.expected`


class Plan(_Result):
    """The plan of a config on hardware that may be absent."""

    schema_version: int = 1  # of `--json`; raised when a key changes its meaning
    on: str  # the value of `--on`: `v5p:2x2x4`
    hardware: str  # description: `16 chips of TPU v5p on 4 hosts`
    devices: int
    backend: str  # the engine that would run there
    settings: dict[str, JsonValue]  # the config keys that matter most for a plan, and others that are set
    parameters: int
    memory: DeviceMemory
    work: Work
    tokens_per_step: int  # of the global batch
    # In a step, as the trainer counts them for MFU: all of attention, without recomputation.
    model_flops_per_device: float | None
    peak_flops: float | None  # of one device in the compute dtype, for MFU
    expected: Expected | None  # None: unknown
    # Whose shares of the peak the expected time takes, or why it is unknown; empty: those of runs on this hardware.
    expected_note: str
    method: str  # how the figures were computed, and what they don't cover
    notes: tuple[str, ...] = ()
    planned_in_s: float

    @computed_field
    @property
    def expected_tokens_per_second_per_device(self) -> float | None:
        return self.tokens_per_step / self.devices / self.expected.seconds if self.expected else None

    @computed_field
    @property
    def expected_mfu(self) -> float | None:
        flops, peak = self.model_flops_per_device, self.peak_flops
        return flops / peak / self.expected.seconds if self.expected and flops and peak else None


class Comparison(_Result):
    """What a run measured, to compare with its plan."""

    steps: int  # measured steps, without the first ones
    seconds: float  # median step time
    tokens_per_second: float  # over all devices, at that median
    mfu: float | None  # median; None if the run recorded none


class Tried(BaseModel):
    """A setting of the grid with its plan, or the reason for its refusal."""

    settings: Settings
    plan: Plan | None = None
    refusal: str | None = None

    @property
    def fits(self) -> bool:
        """True if it fits; False if unknown."""
        return self.plan is not None and self.plan.memory.verdict in ("fits", "fits by recomputing")

    @property
    def words(self) -> str:
        """Its settings as command line overrides."""
        return " ".join(f"{key}={value}" for key, value in self.settings.items())

    @property
    def line(self) -> str:
        """Summary line: the setting and its result."""
        if self.plan is None:
            return f"{self.words}: refused: {(self.refusal or '').partition(chr(10))[0]}"
        memory = self.plan.memory
        return f"{self.words}: {memory.peak_bytes / _GIB:.2f} GiB, {memory.verdict}"


# ------------------------------------------------------------------------------------------------------------ in words


def text(plan: Plan) -> str:
    """Format a whole plan as text."""
    settings = ", ".join(f"{key}={yaml_value(value)}" for key, value in plan.settings.items())
    lines = [f"{plan.on}: {plan.hardware}, backend {plan.backend}", f"{_count(plan.parameters)} parameters; {settings}"]
    lines += ["", *_memory_lines(plan.memory), "", *_expected_lines(plan), ""]
    lines += [*(f"note: {note}" for note in plan.notes), f"{plan.method} Planned in {plan.planned_in_s:.0f} s."]
    return "\n".join(lines)


def sweep_text(tried: Sequence[Tried], keys: Sequence[str]) -> str:
    """Format a table with a row per plan, in order; `keys`: the settings to show."""
    rows = [(*keys, "GiB", "verdict", "tokens/s per device, expected")]
    for setting in tried:
        if plan := setting.plan:
            rate = plan.expected_tokens_per_second_per_device
            memory = (f"{plan.memory.peak_bytes / _GIB:.2f}", plan.memory.verdict)
            speed = "unknown" if rate is None else f"{rate:,.0f}"
            rows.append((*(setting.settings.get(key, "-") for key in keys), *memory, speed))
    return table(rows, right=(len(keys), len(keys) + 2))


def measures_text(tried: Sequence[Tried]) -> str:
    """Format the measure that makes it fit, and those tried before; the last of `tried` fits, or none does."""
    *before, last = tried
    if not last.fits:
        return "\n".join(["None of these makes it fit:", *(f"  {each.line}" for each in tried)])
    tried_before = ["Tried before:", *(f"  {each.line}" for each in before)]
    return "\n".join([f"It fits with {last.line}.", *(tried_before if before else [])])


def comparison_text(plan: Plan, run: Comparison) -> str:
    """Format a table of the run's figures beside those of its plan."""
    seconds, rate = plan.expected and plan.expected.seconds, plan.expected_tokens_per_second_per_device
    figures = [
        ("s a step", seconds, run.seconds, ".4g"),
        ("tokens/s in total", rate and rate * plan.devices, run.tokens_per_second, ",.0f"),
        ("mfu", plan.expected_mfu, run.mfu, ".1%"),
    ]
    rows = [("", "planned", f"measured in {run.steps} steps")]
    for name, planned, measured, form in figures:
        planned, measured = ("-" if value is None else format(value, form) for value in (planned, measured))
        rows.append((name, planned, measured))
    return table(rows, right=(1, 2))


def _memory_lines(memory: DeviceMemory) -> list[str]:
    limit = memory.limit_bytes
    least = "at least " if memory.is_least else ""
    of = "" if limit is None else f" of {limit / _GIB:.2f}"
    share = "" if limit is None else f" ({memory.peak_bytes / limit:.0%})"
    most = max(limit or 0, memory.peak_bytes)
    rows = [(name, f"{size / _GIB:.3f}", _bar(size, most)) for name, size in memory.parts.items() if size]
    lines = [f"memory of the fullest device: {least}{memory.peak_bytes / _GIB:.2f}{of} GiB{share}: {memory.verdict}"]
    lines.append(table(rows, right=(1,), indent="  "))
    if memory.host_bytes:
        lines.append(f"  offloaded to the host, per device: {memory.host_bytes / _GIB:.2f} GiB")
    if memory.at:
        lines.append(f"  the peak is in {memory.at}")
    if memory.rematerialised:
        lines.append(f"  the compiler rematerialises {memory.rematerialised} instructions, because memory is short")
    if memory.biggest:
        lines.append("  largest there:")
        shown = [(f"{b.bytes / _GIB:.3f}", b.name, b.where) for b in memory.biggest[:_MOST_BUFFERS]]
        lines.append(table(shown, right=(0,), indent="    "))
    return lines


def _expected_lines(plan: Plan) -> list[str]:
    expected, each = plan.expected, plan.expected_tokens_per_second_per_device
    if expected is None or each is None:
        return [f"time of a step: unknown, since {plan.expected_note}"]
    spent = sorted(expected.parts.items(), key=lambda part: -part[1])
    parts = ", ".join(f"{name} {_seconds(seconds)}" for name, seconds in spent)
    mfu = "" if plan.expected_mfu is None else f"; mfu {plan.expected_mfu:.0%}"
    note = f", {plan.expected_note}" if plan.expected_note else ""
    lines = [f"time of a step, expected: {_seconds(expected.seconds)}{note}", f"  {parts}"]
    shown = {kind: size for kind, size in expected.synchronous_bytes.items() if size >= 0.005 * _GIB}
    if shown:
        sent = ", ".join(f"{kind} {size / _GIB:.2f} GiB" for kind, size in shown.items())
        lines.append(f"  sent while compute waits: {sent}")
    return [*lines, f"  {each:,.0f} tokens/s per device, {each * plan.devices:,.0f} in total{mfu}"]


def _bar(size: int, most: int) -> str:
    """Draw a bar as long as its share of the widest one, in eighths of a character."""
    eighths = round(size / most * _BAR * 8) if most else 0
    full, rest = divmod(eighths, 8)
    return "█" * full + ("" if not rest else chr(0x2588 + 8 - rest))


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 0.1 else f"{seconds * 1e3:.3g} ms"


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)
