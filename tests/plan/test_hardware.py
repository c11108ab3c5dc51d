import math
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from portable_fsdp.metrics.flops import peak_flops
from portable_fsdp.plan.hardware import (
    CPU,
    GPUS,
    HARDWARE,
    TPUS,
    Hardware,
    Link,
)
from portable_fsdp.plan.target import accelerator_type, links_per_chip, parse_target, shapes_of
from portable_fsdp.runtime.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "topology", "chips", "devices", "hosts"),
    [
        ("v5p:2x2x4", "v5p:2x2x4", 16, 16, 4),
        ("V5P:2X2X4", "v5p:2x2x4", 16, 16, 4),
        ("v5p-32", "v5p:2x2x4", 16, 16, 4),  # counts cores
        ("v5p-8", "v5p:2x2x1", 4, 4, 1),  # 4 chips, not 8
        ("v5p-16", "v5p:2x2x2", 8, 8, 2),
        ("v5p-12288", "v5p:16x16x24", 6144, 6144, 1536),
        ("v4-32", "v4:2x2x4", 16, 16, 4),
        ("v4-128", "v4:4x4x4", 64, 64, 16),
        ("v4:12x16x16", "v4:12x16x16", 3072, 3072, 768),
        ("v5e:4x4", "v5e:4x4", 16, 16, 4),
        ("v5litepod-16", "v5e:4x4", 16, 16, 4),  # counts chips
        ("v5e-16", "v5e:4x4", 16, 16, 4),
        ("v5litepod-8", "v5e:2x4", 8, 8, 1),
        ("v6e-1", "v6e:1x1", 1, 1, 1),
        ("v6e:16x16", "v6e:16x16", 256, 256, 64),
        ("v3-8", "v3:2x2", 4, 8, 1),  # two devices a chip
        ("v2-32", "v2:4x4", 16, 32, 4),
        ("tpu7x:2x2x2", "tpu7x:2x2x2", 8, 16, 2),
        ("tpu7x-128", "tpu7x:4x4x4", 64, 128, 16),
        ("2*v5e:4x4", "v5e:4x4", 32, 32, 8),
        ("4*v6e-256", "v6e:16x16", 1024, 1024, 256),
    ],
)
def test_tpu_slices(text: str, topology: str, chips: int, devices: int, hosts: int) -> None:
    target = parse_target(text)
    assert (target.text, target.topology) == (text, topology)
    assert (target.chips, target.devices, target.hosts) == (chips, devices, hosts)
    assert target.devices_per_host * target.hosts == devices
    assert math.prod(units for _, units in target.levels) == devices


