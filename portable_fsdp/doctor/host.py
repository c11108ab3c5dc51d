"""What this host gives a process: shared memory, disk, open files, locked memory."""

import errno
import os
import resource
import shutil
import tempfile
from pathlib import Path

from portable_fsdp.doctor.finding import Finding, failed, ok, warning

GIB = 2**30
LEAST_SHARED_BYTES = GIB  # docker gives 64 MiB, where NCCL ends with "no space left on device"
LEAST_FREE_BYTES = GIB
USUAL_FREE_BYTES = 20 * GIB  # a checkpoint of 1 B parameters with AdamW in float32 takes 12 GB
LEAST_FILES, USUAL_FILES = 256, 1024
FILES_A_PROCESS = 8  # of the run: gloo and the store hold a few connections to each


def check_shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """NCCL's processes of one host talk through it."""
    try:
        size = shutil.disk_usage(folder)
    except OSError as error:
        return warning(f"{folder}: {error.strerror}", f"mount -t tmpfs tmpfs {folder}")
    room = f"{folder}: {size.free / GIB:.2f} GiB free of {size.total / GIB:.2f}"
    if size.free < LEAST_SHARED_BYTES:
        return warning(room, f"in a container: --shm-size=16g or --ipc=host; else delete what fills {folder}")
    return ok(room)


def check_disk(folder: Path, setting: str) -> Finding:
    """Free disk and permission to write where `folder` is or would be; `setting` says how to choose another one."""
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not place.is_dir():
        return failed(f"{place} is a file", setting)
    free_some = f"free some of {place}, or {setting}"
    try:
        with tempfile.TemporaryFile(dir=place):  # the mode's bits don't tell of a read-only disk
            free = shutil.disk_usage(place).free
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return failed(f"{place}: can't be written to: {error.strerror}", free_some if is_full else setting)
    room = f"{free / GIB:.1f} GiB free at {place}"
    if free < LEAST_FREE_BYTES:
        return failed(room, free_some)
    if free < USUAL_FREE_BYTES:
        return warning(f"{room}; a checkpoint of 1 B parameters with AdamW takes 12 GB", setting)
    return ok(room)


def check_temporary() -> Finding:
    """TMPDIR: compiled programs and downloaded files pass through it."""
    setting = "export TMPDIR=FOLDER on a disk with room"
    chosen = os.environ.get("TMPDIR")
    if chosen and not Path(chosen).is_dir():
        return failed(f"TMPDIR={chosen} is no folder", f"mkdir -p {chosen}, or {setting}")
    try:
        folder = Path(chosen or tempfile.gettempdir())
    except OSError as error:
        return failed(str(error), setting)
    finding = check_disk(folder, setting)
    # Little passes through at once: a few GiB are enough.
    return ok(finding.found.partition(";")[0]) if finding.state == "warning" else finding


def check_open_files(processes: int) -> Finding:
    """`processes`: of the whole run."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return ok("unlimited")
    is_unlimited = hard == resource.RLIM_INFINITY
    needed = max(USUAL_FILES, LEAST_FILES + FILES_A_PROCESS * processes)
    limits = f"{soft} (ulimit -n), hard limit {'unlimited' if is_unlimited else hard}"
    mend = f"ulimit -n {max(needed, 65536 if is_unlimited else min(hard, 65536))}"
    if not is_unlimited and hard < needed:
        mend += ", after raising nofile in /etc/security/limits.conf (docker: --ulimit nofile)"
    if soft < LEAST_FILES:
        return failed(limits, mend)
    return warning(limits, mend) if soft < needed else ok(limits)


def check_locked_memory(needed_by: str) -> Finding:
    """`needed_by`: hardware of this host that registers memory (InfiniBand, TPU chips); empty where there is none."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return ok("unlimited")
    limit = f"{soft / 2**20:.0f} MiB (ulimit -l)"
    if needed_by:
        mend = "ulimit -l unlimited (docker: --ulimit memlock=-1; Slurm: srun --propagate=MEMLOCK)"
        return warning(f"{limit}, beside {needed_by}", mend)
    return ok(f"{limit}; nothing here needs more")


def memory_registering_hardware(chips: int) -> str:
    """What needs locked memory here."""
    cards = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    names = [f"InfiniBand ({', '.join(cards)})"] if cards else []
    if chips and Path("/dev/vfio").exists():
        names.append("TPU chips under /dev/vfio")
    return " and ".join(names)
