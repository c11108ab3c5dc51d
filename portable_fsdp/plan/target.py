"""The target that `--on` names: a TPU slice (`v5p:2x2x4`, `v6e-16`, `2*v5e:16x16`), GPUs (`h100:8`), `cpu:2`.

`hardware.yaml` has the figures of each kind of hardware, with their sources.
"""

import difflib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from portable_fsdp.runtime.errors import ConfigError

UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 1e9, "GB/s": 1e9}
LINKS = ("nvlink", "pcie", "network")
FIGURES = ("program", "memory_bandwidth", "ici", *LINKS)

Shape = tuple[int, ...]
"""Chips of a TPU slice along each axis of its mesh."""


class Figure(NamedTuple):
    """A number and its source."""

    value: float  # bytes, or bytes/s that one device can send while it receives as much
    source: str


@dataclass(frozen=True)
class TpuChip:
    """The slices that chips of a generation form."""

    google: str  # prefix of Google's accelerator types: `v5litepod` in `v5litepod-16`
    cores: int  # number that those types count per chip; 1 if they count chips
    devices: int  # devices that a program sees per chip
    axes: Literal[2, 3]
    most: int  # most chips of a slice
    wraps: Literal["cube", "sixteen", "always"]  # which axes are rings: see `links_per_chip`
    link: Figure | None  # bytes/s, one way, of one ICI link; a chip has two on each axis
    shapes: tuple[Shape, ...]  # sold shapes; with three axes: those below a cube


class Reached(NamedTuple):
    """Shares of a device's peaks that measured runs reach; the expected time is computed from them."""

    products: float  # matrix products, share of peak FLOP/s
    attention: float  # attention kernels, share of the same peak
    memory: float  # other kernels, share of the memory's bandwidth
    link: float  # collectives within a host or a slice
    network: float  # collectives over the network
    source: str


@dataclass(frozen=True)
class Hardware:
    """One kind of device, in hosts of the usual kind; None for an unknown figure."""

    name: str
    kind: Literal["tpu", "cuda", "cpu"]  # the trainer's --device
    device_name: str  # name in its driver and in `models.flops.peak_flops`
    program: Figure | None  # bytes of a device that are available to a program
    memory_bandwidth: Figure | None  # bytes/s of a device
    devices_per_host: int | None  # most GPUs per host
    links: dict[str, Figure]  # by name: nvlink or pcie within a host; network between GPU hosts, or TPU slices
    chip: TpuChip | None
    reached: Reached | None


@cache
def known_hardware() -> tuple[Hardware, ...]:
    """Return all known hardware: TPUs, GPUs, and the CPU last."""
    rows = yaml.safe_load(Path(__file__).with_name("hardware.yaml").read_text(encoding="utf-8"))
    return tuple(_hardware(name, row) for name, row in rows.items())


def _hardware(name: str, row: dict[str, Any]) -> Hardware:
    figures = {key: _figure(*row[key]) if key in row else None for key in FIGURES}
    shapes = tuple(tuple(map(int, shape.split("x"))) for shape in row.get("shapes", ()))
    return Hardware(
        name,
        "tpu" if shapes else "cpu" if name == "cpu" else "cuda",
        row["device_name"],
        program=figures["program"],
        memory_bandwidth=figures["memory_bandwidth"],
        devices_per_host=row.get("devices_per_host", [None])[0],
        links={key: figure for key in LINKS if (figure := figures[key])},
        chip=TpuChip(**row["chip"], link=figures["ici"], shapes=shapes) if shapes else None,
        reached=Reached(**row["reached"]) if "reached" in row else None,
    )


def _figure(text: str, source: str) -> Figure:
    """Parse a figure like `80 GiB`, with its source."""
    number, unit = text.split()
    return Figure(float(number) * UNITS[unit], source)


# ---------------------------------------------------------------------------------------------------- what --on names

CONTEXT_BYTES = 2**29
"""Size of a CUDA context with its kernels, by rule: about half a GiB, more with more libraries. Not measured by us."""


