"""Where checkpoints lie: a local folder (`pathlib.Path`) or a prefix in an object store (UPath, over fsspec).

They differ here and in `commit.py` alone: fsync makes a folder durable and a rename is atomic; an object appears whole
when its upload ends, folders don't exist, and nothing can be renamed.
"""

import errno
import os
import pathlib
import shutil
import stat
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self, cast

from portable_fsdp.runtime.errors import CheckpointError, StoreError
from portable_fsdp.runtime.files import read_regular, sync_folder

_CHUNK_BYTES = 1 << 20  # read of a local file at a time: it stays in the processor's cache until it is hashed
_MAX_READ = 1 << 30  # of one file as a whole; a manifest of a million pieces has 30 MB
_UPLOAD_BYTES = 16 << 20  # one part of a multipart upload, or one download: large enough to be few


def locate(address: str | Path) -> Path:
    """The path of an address: local (`file://` too) or an URL (`s3://bucket/run`, `gs://bucket/run`).

    Raises CheckpointError for a protocol that fsspec doesn't know, a package that isn't installed, and an URL with the
    characters of a pattern: fsspec would delete all that match.
    """
    protocol, separator, rest = str(address).partition("://")
    if not separator:
        return Path(address)
    if protocol in ("file", "local"):
        return Path(rest)
    if pattern := set("*?[]").intersection(rest):
        raise CheckpointError(
            f"{address}: expected an URL without * ? [ ], which fsspec takes for patterns, found {min(pattern)}.\n"
            "  Choose another name."
        )
    from upath import UPath

    try:
        path = UPath(str(address), use_listings_cache=False)  # other processes and hosts write there too
        path.fs  # noqa: B018  # makes the file system, which needs its package
    except (ValueError, ImportError) as error:
        raise CheckpointError(
            f"{address}: expected an URL that fsspec can open, found: {error}\n"
            "  s3:// needs `pip install s3fs`, gs:// needs `pip install gcsfs`; a local folder needs no `://`."
        ) from None
    return cast(Path, path)


def is_object_store(path: Path) -> bool:
    """Whether the manifest is the commit, because no folder can be renamed."""
    return not isinstance(cast(object, path), pathlib.Path)


def names(folder: Path) -> list[str]:
    """The sorted names in `folder`; none where it doesn't exist. Raises OSError, or a store's own error."""
    try:
        if not is_object_store(folder):
            return sorted(os.listdir(folder))
        # Not `iterdir`: it calls `isdir` first, and fsspec answers any error there with False.
        keys: list[str] = _store(folder).ls(_key(folder), detail=False)
    except (FileNotFoundError, NotADirectoryError):
        return []
    own = _key(folder).strip("/")  # some stores keep the folder itself as an empty object, and list it
    return sorted({key.rstrip("/").rpartition("/")[2] for key in keys if key.strip("/") != own})


def sizes(folder: Path) -> dict[str, int]:
    """Name -> bytes of the plain files directly in `folder`, by one listing."""
    if not is_object_store(folder):
        with suppress(FileNotFoundError), os.scandir(folder) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file(follow_symlinks=False)}
        return {}
    objects: dict[str, dict[str, Any]] = _store(folder).find(_key(folder), detail=True)
    return {key.rpartition("/")[2]: int(info["size"]) for key, info in objects.items()}


def exists(path: Path) -> bool:
    """Whether a file is there. Raises where a store doesn't answer; fsspec's own `exists` returns False."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def read(path: Path) -> bytes:
    """All of a small file. Raises OSError, StoreError."""
    with _store_errors(path):
        return path.read_bytes() if is_object_store(path) else read_regular(path, path.parent, _MAX_READ)


def make_folder(folder: Path) -> None:
    """Make it and its parents, with durable names. An object store has no folders."""
    if is_object_store(folder):
        return
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def sync(folder: Path) -> None:
    """Make the names in `folder` durable."""
    if not is_object_store(folder):
        sync_folder(folder)


def remove(path: Path) -> None:
    """Delete a file, or a folder with its content, if it exists."""
    if is_object_store(path):
        with suppress(FileNotFoundError):
            _store(path).rm(_key(path), recursive=True)
    elif path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def move(old: Path, new: Path) -> None:
    """Rename a folder; in an object store copy, then delete, so that a kill may leave both."""
    if is_object_store(old):
        store, start = _store(old), _key(old)
        for key in store.find(start):  # not `mv`: s3fs would try to copy folders, which don't exist
            store.copy(key, _key(new) + key.removeprefix(start))
        remove(old)
    else:
        old.rename(new)


def write(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write `chunks` as the file `path` in an existing folder, durably: whole under its name, or absent.

    `sync` of the folder then makes its name durable. Raises OSError.
    """
    if is_object_store(path):
        _upload(path, chunks)
        return
    part = part_of(path)
    try:
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, path.parent.stat().st_mode & 0o666)
        try:
            for chunk in chunks:
                with memoryview(chunk) as content:
                    done = 0
                    while done < len(content):
                        done += os.write(descriptor, content[done:])
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(part, path)
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None:  # a write or an fsync names no file
            error.filename = str(path)
        with suppress(OSError):  # makes room on a full disk for the error's own file
            part.unlink(missing_ok=True)
        raise


