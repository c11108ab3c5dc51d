"""GPUs and TPUs: what the kernel shows, what the environment says, and what torch makes of it (by its probe)."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from portable_fsdp.doctor.finding import Finding, ProbeAnswer, failed, ok, warning
from portable_fsdp.doctor.packages import installed
from portable_fsdp.runtime.process import problem_of_tpu_worker

LIBTPU_LOCK = Path("/tmp/libtpu_lockfile")  # there whatever TMPDIR says


def gpu_files(devices: Path = Path("/dev")) -> int:
    """GPUs of this host (or container) that NVIDIA's driver shows."""
    return sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in devices.glob("nvidia*"))


def driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str:
    """Of NVIDIA's kernel module, as 570.86.15; empty without one."""
    try:
        match = re.search(r"Kernel Module\D*?(?:for \S+)?\s+(\d+\.[\d.]+)", file.read_text())
    except OSError:
        return ""
    return match[1] if match else ""


def check_gpu(answer: ProbeAnswer | None, files: int, driver: str, environ: Mapping[str, str]) -> Finding:
    """`answer`: of the probe `torch`, None where torch isn't installed; `files`, `driver`: of the functions above."""
    here = f"{files} GPU(s), driver {driver or 'unknown'}"
    torch = answer.value if answer is not None else None
    if torch is not None and torch["devices"]:
        kinds = f"{len(torch['devices'])} x {', '.join(sorted(set(torch['devices'])))}"
        return ok(f"{kinds}; driver {driver} for CUDA {_version(torch['driver_cuda'])}, torch's is {torch['cuda']}")
    if not files:
        return ok("none on this host")
    if torch is None:
        reason = "torch isn't installed" if answer is None else answer.problem
        return warning(f"{here}: torch couldn't be asked: {reason}", "mend the lines on torch first")
    if torch["cuda"] is None:
        return failed(f"{here}: torch {torch['torch']} is built without CUDA", "pip install --force-reinstall torch")
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return warning(f"{here}: none visible with CUDA_VISIBLE_DEVICES={visible!r}", "unset CUDA_VISIBLE_DEVICES")
    if 0 < torch["driver_cuda"] // 1000 < int(torch["cuda"].partition(".")[0]):
        problem = f"{here}: speaks CUDA {_version(torch['driver_cuda'])}, torch is built for {torch['cuda']}"
        return failed(problem, "install a newer driver, or a torch built for the driver's CUDA")
    return failed(f"{here}: {torch['problem']}", "nvidia-smi (a reboot where it fails too)")


def _version(number: int) -> str:
    """12.8 for 12080."""
    return f"{number // 1000}.{number % 1000 // 10}"


def check_nccl(answer: ProbeAnswer | None, interfaces: Sequence[str], environ: Mapping[str, str]) -> Finding:
    """Its version, and whether NCCL_SOCKET_IFNAME names an interface that there is."""
    torch = answer.value if answer is not None and answer.value is not None else {}
    setting = environ.get("NCCL_SOCKET_IFNAME", "")
    if setting and not _matches_any(setting, interfaces):
        problem = f"NCCL_SOCKET_IFNAME={setting} names none of {', '.join(interfaces)}"
        return failed(problem, "export NCCL_SOCKET_IFNAME=ONE_OF_THEM, or unset it")
    if torch.get("nccl"):
        return ok(str(torch["nccl"]))
    if torch.get("devices"):
        return failed("this torch has none", "pip install --force-reinstall torch")
    return ok("none; only GPUs need it")


def _matches_any(setting: str, interfaces: Sequence[str]) -> bool:
    """NCCL's own rules: prefixes joined by commas, all inverted by a leading ^, exact after a leading =."""
    inverted, setting = setting.startswith("^"), setting.removeprefix("^")
    exact, setting = setting.startswith("="), setting.removeprefix("=")
    parts = [part.partition(":")[0] for part in setting.split(",")]
    hits = [any(name == part if exact else name.startswith(part) for part in parts) for name in interfaces]
    return any(hit != inverted for hit in hits)


def check_tpu(chips: Sequence[Path], environ: Mapping[str, str]) -> Finding:
    settings = [f"{name}={environ[name]}" for name in sorted(environ) if name.startswith(("TPU_", "MEGASCALE_"))]
    settings += [f"PJRT_DEVICE={environ['PJRT_DEVICE']}"] if "PJRT_DEVICE" in environ else []
    variables = f"; {', '.join(settings)}" if settings else ""
    if problem := problem_of_tpu_worker(environ):
        return failed(f"{problem}{variables}", "unset the TPU_* variables, or set them as the TPU VM does")
    if not chips:
        if environ.get("PJRT_DEVICE") == "TPU" or any(setting.startswith("TPU_") for setting in settings):
            mend = "in a container: --privileged --net=host; elsewhere unset these variables"
            return warning(f"no chip (no /dev/accel*, no /dev/vfio/*){variables}", mend)
        return ok("none on this host")
    library = installed("libtpu") or environ.get("TPU_LIBRARY_PATH")
    if not library:
        return failed(f"{len(chips)} chip(s), and no libtpu{variables}", "pip install '.[tpu]'")
    return ok(f"{len(chips)} chip(s), libtpu {library}{variables}")


def check_tpu_is_free(chips: Sequence[Path], lock: Path = LIBTPU_LOCK) -> Finding:
    """A chip serves one process: who holds one, or libtpu's lock file? The doctor never ends a process itself."""
    holders = _processes_holding([*chips, lock])
    if holders:
        problem = "by " + ", ".join(f"process {pid} ({command})" for pid, command in holders.items())
        return failed(problem, f"if that run is yours and is to end: kill {' '.join(map(str, holders))}")
    if chips and lock.exists():
        return warning(f"{lock} is left of a run that was killed", f"rm {lock}")
    return ok("no")


def _processes_holding(files: Sequence[Path]) -> dict[int, str]:
    """Process -> command, of those that have one of `files` open and that we may look at (root: all)."""
    names = {str(path) for path in files}
    holders: dict[int, str] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(link) in names for link in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                holders[int(process.name)] = command.strip()[:80]
        except OSError:  # it has ended, or is another user's
            continue
    return holders
