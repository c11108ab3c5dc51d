"""What every source of documents gives, and what those made of files share."""

import glob
import importlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import xxhash

from portable_fsdp.config.data import Column
from portable_fsdp.data.hashes import remembered
from portable_fsdp.runtime.errors import DataError


@dataclass(frozen=True)
class Example:
    """One document as the source has it."""

    number: int
    """Among all of its source, from 0; those that can't be read are counted."""
    place: str
    """Where it stands, for people: `corpus.jsonl:12`."""
    size: int
    """In the source's unit."""
    fields: Mapping[Column, Any]
    notes: tuple[str, ...] = ()
    """What its owner should hear of it, said once with the count of documents: `data: 3 documents of FILE: <note>`."""


@dataclass(frozen=True)
class Broken:
    """What stands in the place of a document that can't be read: `problem` says what was expected and found."""

    number: int
    place: str
    size: int
    problem: str


class Source(Protocol):
    """Documents in an order of their own, the same each time."""

    @property
    def name(self) -> str:
        """What people call it: its path."""
        ...

    @property
    def total(self) -> int:
        """The sum of the documents' sizes, for a progress bar; 0: unknown."""
        ...

    @property
    def unit(self) -> str:
        """Of the sizes: `B`, or `rows`."""
        ...

    def content(self, cache: Path) -> str:
        """A hash of all that the documents are made of; reads all of it, unless `cache` remembers it."""
        ...

    def read(self) -> Iterator[Example | Broken]: ...


AS_A_SHARE = "A share of the documents is written 5%."
"""What `data.eval_split` may have meant where nothing has that name."""


def matching_files(path: str, pattern: str, key: str = "data.path") -> list[Path]:
    """The files that `path` names or matches (`**` stands for any depth), sorted; `pattern` is an example of one, `key`
    the config's, for errors."""
    matches = [path] if os.path.isfile(path) else sorted(glob.glob(path, recursive=True))
    files = [Path(match) for match in matches if os.path.isfile(match)]
    if not files:
        found, advice = "nothing", "The path is taken from the folder that the run starts in."
        if os.path.isdir(path):
            found, advice = "a folder", f"Name its files: {os.path.join(path, pattern)}"
        if key == "data.eval_split":
            advice += f" {AS_A_SHARE}"
        raise DataError(f"{key}: expected a file or a glob that matches some, found {found}: {path}\n  {advice}")
    return files


def hash_of_files(files: Sequence[Path], cache: Path) -> str:
    """Of their bytes and lengths in this order; neither names nor times are in it. Remembered in `cache`."""
    try:
        return remembered(cache / "hashes", files, "files", lambda: _hash_of_files(files))
    except OSError as error:
        raise DataError(f"data.path: {error.filename or name_of(files)}: can't be read: {error.strerror}.") from error


def _hash_of_files(files: Sequence[Path]) -> str:
    digest = xxhash.xxh3_128()
    for path in files:
        length = 0
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                length += len(block)
                digest.update(block)
        digest.update(f" {length} ".encode())
    return digest.hexdigest()


def extra(module: str, needed_by: str = "this source") -> Any:
    """An optional package; raises DataError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise DataError(
            f"data.source: expected the package {name} for {needed_by}, found none.\n"
            "  Install it: pip install 'portable-fsdp[data]'."
        ) from error


def name_of(files: Sequence[Path]) -> str:
    return str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1:,} more"


def not_utf8(error: UnicodeDecodeError) -> str:
    return f"expected UTF-8, found 0x{error.object[error.start]:02x} at byte {error.start}"
