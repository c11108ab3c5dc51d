"""The checks of this host that need no torch. Each returns a `Finding`, or raises what `checked` turns into one."""

import os
import platform
import resource
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from portable_fsdp.runtime.errors import PortableFSDPError
from portable_fsdp.runtime.launchers import detect_launch, problem_of_tpu_worker

if TYPE_CHECKING:
    from packaging.requirements import Requirement

OURS = "portable-fsdp"
INSTALL = "pip install '.'"
MIN_BYTES = GIB = 2**30  # docker gives /dev/shm 64 MiB, where NCCL ends with "no space left on device"
USUAL_BYTES = 20 * GIB  # a checkpoint of 1 B parameters with AdamW in float32 takes 12 GB
MIN_FILES, USUAL_FILES = 256, 1024
NO_GPU = ("", "-1")  # values of CUDA_VISIBLE_DEVICES that hide all
LIBTPU_LOCK = Path("/tmp/libtpu_lockfile")  # libtpu ignores TMPDIR


class Finding(NamedTuple):
    """`warning`: training works, but something is slow or about to fail. `mend`: how to fix it; empty if `ok`."""

    state: Literal["ok", "warning", "failed"]
    found: str
    mend: str = ""


def checked(check: Callable[[], Finding]) -> Finding:
    """Run a check; turn what it raises into a finding."""
    try:
        return check()
    except PortableFSDPError as error:
        problem, _, mend = str(error).partition("\n")
        return Finding("failed", problem, mend.strip() or "fix what this names")
    except metadata.PackageNotFoundError as error:
        return Finding("warning", f"{error.name} is not installed: can't compare versions", INSTALL)
    except ModuleNotFoundError as error:
        return Finding("failed", f"{error.name} is not installed", INSTALL)
    except Exception as error:  # a host without /proc
        return Finding("failed", f"couldn't check: {type(error).__name__}: {error}", "fix what this error names")


def check_launcher(environ: Mapping[str, str]) -> Finding:
    launch = detect_launch(environ)
    rank = "" if launch.is_alone else f"; this is process {launch.rank}"
    return Finding("ok", f"started by {launch.description}{rank}")


def installed(package: str) -> str | None:
    """Its version; None if it isn't installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def requirements(package: str, extra: str = "") -> "list[Requirement]":
    """What an installed package requires on this machine: always, or only for `extra` (and the extras it names)."""
    from packaging.requirements import Requirement

    required: list[Requirement] = []
    for requirement in map(Requirement, metadata.requires(package) or []):
        marker = requirement.marker
        always = marker is None or marker.evaluate({"extra": ""})
        if always is (extra == "") and (marker is None or marker.evaluate({"extra": extra})):
            required.append(requirement)
            for inner in requirement.extras if installed(requirement.name) else ():
                required += requirements(requirement.name, inner)
    return required


def unmet(required: "Sequence[Requirement]") -> tuple[list[str], list[str]]:
    """The missing packages; those of another version, with the one that is needed."""
    versions = {requirement: installed(requirement.name) for requirement in required}
    wrong = [
        f"{requirement.name} {version} (needs {requirement.specifier})"
        for requirement, version in versions.items()
        if version is not None and not requirement.specifier.contains(version, prereleases=True)
    ]
    missing = dict.fromkeys(requirement.name for requirement, version in versions.items() if version is None)
    return list(missing), list(dict.fromkeys(wrong))


def check_python(version: tuple[int, ...]) -> Finding:
    here = f"{'.'.join(map(str, version))} on {platform.system()} {platform.machine()}"
    if version < (3, 11):
        return Finding("failed", here, "python3.11 -m venv .venv, or newer; then pip install '.' in it")
    return Finding("ok", here)


def check_packages() -> Finding:
    """The packages that every run needs."""
    required = requirements(OURS)
    missing, wrong = unmet(required)
    if missing or wrong:
        return Finding("failed", "; ".join([*(f"{name} missing" for name in missing), *wrong]), INSTALL)
    return Finding("ok", ", ".join(f"{requirement.name} {installed(requirement.name)}" for requirement in required))


def check_extras() -> Finding:
    """Optional parts. All packages there but in other versions: a warning; each engine needs its own torch."""
    states: list[str] = []
    mend = ""
    for extra in metadata.metadata(OURS).get_all("Provides-Extra") or []:
        required = requirements(OURS, extra)
        missing, wrong = unmet(required)
        if not required:
            states.append(f"{extra} not for this machine")
        elif missing:
            states.append(f"{extra} lacks {', '.join(missing)}")
        elif wrong:
            states.append(f"{extra} has {', '.join(wrong)}")
            mend = mend or f"pip install '.[{extra}]'"
        else:
            states.append(f"{extra} complete")
    return Finding("warning" if mend else "ok", "; ".join(states), mend)


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """NCCL's processes of one host talk through it."""
    size = shutil.disk_usage(folder)
    room = f"{folder}: {size.free / GIB:.2f} GiB free of {size.total / GIB:.2f}"
    if size.free < MIN_BYTES:
        mend = f"in a container: --shm-size=16g or --ipc=host; else delete what fills {folder}"
        return Finding("warning", room, mend)
    return Finding("ok", room)


