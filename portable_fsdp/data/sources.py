"""Sources of documents, in an order that depends only on their names; and the files or split held out.

A source numbers its documents and records where each one is. An unreadable document is yielded as a `Broken` with its
number, so the other numbers don't depend on it; `data.on_error` decides what happens (cache.py).
"""

import glob
import logging
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash

from portable_fsdp.config.data import FORMAT_COLUMNS, Data, Documents
from portable_fsdp.data.compressed import TextFileSource, read_whole
from portable_fsdp.data.examples import AS_A_SHARE, Broken, DocumentSource, Example, name_of, not_utf8
from portable_fsdp.runtime.errors import DataError

log = logging.getLogger("portable_fsdp")

NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
"""Folders in the standard library that are not its source: other packages, and tests (odd encodings on purpose)."""

EXAMPLES = {"text": "**/*.txt", "jsonl": "**/*.jsonl", "parquet": "**/*.parquet"}
"""The sources whose `path` names files -> an example glob."""

_HELD_OUT = "data.eval_split"


def files_of(documents: Documents, key: str = "data.path") -> list[Path]:
    """Return the files that `path` names or matches (`**`: any depth), sorted, for a source in `EXAMPLES`.

    `key`: the config key, for errors. Raises DataError if there is no file.
    """
    path = str(documents.path)
    matches = [path] if os.path.isfile(path) else sorted(glob.glob(path, recursive=True))
    files = [Path(match) for match in matches if os.path.isfile(match)]
    if not files:
        problem, fix = "no such file or match", "The path is relative to the folder that the run starts in."
        if os.path.isdir(path):
            problem = "expected a file or a glob, found a folder"
            fix = f"Name its files: {os.path.join(path, EXAMPLES[documents.source])}"
        elif not matches and path.startswith("~"):
            fix = f"`~` is not expanded: {os.path.expanduser(path)}"
        if key == _HELD_OUT:
            fix += f" {AS_A_SHARE}"
        raise DataError(f"{key}: {problem}: {path}\n  {fix}")
    if documents.source == "jsonl" and (tables := [file for file in files if file.suffix in (".csv", ".tsv", ".xlsx")]):
        raise DataError(f"{key}: {tables[0]}: tables are not read.\n  Convert it to JSON lines or Parquet.")
    return files


def open_source(documents: Documents, files: Sequence[Path] | None = None, key: str = "data.path") -> DocumentSource:
    """Open the source that these keys name. Raises DataError, which names `key`, if it doesn't exist.

    `files`: at least one file, to use instead of those that `path` names.
    """
    if documents.source == "python_docs":
        return PythonDocs()
    if documents.source == "python_source":
        return PythonSource(Path(sysconfig.get_path("stdlib")))
    if documents.source == "text":
        return TextFiles(files or files_of(documents))
    from portable_fsdp.data.records import Columns, HuggingFace, JsonLines, Parquet  # a run on text needs none

    columns: Columns = {**{column: column for column in FORMAT_COLUMNS[documents.format]}, **documents.columns}
    if documents.source == "huggingface":
        return HuggingFace(documents, columns, key)
    source = JsonLines if documents.source == "jsonl" else Parquet
    return source(files or files_of(documents), columns, documents.ignore)


def open_apart(data: Data, eval_split: str) -> tuple[DocumentSource, DocumentSource]:
    """Open the sources to train on and to hold out, without common rows; `eval_split`: a file, a glob, or a split.

    Files that both name are held out. Raises DataError if none is left to train on, and for splits with common rows.
    """
    if data.source in EXAMPLES:
        held_out = data.model_copy(update={"path": eval_split})
        files, eval_files = files_of(data), files_of(held_out, _HELD_OUT)
        real = {path.resolve() for path in eval_files}
        kept = [path for path in files if path.resolve() not in real]
        if not kept:
            raise DataError(
                f"{_HELD_OUT}: {eval_split} holds out all files of data.path={data.path}: none is left to train on.\n"
                "  Name another file, or hold out a share of the documents: data.eval_split=5%."
            )
        if len(kept) < len(files):
            names = name_of([path for path in files if path.resolve() in real])
            log.info("data: held out (%s) and not trained on, although data.path names it: %s", _HELD_OUT, names)
        return open_source(data, kept), open_source(held_out, eval_files)
    from portable_fsdp.data.records import HuggingFace

    trained = open_source(data)
    held_out = open_source(data.model_copy(update={"split": eval_split}), key=_HELD_OUT)
    if isinstance(trained, HuggingFace) and isinstance(held_out, HuggingFace) and trained.shares_rows_with(held_out):
        raise DataError(
            f"{_HELD_OUT}: {eval_split} has rows in common with data.split={data.split or 'train'}, which the run "
            "trains on.\n"
            "  Hold out a share of the documents (data.eval_split=5%), or use parts without common rows: "
            "data.split='train[5%:]' data.eval_split='train[:5%]'."
        )
    return trained, held_out


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


class TextFiles(TextFileSource):
    """One document per file; files may be compressed."""

    def read(self) -> Iterator[Example | Broken]:
        for number, path in enumerate(self.files):
            content = read_whole(path)
            try:
                yield Example(number, str(path), len(content), {"text": content.decode()})
            except UnicodeDecodeError as error:
                yield Broken(number, str(path), len(error.object), not_utf8(error))


class PythonSource(TextFiles):
    """Source code of the standard library, without its tests: tens of MB."""

    def __init__(self, root: Path) -> None:
        paths: list[Path] = []
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [name for name in subfolders if name not in NOT_LIBRARY]  # os.walk descends into the rest
            paths += [Path(folder, name) for name in names if name.endswith(".py")]
        if not paths:
            raise DataError(f"data.source: this Python has no source under {root}.\n  Set data.source=python_docs.")
        super().__init__(sorted(paths))
        self.name = "python_source"
