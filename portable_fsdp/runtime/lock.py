"""Locks on files by flock, and the one that lets a single run write to `run.dir`.

The kernel releases a lock however its process ends, so a restart has it at once. Python passes the descriptor on to no
program that it starts.
"""

import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from portable_fsdp.runtime.errors import ConfigError

log = logging.getLogger("portable_fsdp")

LOCK_NAME = ".lock"
_ATTEMPTS = 10
_NO_LOCKS_HERE = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS}


def try_lock(descriptor: int) -> bool | None:
    """Lock an open file until it is closed. False: another process has it; None: the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS_HERE:
            raise
        return None
    return True


@contextmanager
def sole_run(folder: Path) -> Generator[None]:
    """While entered, nobody else enters with `folder`, on any host that shares it. Makes the folder.

    At its end it removes the lock's file, and the folders that it made if nothing was written to them. Process 0 alone
    calls it. Raises ConfigError where another run has entered (with its host and PID), and where the folder can't be
    written to. A file system without locks gets a warning.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        try:
            descriptor = _take(folder / LOCK_NAME)
        except OSError as error:
            raise ConfigError(
                f"run.dir: expected a folder that can be written to, or a new one: {folder}\n"
                f"  found that {error.filename or folder} can't: {error.strerror}\n  Set run.dir to another folder."
            ) from None
        try:
            yield
        finally:
            with suppress(OSError):  # the folder may have been moved or deleted during the run
                (folder / LOCK_NAME).unlink()  # before the lock is released: the next run makes its own
            os.close(descriptor)
    finally:
        for path in made:  # the folder, then those above it; one that holds something stays
            with suppress(OSError):
                path.rmdir()


def _take(path: Path) -> int:
    """Lock the file, write its owner into it, return its descriptor. Raises OSError, and ConfigError for another's."""
    for _ in range(_ATTEMPTS):  # another run may end, and remove its folder or its file after it was opened here
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            lock, owner = try_lock(descriptor), _owner(descriptor)
            if lock is not False and path.exists() and os.path.samestat(os.fstat(descriptor), path.lstat()):
                if lock is None:
                    log.warning(
                        "run.dir: %s: this file system has no locks, so nothing stops a second run in this folder. Set "
                        "another run.dir for each run.",
                        path.parent,
                    )
                since = datetime.now(UTC).isoformat(timespec="seconds")
                text = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}) + "\n"
                try:
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, text.encode())
                except OSError:
                    os.close(descriptor)
                    raise
                return descriptor
            os.close(descriptor)
            if lock is False:
                raise ConfigError(
                    f"run.dir: expected a folder that no other run writes to: {path.parent}\n"
                    f"  found one that {owner}.\n"
                    "  Wait for that run, or end it (a SIGTERM to it saves first), or set run.dir to another folder."
                )
    raise OSError(errno.EAGAIN, "other runs take and leave it all the time", str(path))


def _owner(descriptor: int) -> str:
    try:
        owner: dict[str, Any] = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {owner['pid']} on host {owner['host']} writes to since {owner['since']}"
    except (ValueError, KeyError, TypeError, OSError):  # it has the lock, and has not written its name yet
        return "another process has just begun to write to"
