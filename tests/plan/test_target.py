"""The table of hardware, and what `--on` names."""

import math
import os
from itertools import islice

import pytest

from portable_fsdp.models.flops import peak_flops
from portable_fsdp.plan.target import (
    Hardware,
    accelerator_type,
    known_hardware,
    links_per_chip,
    parse_target,
    shapes_of,
)
from portable_fsdp.plan.tpu_compiler import ENVIRONMENT, devices_of
from portable_fsdp.runtime.child import Worker
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.train.auto import UNKNOWN_HARDWARE

HARDWARE = known_hardware()
TARGETS = {  # topology, chips, devices, hosts
    **dict.fromkeys(("v5p:2x2x4", "V5P:2X2X4", "v5p-32"), ("v5p:2x2x4", 16, 16, 4)),  # v5p's types count cores
    "v5p-8": ("v5p:2x2x1", 4, 4, 1),  # 4 chips, not 8
    "v5p-16": ("v5p:2x2x2", 8, 8, 2),
    "v5p-12288": ("v5p:16x16x24", 6144, 6144, 1536),
    "v4-32": ("v4:2x2x4", 16, 16, 4),
    "v4-128": ("v4:4x4x4", 64, 64, 16),
    "v4:12x16x16": ("v4:12x16x16", 3072, 3072, 768),
    **dict.fromkeys(("v5e:4x4", "v5litepod-16", "v5e-16"), ("v5e:4x4", 16, 16, 4)),  # v5e's types count chips
    "v5litepod-8": ("v5e:2x4", 8, 8, 1),
    "v6e-1": ("v6e:1x1", 1, 1, 1),
    "v6e:16x16": ("v6e:16x16", 256, 256, 64),
    "v3-8": ("v3:2x2", 4, 8, 1),  # two devices a chip
    "v2-32": ("v2:4x4", 16, 32, 4),
    "tpu7x:2x2x2": ("tpu7x:2x2x2", 8, 16, 2),
    "tpu7x-128": ("tpu7x:4x4x4", 64, 128, 16),
    "2*v5e:4x4": ("v5e:4x4", 32, 32, 8),
    "4*v6e-256": ("v6e:16x16", 1024, 1024, 256),
    "h100:8": (None, 8, 8, 1),
    **dict.fromkeys(("h100", "a100-80gb", "cpu"), (None, 1, 1, 1)),
    "a100-40gb:16": (None, 16, 16, 2),
    "v100-16gb:64": (None, 64, 64, 8),
    "cpu:2": (None, 2, 2, 1),
    "NVIDIA H100 80GB HBM3:16": (None, 16, 16, 2),  # as drivers name them
    **dict.fromkeys(("TPU v5 lite:8", "TPU v5e:8"), ("v5e:2x4", 8, 8, 1)),
    "TPU v4:16": ("v4:2x2x4", 16, 16, 4),
    "TPU v3:8": ("v3:2x2", 4, 8, 1),
}


WORDS = {
    "cpu:2": "2 processes on the CPU",
    "v2-32": "16 chips, 32 devices of TPU v2 on 4 hosts",
    "2*v5e:4x4": "32 chips of TPU v5 lite in 2 slices on 8 hosts",
    "h100:8": "8 x NVIDIA H100 80GB HBM3 on 1 host",
}


def test_targets() -> None:
    for text, expected in TARGETS.items():
        target = parse_target(text)
        assert (target.topology, target.chips, target.devices, target.hosts) == expected
        assert target.text == text
        assert target.devices_per_host * target.hosts == target.devices
        assert math.prod(units for _, units in target.levels) == target.devices
    assert {name: parse_target(name).in_words for name in WORDS} == WORDS


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["v5p-12"], "v5p:2x2x2 (8 chips, Google's v5p-16)"),
        (["v5p:32", "v5p-2x2x4", "v5p:4x2x2"], "v5p:2x2x4 (16 chips, Google's v5p-32)"),
        (["v5p:3x3x3"], "v5p:2x4x4 (32 chips, Google's v5p-64)"),
        (["v5p", "v5p-0"], "v5p:2x2x1 (4 chips, Google's v5p-8)"),
        (["v5p-12"], "Google's v5p-N (N counts 2 per chip)"),
        (["v6e-17"], "v6e:4x4 (16 chips, Google's v6e-16)"),
        (["v6e:4x4x4"], "v6e:8x8"),
        (["v5e:32x32"], "v5e:16x16 (256 chips, Google's v5litepod-256)"),  # libtpu takes it, but nobody sells it
        (["v5e:4x4x2"], "v5e:4x8"),
        (["v6e-999999999"], "v6e:16x16"),
        (["v5:2x2x4"], "nearest: v5p"),
        (["a100:8"], "a100-80gb, a100-40gb;"),
        (["v100"], "v100-32gb, v100-16gb;"),
        (["h10:8", "h100-8"], "nearest: h100"),
        (["h100:12"], "nearest: h100:8, h100:16."),
        (["h100:0"], "nearest: h100:1"),
        (["cpu:0"], "nearest: cpu:1"),
        (["2*h100:8"], "found 'h100'"),
        (["0*v6e-4"], "found 'v6e'"),
        (["rtx4090", "NVIDIA GeForce RTX 4090:1"], "known: v2, v3, v4,"),
        (["NVIDIA GeForce RTX 4090:1"], UNKNOWN_HARDWARE),  # a run recognises it
        ([""], "found ''"),
        (["h100:8:8"], "found 'h100:8:8'"),
    ],
)
def test_what_is_not_sold_is_refused_with_the_nearest(texts: list[str], message: str) -> None:
    for text in texts:
        with pytest.raises(ConfigError) as refusal:
            parse_target(text)
        assert str(refusal.value).startswith(f"--on={text}: expected ")
        assert message in str(refusal.value)