@pytest.mark.parametrize(
    ("text", "name", "devices", "hosts"),
    [
        ("h100:8", "h100", 8, 1),
        ("h200:1", "h200", 1, 1),
        ("h100", "h100", 1, 1),
        ("b200:4", "b200", 4, 1),
        ("a100-40gb:16", "a100-40gb", 16, 2),
        ("a100-80gb", "a100-80gb", 1, 1),
        ("l40s:4", "l40s", 4, 1),
        ("l4", "l4", 1, 1),
        ("v100-16gb:64", "v100-16gb", 64, 8),
        ("cpu:2", "cpu", 2, 1),
        ("cpu", "cpu", 1, 1),
    ],
)
def test_hosts_of_gpus_and_cpus(text: str, name: str, devices: int, hosts: int) -> None:
    target = parse_target(text)
    assert (target.hardware.name, target.devices, target.hosts, target.slices) == (name, devices, hosts, 1)
    assert (target.topology, target.topology_options) == (None, {})
    assert math.prod(units for _, units in target.levels) == devices


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("v5p-12", "v5p:2x2x2 (8 chips, Google's v5p-16)"),
        ("v5p:32", "v5p:2x2x4 (16 chips, Google's v5p-32)"),
        ("v5p:3x3x3", "v5p:2x4x4 (32 chips, Google's v5p-64)"),
        ("v5p:4x2x2", "v5p:2x2x4 (16 chips"),
        ("v5p", "v5p:2x2x1 (4 chips, Google's v5p-8)"),
        ("v5p-12", "counts 2 cores a chip"),
        ("v6e-17", "v6e:4x4 (16 chips, Google's v6e-16)"),
        ("v6e:4x4x4", "v6e:AxB"),
        ("v5e:32x32", "v5e:16x16 (256 chips, Google's v5litepod-256)"),  # libtpu takes it, but nobody sells it
        ("v5e:4x4x2", "v5e:4x8"),
        ("trillium:4x4", "nearest: v6e;"),
        ("ironwood", "nearest: tpu7x;"),
        ("v5:2x2x4", "nearest: v5p;"),
        ("a100:8", "nearest: a100-80gb, a100-40gb;"),
        ("v100", "nearest: v100-32gb, v100-16gb;"),
        ("h10:8", "nearest: h100"),
        ("h100-8", "nearest: h100"),
        ("h100:12", "nearest: h100:8, h100:16."),
        ("h100:0", "nearest: h100:1"),
        ("cpu:0", "nearest: cpu:1"),
        ("2*h100:8", "found 'h100'"),
        ("0*v6e-4", "found 'v6e'"),
        ("rtx4090", "known: v2, v3, v4,"),
        ("", "found ''"),
        ("h100:8:8", "found 'h100:8:8'"),
        ("v5p-0", "v5p:2x2x1"),
        ("v6e-999999999", "v6e:16x16"),
    ],
)
def test_what_is_not_sold_is_refused_with_the_nearest(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        parse_target(text)
    message = str(refusal.value)
    assert message.startswith(f"--on={text}: expected ")
    assert said in message
    assert "Nothing was started." in message


@pytest.mark.parametrize("hardware", HARDWARE, ids=lambda hardware: hardware.name)
def test_every_figure_has_a_source(hardware: Hardware) -> None:
    figures = [hardware.memory_bytes, hardware.program_bytes, hardware.memory_bandwidth, hardware.devices_per_host]
    links: list[Link | None] = [hardware.network, hardware.in_host[1] if hardware.in_host else None]
    chip = [hardware.chip.link] if hardware.chip else []
    for figure in [*figures, *chip]:
        assert figure is None or (figure.value > 0 and len(figure.source) >= 20)
    for link in links:
        assert link is None or (link.bytes_per_s > 0 and len(link.source) >= 20)


@pytest.mark.parametrize("hardware", HARDWARE, ids=lambda hardware: hardware.name)
def test_figures_fit_together(hardware: Hardware) -> None:
    if hardware.memory_bytes and hardware.program_bytes:
        kept = 1 - hardware.program_bytes.value / hardware.memory_bytes.value
        assert -0.08 < kept < 0.08  # vendors of GPUs sell decimal gigabytes, and mean more
    links = [hardware.network, hardware.in_host[1] if hardware.in_host else None]
    for link in links:
        if link and hardware.memory_bandwidth:
            assert link.bytes_per_s < hardware.memory_bandwidth.value / 4
    if hardware.chip and hardware.chip.link and hardware.memory_bandwidth:
        assert hardware.chip.link.value * 2 * hardware.chip.axes < hardware.memory_bandwidth.value * 2


def test_peaks_are_known_by_the_names_here() -> None:
    """v2's peak isn't in the table; a V100 has no bfloat16."""
    for hardware in HARDWARE:
        if hardware.name in ("v2", "cpu"):
            assert peak_flops(hardware.device_name, "bfloat16") is None
        else:
            dtype = "float32" if hardware.name.startswith("v100") else "bfloat16"
            assert peak_flops(hardware.device_name, dtype)


def test_names_are_one_each_and_each_is_understood() -> None:
    assert len({hardware.name for hardware in HARDWARE}) == len(HARDWARE)
    for hardware in (*GPUS, CPU):
        assert parse_target(f"{hardware.name}:2").hardware is hardware


@pytest.mark.parametrize("hardware", TPUS, ids=lambda hardware: hardware.name)
def test_every_shape_and_type_is_understood(hardware: Hardware) -> None:
    chip = hardware.chip
    assert chip is not None
    shapes = list(shapes_of(chip))
    assert len(set(shapes)) == len(shapes)
    assert max(math.prod(shape) for shape in shapes) == chip.most_chips
    for shape in shapes:
        by_shape = parse_target(f"{hardware.name}:{'x'.join(map(str, shape))}")
        by_type = parse_target(accelerator_type(chip, shape))
        assert (by_shape.shape, by_shape.chips, by_type.chips) == (shape, math.prod(shape), math.prod(shape))


@pytest.mark.parametrize(
    ("type_", "shape"),
    # AI-Hypercomputer/xpk, core/system_characteristics.py: one shape for each size.
    [
        *[("v5p-64", (2, 4, 4)), ("v5p-256", (4, 4, 8)), ("v5p-384", (4, 4, 12)), ("v5p-512", (4, 8, 8))],
        *[("v5p-768", (4, 8, 12)), ("v5p-1024", (8, 8, 8)), ("v5p-1152", (4, 12, 12)), ("v5p-1536", (8, 8, 12))],
        *[("v5p-2048", (8, 8, 16)), ("v5p-3072", (8, 12, 16)), ("v5p-4096", (8, 16, 16)), ("v5p-8192", (16, 16, 16))],
        *[("v4-1536", (8, 8, 12)), ("v4-4096", (8, 16, 16)), ("tpu7x-512", (4, 8, 8))],
    ],
)
def test_a_type_is_the_shape_most_like_a_cube(type_: str, shape: tuple[int, ...]) -> None:
    assert parse_target(type_).shape == shape


@pytest.mark.parametrize(
    ("text", "links"),
    [
        ("v5p:4x4x4", 6),  # rings on all axes
        ("v5p:8x8x16", 6),
        ("v5p:2x2x1", 2),  # a square of 4 chips has 4 links, each of which two chips share
        ("v5p:2x2x4", 3.5),  # 8 + 8 + 12 links for 16 chips
        ("v6e:16x16", 4),
        ("v6e:8x16", 3.75),  # a ring of 16; 7 links in a row of 8
        ("v6e:4x4", 3),
        ("v6e:1x1", 0),
        ("v3:4x4", 4),  # nobody says which slices have rings: the most favourable
    ],
)
def test_links_of_a_slice_are_counted(text: str, links: float) -> None:
    target = parse_target(text)
    assert target.hardware.chip is not None
    assert links_per_chip(target.hardware.chip, target.shape) == pytest.approx(links)


@pytest.mark.parametrize(
    ("text", "link", "gigabytes_per_s"),
    [
        ("v5p:4x4x4", "ici", 600),  # "1200 GB/s bidirectional"
        ("v5e:16x16", "ici", 200),
        ("v6e:16x16", "ici", 400),
        ("tpu7x:4x4x4", "ici", 300),  # of a chip's 600, a device's share
        ("2*v5p:4x4x4", "network", 6.25),
        ("h100:8", "nvlink", 450),
        ("h100:16", "network", 50),
        ("l40s:4", "pcie", 32),
    ],
)
def test_bandwidths(text: str, link: str, gigabytes_per_s: float) -> None:
    assert parse_target(text).bandwidth(link) == pytest.approx(gigabytes_per_s * 1e9)


def test_unknown_bandwidths_are_none() -> None:
    unknown = [("v4-32", "network"), ("v2-8", "ici"), ("l4:16", "network"), ("cpu:2", "host"), ("h100:8", "ici")]
    assert [parse_target(text).bandwidth(link) for text, link in unknown] == [None] * len(unknown)


LIBTPU = """
from itertools import islice
from jax.experimental import topologies
from portable_fsdp.plan.hardware import TPUS
from portable_fsdp.plan.target import parse_target, shapes_of
names = [f"{h.name}:{'x'.join(map(str, s))}" for h in TPUS if h.name != "tpu7x" for s in islice(shapes_of(h.chip), 8)]
for name in [*names, "2*v5e:4x4"]:
    target = parse_target(name)
    found = topologies.get_topology_desc(platform="tpu", topology_name=target.topology, **target.topology_options)
    print(name, len(found.devices) == target.devices)
"""


@pytest.mark.xla
@pytest.mark.slow
def test_libtpu_sees_as_many_devices() -> None:
    """For small slices of all that libtpu 0.0.21 knows; it doesn't know TPU7x."""
    environment = {
        **os.environ,
        **{"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"},
        **{"TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},
    }
    done = subprocess.run([sys.executable, "-c", LIBTPU], env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    known = sum(len(list(islice(shapes_of(h.chip), 8))) for h in TPUS if h.chip and h.name != "tpu7x")
    assert len(lines) == known + 1
    assert [line for line in lines if not line.endswith("True")] == []
