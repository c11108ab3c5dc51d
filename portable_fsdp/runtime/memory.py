"""How much memory this host has for its processes: RAM and swap, or less where a container's or a job's cgroup says."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil

_CGROUPS = Path("sys/fs/cgroup")


def host_memory_bytes(root: Path = Path("/")) -> int:
    """What all processes of this host may have together. What others use of it is counted as if it were free.

    `root`: the folder that `proc` and `sys` lie in.
    """
    try:
        lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
        sizes = {words[0]: int(words[1]) * 1024 for words in lines if words[0] in ("MemTotal:", "SwapTotal:")}
    except OSError:  # no Linux
        return psutil.virtual_memory().total
    return min([sizes["MemTotal:"], *_cgroup_limits(root)]) + sizes.get("SwapTotal:", 0)


def in_units(count: int) -> str:
    """Bytes as `25.1 GiB`, `3.2 MiB` or, rounded up, `12 KiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{-(-max(count, 0) // 1024):,} KiB"


def host_identity() -> tuple[str, str]:
    """The machine, by its kernel's boot, and the container and cgroup. Both are equal for processes that share one
    limit."""
    try:
        container = os.readlink("/proc/self/ns/mnt") + Path("/proc/self/cgroup").read_text()
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), container
    except OSError:
        return socket.gethostname(), ""


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Bytes, of this process's cgroup and of those above it, of either version."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, name = root / _CGROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / _CGROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]  # .. leads out of the container
        for depth in range(len(parts) + 1):
            try:
                limit = (base.joinpath(*parts[:depth]) / name).read_text().strip()
            except OSError:
                continue
            if limit.isdecimal():  # else max
                yield int(limit)
