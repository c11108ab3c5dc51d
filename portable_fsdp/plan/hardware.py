"""Kinds of hardware: reads `hardware.yaml`, where every figure stands beside its source."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 1e9, "GB/s": 1e9}
LINKS = ("nvlink", "pcie", "network")
FIGURES = ("memory", "program", "memory_bandwidth", "ici", *LINKS)

Shape = tuple[int, ...]
"""Chips of a TPU slice along each axis of its mesh."""


class Figure(NamedTuple):
    """A number, and who says it."""

    value: float  # bytes, or bytes/s that one device can send while it receives as much
    source: str
    # Switches that add up what devices send, and send out copies, halve the bytes of a ring: a gather then mostly
    # receives and a reduction mostly sends, and both may run at once.
    in_switch: bool = False


@dataclass(frozen=True)
class TpuChip:
    """How chips of a generation make slices."""

    google: str  # how Google's accelerator types begin: `v5litepod` in `v5litepod-16`
    cores: int  # that those types count for each chip; 1 where they count chips
    devices: int  # that a program sees in a chip
    axes: Literal[2, 3]
    most: int  # chips of a slice
    wraps: Literal["cube", "sixteen", "always"]  # which axes are rings: see `target.links_per_chip`
    link: Figure | None  # bytes/s, one way, of one link of ICI; a chip has two on each axis
    shapes: tuple[Shape, ...]  # that are sold; of three axes: the ones below a cube


class Reached(NamedTuple):
    """Shares of what a device can do at most that measured runs reach: an expected time is made of them."""

    products: float  # matrix products, of the peak
    attention: float  # attention kernels, of the same peak
    memory: float  # other kernels, of the memory's bandwidth
    link: float  # collectives within a host or a slice
    network: float  # and over the network
    source: str


@dataclass(frozen=True)
class Hardware:
    """One kind of device, in hosts of the usual make; None for an unknown figure."""

    name: str
    kind: Literal["tpu", "cuda", "cpu"]  # the trainer's --device
    device_name: str  # as its driver and `models.flops.peak_flops` name it
    memory: Figure | None  # bytes of a device
    program: Figure | None  # bytes of these that a program may have
    memory_bandwidth: Figure | None  # bytes/s of a device
    devices_per_host: int | None  # of GPUs, at most
    links: dict[str, Figure]  # by name: nvlink or pcie within a host; network between GPU hosts, or TPU slices
    chip: TpuChip | None
    reached: Reached | None


OTHER_NAMES = {
    **{"trillium": "v6e", "v6": "v6e", "ironwood": "tpu7x", "v7x": "tpu7x", "v7": "tpu7x"},
    **{"v5lite": "v5e", "v5": "v5p"},
}
"""Other names that people and Google use -> the name here."""


@cache
def known_hardware() -> tuple[Hardware, ...]:
    """All of it: TPUs, GPUs, and the CPU last."""
    rows = yaml.safe_load(Path(__file__).with_name("hardware.yaml").read_text(encoding="utf-8"))
    return tuple(_hardware(name, row) for name, row in rows.items())


def _hardware(name: str, row: dict[str, Any]) -> Hardware:
    figures = {key: _figure(*cells) for key, cells in row.items() if key in FIGURES}
    chip = None
    if "chip" in row:
        shapes = tuple(tuple(int(size) for size in shape.split("x")) for shape in row["shapes"])
        chip = TpuChip(**row["chip"], link=figures.get("ici"), shapes=shapes)
    return Hardware(
        name,
        "tpu" if chip else "cpu" if name == "cpu" else "cuda",
        row["device_name"],
        *(figures.get(key) for key in ("memory", "program", "memory_bandwidth")),
        devices_per_host=row["devices_per_host"][0] if "devices_per_host" in row else None,
        links={key: figures[key] for key in LINKS if key in figures},
        chip=chip,
        reached=Reached(**row["reached"]) if "reached" in row else None,
    )


def _figure(text: str, source: str, *remarks: str) -> Figure:
    """Of `80 GiB` and its source."""
    number, unit = text.split()
    return Figure(float(number) * UNITS[unit], source, "reduces in switches" in remarks)
