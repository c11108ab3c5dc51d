"""Hardware by its name: `v5p:2x2x4`, `v6e-16`, `2*v5e:16x16`, `h100:8`, `cpu:2`, with what it can do at most.

Every figure stands beside the words that say it. Where two sources disagree the greater one counts, because times
that are made of them are lower bounds, and the source says so. What nobody says is None, and never guessed. Peaks in
FLOP/s are in `metrics.flops`, under `Hardware.device_name`.
"""

import difflib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from portable_fsdp.runtime.errors import ConfigError

GIBIBYTE = 2**30
GIGA = 1e9

Shape = tuple[int, ...]
"""Chips of a TPU slice along each axis of its mesh."""


class Figure(NamedTuple):
    """A number, and who says it."""

    value: float
    source: str


class Link(NamedTuple):
    """What devices exchange data over."""

    bytes_per_s: float  # that one device can send, while it receives as much
    source: str
    # Switches that add up what devices send, and send out copies, halve what a ring would send: then a gather mostly
    # receives and a reduction mostly sends, and both may run at once.
    in_switch: bool = False


class TpuChip(NamedTuple):
    """How chips of a generation make slices."""

    google: str  # how Google's accelerator types begin: `v5litepod` in `v5litepod-16`
    counted: int  # in those types a chip counts as so many: 2 where they count cores
    devices: int  # that a program sees in a chip
    axes: Literal[2, 3]
    link: Figure | None  # bytes/s, one way, of one link of ICI; a chip has two on each axis
    flat: tuple[Shape, ...]  # the shapes that are sold; of three axes: the ones below a cube
    most_chips: int
    wraps: Literal["cube", "sixteen", "always"]  # which axes are rings: see `links_per_chip`


@dataclass(frozen=True)
class Hardware:
    """One kind of device, in hosts of the usual make."""

    name: str
    kind: Literal["tpu", "cuda", "cpu"]  # the trainer's --device
    device_name: str  # as its driver names it, which is how `metrics.flops.peak_flops` knows it
    memory_bytes: Figure | None  # of a device
    program_bytes: Figure | None  # of these, what a program may have
    memory_bandwidth: Figure | None  # bytes/s of a device
    devices_per_host: Figure | None  # at most; hosts of a TPU slice: see `Target.hosts`
    in_host: tuple[str, Link] | None = None  # name (`nvlink`, `pcie`) and link between the GPUs of a host
    network: Link | None = None  # between GPU hosts, or TPU slices
    chip: TpuChip | None = None


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


OTHER_NAMES = {
    **{"trillium": "v6e", "v6": "v6e", "ironwood": "tpu7x", "v7x": "tpu7x", "v7": "tpu7x"},
    **{"v5lite": "v5e", "v5": "v5p"},
}
"""What people and Google say, and what is said here."""


# ----------------------------------------------------------------------------------------------------------- tables

_DOCS = "docs.cloud.google.com/tpu/docs/"
_BOOK = "jax-ml.github.io/scaling-book/tpus"
_LIBTPU = "what libtpu 0.0.21 lets a program have: it names it when it refuses one"
_OOM = "the capacity that PyTorch's out-of-memory messages name"
_BELOW_A_CUBE = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
_TWO_AXES = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_V2 = ((2, 2), (4, 4), (8, 8), (8, 16), (16, 16))
_V3 = ((2, 2), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16), (16, 32), (32, 32))
_SHARP = "InfiniBand switches reduce and copy: NVIDIA SHARP"

