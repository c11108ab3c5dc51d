"""The files of a corpus: text, plain or compressed by gzip or zstd; and their cached hashes.

The first bytes identify the compression, since no UTF-8 begins with them. Cached hashes save each process from reading
the whole corpus at every start. A memo is a small file named by a hash of the files' real path, inode, size, mtime
(content changed) and ctime (anything changed). A change of a file changes one of these, unless it falls into the same
clock tick as the hash: so the hash of a file younger than `settled_s` is not cached, as in git's index ("racy"
entries). A change that preserves all five goes unnoticed.
"""

import gzip
import hashlib
import io
import json
import os
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, cast

import xxhash

from portable_fsdp.data.examples import extra, name_of
from portable_fsdp.runtime.errors import DataError
from portable_fsdp.runtime.files import write_text_atomically

BOM = b"\xef\xbb\xbf"
"""Byte order mark that some editors write before UTF-8; not part of the text."""

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"


def read_whole(path: Path) -> bytes:
    """Read the unpacked content, without a byte order mark. Raises DataError for an unreadable file."""
    try:
        with opened(path) as file:
            return file.read().removeprefix(BOM)
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(str(path), path, error) from error


class TextFileSource:
    """Base of sources that read text files: their size in bytes, and a hash."""

    unit = "B"

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files
        self.name = name_of(files)
        is_compressed = any(_kind(path) for path in files)
        self.total = 0 if is_compressed else sum(path.stat().st_size for path in files)
        """0 (unknown) if a file is compressed."""

    def content(self, cache: Path) -> str:
        return hash_of_files(self.files, cache)


def _kind(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            first = file.read(len(_ZSTD))
    except OSError:
        return None  # reading the file raises the error
    return "gzip" if first.startswith(_GZIP) else "zstd" if first == _ZSTD else None


def opened(path: Path) -> BinaryIO:
    match _kind(path):
        case "gzip":
            return cast(BinaryIO, gzip.open(path, "rb"))
        case "zstd":  # Python has it from 3.14 on
            arrow = extra("pyarrow", f"{path} (compressed by zstd)")
            return io.BufferedReader(arrow.input_stream(str(path), compression="zstd"))
        case _:
            return path.open("rb")


def unreadable(place: str, path: Path, error: Exception) -> DataError:
    kind = _kind(path)
    if kind is None:
        return DataError(f"data.path: {place}: can't be read: {getattr(error, 'strerror', None) or error}.")
    return DataError(
        f"data.path: {place}: the {kind} file is damaged or incomplete: {error}\n"
        f"  Copy it again; `{kind} --test {path}` checks it."
    )


# -------------------------------------------------------------------------------------------------------------- hashes


SETTLED_S = 10.0
"""Margin: FAT stores times to 2 seconds, and a file server's clock may be seconds off."""

Remember = Callable[[str, Callable[[], str]], str]
"""`remember(purpose, make)` returns the result of `make()`, perhaps from a cache; see `remembered`."""


def remembered(
    folder: Path,
    files: Sequence[Path],
    purpose: str,
    make: Callable[[], str],
    *,
    settled_s: float = SETTLED_S,
    clock: Callable[[], int] = time.time_ns,
) -> str:
    """Return the result of `make()`, or its memo in `folder`. The result must depend on `purpose` and the bytes of
    `files` alone.

    Any number of processes may call it at once. A damaged memo is ignored, and nothing is cached if `folder` isn't
    writable. Raises OSError for a missing file.
    """
    now = clock()
    stats = [(os.path.realpath(path), os.stat(path)) for path in files]
    facts = [(path, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for path, stat in stats]
    memo = folder / xxhash.xxh3_128_hexdigest(json.dumps([purpose, facts]).encode())
    with suppress(OSError, UnicodeDecodeError):
        digest, _, check = memo.read_text().partition(" ")
        if check == _check(memo, digest):
            return digest
    digest = make()
    newest = max((max(stat.st_mtime_ns, stat.st_ctime_ns) for _, stat in stats), default=0)
    if newest < now - settled_s * 1e9:
        with suppress(OSError):  # the next start hashes again
            memo.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(memo, f"{digest} {_check(memo, digest)}")
    return digest


def _check(memo: Path, digest: str) -> str:
    return xxhash.xxh3_64_hexdigest(f"{memo.name} {digest}".encode())


def hash_of_files(files: Sequence[Path], cache: Path) -> str:
    """Hash bytes and lengths in this order, without names and times; cached in `cache`. Raises DataError."""
    try:
        return remembered(cache / "hashes", files, "files", lambda: _hash_of_files(files))
    except OSError as error:
        raise DataError(f"data.path: {error.filename or name_of(files)}: can't be read: {error.strerror}.") from error


def _hash_of_files(files: Sequence[Path]) -> str:
    digest = xxhash.xxh3_128()
    for path in files:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)  # adds to it
            digest.update(f" {file.tell()} ".encode())
    return digest.hexdigest()
