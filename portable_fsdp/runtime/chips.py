"""The TPU chips of this host."""

from pathlib import Path


def tpu_chips(devices: Path = Path("/dev")) -> list[Path]:
    """Their device files."""
    return sorted([*devices.glob("accel[0-9]*"), *(devices / "vfio").glob("[0-9]*")])
