"""The speeds that measured runs reach on a kind of device: what an expected time is made of."""

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from portable_fsdp.metrics.flops import peak_flops
from portable_fsdp.plan.result import Expected
from portable_fsdp.plan.target import Target

DTYPES = ("bfloat16", "float16", "float32", "tf32")


class Rates(NamedTuple):
    """Of one device."""

    peaks: Mapping[str, float]  # FLOP/s by dtype, that it can do at most
    products: float  # the share of it that matrix products reach
    attention: float  # and attention kernels
    memory: float  # bytes/s that other kernels move
    links: Mapping[str, float]  # bytes/s that a device sends, by link

    def peak(self, dtype: str) -> float:
        """FLOP/s; bfloat16's where the vendor names none for `dtype`."""
        return self.peaks.get(dtype, self.peaks["bfloat16"])


class ComputeStream:
    """What a device computes, one thing after the other, and when it waits for communication."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds since the beginning
        self._parts: defaultdict[str, float] = defaultdict(float)

    def run(self, part: str, seconds: float) -> None:
        """`part`: as of `Expected.parts`."""
        self._parts[part] += seconds
        self.now += seconds

    def wait(self, until: float) -> None:
        """Until communication has ended; nothing where it has."""
        self.run("exposed communication", max(0.0, until - self.now))

    def expected(self, synchronous_bytes: Mapping[str, float]) -> Expected:
        """All of it; parts that took no time are left out."""
        parts = {part: seconds for part, seconds in self._parts.items() if seconds}
        return Expected(seconds=self.now, parts=parts, synchronous_bytes=dict(synchronous_bytes))


def rates_of(target: Target) -> Rates | None:
    """None where the peak, the memory's bandwidth or the shares that runs reach aren't known."""
    hardware, reached = target.hardware, target.hardware.reached
    peaks = {dtype: peak for dtype in DTYPES if (peak := peak_flops(hardware.device_name, dtype))}
    if reached is None or hardware.memory_bandwidth is None or "bfloat16" not in peaks:
        return None
    links = {name: target.link(name) for name, _ in target.levels}
    return Rates(
        peaks=peaks,
        products=reached.products,
        attention=reached.attention,
        memory=hardware.memory_bandwidth.value * reached.memory,
        links={
            name: link.value * (reached.network if name == "network" else reached.link)
            for name, link in links.items()
            if link is not None
        },
    )
