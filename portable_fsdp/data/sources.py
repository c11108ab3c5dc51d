"""Where text comes from: two corpora that every Python installation holds, and files."""

import glob
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from portable_fsdp.config.schema import Data
from portable_fsdp.runtime.errors import DataError

# Folders of the standard library's tree that aren't its source: installed packages, and tests with broken text on
# purpose.
_NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib2to3"}


def read_documents(data: Data) -> Iterator[str]:
    """The documents of `data.source`, in an order that depends on nothing but their names.

    Raises DataError where there is no text, or text that is not UTF-8.
    """
    if data.source == "python_docs":
        return _python_docs()
    if data.source == "python_source":
        return _python_source()
    return _text(data.path or "")


def _python_docs() -> Iterator[str]:
    """CPython's language reference, as `help()` shows it: about 465,000 characters."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield topics[name]


def _python_source() -> Iterator[str]:
    """The standard library's own source, file by file."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if not _NOT_SOURCE.intersection(path.relative_to(root).parts):
            yield _read(path)


def _text(pattern: str) -> Iterator[str]:
    paths = sorted(Path(name) for name in glob.glob(pattern, recursive=True))
    files = [path for path in paths if path.is_file()]
    if not files:
        raise DataError(
            f"data.path: expected a text file or a glob that matches some, found none: {pattern}\n"
            "  A relative path is taken from the folder that the run starts in."
        )
    for path in files:
        yield _read(path)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: expected UTF-8 text, found the byte 0x{error.object[error.start]:02x} at offset {error.start}.\n"
            "  Convert the file (iconv -f ... -t utf-8), or leave it out of data.path."
        ) from None
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror}.") from None
