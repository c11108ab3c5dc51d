"""One run a folder: who writes to `run.dir` holds a lock on a small file in it.

The lock is flock's, on an open file: the kernel releases it however the process ends, so a restart has it at once.
Python passes the descriptor on to no program that it starts.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from portable_fsdp.runtime.errors import ConfigError

log = logging.getLogger("portable_fsdp")

LOCK_NAME = ".lock"
_ATTEMPTS = 10
_NO_LOCKS_HERE = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS}


@contextmanager
def sole_run(folder: Path) -> Generator[None]:
    """While entered, nobody else enters with `folder`, on any host that shares it. Makes the folder.

    At its end it removes the lock's file, and the folders that it made if nothing was written to them. Process 0 alone
    calls it. Raises ConfigError where another run has entered (with its host and PID), and where the folder can't be
    written to. A file system without locks gets a warning.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        descriptor = _make_and_lock(folder)
    except OSError as error:
        _remove(made)
        raise ConfigError(
            f"run.dir: expected a folder that can be written to, or a new one: {folder}\n"
            f"  found that {error.filename or folder} can't: {error.strerror}\n  Set run.dir to another folder."
        ) from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the folder may have been moved or deleted during the run
            (folder / LOCK_NAME).unlink()  # before the lock is released: the next run makes its own
        os.close(descriptor)
        _remove(made)


def _make_and_lock(folder: Path) -> int:
    """The descriptor of the lock's file, which names its owner. Raises OSError, and ConfigError for another's."""
    path = folder / LOCK_NAME
    for attempt in range(_ATTEMPTS):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:  # a run that had made the folder ended, and removed it again
            if attempt == _ATTEMPTS - 1:
                raise
            continue
        try:
            _lock(descriptor, folder)
            if _is_at(path, descriptor):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, _describe_owner())
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its owner ended and deleted it after it was opened here
    raise OSError(errno.EAGAIN, "other runs take and leave it all the time", str(path))


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"run.dir: expected a folder that no other run writes to: {folder}\n"
            f"  found one that {_owner(descriptor)}.\n"
            "  Wait for that run, or end it (a SIGTERM to it saves first), or set run.dir to another folder."
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS_HERE:
            raise
        log.warning(
            "run.dir: %s: this file system has no locks (%s), so that two runs in one folder would not be noticed. "
            "Give each run a folder of its own.",
            folder,
            error.strerror,
        )


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _describe_owner() -> bytes:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    return (json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}) + "\n").encode()


def _owner(descriptor: int) -> str:
    try:
        owner: dict[str, Any] = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {owner['pid']} on host {owner['host']} writes to since {owner['since']}"
    except (ValueError, KeyError, TypeError, OSError):  # it has the lock, and has not written its name yet
        return "another process has just begun to write to"


def _remove(made: list[Path]) -> None:
    """The folder first, then those above it; one that holds something stays."""
    for path in made:
        with contextlib.suppress(OSError):
            path.rmdir()
