"""Atomic writes, reads that stay inside a folder, strict JSON, the cache folder, and the lock of a run's folder."""

import errno
import fcntl
import json
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from portable_fsdp.runtime.errors import ConfigError


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Return `portable_fsdp` in the user's cache folder (XDG base directory specification)."""
    base = environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "portable_fsdp"


def write_text_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` in UTF-8, so that a kill at any time leaves the old or the new file.

    Temporary file in the same folder, fsync, rename, fsync of the folder. One writer per path. Raises OSError, and then
    leaves the old file unchanged.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)  # perhaps a link
    write_whole(path, temporary, [text.encode()])
    sync_folder(path.parent)


def write_whole(path: Path, temporary: Path, chunks: Iterable[bytes | memoryview], mode: int = 0o666) -> None:
    """Write `chunks` to `path`, durably: whole under its name, or absent. `sync_folder` then makes its name durable.

    `temporary`: a name in the same folder, which a kill leaves behind. Raises OSError.
    """
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
        try:
            for chunk in chunks:
                with memoryview(chunk) as content:
                    done = 0
                    while done < len(content):
                        done += os.write(descriptor, content[done:])
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):  # a write or an fsync names no file
            error.filename = str(path)
        with suppress(OSError):  # makes room on a full disk for the error's own file
            temporary.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Make names in `folder` durable: a file's own fsync doesn't cover its name."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_inside(path: Path, folder: Path) -> BinaryIO:
    """Open a file of `folder` for reading. Raises OSError, also for a link that leads out of the folder.

    The blobs of a snapshot in the hub's cache count as part of its folder.
    """
    real, root = Path(os.path.realpath(path, strict=True)), Path(os.path.realpath(folder))
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else root
    if not (real.is_relative_to(root) or real.is_relative_to(blobs)):
        raise OSError(errno.ENXIO, "the link leads out of its folder", str(path))
    return real.open("rb")


def read_inside(path: Path, folder: Path) -> bytes:
    """Return the content of a file; raises like `open_inside`."""
    with open_inside(path, folder) as file:
        return file.read()


# ---------------------------------------------------------------------------------------------------------------- JSON


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def parse_json(text: str | bytes, constant: Callable[[str], Any] = _refuse_constant) -> Any:
    """Parse one value. Raises ValueError for text that isn't JSON in UTF-8, and for duplicate keys of an object.

    `constant`: returns the value of `NaN`, `Infinity` and `-Infinity`; by default they also raise ValueError.
    """
    text = text.decode() if isinstance(text, bytes) else text
    return json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=constant)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        key, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"duplicate key {key[:80]!r}")
    return result


log = logging.getLogger("portable_fsdp")

LOCK_NAME = ".lock"
_ATTEMPTS = 10
_NO_LOCKS_HERE = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS}


def try_lock(descriptor: int) -> bool | None:
    """Lock an open file until it is closed. False: another process has the lock; None: the file system has no locks."""
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
    """Create `folder` and lock it against other runs, on all hosts that share it. Only process 0 calls it.

    On exit it removes the lock file, and the folders that it created if they are empty. Raises ConfigError if another
    run holds the lock (with its host and PID), or the folder isn't writable. Warns if the file system has no locks.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        try:
            descriptor = _take(folder / LOCK_NAME)
        except OSError as error:
            raise ConfigError(
                f"run.dir: expected a writable or new folder: {folder}\n"
                f"  can't write to {error.filename or folder}: {error.strerror}\n  Set run.dir to another folder."
            ) from None
        try:
            yield
        finally:
            with suppress(OSError):  # the folder may have been moved or deleted during the run
                (folder / LOCK_NAME).unlink()  # before releasing the lock: the next run creates its own file
            os.close(descriptor)
    finally:
        for path in made:  # the folder, then its parents; a folder with files stays
            with suppress(OSError):
                path.rmdir()


def _take(path: Path) -> int:
    """Lock the file, write its owner, return its descriptor. Raises OSError, or ConfigError if another run has it."""
    for _ in range(_ATTEMPTS):  # another run may end, and remove its folder or file after it was opened here
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            lock, owner = try_lock(descriptor), _owner(descriptor)
            if lock is not False and path.exists() and os.path.samestat(os.fstat(descriptor), path.lstat()):
                if lock is None:
                    log.warning(
                        "run.dir: %s: this file system has no locks, so nothing prevents a second run in this folder. "
                        "Set a different run.dir for each run.",
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
                raise _in_use(path.parent, owner)
    raise OSError(errno.EAGAIN, "other runs keep locking and releasing it", str(path))


def require_unused(folder: Path) -> None:
    """Raise ConfigError if a run is inside `sole_run` with this folder now. Creates nothing."""
    with suppress(OSError):  # no lock file; or an error that `sole_run` reports
        descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_NOFOLLOW)
        try:
            if try_lock(descriptor) is False:
                raise _in_use(folder, _owner(descriptor))
        finally:
            os.close(descriptor)


def _in_use(folder: Path, owner: str) -> ConfigError:
    return ConfigError(
        f"run.dir: another run writes to this folder: {folder}\n  Locked by {owner}.\n"
        "  Wait for that run, or end it (on SIGTERM it saves first), or set run.dir to another folder."
    )


def _owner(descriptor: int) -> str:
    try:
        owner: dict[str, Any] = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {owner['pid']} on host {owner['host']} since {owner['since']}"
    except (ValueError, KeyError, TypeError, OSError):  # it holds the lock, but hasn't written its name yet
        return "a process that has just started"
