"""Files that are either complete or absent, files that somebody else wrote (strict JSON too), the cache folder."""

import errno
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

MAX_TEXT_BYTES = 1 << 27
"""For a JSON file; the largest tokenizers have 60 MB."""
MAX_LOG_BYTES = 1 << 30
"""For metrics.jsonl and the like: two million steps."""
MAX_LINE_BYTES = 1 << 20
_MAX_NAMES = 100_000


def cache_folder(environ: Mapping[str, str]) -> Path:
    """`portable_fsdp` in the user's cache folder, by the XDG base directory specification."""
    base = environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "portable_fsdp"


def write_text_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` in UTF-8, so that a kill at any instant leaves the old or the new file.

    Temporary file in the same folder, fsync, rename, fsync of the folder. One writer per path. Raises OSError, and
    leaves the old file as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)  # "x" doesn't follow a link
    try:
        with temporary.open("x", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        if isinstance(error, OSError):
            error.filename = str(path)
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make names in `folder` durable: a file's own fsync doesn't cover its name."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_regular(path: Path, folder: Path | None = None, max_bytes: int | None = None) -> BinaryIO:
    """Open a file that somebody else may have written, without ever waiting for it.

    Raises OSError for anything but a regular file, for more than `max_bytes`, and with `folder` for a link that leads
    out of it. The blobs of a snapshot in the hub's cache count as part of its folder.
    """
    real = Path(os.path.realpath(path, strict=True))
    if folder is not None:
        root = Path(os.path.realpath(folder))
        blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else root
        if not (real.is_relative_to(root) or real.is_relative_to(blobs)):
            raise OSError(errno.ENXIO, "expected a file of this folder, found a link out of it", str(path))
    descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and (max_bytes is None or status.st_size <= max_bytes):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISREG(status.st_mode):
        raise OSError(errno.ENXIO, f"expected at most {max_bytes:,} bytes, found {status.st_size:,}", str(path))
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "expected a file, found a folder", str(path))
    raise OSError(errno.ENXIO, "expected a file, found a pipe or a device", str(path))


def read_regular(path: Path, folder: Path | None = None, max_bytes: int = MAX_TEXT_BYTES) -> bytes:
    """The content of a small file; as `open_regular`."""
    with open_regular(path, folder, max_bytes) as file:
        return file.read(max_bytes)


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """The lines from here on, a longer one than `MAX_LINE_BYTES` in pieces."""
    return iter(lambda: file.readline(MAX_LINE_BYTES), b"")


def names_in(folder: Path) -> list[str]:
    """The sorted names in a folder. Raises OSError, also for more than a folder of a model or a run has."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in islice(entries, _MAX_NAMES + 1)]
    if len(names) > _MAX_NAMES:
        raise OSError(errno.E2BIG, f"expected at most {_MAX_NAMES:,} files in this folder, found more", str(folder))
    return sorted(names)


# ---------------------------------------------------------------------------------------------------------------- JSON


MAX_NESTED = 1_000_000
"""Lists in one text, an object counting as four. Each takes two bytes of the text, and up to 72 bytes of memory."""

# An unterminated string takes the rest of the text, so that each character is looked at once.
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)', re.DOTALL)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"expected numbers as JSON has them, found {name}")


def parse_json(
    text: str | bytes, constant: Callable[[str], Any] = _refuse_constant, max_nested: int = MAX_NESTED
) -> Any:
    """Parse one value. Raises ValueError for text that is no JSON in UTF-8, for a key that an object has twice, and for
    more objects and lists than `max_nested`.

    `constant`: gives the value of `NaN`, `Infinity` and `-Infinity`; by default they raise ValueError too.
    """
    text = text.decode() if isinstance(text, bytes) else text
    if _nested(text) > max_nested and _nested(outside := _STRING.sub("", text)) > max_nested:
        objects, lists = outside.count("{"), outside.count("[")
        raise ValueError(f"expected fewer objects and lists, found {objects:,} and {lists:,}")
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=constant)
    except RecursionError:
        raise ValueError("expected fewer levels of objects and lists") from None


def _nested(text: str) -> int:
    return 4 * text.count("{") + text.count("[")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        key, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {key[:80]!r} stands twice")
    return result