TPUS = (
    Hardware(
        name="v2",
        kind="tpu",
        device_name="TPU v2",
        memory_bytes=Figure(8 * GIBIBYTE, "a core's: the 7.48 GiB below and the 0.52 GiB that libtpu keeps"),
        program_bytes=Figure(7.48 * GIBIBYTE, _LIBTPU),
        memory_bandwidth=None,
        devices_per_host=Figure(8, "hosts of 4 chips with 2 cores, of which v2-8 is one"),
        chip=TpuChip("v2", 2, 2, 2, None, _V2, 256, "always"),
    ),
    Hardware(
        name="v3",
        kind="tpu",
        device_name="TPU v3",
        memory_bytes=Figure(16 * GIBIBYTE, f"32 GiB a chip, which has 2 cores, {_DOCS}v3"),
        program_bytes=Figure(15.48 * GIBIBYTE, _LIBTPU),
        memory_bandwidth=Figure(450 * GIGA, f"900 GB/s a chip, which has 2 cores, {_DOCS}v3"),
        devices_per_host=Figure(8, "hosts of 4 chips with 2 cores, of which v3-8 is one"),
        chip=TpuChip("v3", 2, 2, 2, Figure(100 * GIGA, f"ICI BW/link one-way, {_BOOK}"), _V3, 1024, "always"),
    ),
    Hardware(
        name="v4",
        kind="tpu",
        device_name="TPU v4",
        memory_bytes=Figure(32 * GIBIBYTE, f"32 GiB a chip, {_DOCS}v4"),
        program_bytes=Figure(30.75 * GIBIBYTE, f"{_LIBTPU}; both cores as one device (megacore)"),
        memory_bandwidth=Figure(1230 * GIGA, f"{_BOOK}, question 1; 1200 GB/s in {_DOCS}v4"),
        devices_per_host=Figure(
            4, "v4-128 has 16 hosts and 64 devices, orbax's docstring of SingleReplicaArrayHandler"
        ),
        chip=TpuChip(
            *("v4", 2, 1, 3),
            Figure(50 * GIGA, f"400 Gb/s in each direction, glennklockwood.com/garden/processors/TPUv4; {_BOOK}: 45"),
            *(_BELOW_A_CUBE, 4096, "cube"),
        ),
    ),
    Hardware(
        name="v5e",
        kind="tpu",
        device_name="TPU v5 lite",
        memory_bytes=Figure(16 * GIBIBYTE, f"16 GB a chip, {_DOCS}v5e; libtpu keeps 0.25 GiB of 16"),
        program_bytes=Figure(15.75 * GIBIBYTE, _LIBTPU),
        memory_bandwidth=Figure(859 * GIGA, f"800 GiB/s in {_DOCS}v5e of 2026; 819 GB/s in older copies of that page"),
        devices_per_host=Figure(8, f"chips per host, {_DOCS}v5e"),
        network=Link(3.125 * GIGA, f"data center network bandwidth 6.4 Tb/s for 256 chips, {_DOCS}v5e"),
        chip=TpuChip(
            *("v5litepod", 1, 1, 2),
            Figure(50 * GIGA, f"bidirectional ICI bandwidth 400 GB/s a chip, 4 ports, {_DOCS}v5e; {_BOOK}: 45 to 50"),
            *(_TWO_AXES, 256, "sixteen"),
        ),
    ),
    Hardware(
        name="v5p",
        kind="tpu",
        device_name="TPU v5p",
        memory_bytes=Figure(96 * GIBIBYTE, f"96 GiB of physical memory a chip, of which 95 are listed, {_DOCS}v5p"),
        program_bytes=Figure(95.74 * GIBIBYTE, _LIBTPU),
        memory_bandwidth=Figure(2765 * GIGA, f"HBM bandwidth per chip, {_DOCS}v5p"),
        devices_per_host=Figure(4, f"4-chip VM, {_DOCS}v5p"),
        network=Link(6.25 * GIGA, f"DCN bandwidth per chip 50 Gb/s, {_DOCS}v5p"),
        chip=TpuChip(
            *("v5p", 2, 1, 3),
            Figure(
                100 * GIGA, f"bidirectional ICI bandwidth 1200 GB/s a chip, 6 links, {_DOCS}v5p; {_BOOK}: 90 to 100"
            ),
            *(_BELOW_A_CUBE, 6144, "cube"),
        ),
    ),
    Hardware(
        name="v6e",
        kind="tpu",
        device_name="TPU v6 lite",
        memory_bytes=Figure(32 * GIBIBYTE, f"32 GB a chip, {_DOCS}v6e; libtpu keeps 0.25 GiB of 31.5"),
        program_bytes=Figure(31.25 * GIBIBYTE, _LIBTPU),
        memory_bandwidth=Figure(1638 * GIGA, f"HBM bandwidth per chip, {_DOCS}v6e"),
        devices_per_host=Figure(8, f"chips per host, {_DOCS}v6e"),
        network=Link(12.5 * GIGA, f"data center network bandwidth 25.6 Tb/s for 256 chips, {_DOCS}v6e"),
        chip=TpuChip(
            *("v6e", 1, 1, 2),
            Figure(100 * GIGA, f"bidirectional ICI bandwidth 800 GB/s a chip, 4 ports, {_DOCS}v6e; {_BOOK}: 90 to 100"),
            *(_TWO_AXES, 256, "sixteen"),
        ),
    ),
    Hardware(
        name="tpu7x",
        kind="tpu",
        device_name="TPU7x",
        memory_bytes=Figure(96 * GIBIBYTE, f"192 GiB a chip, which is two devices, {_DOCS}tpu7x"),
        program_bytes=Figure(94.74 * GIBIBYTE, "what libtpu 0.0.51 lets a program have; 0.0.21 doesn't know TPU7x"),
        memory_bandwidth=Figure(3690 * GIGA, f"7380 GB/s a chip, which is two devices, {_DOCS}tpu7x"),
        devices_per_host=Figure(8, f"VMs of 4 chips, which are two devices each, {_DOCS}tpu7x"),
        network=Link(6.25 * GIGA, f"DCN bandwidth 100 Gb/s a chip, which is two devices, {_DOCS}tpu7x"),
        chip=TpuChip(
            *("tpu7x", 2, 2, 3),
            Figure(100 * GIGA, f"bidirectional ICI bandwidth 1200 GB/s a chip, 6 links, {_DOCS}tpu7x"),
            *(_BELOW_A_CUBE, 9216, "cube"),
        ),
    ),
)