@dataclass(frozen=True)
class Target:
    """The devices to plan for, and how they are connected."""

    text: str  # the value of `--on`
    hardware: Hardware
    devices: int  # devices that the training program sees, over all slices
    hosts: int  # each runs a process of the program; for a TPU: virtual machines
    slices: int = 1
    shape: Shape = ()  # chips of one slice along each axis; empty for GPUs and CPUs

    @property
    def devices_per_host(self) -> int:
        return self.devices // self.hosts

    @property
    def chips(self) -> int:
        """Number of chips in all slices; a GPU counts one."""
        return self.slices * math.prod(self.shape) if self.shape else self.devices

    @property
    def topology(self) -> str | None:
        """libtpu's name of one slice; None for other hardware than TPUs."""
        return f"{self.hardware.name}:{_written(self.shape)}" if self.shape else None

    @property
    def torus(self) -> Shape:
        """Devices along each axis in the order of their numbers: slices, z, y, x; empty if a chip has two devices."""
        chip = self.hardware.chip
        return (self.slices, *reversed(self.shape)) if chip is not None and chip.devices == 1 else ()

    @property
    def limit_bytes(self) -> int | None:
        """Bytes available to a step on a device; None: unknown. On GPUs without the context, which isn't torch's."""
        program = self.hardware.program
        context = CONTEXT_BYTES if self.hardware.kind == "cuda" else 0
        return None if program is None else int(program.value) - context

    @property
    def in_words(self) -> str:
        """Description: `16 chips of TPU v5p on 4 hosts`, `8 x NVIDIA H100 80GB HBM3 on 1 host`."""
        hosts = f"on {self.hosts} host{'s' if self.hosts > 1 else ''}"
        if self.hardware.kind == "cpu":
            return f"{self.devices} process{'es' * (self.devices > 1)} on the CPU"
        if self.hardware.kind == "cuda":
            return f"{self.devices} x {self.hardware.device_name} {hosts}"
        slices = f" in {self.slices} slices" if self.slices > 1 else ""
        devices = "" if self.devices == self.chips else f", {self.devices} devices"
        return f"{self.chips} chips{devices} of {self.hardware.device_name}{slices} {hosts}"

    @property
    def levels(self) -> tuple[tuple[str, int], ...]:
        """Links from the inside out, each with the number of inner groups that it joins; their product is `devices`.

        `chip` joins devices that share a TPU chip, `host` joins CPU processes; the speed of neither is known.
        """
        if self.hardware.chip is not None:
            return ("chip", self.hardware.chip.devices), ("ici", math.prod(self.shape)), ("network", self.slices)
        name = next((name for name in self.hardware.links if name != "network"), "host")
        return (name, self.devices_per_host), ("network", self.hosts)

    def link(self, name: str) -> Figure | None:
        """Return the bytes/s that one device can send over a link with all its wires; None if no source states it.

        ICI: the mean over the slice's chips. However a collective is routed, the chips can't receive faster than over
        all wires of the slice at once.
        """
        chip = self.hardware.chip
        if name == "ici" and chip is not None and chip.link is not None:
            return chip.link._replace(value=chip.link.value * links_per_chip(chip, self.shape) / chip.devices)
        return self.hardware.links.get(name)


def parse_target(text: str) -> Target:
    """Parse the value of `--on`, in upper or lower case.

    Takes what docs/planning.md lists, and the driver's name of a device with the total number, as in
    `NVIDIA H100 80GB HBM3:8` and `TPU v6e:8`. Raises ConfigError, with the nearest names, for unknown hardware and for
    a shape that isn't sold.
    """
    device_name, _, devices = text.rpartition(":")
    for hardware in known_hardware():
        if device_name in (hardware.device_name, f"TPU {hardware.name}") and devices.isdecimal():
            if (chip := hardware.chip) is None:
                return _host_target(text, hardware, int(devices))
            return replace(parse_target(f"{chip.google}-{int(devices) // chip.devices * chip.cores}"), text=text)
    match = re.fullmatch(r"(?:(\d+)\*)?([a-z][a-z0-9]*(?:-\d+gb)?)(?:([:-])([0-9x]+))?", text.strip().lower())
    if match is None:
        raise _unknown(text, text.strip().lower())
    count, name, mark, rest = match.groups()
    slices = int(count or 1)
    for hardware in known_hardware():
        if hardware.chip is not None:
            if name in {hardware.name, hardware.chip.google} and slices > 0:
                return _slice_target(text, hardware, hardware.chip, slices, mark or "", rest or "")
        elif name == hardware.name and count is None and mark != "-" and "x" not in (rest or ""):
            return _host_target(text, hardware, int(rest or 1))
    raise _unknown(text, name)


def with_memory(target: Target, gib: float) -> Target:
    """Return the target with this much memory per device, all of it available to a program."""
    return replace(target, hardware=replace(target.hardware, program=Figure(gib * 2**30, "set by the user")))


# ------------------------------------------------------------------------------------------------------- TPU slices


