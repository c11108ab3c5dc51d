"""Explains a write error of a save: its cause, what is saved, and the way out. Never raises itself."""

import errno
from pathlib import Path

from portable_fsdp.checkpoint.format import committed_steps
from portable_fsdp.runtime.host import in_units

_FULL = {errno.ENOSPC, errno.EDQUOT}
_NOT_OURS = "{folder} belongs to somebody else: make it writable."
_CAUSES = {
    errno.ENOSPC: "No space is left in {folder}{sizes}.",
    errno.EDQUOT: "Your quota in {folder} is used up{sizes}.",
    errno.EFBIG: "A file in {folder} may not become that large: raise the limit (ulimit -f).",
    errno.EROFS: "{folder} is mounted read-only: mount it for writing.",
    errno.EACCES: _NOT_OURS,
    errno.EPERM: _NOT_OURS,
    errno.EIO: "The storage below {folder} failed: the system's log (dmesg) says why.",
}


def with_cause(error: Exception, folder: Path) -> str:
    """The error, and below it its cause in `folder`, where we know one."""
    reason = _cause(error, folder) if isinstance(error, OSError) else ""
    return f"{error}\n  {reason}" if reason else str(error)


def way_out(error: OSError, folder: Path, needed_bytes: int = 0) -> str:
    """Lines for the end of a message, each after a line break: the cause, what is saved in `folder`, what to do.

    `needed_bytes`: of the checkpoint.
    """
    reason = _cause(error, folder, needed_bytes)
    try:
        steps = committed_steps(folder)
    except Exception:  # the storage that failed may not answer either
        return f"\n  {reason}" if reason else ""
    before = "Then"
    if error.errno in _FULL:
        prune = f" (python -m portable_fsdp.checkpoint prune {folder} --keep 1)" if len(steps) > 1 else ""
        before = f"Free room there{prune} and"
    saved = f"The last saved checkpoint is {steps[0]}." if steps else "No checkpoint was saved before it."
    rerun = f"{before} rerun the same command: it {f'resumes from {steps[0].name}' if steps else 'begins anew'}."
    elsewhere = "Or save elsewhere: checkpoint.dir=ANOTHER" + (f" checkpoint.resume={steps[0]}" if steps else "") + "."
    return "".join(f"\n  {line}" for line in (reason, saved, rerun, elsewhere) if line)


def _cause(error: OSError, folder: Path, needed_bytes: int = 0) -> str:
    """One sentence; "" for an error that needs none."""
    sizes = f": {in_units(needed_bytes)} are needed" if needed_bytes else ": free some"
    return _CAUSES.get(error.errno or 0, "").format(folder=folder, sizes=sizes)
