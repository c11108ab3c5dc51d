"""The storage of checkpoints, with a way to commit for each kind: `FolderStore` and `ObjectStore`.

A local folder is a `pathlib.Path`. A prefix in an object store is a UPath (over fsspec), which we type as a Path too:
both join, have parents and names, and answer `stat`. Everything else goes through `store_of(path)`.
"""

import asyncio
import errno
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self, cast

from portable_fsdp.runtime.errors import CheckpointError, StoreError
from portable_fsdp.runtime.files import sync_folder, write_whole

MANIFEST = "manifest.json"
FOLDERS = ("model", "optimizer")
STEP_NAME = re.compile(r"step-(\d{8,})")

_TEMPORARY = re.compile(r"(step-\d{8,})\.tmp-[0-9a-f]{8}")
_UPLOAD_BYTES = 16 << 20  # one part of a multipart upload, or one download: large enough to be few


class FolderStore:
    """A file system. The rename of a folder is atomic, and is the commit; fsync makes files and names durable.

    The docstrings of its methods hold for both stores. `final` is a step's folder, `attempt` the id of one attempt.
    """

    is_local = True
    chunk_bytes = 1 << 20  # at a time from a file that is read from end to end; stays in the cache until it is hashed
    pauses_s = (0.001, 0.1)  # between two polls for another process's file: the first, the longest

    # The commit protocol.

    def temporary_of(self, final: Path, attempt: str) -> Path:
        """The folder that an attempt writes to before its commit."""
        return final.with_name(f"{final.name}.tmp-{attempt[:8]}")

    def commit(self, temporary: Path, final: Path, manifest: bytes) -> None:
        """Make `final` appear, whole, at one instant. All other files are in `temporary`, durably."""
        self.write(temporary / MANIFEST, [manifest])
        require_regular(temporary / MANIFEST, temporary.name)
        for folder in (*(temporary / name for name in FOLDERS), temporary):
            self.sync(folder)
        temporary.rename(final)
        self.sync(final.parent)

    def is_committed(self, final: Path) -> bool:
        """Whether a commit made `final`."""
        return final.is_dir()  # the commit gives it this name

    def withdraw(self, final: Path, attempt: str) -> Path:
        """Undo a commit at one instant. Returns the folder that is left to delete."""
        withdrawn = final.rename(self.temporary_of(final, attempt))
        self.sync(final.parent)
        return withdrawn

    def unfinished(self, run_folder: Path, name: str = "") -> list[Path]:
        """Return folders that saves and deletions left unfinished: all, or those of the step folder `name`."""
        matches = map(_TEMPORARY.fullmatch, self.names(run_folder))
        return [run_folder / match[0] for match in matches if match and name in ("", match[1])]

    # Files and folders.

    def names(self, folder: Path) -> list[str]:
        """List the sorted names in `folder`; empty if it doesn't exist. Raises OSError, or a store's own error."""
        with suppress(FileNotFoundError, NotADirectoryError):
            return sorted(os.listdir(folder))
        return []

    def sizes(self, folder: Path) -> dict[str, int]:
        """Map the names of plain files directly in `folder` to their bytes, by one listing."""
        with suppress(FileNotFoundError), os.scandir(folder) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file(follow_symlinks=False)}
        return {}

    def make_folder(self, folder: Path) -> None:
        """Create the folder and its parents, with durable names."""
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for path in missing:
            sync_folder(path.parent)

    def sync(self, folder: Path) -> None:
        """Make the names in `folder` durable."""
        sync_folder(folder)

    def size(self, path: Path) -> int | None:
        """Return the bytes of a plain file; None for a link, a folder, or a special file. Raises FileNotFoundError."""
        with _not_of_the_content(path):
            status = path.lstat()
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def open(self, path: Path) -> "FileReader":
        """Open a plain file. Raises OSError (for links and special files too) and StoreError."""
        with _not_of_the_content(path):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(descriptor)
            raise OSError(f"{path}: expected a plain file, found a special one")

        def read_into(start: int, buffer: memoryview) -> None:
            while buffer:
                with _not_of_the_content(path):
                    count = os.preadv(descriptor, [buffer], start)
                if count == 0:
                    raise OSError(f"{path}: expected {len(buffer)} more bytes at {start}, found its end")
                start, buffer = start + count, buffer[count:]

        return FileReader(status.st_size, read_into, lambda: os.close(descriptor))

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        """Write `chunks` as the file `path` in an existing folder, durably: whole under its name, or absent.

        `sync` of the folder then makes its name durable. Raises OSError, or a store's own error.
        """
        write_whole(path, part_of(path), chunks, path.parent.stat().st_mode & 0o666)

    def move(self, old: Path, new: Path) -> None:
        """Rename a folder."""
        old.rename(new)

    def remove(self, path: Path) -> None:
        """Delete a file, or a folder with its content, if it exists."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


class ObjectStore:
    """An object store. An object appears whole when its upload ends; folders don't exist, and nothing can be renamed.

    So all processes write under the final name from the start, and the upload of the manifest is the commit.
    """

    is_local = False
    chunk_bytes = _UPLOAD_BYTES  # each is a request
    pauses_s = (0.1, 2.0)

    def temporary_of(self, final: Path, attempt: str) -> Path:
        return final

    def commit(self, temporary: Path, final: Path, manifest: bytes) -> None:
        self.write(final / MANIFEST, [manifest])

    def is_committed(self, final: Path) -> bool:
        return exists(final / MANIFEST)

    def withdraw(self, final: Path, attempt: str) -> Path:
        self.remove(final / MANIFEST)
        return final

    def unfinished(self, run_folder: Path, name: str = "") -> list[Path]:
        steps = [run_folder / each for each in self.names(run_folder) if STEP_NAME.fullmatch(each)]
        return [path for path in steps if name in ("", path.name) and not self.is_committed(path)]

    def names(self, folder: Path) -> list[str]:
        try:
            # Not `iterdir`: it calls `isdir` first, and fsspec answers any error there with False.
            keys: list[str] = _client(folder).ls(_key(folder), detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        own = _key(folder).strip("/")  # some stores keep the folder itself as an empty object, and list it
        return sorted({key.rstrip("/").rpartition("/")[2] for key in keys if key.strip("/") != own})

    def sizes(self, folder: Path) -> dict[str, int]:
        objects: dict[str, dict[str, Any]] = _client(folder).find(_key(folder), detail=True)
        return {key.rpartition("/")[2]: int(info["size"]) for key, info in objects.items()}

    def make_folder(self, folder: Path) -> None:
        pass

    def sync(self, folder: Path) -> None:
        pass

    def size(self, path: Path) -> int | None:
        with _not_of_the_content(path):
            return path.stat().st_size

    def open(self, path: Path) -> "FileReader":
        def read_into(start: int, buffer: memoryview) -> None:
            if not buffer:  # a store would read an empty range as the whole object
                return
            with _not_of_the_content(path):  # by name: the second parameter of s3fs is another
                content = _client(path).cat_file(_key(path), start=start, end=start + len(buffer))
            if len(content) != len(buffer):
                raise OSError(f"{path}: expected {len(buffer)} bytes at {start}, found {len(content)}")
            buffer[:] = content

        return FileReader(self.size(path) or 0, read_into, lambda: None)

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        file = _client(path).open(_key(path), "wb", block_size=_UPLOAD_BYTES, autocommit=False)
        try:
            for chunk in chunks:
                file.write(chunk)
            file.close()
            file.commit()
        except BaseException:
            with suppress(Exception):
                file.discard()
            raise

    def move(self, old: Path, new: Path) -> None:
        """Copy, then delete: a kill may leave both."""
        client, start = _client(old), _key(old)
        for key in client.find(start):  # not `mv`: s3fs would try to copy folders, which don't exist
            client.copy(key, _key(new) + key.removeprefix(start))
        self.remove(old)

    def remove(self, path: Path) -> None:
        with suppress(FileNotFoundError):
            _client(path).rm(_key(path), recursive=True)


@dataclass(frozen=True)
class FileReader:
    """An open file of `size` bytes, read at any offset. A context manager, or closed by `close`, once."""

    size: int
    read_into: Callable[[int, memoryview], None]
    """Fill a buffer of bytes from an offset. Raises OSError where the file is too short, StoreError."""
    close: Callable[[], None]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, start: int, size: int) -> bytes:
        """Read `size` bytes from offset `start`."""
        content = bytearray(size)
        self.read_into(start, memoryview(content))
        return bytes(content)


_FOLDERS, _OBJECTS = FolderStore(), ObjectStore()


def store_of(path: Path) -> FolderStore | ObjectStore:
    """Return the store of `path`."""
    return _FOLDERS if isinstance(cast(object, path), Path) else _OBJECTS


def read_file(path: Path) -> bytes:
    """Read a small plain file at once. Raises OSError, StoreError."""
    with store_of(path).open(path) as file:
        return file.read(0, file.size)


def locate(address: str | Path) -> Path:
    """Return the path of an address: local (`file://` too) or a URL (`s3://bucket/run`, `gs://bucket/run`).

    Raises CheckpointError for a protocol that fsspec doesn't know, a package that isn't installed, a URL without a
    server, and one with the characters of a pattern: fsspec would delete all matches. StoreError without a network.
    """
    protocol, separator, rest = str(address).partition("://")
    if not separator:
        return Path(address)
    if protocol in ("file", "local"):
        return Path(rest)
    if pattern := set("*?[]").intersection(rest):
        raise CheckpointError(
            f"{address}: expected a URL without * ? [ ], which fsspec reads as patterns, found {min(pattern)}.\n"
            "  Choose another name."
        )
    if protocol != "memory" and not rest.partition("/")[0]:
        raise CheckpointError(f"{address}: names no bucket or server.\n  Write {protocol}://NAME/FOLDER.")
    from upath import UPath

    try:
        path = UPath(str(address), use_listings_cache=False)  # other processes and hosts write there too
        client, bucket = path.fs, rest.partition("/")[0]  # makes the file system, which needs its package
        _require_answer(client, bucket)
    except StoreError:
        raise
    except Exception as error:  # some connect
        fix = "s3:// needs `pip install s3fs`, gs:// needs `pip install gcsfs`; a local folder needs no `://`"
        fix = "Check the server's name, and the network" if isinstance(error, OSError) else fix
        raise CheckpointError(f"{address}: fsspec can't open this URL: {error}\n  {fix}.") from None
    return cast(Path, path)


@cache
def _require_answer(client: Any, bucket: str) -> None:
    """Raise StoreError if Google's storage can't be reached: gcsfs retries a run's requests for half a minute."""
    request = getattr(getattr(type(client), "_request", None), "__wrapped__", None)  # without its retries
    if request is None:
        return
    logger = logging.getLogger("gcsfs")  # prints the stack of each error that it raises
    for pause_s in (0.5, 1.0, 0.0):
        level = logger.level
        logger.setLevel(logging.CRITICAL)
        try:
            asyncio.run_coroutine_threadsafe(request(client, "GET", "b/{}", bucket), client.loop).result(15)
        except Exception as error:
            if not (type(error).__module__.startswith("aiohttp") or isinstance(error, TimeoutError)):
                return  # an answer: the request for the data has its own error
            if not pause_s:
                raise StoreError(f"gs://{bucket}: no answer: {error}\n  Check the network, then start again.") from None
            time.sleep(pause_s)
        else:
            return
        finally:
            logger.setLevel(level)


