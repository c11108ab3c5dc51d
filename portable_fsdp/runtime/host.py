"""Resources of this host: TPU chips, packages, memory for its processes within cgroup limits, threads."""

import importlib.util
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from importlib import metadata
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def tpu_chips(devices: Path = Path("/dev")) -> list[Path]:
    """Return the device files of the TPU chips."""
    return sorted([*devices.glob("accel[0-9]*"), *(devices / "vfio").glob("[0-9]*")])


def keep_torch_tpu_out() -> None:
    """Call before importing torch: disables its autoload of device packages, if torch_tpu is installed.

    On a TPU the engine loads torch_tpu itself. On a host without a chip, or on its CPU, torch with torch_tpu loaded
    hangs in the first backward: autograd starts a thread per device, and that thread opens the TPU (0.2.0).
    """
    if importlib.util.find_spec("torch_tpu") is not None:
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"


def installed(package: str) -> str | None:
    """Return the version of a package; None if it isn't installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def pip_install(extra: str = "") -> str:
    """Return the command that installs this package with an extra: in its checkout, or as a wheel installed it."""
    is_checkout = (Path(__file__).parents[2] / "pyproject.toml").is_file()
    return f"pip install '{'.' if is_checkout else 'portable-fsdp'}{f'[{extra}]' if extra else ''}'"


def prefer_expandable_segments() -> None:
    """Call before CUDA starts: torch's allocator then uses expandable segments, unless the user configured it."""
    if not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


def host_memory_bytes(root: Path = Path("/")) -> int:
    """Return RAM and swap for all processes of this host together; memory in use counts as free.

    `root`: the folder that contains `proc` and `sys`.
    """
    try:
        lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
        sizes = {words[0]: int(words[1]) * 1024 for words in lines if words[0] in ("MemTotal:", "SwapTotal:")}
    except OSError:  # not Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([sizes["MemTotal:"], *_cgroup_limits(root)]) + sizes.get("SwapTotal:", 0)


def in_units(count: int) -> str:
    """Format bytes as `25.1 GiB`, `3.2 MiB` or, rounded up, `12 KiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{-(-max(count, 0) // 1024):,} KiB"


def time_text(saved: str) -> str:
    """Format a time in ISO 8601 as `2026-01-02 03:04:05`."""
    return saved[:19].replace("T", " ")


def host_identity() -> tuple[str, str]:
    """Return (boot id of the kernel, container and cgroup): equal for processes that share one memory limit."""
    try:
        container = os.readlink("/proc/self/ns/mnt") + Path("/proc/self/cgroup").read_text()
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip(), container
    except OSError:
        return socket.gethostname(), ""


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Yield the memory limits (bytes) of this process's cgroup and its ancestors, cgroup v1 or v2."""
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
            if limit.isdecimal():  # else "max"
                yield int(limit)


def begin(call: Callable[[], T]) -> "Future[T]":
    """Run `call` in a daemon thread: one that never returns doesn't keep the process from ending. For libraries
    that nothing can interrupt."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # a panic in Rust isn't an Exception
            future.set_exception(error)

    threading.Thread(target=run, name="portable_fsdp call", daemon=True).start()
    return future
