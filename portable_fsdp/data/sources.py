"""Sources: where the documents come from, in an order that depends on nothing but their names.

A source gives each document its number and its place. What can't be read comes as a `Broken` under the same number, so
that the numbers of the others don't depend on it, and `data.on_error` decides what becomes of it (cache.py).
"""

import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash

from portable_fsdp.config.data import FORMAT_COLUMNS, Documents
from portable_fsdp.data.compressed import hash_of_text, read_whole, total_size
from portable_fsdp.data.examples import (
    Broken,
    Example,
    Source,
    hash_of_files,
    matching_files,
    name_of,
    not_utf8,
)
from portable_fsdp.data.records import Columns, HuggingFace, JsonLines, Parquet
from portable_fsdp.runtime.errors import DataError

NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
"""Folders under the standard library that are not its source: other packages, and tests (odd encodings on purpose)."""


EXAMPLES = {"text": "**/*.txt", "jsonl": "**/*.jsonl", "parquet": "**/*.parquet"}
"""The sources whose `path` names files -> a glob of some."""


def files_of(documents: Documents, key: str = "data.path") -> list[Path]:
    """Those that `path` names, of a source in `EXAMPLES`; `key`: the config's, for errors."""
    return matching_files(str(documents.path), EXAMPLES[documents.source], key)


def columns_of(documents: Documents) -> Columns:
    return {**{column: column for column in FORMAT_COLUMNS[documents.format]}, **documents.columns}


def open_source(documents: Documents, files: Sequence[Path] | None = None) -> Source:
    """The source that these keys mean; raises DataError if there is nothing of that name.

    `files`: at least one, in place of those that `path` names.
    """
    columns = columns_of(documents)
    match documents.source:
        case "python_docs":
            return PythonDocs()
        case "python_source":
            return PythonSource(Path(sysconfig.get_path("stdlib")))
        case "text":
            return TextFiles(files or files_of(documents))
        case "jsonl":
            return JsonLines(files or files_of(documents), columns)
        case "parquet":
            return Parquet(files or files_of(documents), columns)
        case "huggingface":
            return HuggingFace(str(documents.path), documents.split, columns)


class PythonDocs:
    """CPython's reference text, as `help()` shows it: about 465,000 characters."""

    name = "python_docs"
    unit = "B"

    def __init__(self) -> None:
        from pydoc_data.topics import topics

        self._texts = sorted(topics.values())
        self.total = sum(map(len, self._texts))

    def content(self, cache: Path) -> str:
        return xxhash.xxh3_128_hexdigest(repr(self._texts).encode())

    def read(self) -> Iterator[Example | Broken]:
        for number, text in enumerate(self._texts):
            yield Example(number, f"python_docs[{number}]", len(text), {"text": text})


class PythonSource:
    """The standard library's own source, without its tests: tens of MB; a file that isn't UTF-8 is left out."""

    name = "python_source"
    unit = "B"

    def __init__(self, root: Path) -> None:
        found = python_files(root)
        self._files = [path for path in found if _is_text(path)]
        self.total = sum(path.stat().st_size for path in self._files)
        if not self._files:
            raise DataError(
                f"data.source: expected the standard library's source in UTF-8 under {root}, found {len(found)} .py "
                "files and none that can be read.\n  This Python carries no source; set data.source=python_docs or "
                "text."
            )

    def content(self, cache: Path) -> str:
        return hash_of_files(self._files, cache)

    def read(self) -> Iterator[Example | Broken]:
        for number, path in enumerate(self._files):
            content = path.read_bytes()
            yield Example(number, str(path), len(content), {"text": content.decode()})


def python_files(root: Path) -> list[Path]:
    paths: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in NOT_LIBRARY]  # os.walk descends into what is left
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(paths)


def _is_text(path: Path) -> bool:
    try:
        path.read_bytes().decode()
    except (UnicodeDecodeError, OSError):
        return False
    return True


class TextFiles:
    """One document for each file, which may be compressed."""

    unit = "B"

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self.name = name_of(files)
        self.total = total_size(files)

    def content(self, cache: Path) -> str:
        return hash_of_text(self._files, cache)

    def read(self) -> Iterator[Example | Broken]:
        for number, path in enumerate(self._files):
            content = read_whole(path)
            try:
                yield Example(number, str(path), len(content), {"text": content.decode()})
            except UnicodeDecodeError as error:
                yield Broken(number, str(path), len(error.object), not_utf8(error) + "; `iconv -t utf-8` converts it")
