"""A document as its source gives it and as it is rendered, and helpers of the sources made of files."""

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from portable_fsdp.data.tokenize import Tokens
from portable_fsdp.runtime.errors import DataError


@dataclass(frozen=True)
class Example:
    """One document as the source has it."""

    number: int
    """Among all of its source, from 0, unreadable ones included."""
    place: str
    """For messages: `corpus.jsonl:12`."""
    size: int
    """In the source's unit."""
    fields: Mapping[str, Any]
    """The format's columns by its own names for them, and others that mean something for training."""
    notes: tuple[str, ...] = ()
    """Warnings for its owner, logged once with the count of documents: `data: 3 documents of FILE: <note>`."""


@dataclass(frozen=True)
class Broken:
    """Takes the place of a document that can't be read: `problem` says what was expected and found."""

    number: int
    place: str
    size: int
    problem: str


class Rendered(NamedTuple):
    """A document's ids, and for each whether it counts; None: all do."""

    number: int
    ids: Tokens
    counted: NDArray[np.bool_] | None = None
    prompt_differs: bool = False
    """The prompt alone ends in other tokens than within the whole, so the model learns from another context."""
    notes: tuple[str, ...] = ()
    """See `Example.notes`."""


def broken(example: Example | Broken, problem: str) -> Broken:
    return Broken(example.number, example.place, example.size, problem)


class DocumentSource(Protocol):
    """Documents in an order of their own, the same each time."""

    name: str
    """Its path, for messages."""
    total: int
    """The sum of the documents' sizes, for a progress bar; 0: unknown."""
    unit: str
    """The unit of sizes: `B`, or `rows`."""

    def content(self, cache: Path) -> str:
        """A hash of everything that determines the documents; reads all of it, unless `cache` remembers the hash."""
        ...

    def read(self) -> Iterator[Example | Broken]: ...


AS_A_SHARE = "A share of the documents is written 5%."
"""The likely meaning of a `data.eval_split` that nothing matches."""


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