@pytest.mark.parametrize("hardware", HARDWARE, ids=lambda hardware: hardware.name)
def test_every_figure_has_a_source_and_every_shape_and_type_is_understood(hardware: Hardware) -> None:
    chip = hardware.chip
    for figure in (
        hardware.program,
        hardware.memory_bandwidth,
        *([chip.link] if chip else []),
        *hardware.links.values(),
    ):
        assert figure is None or (figure.value > 0 and len(figure.source) >= 20)
    bandwidth = hardware.memory_bandwidth.value if hardware.memory_bandwidth else math.inf
    assert all(link.value < bandwidth / 4 for link in hardware.links.values())
    # models.weights has no peak for v2; a V100 has no bfloat16.
    dtype = "float32" if hardware.name.startswith("v100") else "bfloat16"
    assert (peak_flops(hardware.device_name, dtype) is None) == (hardware.name in ("v2", "cpu"))
    if chip is None:
        assert parse_target(f"{hardware.name}:2").hardware is hardware
        return
    assert chip.link is None or chip.link.value * 2 * chip.axes < bandwidth * 2
    shapes = list(shapes_of(chip))
    assert len(set(shapes)) == len(shapes)
    assert max(math.prod(shape) for shape in shapes) == chip.most
    for shape in [*shapes[:12], *shapes[12::25], shapes[-1]]:
        by_shape = parse_target(f"{hardware.name}:{'x'.join(map(str, shape))}")
        by_type = parse_target(accelerator_type(chip, shape))
        assert (by_shape.shape, by_shape.chips, by_type.chips) == (shape, math.prod(shape), math.prod(shape))


# AI-Hypercomputer/xpk, core/system_characteristics.py: one shape for each size.
XPK = {
    **{"v5p-64": (2, 4, 4), "v5p-256": (4, 4, 8), "v5p-384": (4, 4, 12), "v5p-512": (4, 8, 8), "v5p-768": (4, 8, 12)},
    **{"v5p-1024": (8, 8, 8), "v5p-1152": (4, 12, 12), "v5p-1536": (8, 8, 12), "v5p-2048": (8, 8, 16)},
    **{"v5p-3072": (8, 12, 16), "v5p-4096": (8, 16, 16), "v5p-8192": (16, 16, 16), "v4-1536": (8, 8, 12)},
    **{"v4-4096": (8, 16, 16), "tpu7x-512": (4, 8, 8)},
}
LINKS = {
    **{"v5p:4x4x4": 6, "v5p:8x8x16": 6},  # rings on all axes
    "v5p:2x2x1": 2,  # a square of 4 chips has 4 links, each of which two chips share
    "v5p:2x2x4": 3.5,  # 8 + 8 + 12 links for 16 chips
    **{"v6e:16x16": 4, "v6e:8x16": 3.75, "v6e:4x4": 3, "v6e:1x1": 0},  # a ring of 16; 7 links in a row of 8
    "v3:4x4": 4,  # nobody says which slices have rings: the most favourable
}
GIGABYTES_PER_S = {
    ("v5p:4x4x4", "ici"): 600,  # "1200 GB/s bidirectional"
    **{("v5e:16x16", "ici"): 200, ("v6e:16x16", "ici"): 400, ("2*v5p:4x4x4", "network"): 6.25},
    ("tpu7x:4x4x4", "ici"): 300,  # of a chip's 600, a device's share
    **{("h100:8", "nvlink"): 450, ("h100:16", "network"): 50, ("l40s:4", "pcie"): 32},
    **{("v4-32", "network"): None, ("v2-8", "ici"): None, ("l4:16", "network"): None},
    **{("cpu:2", "host"): None, ("h100:8", "ici"): None},
}


def test_names_differ_a_type_is_the_shape_most_like_a_cube_and_links_have_their_bandwidths() -> None:
    assert len({hardware.name for hardware in HARDWARE}) == len(HARDWARE) == 17
    assert {name: parse_target(name).shape for name in XPK} == XPK
    for text, links in LINKS.items():
        target = parse_target(text)
        assert target.hardware.chip is not None
        assert links_per_chip(target.hardware.chip, target.shape) == pytest.approx(links), text
    for (text, name), expected in GIGABYTES_PER_S.items():
        link = parse_target(text).link(name)
        assert (link and link.value) == (None if expected is None else pytest.approx(expected * 1e9)), text


def _devices(names: list[str]) -> dict[str, int]:
    """For a child: the devices that libtpu sees."""
    os.environ.update(ENVIRONMENT)  # before jax is imported
    targets = {name: parse_target(name) for name in names}
    return {name: len(devices_of(target.topology or "", target.slices)) for name, target in targets.items()}


@pytest.mark.xla
@pytest.mark.slow
def test_libtpu_sees_as_many_devices() -> None:
    """For small slices of all that libtpu 0.0.21 knows; it doesn't know TPU7x."""
    names = [
        f"{hardware.name}:{'x'.join(map(str, shape))}"
        for hardware in HARDWARE
        if hardware.name != "tpu7x" and hardware.chip
        for shape in islice(shapes_of(hardware.chip), 8)
    ]
    names.append("2*v5e:4x4")
    with Worker(250) as worker:
        assert worker(_devices, names) == {name: parse_target(name).devices for name in names}
