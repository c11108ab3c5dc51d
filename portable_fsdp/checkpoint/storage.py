"""Where checkpoints lie: a folder, or a prefix in an object store behind fsspec. One path type for both.

`pathlib.Path` names a local folder, universal_pathlib's UPath (pathlib's interface over fsspec) an URL. What differs
stands here and in `commit.py`: a folder is made durable by fsync and renamed at one instant; an object appears whole
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
from portable_fsdp.runtime.files import sync_folder

_CHUNK_BYTES = 1 << 20  # of a local file, to read at a time: it is still in the processor's cache when it is used
_UPLOAD_BYTES = 16 << 20  # of one part of a multipart upload, or of one download: large enough to be few


def locate(address: str | Path) -> Path:
    """The path of `address`: a local one (`file://` too), or of an URL (`s3://bucket/run`, `gs://bucket/run`).

    Raises CheckpointError for a protocol that fsspec doesn't know, or whose package isn't installed, and for an URL
    with characters that fsspec takes for a pattern: what it deletes would be all that match.
    """
    protocol, separator, rest = str(address).partition("://")
    if not separator:
        return Path(address)
    if protocol in ("file", "local"):
        return Path(rest)
    if found := set("*?[]").intersection(rest):
        raise CheckpointError(
            f"{address}: expected an URL without * ? [ ], which fsspec takes for patterns, found {min(found)}.\n"
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
    """Whether a manifest is the commit there, since no folder can be renamed."""
    return not isinstance(cast(object, path), pathlib.Path)


def names(folder: Path) -> list[str]:
    """What lies directly in `folder`, sorted; nothing where it doesn't exist. Raises OSError, or a store's own."""
    try:
        if not is_object_store(folder):
            return sorted(os.listdir(folder))
        # Not `iterdir`: it asks `isdir` first, for which fsspec takes any error for a no.
        keys: list[str] = _store(folder).ls(_key(folder), detail=False)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = {key.rstrip("/").rpartition("/")[2] for key in keys if _below(key, folder)}
    return sorted(found)


def sizes(folder: Path) -> dict[str, int]:
    """Name -> bytes of the plain files directly in `folder`; one listing in an object store."""
    if not is_object_store(folder):
        with suppress(FileNotFoundError), os.scandir(folder) as entries:
            return {entry.name: entry.stat().st_size for entry in entries if entry.is_file(follow_symlinks=False)}
        return {}
    found: dict[str, dict[str, Any]] = _store(folder).find(_key(folder), detail=True)
    return {key.rpartition("/")[2]: int(info["size"]) for key, info in found.items()}


def exists(path: Path) -> bool:
    """Whether a file is there. Raises OSError where a store doesn't say: fsspec's own takes any error for a no."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def read(path: Path) -> bytes:
    """All of a small file. Raises OSError, StoreError."""
    with _asked(path):
        return path.read_bytes()


def make_folder(folder: Path) -> None:
    """Make it, and those above it, with durable names. An object store has none."""
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
    """Delete a file, or a folder with all that it holds. What isn't there is no error."""
    if is_object_store(path):
        with suppress(FileNotFoundError):
            _store(path).rm(_key(path), recursive=True)
    elif path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def move(old: Path, new: Path) -> None:
    """Rename a folder; in an object store copy and delete, which a kill can cut in two."""
    if is_object_store(old):
        store, start = _store(old), _key(old)
        for key in store.find(start):  # not `mv`: s3fs would copy folders too, which aren't there
            store.copy(key, _key(new) + key.removeprefix(start))
        remove(old)
    else:
        old.rename(new)


def write(path: Path, chunks: Iterable[bytes | memoryview], *, durable: bool = True) -> None:
    """Make the file `path` of `chunks`: whole and on disk, or not there under its name. Its folder exists.

    `durable`: fsync it. Its name is only durable after `sync` of the folder. Raises OSError.
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
                    written = 0
                    while written < len(content):
                        written += os.write(descriptor, content[written:])
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(part, path)
    except Exception as error:
        if isinstance(error, OSError) and error.filename is None:  # of a write or an fsync
            error.filename = str(path)
        with suppress(OSError):  # a full disk has room again for the word of it
            part.unlink(missing_ok=True)
        raise


def part_of(path: Path) -> Path:
    """What a kill in `write` leaves."""
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
    """A file, open for reading at any place. A context manager. Raises OSError, links and special files among them;
    StoreError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        # To read at a time, of a file that is read from end to end; in a store each is a request.
        self.chunk_bytes = _UPLOAD_BYTES if is_object_store(path) else _CHUNK_BYTES
        if is_object_store(path):
            with _asked(path):
                self.size = path.stat().st_size
            return
        with _asked(path):
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
        """Give the file back. Once more is no error."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def read_into(self, start: int, buffer: memoryview) -> None:
        """Fill `buffer` (of bytes) with what stands at `start`; OSError where the file ends before."""
        if self._descriptor is None:
            if not buffer:  # no range says nothing
                return
            # By name: the second parameter of s3fs is another.
            with _asked(self._path):
                content = _store(self._path).cat_file(_key(self._path), start=start, end=start + len(buffer))
            if len(content) != len(buffer):
                raise OSError(f"{self._path}: expected {len(buffer)} bytes at {start}, found {len(content)}")
            buffer[:] = content
            return
        while buffer:
            with _asked(self._path):
                count = os.preadv(self._descriptor, [buffer], start)
            if count == 0:
                raise OSError(f"{self._path}: expected {len(buffer)} more bytes at {start}, found its end")
            start, buffer = start + count, buffer[count:]

    def read(self, start: int, size: int) -> bytes:
        """`size` bytes at `start`."""
        content = bytearray(size)
        self.read_into(start, memoryview(content))
        return bytes(content)


def require_regular(path: Path, name: str) -> int:
    """The length of a plain file in bytes; raises CheckpointError for what is absent, a link, a folder or a pipe."""
    try:
        with _asked(path):
            status = path.stat() if is_object_store(path) else path.lstat()
    except OSError:
        raise CheckpointError(f"checkpoint {name}: expected the file {path}, found none") from None
    if not is_object_store(path) and not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"checkpoint {name}: {path}: expected a plain file, found a link or a special file")
    return status.st_size


@contextmanager
def _asked(path: Path) -> Generator[None]:
    """Errors that say nothing of what lies at `path` become StoreError; those of object stores are of many classes."""
    try:
        yield
    except Exception as error:
        if isinstance(error, FileNotFoundError) or (not is_object_store(path) and _tells_of_content(error)):
            raise
        raise StoreError(
            f"{path}: expected to be able to read it, found {type(error).__name__}: {error}\n"
            "  It may be whole: start again when the storage answers."
        ) from error


def _tells_of_content(error: Exception) -> bool:
    """Of the file or its place, rather than of this moment (no descriptor left, a server away, no right to read)."""
    told = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EIO, errno.ENXIO}
    return not isinstance(error, OSError) or error.errno in told


def _below(key: str, folder: Path) -> bool:
    """Not the folder itself, which some stores keep as an empty object, and list."""
    return key.strip("/") != _key(folder).strip("/")


def _store(path: Path) -> Any:
    return cast(Any, path).fs


def _key(path: Path) -> str:
    return cast(Any, path).path
