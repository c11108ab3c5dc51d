"""Sources: where the documents come from, in an order that depends on nothing but their names."""

import glob
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from portable_fsdp.config import schema
from portable_fsdp.runtime.errors import DataError

NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
"""Folders under the standard library that are not its source: other packages, and tests (odd encodings on purpose)."""


def read_documents(data: schema.Data) -> Iterator[str]:
    """The documents of `data.source`, one at a time; raises DataError (while iterating) if they can't be read."""
    match data.source:
        case "python_docs":
            return _python_docs()
        case "python_source":
            return _python_source(Path(sysconfig.get_path("stdlib")))
        case "text":
            return _text(str(data.path))


def _python_docs() -> Iterator[str]:
    """CPython's reference text, as `help()` shows it: about 465,000 characters."""
    from pydoc_data.topics import topics

    yield from sorted(topics.values())


def _python_source(root: Path) -> Iterator[str]:
    """The standard library's own source, without its tests: tens of MB; a file that isn't UTF-8 is left out."""
    found = 0
    read = 0
    for path in _python_files(root):
        found += 1
        try:
            text = path.read_bytes().decode()
        except (UnicodeDecodeError, OSError):
            continue
        read += 1
        yield text
    if read == 0:
        raise DataError(
            f"data.source: expected the standard library's source in UTF-8 under {root}, found {found} .py files and "
            "none that can be read.\n  This Python carries no source; set data.source=python_docs or text."
        )


def _python_files(root: Path) -> list[Path]:
    paths: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in NOT_LIBRARY]  # os.walk descends into what is left
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(paths)


def _text(path: str) -> Iterator[str]:
    """One document for each file that `path` names or matches (`**` stands for any depth)."""
    matches = [path] if os.path.isfile(path) else sorted(glob.glob(path, recursive=True))
    files = [Path(match) for match in matches if os.path.isfile(match)]
    if not files:
        found, advice = "nothing", "The path is taken from the folder that the run starts in."
        if os.path.isdir(path):
            found, advice = "a folder", f"Name its files: {os.path.join(path, '**', '*.txt')}"
        raise DataError(
            f"data.path: expected a text file or a glob that matches some, found {found}: {path}\n  {advice}"
        )
    for file in files:
        yield _read(file)


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"data.path: {file}: expected UTF-8, found 0x{error.object[error.start]:02x} at byte {error.start}.\n"
            "  Convert the file (iconv -t utf-8), or take it out of the glob."
        ) from error
    except OSError as error:
        raise DataError(f"data.path: {file}: can't be read: {error.strerror}.") from error
