"""What `--on` names: a TPU slice (`v5p:2x2x4`, `v6e-16`, `2*v5e:16x16`), GPUs (`h100:8`), `cpu:2`."""

import difflib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from portable_fsdp.plan.hardware import HARDWARE, OTHER_NAMES, Hardware, Shape, TpuChip
from portable_fsdp.runtime.errors import ConfigError


@dataclass(frozen=True)
class Target:
    """What to plan for: so many devices of a kind, and how they hang together."""

    text: str  # as it was given
    hardware: Hardware
    devices: int  # that the training program sees, in all slices together
    hosts: int  # that each run a process of the program's; for a TPU: virtual machines
    slices: int = 1
    shape: Shape = ()  # of one slice, in chips; empty for GPUs and CPUs

    @property
    def devices_per_host(self) -> int:
        return self.devices // self.hosts

    @property
    def chips(self) -> int:
        """All of them; a GPU is one."""
        return self.slices * math.prod(self.shape) if self.shape else self.devices

    @property
    def topology(self) -> str | None:
        """One slice as libtpu names it; None for what isn't a TPU."""
        return f"{self.hardware.name}:{_written(self.shape)}" if self.shape else None

    @property
    def topology_options(self) -> dict[str, object]:
        """What libtpu must be told beside the name, as jax's `get_topology_desc` takes it."""
        options: dict[str, object] = {"num_slices": self.slices} if self.slices > 1 else {}
        if self.hardware.name == "v4":
            options["chip_config_name"] = "megacore"  # else it describes two devices a chip, of half the memory
        if self.shape and math.prod(self.shape) == 1:
            options["chips_per_host_bounds"] = (1, 1, 1)
        return options

    @property
    def levels(self) -> tuple[tuple[str, int], ...]:
        """Links from the inside out, each with how many of the next inner group it joins; their product: devices.

        A TPU's `chip` is no link whose speed is known: it joins devices that share a chip.
        """
        if self.hardware.chip is not None:
            return (
                ("chip", self.hardware.chip.devices),
                ("ici", math.prod(self.shape)),
                ("network", self.slices),
            )
        name = self.hardware.in_host[0] if self.hardware.in_host else "host"
        return ((name, self.devices_per_host), ("network", self.hosts))

    def bandwidth(self, link: str) -> float | None:
        """Bytes/s that one device can send over `link`, with all its wires in use; None where nobody says.

        ICI: the mean over the slice's chips. What all of them receive in a collective can't come in faster than over
        all wires of the slice at once, however it is routed.
        """
        hardware = self.hardware
        if link == "network":
            return hardware.network.bytes_per_s if hardware.network else None
        if link == "ici" and hardware.chip is not None and hardware.chip.link is not None:
            return hardware.chip.link.value * links_per_chip(hardware.chip, self.shape) / hardware.chip.devices
        if hardware.in_host and link == hardware.in_host[0]:
            return hardware.in_host[1].bytes_per_s
        return None

    def in_switch(self, link: str) -> bool:
        """Whether the link's switches do part of a collective's work."""
        if link == "network":
            return self.hardware.network is not None and self.hardware.network.in_switch
        return (
            self.hardware.in_host is not None
            and link == self.hardware.in_host[0]
            and self.hardware.in_host[1].in_switch
        )


def parse_target(text: str) -> Target:
    """Understand what `--on` names. All letters count as small ones.

    - a TPU slice as libtpu names it: `v5p:2x2x4`, chips along each axis;
    - Google's accelerator type: `v6e-16` and `v5litepod-16` are 16 chips, `v5p-32` and `v4-32` too: they count cores;
    - several TPU slices: their number and `*` before one of these, `2*v6e-256`;
    - GPUs: `h100:8`, all of them together; `h100` is one;
    - processes on a CPU: `cpu:2`.

    Raises ConfigError, with what comes nearest, for hardware or a shape that isn't known or sold.
    """
    match = re.fullmatch(r"(?:(\d+)\*)?([a-z][a-z0-9]*(?:-\d+gb)?)(?:([:-])([0-9x]+))?", text.strip().lower())
    if match is None:
        raise _unknown(text, text.strip().lower())
    count, name, mark, rest = match.groups()
    slices = int(count or 1)
    for hardware in HARDWARE:
        if hardware.chip is not None and name in {hardware.name, hardware.chip.google} and slices > 0:
            return _slice_target(text, hardware, hardware.chip, slices, mark, rest)
        if (
            hardware.chip is None
            and name == hardware.name
            and count is None
            and (mark != "-" and "x" not in (rest or ""))
        ):
            return _host_target(text, hardware, int(rest or 1))
    raise _unknown(text, name)


# ------------------------------------------------------------------------------------------------------- TPU slices


def links_per_chip(chip: TpuChip, shape: Shape) -> float:
    """Links of ICI that a chip of this slice has, in the mean: two on an axis that is a ring, else the ends have one.

    Rings are: all axes of slices made of whole cubes of 4x4x4 (v4, v5p, TPU7x: "slices smaller than a full cube ...
    don't have wrap-around links", docs.cloud.google.com/tpu/docs/v5p); axes of 16 (v5e, v6e: jax-ml.github.io/
    scaling-book/tpus: "without wraps on dims < 16"); for v2 and v3 nobody says, so all are taken for rings.
    """
    cubes = all(size % 4 == 0 for size in shape)
    rings = {"cube": [cubes] * len(shape), "sixteen": [size == 16 for size in shape], "always": [True] * len(shape)}
    return sum(
        2.0 if ring else 2 * (size - 1) / size for size, ring in zip(shape, rings[chip.wraps], strict=True) if size > 1
    )