GPUS = (
    Hardware(
        name="b200",
        kind="cuda",
        device_name="NVIDIA B200",
        memory_bytes=Figure(180e9, "1,440 GB for 8 GPUs, docs.nvidia.com/dgx/dgxb200-user-guide"),
        program_bytes=Figure(178.35 * GIBIBYTE, f"{_OOM} on B200"),
        memory_bandwidth=Figure(8000 * GIGA, "64 TB/s for 8 GPUs, NVIDIA DGX B200 data sheet"),
        devices_per_host=Figure(8, "HGX and DGX B200: 8 GPUs"),
        in_host=("nvlink", Link(900 * GIGA, "NVLink 5: 14.4 TB/s both ways for 8 GPUs, DGX B200 user guide", True)),
        network=Link(50 * GIGA, f"8 x ConnectX-7 of 400 Gb/s, DGX B200 user guide; {_SHARP}", True),
    ),
    Hardware(
        name="h200",
        kind="cuda",
        device_name="NVIDIA H200",
        memory_bytes=Figure(141e9, "NVIDIA H200 data sheet, SXM: 141 GB"),
        program_bytes=Figure(139.72 * GIBIBYTE, f"{_OOM} on H200: 139.72 to 139.81 GiB, by driver"),
        memory_bandwidth=Figure(4800 * GIGA, "NVIDIA H200 data sheet, SXM: 4.8 TB/s"),
        devices_per_host=Figure(8, "HGX and DGX H200: 8 GPUs"),
        in_host=("nvlink", Link(450 * GIGA, "NVLink 4: 900 GB/s both ways, NVIDIA H200 data sheet", True)),
        network=Link(50 * GIGA, f"8 x ConnectX-7 of 400 Gb/s, NVIDIA DGX H200 data sheet; {_SHARP}", True),
    ),
    Hardware(
        name="h100",
        kind="cuda",
        device_name="NVIDIA H100 80GB HBM3",
        memory_bytes=Figure(80e9, "NVIDIA H100 data sheet, SXM: 80 GB"),
        program_bytes=Figure(79.11 * GIBIBYTE, f"{_OOM} on H100 SXM: github.com/vllm-project/vllm/issues/27508"),
        memory_bandwidth=Figure(3350 * GIGA, "NVIDIA H100 data sheet, SXM: 3.35 TB/s"),
        devices_per_host=Figure(8, "HGX and DGX H100: 8 GPUs"),
        in_host=("nvlink", Link(450 * GIGA, "NVLink 4: 900 GB/s both ways, NVIDIA H100 data sheet", True)),
        network=Link(50 * GIGA, f"8 x ConnectX-7 of 400 Gb/s, NVIDIA DGX H100 data sheet; {_SHARP}", True),
    ),
    Hardware(
        name="a100-80gb",
        kind="cuda",
        device_name="NVIDIA A100-SXM4-80GB",
        memory_bytes=Figure(80e9, "NVIDIA A100 data sheet, 80GB SXM"),
        program_bytes=Figure(79.15 * GIBIBYTE, f"{_OOM} on A100 80GB: 79.15 to 79.3 GiB, by driver"),
        memory_bandwidth=Figure(2039 * GIGA, "NVIDIA A100 data sheet, 80GB SXM: 2,039 GB/s"),
        devices_per_host=Figure(8, "HGX and DGX A100: 8 GPUs"),
        in_host=("nvlink", Link(300 * GIGA, "NVLink 3: 600 GB/s both ways, NVIDIA A100 data sheet")),
        network=Link(25 * GIGA, f"8 x ConnectX-6 of 200 Gb/s, NVIDIA DGX A100 data sheet; {_SHARP}", True),
    ),
    Hardware(
        name="a100-40gb",
        kind="cuda",
        device_name="NVIDIA A100-SXM4-40GB",
        memory_bytes=Figure(40e9, "NVIDIA A100 data sheet, 40GB"),
        program_bytes=Figure(39.39 * GIBIBYTE, "40,339 MiB that PyTorch names on an A100-PCIE-40GB"),
        memory_bandwidth=Figure(1555 * GIGA, "NVIDIA A100 data sheet, 40GB: 1,555 GB/s"),
        devices_per_host=Figure(8, "HGX and DGX A100: 8 GPUs"),
        in_host=("nvlink", Link(300 * GIGA, "NVLink 3: 600 GB/s both ways, NVIDIA A100 data sheet")),
        network=Link(25 * GIGA, f"8 x ConnectX-6 of 200 Gb/s, NVIDIA DGX A100 data sheet; {_SHARP}", True),
    ),
    Hardware(
        name="l40s",
        kind="cuda",
        device_name="NVIDIA L40S",
        memory_bytes=Figure(48e9, "NVIDIA L40S data sheet: 48 GB"),
        program_bytes=Figure(44.53 * GIBIBYTE, f"{_OOM} on L40S: github.com/Wan-Video/Wan2.1/issues/205"),
        memory_bandwidth=Figure(864 * GIGA, "NVIDIA L40S data sheet: 864 GB/s"),
        devices_per_host=Figure(8, "the greatest machines of clouds: 8 GPUs (AWS g6e.48xlarge)"),
        in_host=("pcie", Link(32 * GIGA, "PCIe Gen4 x16, 64 GB/s both ways, NVIDIA L40S data sheet; no NVLink")),
    ),
    Hardware(
        name="l4",
        kind="cuda",
        device_name="NVIDIA L4",
        memory_bytes=Figure(24e9, "NVIDIA L4 data sheet: 24 GB"),
        program_bytes=Figure(22.05 * GIBIBYTE, f"{_OOM} on L4"),
        memory_bandwidth=Figure(300 * GIGA, "NVIDIA L4 data sheet: 300 GB/s"),
        devices_per_host=Figure(8, "g2-standard-96: 8 GPUs, AI-Hypercomputer/xpk, core/system_characteristics.py"),
        in_host=("pcie", Link(32 * GIGA, "PCIe Gen4 x16, 64 GB/s both ways, NVIDIA L4 data sheet; no NVLink")),
    ),
    Hardware(
        name="v100-32gb",
        kind="cuda",
        device_name="Tesla V100-SXM2-32GB",
        memory_bytes=Figure(32 * GIBIBYTE, "NVIDIA V100 data sheet, SXM2: 32 GB, of which nvidia-smi shows 32,768 MiB"),
        program_bytes=Figure(32_494 * 2**20, "32,494 MiB that PyTorch names on a V100-SXM2-32GB (YOLOv5's log)"),
        memory_bandwidth=Figure(900 * GIGA, "NVIDIA V100 data sheet, SXM2: 900 GB/s"),
        devices_per_host=Figure(8, "NVIDIA DGX-1: 8 GPUs"),
        in_host=("nvlink", Link(150 * GIGA, "NVLink 2: 300 GB/s both ways, NVIDIA V100 data sheet")),
        network=Link(
            6.25 * GIGA, f"4 x InfiniBand EDR of 100 Gb/s for 8 GPUs, NVIDIA DGX-1 data sheet; {_SHARP}", True
        ),
    ),
    Hardware(
        name="v100-16gb",
        kind="cuda",
        device_name="Tesla V100-SXM2-16GB",
        memory_bytes=Figure(16 * GIBIBYTE, "NVIDIA V100 data sheet, SXM2: 16 GB, of which nvidia-smi shows 16,384 MiB"),
        program_bytes=Figure(16_160 * 2**20, "16,160 MiB that PyTorch names on a V100-SXM2-16GB (YOLOv5's log)"),
        memory_bandwidth=Figure(900 * GIGA, "NVIDIA V100 data sheet, SXM2: 900 GB/s"),
        devices_per_host=Figure(8, "NVIDIA DGX-1: 8 GPUs"),
        in_host=("nvlink", Link(150 * GIGA, "NVLink 2: 300 GB/s both ways, NVIDIA V100 data sheet")),
        network=Link(
            6.25 * GIGA, f"4 x InfiniBand EDR of 100 Gb/s for 8 GPUs, NVIDIA DGX-1 data sheet; {_SHARP}", True
        ),
    ),
)

CPU = Hardware("cpu", "cpu", "cpu", None, None, None, None)

HARDWARE = (*TPUS, *GPUS, CPU)