def links_per_chip(chip: TpuChip, shape: Shape) -> float:
    """Return the mean number of ICI links per chip of this slice: two on a ring axis; on others, end chips have one.

    Rings are: all axes of slices made of whole cubes of 4x4x4 (v4, v5p, TPU7x: "slices smaller than a full cube ...
    don't have wrap-around links", docs.cloud.google.com/tpu/docs/v5p); axes of 16 (v5e, v6e: jax-ml.github.io/
    scaling-book/tpus: "without wraps on dims < 16"). There is no source for v2 and v3, so all axes count as rings.
    """
    cubes = all(size % 4 == 0 for size in shape)
    rings = {"cube": [cubes] * len(shape), "sixteen": [size == 16 for size in shape], "always": [True] * len(shape)}
    return sum(
        2.0 if ring else 2 * (size - 1) / size for size, ring in zip(shape, rings[chip.wraps], strict=True) if size > 1
    )


def shapes_of(chip: TpuChip) -> Iterator[Shape]:
    """Yield all slice shapes that are sold, the small ones first.

    With three axes, from a cube on: A <= B <= C, all multiples of 4 (cloud.google.com/tpu/docs/types-topologies,
    written for v4; the lists of v5p and TPU7x in AI-Hypercomputer/xpk, core/system_characteristics.py, agree).
    """
    yield from chip.shapes
    if chip.axes == 3:
        most = chip.most // 64
        cubes = (
            (4 * a, 4 * b, 4 * c)
            for a in range(1, most + 1)
            for b in range(a, most // a + 1)
            for c in range(b, most // (a * b) + 1)
        )
        yield from sorted(cubes, key=math.prod)


def accelerator_type(chip: TpuChip, shape: Shape) -> str:
    """Return Google's name for a slice of this size: `v5p-32` for 2x2x4."""
    return f"{chip.google}-{math.prod(shape) * chip.cores}"


def _slice_target(text: str, hardware: Hardware, chip: TpuChip, slices: int, mark: str, rest: str) -> Target:
    shapes = [shape for shape in shapes_of(chip) if rest in (_written(shape), str(math.prod(shape) * chip.cores))]
    if not shapes or mark != (":" if "x" in rest else "-"):
        raise _no_such_slice(text, hardware, chip, rest)
    # The default shape of a size is the one most like a cube (types-topologies, as above).
    shape = min(shapes, key=sum)
    chips = math.prod(shape)
    return Target(text, hardware, slices * chips * chip.devices, slices * _hosts(hardware, chips), slices, shape)


def _hosts(hardware: Hardware, chips: int) -> int:
    """Return the number of virtual machines of a slice: 4 chips each; a v5e or v6e slice of 8 chips is one machine.

    Source: VM types, docs.cloud.google.com/tpu/docs/v6e: "v6e slices are created using half-host VMs, each with 4 TPU
    chips", with v6e-1 and v6e-8 as exceptions; v5e's page has the same; all others have hosts of 4 chips.
    """
    return 1 if hardware.name in {"v5e", "v6e"} and chips == 8 else max(1, chips // 4)


def _written(shape: Shape) -> str:
    return "x".join(map(str, shape))


def _no_such_slice(text: str, hardware: Hardware, chip: TpuChip, rest: str) -> ConfigError:
    chips = math.prod(int(size) for size in rest.split("x") if size) / (chip.cores if rest.isdigit() else 1)
    near = sorted(shapes_of(chip), key=lambda shape: (abs(math.log(math.prod(shape) / max(chips, 1))), sum(shape)))
    names = ", ".join(
        f"{hardware.name}:{_written(shape)} ({math.prod(shape)} chips, Google's {accelerator_type(chip, shape)})"
        for shape in near[:3]
    )
    return ConfigError(
        f"--on={text}: expected a {hardware.name} slice that is sold: chips along each axis, or Google's "
        f"{chip.google}-N (N counts {chip.cores} per chip).\n  nearest: {names}."
    )


# --------------------------------------------------------------------------------------------------- GPUs and CPUs


def _host_target(text: str, hardware: Hardware, devices: int) -> Target:
    most = hardware.devices_per_host or max(1, devices)
    if devices < 1 or (devices > most and devices % most):
        lower = max(1, devices // most * most)
        raise ConfigError(
            f"--on={text}: expected 1 to {most} {hardware.name} in one host, or whole hosts of {most}, found {devices}."
            f"\n  nearest: {hardware.name}:{lower}, {hardware.name}:{lower // most * most + most}."
        )
    return Target(text, hardware, devices, math.ceil(devices / most))


def _unknown(text: str, name: str) -> ConfigError:
    known = [hardware.name for hardware in known_hardware()]
    near = difflib.get_close_matches(re.split(r"[:*]|-\d+$", name)[0], known, n=3, cutoff=0.4)
    return ConfigError(
        f"--on={text}: expected a TPU slice (v5p:2x2x4, v6e-16, 2*v6e:16x16), GPUs (h100:8) or cpu:2, found {name!r}.\n"
        f"  nearest: {', '.join(near) or 'nothing'}; known: {', '.join(known)}."
    )
