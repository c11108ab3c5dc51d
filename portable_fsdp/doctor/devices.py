"""GPUs and TPUs: what the kernel shows, what the environment says, and what torch makes of it (asked in a child)."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from portable_fsdp.doctor.finding import Finding, ProbeAnswer, failed, ok, warning
from portable_fsdp.doctor.packages import installed
from portable_fsdp.runtime.process import problem_of_tpu_worker

LIBTPU_LOCK = Path("/tmp/libtpu_lockfile")  # there whatever TMPDIR says
TPU_VARIABLES = ("TPU_", "MEGASCALE_")


# ----------------------------------------------------------------------------------------------------------------- GPU


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
    """`answer`: of `ask_torch`, None where torch isn't installed; `files`, `driver`: of the two functions above."""
    here = f"{files} GPU(s), driver {driver or 'unknown'}"
    known = answer.value if answer is not None else None
    if known is None:
        if not files:
            return ok("gpu", "none on this host")
        why = "torch isn't installed" if answer is None else answer.problem
        return warning("gpu", f"{here}: torch couldn't be asked: {why}", "mend the lines on torch first")
    names, built = known["devices"], known["cuda"]
    if names:
        speaks = _cuda(known["driver_cuda"])
        return ok(
            "gpu",
            f"{len(names)} x {', '.join(sorted(set(names)))}; driver {driver} for CUDA {speaks}, torch's is {built}",
        )
    if not files:
        return ok("gpu", "none on this host")
    if built is None:
        return failed(
            "gpu", f"{here}: torch {known['torch']} is built without CUDA", "pip install --force-reinstall torch"
        )
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return warning(
            "gpu", f"{here}: none visible with CUDA_VISIBLE_DEVICES={visible!r}", "unset CUDA_VISIBLE_DEVICES"
        )
    if 0 < known["driver_cuda"] // 1000 < int(built.partition(".")[0]):
        older = f"{here}: speaks CUDA {_cuda(known['driver_cuda'])}, torch is built for {built}"
        return failed("gpu", older, "install a newer driver, or a torch built for the driver's CUDA")
    return failed("gpu", f"{here}: {known['problem']}", "nvidia-smi (a reboot where it fails too)")


def _cuda(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def check_nccl(answer: ProbeAnswer | None, interfaces: Sequence[str], environ: Mapping[str, str]) -> Finding:
    """Its version, and whether NCCL_SOCKET_IFNAME names an interface that there is."""
    value = answer.value if answer is not None else None
    known = str(value.get("nccl", "")) if value is not None else ""
    asked = environ.get("NCCL_SOCKET_IFNAME", "")
    if asked and not _names_one(asked, interfaces):
        found = f"NCCL_SOCKET_IFNAME={asked} names none of {', '.join(interfaces)}"
        return failed("nccl", found, "export NCCL_SOCKET_IFNAME=ONE_OF_THEM, or unset it")
    if known:
        return ok("nccl", known)
    if value is not None and value["devices"]:
        return failed("nccl", "this torch has none", "pip install --force-reinstall torch")
    return ok("nccl", "none; only GPUs need it")


def _names_one(asked: str, interfaces: Sequence[str]) -> bool:
    """NCCL's own rules: prefixes joined by commas, all turned round by a leading ^, exact after a leading =."""
    turned, asked = asked.startswith("^"), asked.removeprefix("^")
    exact, asked = asked.startswith("="), asked.removeprefix("=")
    parts = [part.partition(":")[0] for part in asked.split(",")]
    hits = [any(name == part if exact else name.startswith(part) for part in parts) for name in interfaces]
    return any(hit != turned for hit in hits)


# ----------------------------------------------------------------------------------------------------------------- TPU


def check_tpu(chips: Sequence[Path], environ: Mapping[str, str]) -> Finding:
    said = [f"{name}={environ[name]}" for name in sorted(environ) if name.startswith(TPU_VARIABLES)]
    said += [f"PJRT_DEVICE={environ['PJRT_DEVICE']}"] if "PJRT_DEVICE" in environ else []
    variables = f"; {', '.join(said)}" if said else ""
    wrong = problem_of_tpu_worker(environ)
    if wrong:
        return failed("tpu", f"{wrong}{variables}", "unset the TPU_* variables, or set them as the TPU VM does")
    if not chips:
        if environ.get("PJRT_DEVICE") == "TPU" or any(line.startswith("TPU_") for line in said):
            mend = "in a container: --privileged --net=host; elsewhere unset these variables"
            return warning("tpu", f"no chip (no /dev/accel*, no /dev/vfio/*){variables}", mend)
        return ok("tpu", "none on this host")
    library = installed("libtpu")
    if library is None and not environ.get("TPU_LIBRARY_PATH"):
        return failed("tpu", f"{len(chips)} chip(s), and no libtpu{variables}", "pip install '.[tpu]'")
    return ok("tpu", f"{len(chips)} chip(s), libtpu {library or environ['TPU_LIBRARY_PATH']}{variables}")


def check_tpu_is_free(chips: Sequence[Path], lock: Path = LIBTPU_LOCK) -> Finding:
    """A chip serves one process: who holds one, or libtpu's lock file? The doctor never ends a process itself."""
    holders = holding([*chips, lock])
    if holders:
        who = ", ".join(f"process {pid} ({command})" for pid, command in holders.items())
        return failed(
            "tpu in use", f"by {who}", f"if that run is yours and is to end: kill {' '.join(map(str, holders))}"
        )
    if chips and lock.exists():
        return warning("tpu in use", f"{lock} is left of a run that was killed", f"rm {lock}")
    return ok("tpu in use", "no")


def holding(files: Sequence[Path]) -> dict[int, str]:
    """Processes that have one of `files` open -> their command, as far as we may look (root: all)."""
    wanted = {str(path) for path in files}
    found: dict[int, str] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(link) in wanted for link in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(process.name)] = command.strip()[:80]
        except OSError:  # it has ended, or is another user's
            continue
    return found