def shapes_of(chip: TpuChip) -> Iterator[Shape]:
    """All shapes of a slice that are sold, the small ones first.

    Of three axes, from a cube on: A <= B <= C, all of them multiples of 4 (cloud.google.com/tpu/docs/types-topologies,
    written for v4; the lists of v5p and TPU7x in AI-Hypercomputer/xpk, core/system_characteristics.py, keep to it).
    """
    yield from chip.flat
    if chip.axes == 3:
        most = chip.most_chips // 64
        cubes = (
            (a, b, c)
            for a in range(1, most + 1)
            for b in range(a, most // a + 1)
            for c in range(b, most // (a * b) + 1)
        )
        for a, b, c in sorted(cubes, key=math.prod):
            yield (4 * a, 4 * b, 4 * c)


def accelerator_type(chip: TpuChip, shape: Shape) -> str:
    """Google's name for a slice of this size: `v5p-32` for 2x2x4."""
    return f"{chip.google}-{math.prod(shape) * chip.counted}"


def _slice_target(
    text: str, hardware: Hardware, chip: TpuChip, slices: int, mark: str | None, rest: str | None
) -> Target:
    if mark == ":" and rest is not None and _is_shape(rest):
        shape: Shape | None = tuple(int(size) for size in rest.split("x"))
        shape = shape if shape in set(shapes_of(chip)) else None
    elif mark == "-" and rest is not None and rest.isdigit():
        shape = _shape_of_count(chip, int(rest))
    else:
        shape = None
    if shape is None:
        raise _no_such_slice(text, hardware, chip, rest or "")
    hosts = slices * _machines(hardware, math.prod(shape))
    return Target(text, hardware, slices * math.prod(shape) * chip.devices, hosts, slices, shape)


def _shape_of_count(chip: TpuChip, count: int) -> Shape | None:
    """The shape that Google gives a type by default: the one most like a cube (types-topologies, as above)."""
    sold = [shape for shape in shapes_of(chip) if math.prod(shape) * chip.counted == count]
    return min(sold, key=sum, default=None)


def _machines(hardware: Hardware, chips: int) -> int:
    """Virtual machines of a slice: of 4 chips each; a v5e or v6e slice of 8 chips is one machine of 8.

    Source: VM types, docs.cloud.google.com/tpu/docs/v6e: "v6e slices are created using half-host VMs, each with 4 TPU
    chips", with v6e-1 and v6e-8 as exceptions; v5e's page has the same; all others have hosts of 4 chips.
    """
    if hardware.name in {"v5e", "v6e"} and chips == 8:
        return 1
    return max(1, chips // 4)


def _is_shape(text: str) -> bool:
    return re.fullmatch(r"\d+(x\d+)+", text) is not None


def _written(shape: Shape) -> str:
    return "x".join(str(size) for size in shape)


def _no_such_slice(text: str, hardware: Hardware, chip: TpuChip, rest: str) -> ConfigError:
    counts_cores = f", where N counts {chip.counted} cores a chip" if chip.counted > 1 else ""
    wanted = math.prod(int(size) for size in rest.split("x") if size) / (chip.counted if rest.isdigit() else 1)
    near = sorted(shapes_of(chip), key=lambda shape: (abs(math.log(math.prod(shape) / max(wanted, 1))), sum(shape)))
    names = ", ".join(
        f"{hardware.name}:{_written(shape)} ({math.prod(shape)} chips, Google's {accelerator_type(chip, shape)})"
        for shape in near[:3]
    )
    axes = "AxB" if chip.axes == 2 else "AxBxC"
    return ConfigError(
        f"--on={text}: expected a {hardware.name} slice that is sold: {hardware.name}:{axes} in chips, or Google's "
        f"{chip.google}-N{counts_cores}.\n  nearest: {names}. Nothing was started."
    )


# --------------------------------------------------------------------------------------------------- GPUs and CPUs


def _host_target(text: str, hardware: Hardware, devices: int) -> Target:
    most = int(hardware.devices_per_host.value) if hardware.devices_per_host else max(1, devices)
    if devices < 1 or (devices > most and devices % most):
        lower = max(1, devices // most * most)
        raise ConfigError(
            f"--on={text}: expected 1 to {most} {hardware.name} in one host, or whole hosts of {most}, found {devices}."
            f"\n  nearest: {hardware.name}:{lower}, {hardware.name}:{lower // most * most + most}. Nothing was started."
        )
    return Target(text, hardware, devices, max(1, math.ceil(devices / most)))


def _unknown(text: str, name: str) -> ConfigError:
    stem = re.split(r"[:*]|-\d+$", name.removeprefix("tpu-"))[0] or name
    known = [hardware.name for hardware in HARDWARE]
    meant = [OTHER_NAMES[stem]] if stem in OTHER_NAMES else [other for other in known if other.startswith(stem + "-")]
    near = meant or difflib.get_close_matches(stem, known, n=3, cutoff=0.4)
    return ConfigError(
        f"--on={text}: expected a TPU slice (v5p:2x2x4, v6e-16, 2*v6e:16x16), GPUs (h100:8) or cpu:2, found {name!r}.\n"
        f"  nearest: {', '.join(near) or 'nothing'}; known: {', '.join(known)}. Nothing was started."
    )
