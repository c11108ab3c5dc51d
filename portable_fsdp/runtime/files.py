"""Files that are either complete or absent, and the user's cache folder."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


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
    try:
        with temporary.open("w", encoding="utf-8", newline="") as file:
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
