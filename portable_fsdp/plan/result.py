"""What a plan says, in plain values: what the report prints, and what `--json` prints with a stable schema."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, JsonValue, computed_field

from portable_fsdp.plan.hlo import Moved

FitVerdict = Literal["fits", "fits by recomputing", "does not fit", "unknown"]

Progress = Callable[[str], None]
"""Called with a few words on what begins."""


class _Result(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelFacts(_Result):
    """What a plan needs of a model besides its step."""

    parameters: int  # a tied weight once
    tokens_per_row: int  # 1 where rows have no tokens
    rows: str  # what rows of data.factory hold: `pixel_values float32 [3, 224, 224], ...`; empty: text
    flops_per_token: float | None  # of forward and backward, as MFU counts them; None for a mixture of experts
    elements_by_rows: dict[int, int]  # size of dimension 0, the one that is sharded -> elements of such weights


class Buffer(_Result):
    """One of the largest pieces of memory that live at the peak."""

    name: str  # a tensor's FQN, an operator, or an instruction of the program
    bytes: int
    where: str  # the module, or the source line, that made it; empty where it isn't known


class DeviceMemory(_Result):
    """What a step takes of one device: the fullest one."""

    parts: dict[str, int]  # of the peak, in bytes, in the order of display: weights, optimizer, ...
    limit_bytes: int | None  # that the device lets a program have; None: unknown
    at: str = ""  # the moment and the module of the peak; empty where it isn't known
    biggest: tuple[Buffer, ...] = ()  # the largest first
    host_bytes: int = 0  # offloaded to the host, for one device's process
    is_least: bool = False  # a lower bound: the device needs more, unknown how much
    rematerialised: int = 0  # instructions that the compiler repeats by itself, because memory was short

    @computed_field
    @property
    def peak_bytes(self) -> int:
        """What must fit at once."""
        return sum(self.parts.values())

    @computed_field
    @property
    def verdict(self) -> FitVerdict:
        """Whether it fits; by recomputing: the compiler made it fit by itself, at the cost of time."""
        if self.limit_bytes is None:
            return "unknown"
        if self.peak_bytes > self.limit_bytes:
            return "does not fit"
        if self.is_least:
            return "unknown"
        return "fits by recomputing" if self.rematerialised else "fits"


class Work(_Result):
    """What one device does in one step."""

    matmul_flops: dict[str, float]  # dtype of the factors -> operations; a multiply and an add are two
    memory_bytes: float  # that must at least cross between the device's memory and its processor
    collectives: dict[str, Moved]
    """Kind and dtype (`all_gather bfloat16`) -> calls, bytes of full tensors, sent_bytes of one device in a ring."""
    sent_bytes: dict[str, float]  # link (`ici`, `nvlink`, `network`) -> bytes that one device sends over it


class Expected(_Result):
    """How long a step should take, at the speeds that measured runs reach."""

    seconds: float
    # What compute does meanwhile: products, attention, elementwise, copies, and exposed communication, when it waits.
    parts: dict[str, float]
    # Kind of collective -> bytes that one device sends while compute waits, because the program's schedule stops there.
    synchronous_bytes: dict[str, float]


class EnginePlan(NamedTuple):
    """What an engine's planner says of a step; the bounds of its time follow from `work`."""

    model: ModelFacts
    memory: DeviceMemory
    work: Work
    method: str  # how the figures were made, and what they don't cover
    notes: tuple[str, ...] = ()  # what a user should know besides
    expected: Expected | None = None  # None: no measured run tells what this hardware reaches


class Time(_Result):
    """Lower bounds of a step by roofline, each as if everything else were free."""

    compute_s: float | None  # None: no peak known for this device and dtype
    memory_s: float | None
    links_s: dict[str, float]  # by link; those without a known bandwidth are left out
    devices: int
    tokens_per_step: int  # of the global batch
    # In a step, as the trainer counts them for MFU: all of attention, nothing twice.
    model_flops_per_device: float | None
    peak_flops: float | None  # of one device in the compute dtype, for MFU

    @computed_field
    @property
    def bounds(self) -> dict[str, float]:
        """All that are known, by their names."""
        named = {"compute": self.compute_s, "memory": self.memory_s, **self.links_s}
        return {name: seconds for name, seconds in named.items() if seconds is not None}

    @computed_field
    @property
    def seconds(self) -> float | None:
        """No step can take less; None for unknown hardware."""
        return max(self.bounds.values(), default=None)

    @computed_field
    @property
    def binds(self) -> str | None:
        """The name of the longest bound."""
        return max(self.bounds, key=self.bounds.__getitem__, default=None)

    @computed_field
    @property
    def tokens_per_second(self) -> float | None:
        """At most, over all devices."""
        return self.tokens_per_step / self.seconds if self.seconds else None

    @computed_field
    @property
    def tokens_per_second_per_device(self) -> float | None:
        return self.tokens_per_second / self.devices if self.tokens_per_second else None

    @computed_field
    @property
    def mfu(self) -> float | None:
        """At most. It may exceed 1: MFU counts all of attention, the bound half."""
        if not self.seconds or not self.peak_flops or self.model_flops_per_device is None:
            return None
        return self.model_flops_per_device / self.seconds / self.peak_flops


class Plan(_Result):
    """A config on hardware that need not be there."""

    schema_version: int = 1  # of `--json`; raised when a key changes its meaning
    on: str  # as it was given: `v5p:2x2x4`
    hardware: str  # in words: `16 TPU v5p chips of 4 hosts`
    devices: int
    backend: str  # the engine that would run there
    settings: dict[str, JsonValue]  # the keys of the config that a plan depends on most, and others that are set
    parameters: int
    memory: DeviceMemory
    work: Work
    time: Time
    expected: Expected | None  # None: no measured run tells what this hardware reaches
    method: str  # how the figures were made, and what they don't cover
    notes: tuple[str, ...] = ()
    planned_in_s: float

    @computed_field
    @property
    def expected_tokens_per_second_per_device(self) -> float | None:
        return self.time.tokens_per_step / self.devices / self.expected.seconds if self.expected else None

    @computed_field
    @property
    def expected_mfu(self) -> float | None:
        flops, peak = self.time.model_flops_per_device, self.time.peak_flops
        return flops / peak / self.expected.seconds if self.expected and flops and peak else None


class Comparison(_Result):
    """A measured run beside the bounds of its step."""

    steps: int  # that were measured, without the first ones
    seconds: float  # of a step, the median
    tokens_per_second: float  # over all devices, at that median
    mfu: float | None  # the median; None where the run had none
    ratio: float | None  # measured seconds over the bound's; under 1 the bound, or the plan, is wrong
    expected_ratio: float | None  # measured seconds over the expected ones
