"""What this host has: TPU chips, packages, and memory for its processes, limited by a container's or a job's cgroup."""

import importlib.util
import os
import socket
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path


def tpu_chips(devices: Path = Path("/dev")) -> list[Path]:
    """Their device files."""
    return sorted([*devices.glob("accel[0-9]*"), *(devices / "vfio").glob("[0-9]*")])


def keep_torch_tpu_out() -> None:
    """Before torch is imported: it then doesn't load the packages that give it devices, if torch_tpu is one of them.

    The engine loads torch_tpu itself, on a TPU. On a host without a chip, or on its CPU, a torch that has loaded it
    hangs in the first backward: autograd starts a thread for each device, and that one's opens the TPU (0.2.0).
    """
    if importlib.util.find_spec("torch_tpu") is not None:
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"


def installed(package: str) -> str | None:
    """The version of a package; None if it isn't installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def prefer_expandable_segments() -> None:
    """Before CUDA starts: torch's allocator then grows segments in place of gaps. What the user set stays."""
    if not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


def host_memory_bytes(root: Path = Path("/")) -> int:
    """RAM and swap that all processes of this host may use together; what others use of it counts as free.

    `root`: the folder that `proc` and `sys` lie in.
    """
    try:
        lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
        sizes = {words[0]: int(words[1]) * 1024 for words in lines if words[0] in ("MemTotal:", "SwapTotal:")}
    except OSError:  # no Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([sizes["MemTotal:"], *_cgroup_limits(root)]) + sizes.get("SwapTotal:", 0)


def in_units(count: int) -> str:
    """Bytes as `25.1 GiB`, `3.2 MiB` or, rounded up, `12 KiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{-(-max(count, 0) // 1024):,} KiB"


def host_identity() -> tuple[str, str]:
    """The machine, by its kernel's boot, and the container and cgroup: equal for processes that share one limit."""
    try:
        container = os.readlink("/proc/self/ns/mnt") + Path("/proc/self/cgroup").read_text()
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), container
    except OSError:
        return socket.gethostname(), ""


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Bytes, of this process's cgroup and its ancestors, of either version."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        folder = root / "sys/fs/cgroup"
        if controllers == "":
            name = "memory.max"
        elif "memory" in controllers.split(","):
            folder, name = folder / "memory", "memory.limit_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]  # .. leads out of the container
        for depth in range(len(parts) + 1):
            try:
                limit = (folder.joinpath(*parts[:depth]) / name).read_text().strip()
            except OSError:
                continue
            if limit.isdecimal():  # else max
                yield int(limit)