def exists(path: Path) -> bool:
    """Whether a file exists. Raises if a store doesn't answer; fsspec's own `exists` returns False."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def is_link(path: Path) -> bool:
    """Whether `path` is a symbolic link. Object stores have none, so no request is sent."""
    return store_of(path).is_local and path.is_symlink()


def part_of(path: Path) -> Path:
    """The temporary name in `FolderStore.write`, which a kill leaves behind."""
    return path.with_name(f"{path.name}.part")


def require_regular(path: Path, name: str) -> int:
    """Return the bytes of a plain file. Raises CheckpointError for an absent file, a link, a folder or a pipe."""
    try:
        size = store_of(path).size(path)
    except OSError:
        raise CheckpointError(f"checkpoint {name}: no such file: {path}") from None
    if size is None:
        raise CheckpointError(f"checkpoint {name}: {path}: expected a plain file, found a link or a special file")
    return size


_OF_THE_CONTENT = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EIO, errno.ENXIO}
"""File system errors about the file itself; others are about the moment (no descriptor, no answer, no permission)."""


@contextmanager
def _not_of_the_content(path: Path) -> Generator[None]:
    """Turn errors that aren't about the content into StoreError. Stores raise errors of many classes."""
    try:
        yield
    except Exception as error:
        is_known = store_of(path).is_local and getattr(error, "errno", errno.EIO) in _OF_THE_CONTENT
        if is_known or isinstance(error, FileNotFoundError):
            raise
        raise StoreError(
            f"{path}: can't be read: {type(error).__name__}: {error}\n"
            "  The file may be intact: start again when the storage answers."
        ) from error


def _client(path: Path) -> Any:
    return cast(Any, path).fs


def _key(path: Path) -> str:
    return cast(Any, path).path
