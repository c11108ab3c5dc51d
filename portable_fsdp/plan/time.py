"""Expected time of a step: the operations of one device, simulated at the speeds that measured runs reach (`Rates`).

benchmarks/results/expected_times.md compares it with published runs.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, Field, StrictInt, TypeAdapter, ValidationError

from portable_fsdp.models.flops import peak_flops
from portable_fsdp.plan.result import Comparison, Expected
from portable_fsdp.plan.target import Target
from portable_fsdp.runtime.errors import UsageError

DTYPES = ("float32", "tf32", "bfloat16", "float16", "s8")
"""Of the factors of products whose peaks vendors state."""

WARM_UP_STEPS = 5

GPU_KERNEL_S = 4e-6
"""Least time between the starts of two GPU kernels. A guess; it doesn't matter for large kernels."""


def over_links(
    levels: Sequence[tuple[str, int]],
    full_bytes: float,
    *,
    members: int | None = None,
    stride: int = 1,
    exchanges: bool = False,
) -> dict[str, float]:
    """Return link -> least bytes that one device sends to gather, or reduce-scatter, a tensor; an all-reduce: twice.

    `exchanges`: an all-to-all, in which each device sends an equal piece of its `full_bytes` to each other device.
    `levels` as `Target.levels`. A group has `members` devices (None: all), each `stride` after the last in the order of
    hosts, so neighbours share a host, a chip or a slice. Each part of the tensor crosses a network once per host or
    slice, divided over its devices, and then the links inside.
    """
    left = size = members or math.prod(units for _, units in levels)
    sent: dict[str, float] = {}
    inside = 1  # members of the group within one unit of this level
    for link, units in levels:
        if stride % units == 0:
            stride //= units
            continue
        taken = min(left, units // stride)
        sent[link] = full_bytes * (1 - 1 / taken) * (inside * taken / size if exchanges else 1 / inside)
        inside, left, stride = inside * taken, left // taken, 1
    return {link: value for link, value in sent.items() if value and link not in ("chip", "host")}


class Rates(NamedTuple):
    """The speeds that measured runs reach on a device."""

    peaks: Mapping[str, float]  # peak FLOP/s by dtype
    products: float  # share of the peak that matrix products reach
    attention: float  # share of the peak that attention kernels reach
    memory: float  # bytes/s that other kernels move
    links: Mapping[str, float]  # bytes/s that a device sends, by link
    kernel_s: float = 0.0  # least time of any kernel

    def seconds_of(self, kernel: "Compute") -> float:
        """Return a kernel's time; bfloat16's peak replaces that of a dtype for which the vendor states none."""
        peak = self.peaks.get(kernel.dtype, self.peaks["bfloat16"])
        reached = peak * (self.attention if kernel.part == "attention" else self.products)
        return max(kernel.flops / reached, kernel.memory_bytes / self.memory, self.kernel_s)


class Compute(NamedTuple):
    """A kernel: it takes the time of its products, or of the bytes that it moves to and from memory."""

    part: str  # key of `Expected.parts`
    flops: float
    memory_bytes: float
    dtype: str = "bfloat16"  # of the factors of its products


class Send(NamedTuple):
    """A collective begins when the previous one on its stream has ended."""

    key: Hashable  # for `Wait`
    stream: str
    sent: Mapping[str, float]  # link -> bytes that a device sends over it
    is_ahead: bool = False  # it may begin as early as the end of the last `Wait`


class Wait(NamedTuple):
    """Compute waits for the end of a collective; no wait if none with this key has begun."""

    key: Hashable
    # (kind of collective, bytes that a device sends while compute waits): the schedule itself stops there.
    synchronous: tuple[tuple[str, float], ...] = ()


class Drain(NamedTuple):
    """Compute waits for all collectives."""


class Loop(NamedTuple):
    """All iterations of a loop, or the longest branch of a condition; no collective outlives an iteration."""

    turns: int
    branches: "Sequence[Sequence[ScheduleEntry]]"


ScheduleEntry = Compute | Send | Wait | Drain | Loop


def expected_time(operations: Iterable[ScheduleEntry], rates: Rates) -> Expected:
    """Return the time of `operations` in order: one stream computes, and each other stream runs its collectives in
    order, overlapped with compute. Parts that take no time are left out."""
    parts: defaultdict[str, float] = defaultdict(float)
    synchronous: defaultdict[str, float] = defaultdict(float)
    now = last_wait = 0.0
    free: dict[str, float] = {}  # stream -> when its last collective ends
    ends: dict[Hashable, float] = {}  # key of a collective -> when it ends

    for operation in operations:
        before = now
        match operation:
            case Compute(part):
                seconds = rates.seconds_of(operation)
                parts[part] += seconds
                now += seconds
            case Send(key, stream, sent, is_ahead):
                begin = max(free.get(stream, 0.0), last_wait if is_ahead else now)
                seconds = (size / rates.links[link] for link, size in sent.items() if link in rates.links)
                ends[key] = free[stream] = begin + max(seconds, default=0.0)
            case Wait(key, waits):
                now = last_wait = max(now, ends.get(key, 0.0))
                for kind, size in waits:
                    synchronous[kind] += size
            case Drain():
                now = max([now, *free.values()])
            case Loop(turns, branches):
                inner = max((expected_time(branch, rates) for branch in branches), key=lambda branch: branch.seconds)
                now += turns * inner.seconds
                for name, seconds in inner.parts.items():
                    parts[name] += turns * seconds
                for kind, size in inner.synchronous_bytes.items():
                    synchronous[kind] += turns * size
        if isinstance(operation, Wait | Drain):
            parts["exposed communication"] += now - before
    spent = {part: seconds for part, seconds in parts.items() if seconds}
    return Expected(seconds=now, parts=spent, synchronous_bytes=synchronous)


def rates_of(target: Target) -> Rates | None:
    """Return the target's rates; None if the peak, the memory's bandwidth or the reached shares are unknown."""
    hardware, reached = target.hardware, target.hardware.reached
    peaks = {dtype: peak for dtype in DTYPES if (peak := peak_flops(hardware.device_name, dtype))}
    if reached is None or hardware.memory_bandwidth is None or "bfloat16" not in peaks:
        return None
    return Rates(
        peaks=peaks,
        products=reached.products,
        attention=reached.attention,
        memory=hardware.memory_bandwidth.value * reached.memory,
        links={
            name: link.value * (reached.network if name == "network" else reached.link)
            for name, _ in target.levels
            if (link := target.link(name))
        },
        kernel_s=GPU_KERNEL_S if hardware.kind == "cuda" else 0.0,
    )


# ------------------------------------------------------------------------------------------------------ comparison


class _Row(BaseModel):
    """The part of a row of metrics.jsonl that a comparison needs."""

    seconds: float = Field(gt=0, allow_inf_nan=False, strict=True)
    tokens: StrictInt
    mfu: float | None = Field(default=None, allow_inf_nan=False, strict=True)


def compare(rows: Sequence[Mapping[str, Any]], tokens_per_step: int) -> Comparison:
    """Return the figures of a run's median step, to compare with its plan; `rows` of its metrics.jsonl, as read by
    `observe.run_files.read_jsonl`.

    Leaves out the first steps, which compile and warm up: WARM_UP_STEPS, or all but the last. Raises UsageError for no
    rows, for invalid rows, and for a run with another number of tokens per step.
    """
    try:
        steps = TypeAdapter(list[_Row]).validate_python(rows)
        actual = ", ".join(map(str, sorted({step.tokens for step in steps}))) or "0 rows"
    except ValidationError:
        steps, actual = [], f"{len(rows)} rows, some of them invalid"
    if {step.tokens for step in steps} != {tokens_per_step}:
        raise UsageError(
            f"--compare: expected a run with {tokens_per_step:,} tokens per step, as planned, found {actual}.\n"
            "  Name the folder of a run that has finished steps, and plan with its own config.yaml."
        )
    measured = steps[min(WARM_UP_STEPS, len(steps) - 1) :]
    seconds = statistics.median(step.seconds for step in measured)
    shares = [step.mfu for step in measured if step.mfu is not None]
    return Comparison(
        steps=len(measured),
        seconds=seconds,
        tokens_per_second=tokens_per_step / seconds,
        mfu=statistics.median(shares) if shares else None,
    )