def part_of(path: Path) -> Path:
    """The name that a kill in `write` leaves behind."""
    return path.with_name(f"{path.name}.part")


def _upload(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    file = _store(path).open(_key(path), "wb", block_size=_UPLOAD_BYTES, autocommit=False)
    try:
        for chunk in chunks:
            file.write(chunk)
        file.close()
        file.commit()
    except BaseException:
        with suppress(Exception):
            file.discard()
        raise


class FileReader:
    """An open file that is read at any offset. A context manager. Raises OSError (for links and special files too) and
    StoreError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        # For a file that is read from end to end; in an object store each chunk is a request.
        self.chunk_bytes = _UPLOAD_BYTES if is_object_store(path) else _CHUNK_BYTES
        with _store_errors(path):
            if is_object_store(path):
                self.size = path.stat().st_size
                return
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        status = os.fstat(self._descriptor)
        self.size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise OSError(f"{path}: expected a plain file, found a special one")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, once or again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill a buffer of bytes from offset `start`; OSError where the file is too short."""
        if self._descriptor is None:
            if not buffer:  # a store would take an empty range for the whole object
                return
            # By name: the second parameter of s3fs is another.
            with _store_errors(self._path):
                content = _store(self._path).cat_file(_key(self._path), start=start, end=start + len(buffer))
            if len(content) != len(buffer):
                raise OSError(f"{self._path}: expected {len(buffer)} bytes at {start}, found {len(content)}")
            buffer[:] = content
            return
        while buffer:
            with _store_errors(self._path):
                count = os.preadv(self._descriptor, [buffer], start)
            if count == 0:
                raise OSError(f"{self._path}: expected {len(buffer)} more bytes at {start}, found its end")
            start, buffer = start + count, buffer[count:]

    def read(self, start: int, size: int) -> bytes:
        """`size` bytes from offset `start`."""
        content = bytearray(size)
        self.read_into(start, memoryview(content))
        return bytes(content)


def require_regular(path: Path, name: str) -> int:
    """The size of a plain file in bytes. Raises CheckpointError for an absent file, a link, a folder or a pipe."""
    try:
        with _store_errors(path):
            status = path.stat() if is_object_store(path) else path.lstat()
    except OSError:
        raise CheckpointError(f"checkpoint {name}: expected the file {path}, found none") from None
    if not is_object_store(path) and not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"checkpoint {name}: {path}: expected a plain file, found a link or a special file")
    return status.st_size


_OF_THE_CONTENT = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EIO, errno.ENXIO}
"""Errors about the file itself, rather than this moment (no free descriptor, no answer, no permission)."""


@contextmanager
def _store_errors(path: Path) -> Generator[None]:
    """Errors that say nothing about the content at `path` become StoreError; stores raise errors of many classes."""
    try:
        yield
    except Exception as error:
        is_of_content = not isinstance(error, OSError) or error.errno in _OF_THE_CONTENT
        if isinstance(error, FileNotFoundError) or (is_of_content and not is_object_store(path)):
            raise
        raise StoreError(
            f"{path}: expected to be able to read it, found {type(error).__name__}: {error}\n"
            "  It may be whole: start again when the storage answers."
        ) from error


def _store(path: Path) -> Any:
    return cast(Any, path).fs


def _key(path: Path) -> str:
    return cast(Any, path).path