def check_disk(folder: Path, usual_bytes: int = 0) -> Finding:
    """Free disk and permission to write where `folder` is or would be."""
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    mend = f"free some of {place}, or choose another disk's folder (run.dir, TMPDIR)"
    try:
        with tempfile.TemporaryFile(dir=place):  # mode bits don't show a read-only disk
            free = shutil.disk_usage(place).free
    except OSError as error:
        return Finding("failed", f"{place}: can't be written to: {error.strerror}", mend)
    room = f"{free / GIB:.1f} GiB free at {place}"
    if free < MIN_BYTES:
        return Finding("failed", room, mend)
    if free < usual_bytes:
        return Finding("warning", f"{room}; a checkpoint of 1 B parameters with AdamW takes 12 GB", mend)
    return Finding("ok", room)


def check_open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limits = f"{soft} (ulimit -n), hard limit {hard}"
    if soft == resource.RLIM_INFINITY or soft >= USUAL_FILES:
        return Finding("ok", limits)
    mend = f"ulimit -n {USUAL_FILES}"
    if hard != resource.RLIM_INFINITY and hard < USUAL_FILES:
        mend += ", after raising nofile in /etc/security/limits.conf (docker: --ulimit nofile)"
    return Finding("failed" if soft < MIN_FILES else "warning", limits, mend)


def check_locked_memory(needed_by: Sequence[str]) -> Finding:
    """`needed_by`: hardware of this host that registers memory: InfiniBand, TPU chips."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft / 2**20:.0f} MiB (ulimit -l)"
    if soft == resource.RLIM_INFINITY or not needed_by:
        return Finding("ok", limit)
    mend = "ulimit -l unlimited (docker: --ulimit memlock=-1; Slurm: srun --propagate=MEMLOCK)"
    return Finding("warning", f"{limit}, beside {', '.join(needed_by)}", mend)


def check_gpu(files: int, visible: str | None) -> Finding:
    """Whether torch can use them is the engine's line. `visible`: CUDA_VISIBLE_DEVICES."""
    if files and visible in NO_GPU:
        return Finding("warning", f"{files}, hidden by CUDA_VISIBLE_DEVICES={visible!r}", "unset CUDA_VISIBLE_DEVICES")
    return Finding("ok", f"{files or 'none'} on this host")


def check_tpu(chips: Sequence[Path], environ: Mapping[str, str]) -> Finding:
    """Whether a chip has an engine's package and libtpu, and which variables are wrong."""
    from portable_fsdp.backends.open import engines_on, spec_of

    if problem := problem_of_tpu_worker(environ):
        return Finding("failed", problem, "unset the TPU_* variables, or set them as the TPU VM does")
    packages = [spec_of(engine).packages["tpu"] for engine in engines_on("tpu")]
    there = {package.name: package for package in packages if installed(package.name)}
    for package in there.values():
        package.check()
    if not chips and (environ.get("PJRT_DEVICE") == "TPU" or any(name.startswith("TPU_") for name in environ)):
        mend = "in a container: --privileged --net=host; elsewhere unset PJRT_DEVICE and TPU_*"
        return Finding("warning", "no chip (/dev/accel*, /dev/vfio/*), though PJRT_DEVICE or TPU_* is set", mend)
    libtpu = installed("libtpu") or environ.get("TPU_LIBRARY_PATH")
    if chips and not (there and libtpu):
        absent = "libtpu" if there else "engine"
        return Finding("failed", f"{len(chips)} chip(s), and no {absent}", "pip install '.[tpu]'")
    return Finding("ok", f"{len(chips)} chip(s), {', '.join(there)}, libtpu {libtpu}" if chips else "none on this host")


def check_tpu_is_free(chips: Sequence[Path], lock: Path = LIBTPU_LOCK) -> Finding:
    """Who holds a chip or libtpu's lock file? A chip serves one process; the doctor never ends a process itself."""
    names = {str(path) for path in [*chips, lock]}
    holders: dict[int, str] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(link) in names for link in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                holders[int(process.name)] = command.strip()[:80]
        except OSError:  # it has ended, or is another user's
            continue
    if holders:
        found = "by " + ", ".join(f"process {pid} ({command})" for pid, command in holders.items())
        return Finding("failed", found, f"if that run is yours and is to end: kill {' '.join(map(str, holders))}")
    if chips and lock.exists():
        return Finding("warning", f"a killed run has left {lock}", f"rm {lock}")
    return Finding("ok", "no")
