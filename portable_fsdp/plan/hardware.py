"""Kinds of hardware, with what each can do at most.

Every figure stands beside the words that say it. Where two sources disagree the greater one counts, because times
that are made of them are lower bounds, and the source says so. What nobody says is None, and never guessed. Peaks in
FLOP/s are in `metrics.flops`, under `Hardware.device_name`.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

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
    wraps: Literal["cube", "sixteen", "always"]  # which axes are rings: see `target.links_per_chip`


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
