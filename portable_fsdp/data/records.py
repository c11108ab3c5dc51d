"""Sources of documents with named columns: JSON lines or arrays, parquet files, datasets of the hub."""

import difflib
import json
import re
import sys
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, cast

import xxhash

from portable_fsdp.config.data import FORMAT_COLUMNS, Column, Documents
from portable_fsdp.data.compressed import (
    BOM,
    TextFileSource,
    hash_of_files,
    opened,
    read_whole,
    unreadable,
)
from portable_fsdp.data.examples import (
    AS_A_SHARE,
    LEFT_OUT,
    Broken,
    Example,
    at_most_20,
    extra,
    format_of,
    meaningful_columns,
    name_of,
    not_utf8,
    without_nulls,
)
from portable_fsdp.runtime.errors import DataError
from portable_fsdp.runtime.files import parse_json

Columns = Mapping[Column, str]
"""The format's name of a column -> its name in the file."""

ROWS_AT_ONCE = 1000
_SPACE = re.compile(r"\s*")

SHAREGPT = "conversations"
"""The column of messages in ShareGPT's files."""


class JsonLines(TextFileSource):
    """One JSON object a line, empty lines skipped, or a JSON array of objects. Files may be compressed."""

    def __init__(self, files: Sequence[Path], columns: Columns, ignore: Collection[str] = ()) -> None:
        super().__init__(files)
        self._columns = columns
        self._ignore = ignore
        self._needed = {columns[column] for column in FORMAT_COLUMNS[format_of(columns)]}

    def read(self) -> Iterator[Example | Broken]:
        number, self._seen = 0, set[str]()
        for path in self.files:
            is_array = is_json_array(path)
            for line_number, line in (read_array if is_array else read_lines)(path):
                if is_array or line.strip():
                    expected = "expected a JSON object" + ("" if is_array else " on one line")
                    yield self._example(number, f"{path}:{line_number}", line, expected)
                    number += 1
        if never := {*self._columns.values()} - self._seen - self._needed:
            raise DataError(f"data.columns: no row has the column {min(never)}: {self.name}.")

    def _example(self, number: int, place: str, line: bytes, expected: str) -> Example | Broken:
        try:
            values = _json_object(line, expected)
            self._seen.update(self._columns.values() & values.keys())
            values = {name: value for name, value in values.items() if value is not None}
            # A row may lack an optional column.
            columns: Columns = {
                column: name for column, name in self._columns.items() if name in self._needed or name in values
            }
            read = _all_read(columns, values, self._ignore)
        except ValueError as error:
            return Broken(number, place, len(line), str(error))
        fields = {field: values[name] for field, name in read.items()}
        return Example(number, place, len(line), fields, _notes(read, values, self._ignore))


def _json_object(line: bytes, expected: str) -> dict[str, Any]:
    """Parse a JSON object. The message of its ValueError begins with `expected`."""
    try:
        # Python writes NaN, perhaps in a column that the format doesn't read.
        value = parse_json(line.rstrip(), constant=float)
    except json.JSONDecodeError as error:
        is_cut = error.msg.startswith("Unterminated") or error.pos >= len(error.doc.rstrip())
        cut = "; the text ends too early, so it may be cut" if is_cut and error.doc.strip() else ""
        raise ValueError(f"{expected}; column {error.colno}: {error.msg}{cut}") from error
    except UnicodeDecodeError as error:
        raise ValueError(not_utf8(error)) from error
    except ValueError as error:
        raise ValueError(f"{expected}: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{expected}, found {json.dumps(value)[:40]}")
    if b"\\u" in line:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("expected text, found half of a surrogate pair (\\ud800 to \\udfff)") from error
    return cast(dict[str, Any], value)


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, line with its newline). Raises DataError, which names the first incomplete line."""
    number = 0
    try:
        with opened(path) as file:
            for number, line in enumerate(file, 1):
                yield number, line.removeprefix(BOM) if number == 1 else line
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(f"{path}:{number + 1}", path, error) from error


def is_json_array(path: Path) -> bool:
    """True if the file begins like a JSON array; False if it can't be read."""
    try:
        with opened(path) as file:
            return file.read(4096).removeprefix(BOM).lstrip().startswith(b"[")
    except (OSError, EOFError, zlib.error):
        return False


def read_array(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number of its first line, text) of each element of a JSON array. From an element that can't be parsed on,
    the rest of the file is one element, as is anything after the array: parsing it shows the error. Raises DataError.
    """
    text = read_whole(path).decode(errors="surrogateescape")
    decoder, line, counted, is_broken = json.JSONDecoder(), 1, 0, False
    at = _behind_space(text, text.index("[") + 1)
    has_more = text[at : at + 1] != "]"
    while has_more:
        try:
            end = decoder.raw_decode(text, at)[1]
        except ValueError:
            end, is_broken = len(text), True
        line, counted = line + text.count("\n", counted, at), at
        yield line, text[at:end].encode(errors="surrogateescape")
        at = _behind_space(text, end)
        has_more = text[at : at + 1] == ","
        at = _behind_space(text, at + has_more)
    rest = text[at:].strip()
    if rest != "]" and not is_broken:
        yield line + text.count("\n", counted, at), rest.encode(errors="surrogateescape")


def _behind_space(text: str, at: int) -> int:
    return cast("re.Match[str]", _SPACE.match(text, at)).end()


class Parquet:
    """The rows of parquet files, one row group in memory at a time."""

    unit = "rows"

    def __init__(self, files: Sequence[Path], columns: Columns, ignore: Collection[str] = ()) -> None:
        self._parquet = extra("pyarrow.parquet")
        self._files = files
        self._columns = columns
        self._ignore = ignore
        self.name = name_of(files)
        self.total = 0
        for path in files:
            with self._open(path) as file:
                self.total += file.metadata.num_rows
                _checked(columns, file.schema_arrow.names, ignore, str(path))

    def content(self, cache: Path) -> str:
        return hash_of_files(self._files, cache)

    def read(self) -> Iterator[Example | Broken]:
        number = 0
        for path in self._files:
            with self._open(path) as file:
                names = file.schema_arrow.names
                read = _all_read(self._columns, names, self._ignore)
                notes = _notes(read, names, self._ignore)
                for row, values in enumerate(self._rows(file, path, list({*read.values()}))):
                    yield Example(number, f"{path}: row {row}", 1, _arrow_fields(read, values), notes)
                    number += 1

    def _rows(self, file: Any, path: Path, names: list[str]) -> Iterator[dict[str, Any]]:
        try:
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=names):
                yield from batch.to_pylist()
        except (OSError, ValueError) as error:  # pyarrow raises both
            raise DataError(f"data.path: {path}: the parquet file can't be read: {error}") from error

    def _open(self, path: Path) -> Any:
        try:
            return self._parquet.ParquetFile(path)
        except (OSError, ValueError) as error:
            raise DataError(f"data.path: {path}: can't be opened as parquet: {error}") from error


class HuggingFace:
    """A dataset of the hub, or one that `save_to_disk` wrote; in `datasets`' order."""

    unit = "rows"

    def __init__(self, documents: Documents, columns: Columns, key: str) -> None:
        """`key`: the config key, for errors."""
        path, self._split, ignore = str(documents.path), documents.split or "train", documents.ignore
        self.name = f"{path} ({self._split})"
        self._data, self._sizes = _load_data_set(path, self._split, key)
        names = self._data.column_names
        self._read = _checked(columns, names, ignore, self.name)
        self._notes = _notes(self._read, names, ignore)
        self._data = self._data.select_columns(list(dict.fromkeys(self._read.values())))
        self.total = len(self._data)

    def content(self, cache: Path) -> str:
        """Hash the files, and the part of them that the split selects."""
        files = [Path(file["filename"]) for file in self._data.cache_files]
        taken = f"{hash_of_files(files, cache)} {self._split} {self.total} {self._data.features}"
        if not files:  # a dataset without files is in memory
            taken += xxhash.xxh3_128_hexdigest(repr(list(self._data)).encode())
        return xxhash.xxh3_128_hexdigest(taken.encode())

    def shares_rows_with(self, other: Self) -> bool:
        """True if a row is in both; they are parts of one dataset."""
        return any(
            ours.splitname == theirs.splitname and max(ours.from_, theirs.from_) < min(ours.to, theirs.to)
            for ours in self._taken()
            for theirs in other._taken()
        )

    def _taken(self) -> Sequence[Any]:
        """Return the ranges of rows, each with the name of its split."""
        return extra("datasets").ReadInstruction.from_spec(self._split).to_absolute(self._sizes)

    def read(self) -> Iterator[Example | Broken]:
        features = self._data.features
        for row, values in enumerate(self._data):
            yield Example(row, f"{self.name}: row {row}", 1, _arrow_fields(self._read, values, features), self._notes)


_HUB_NAME = re.compile(r"(?P<path>[^:@]+)(:(?P<subset>[^@]+))?(@(?P<revision>.+))?")


def first_rows_of_hub(documents: Documents, count: int) -> tuple[list[dict[str, Any]], int | None]:
    """Return the first rows of a hub dataset, without a download of the rest, and their total number (None: unknown).
    Raises DataError."""
    split = documents.split or "train"
    rows, sizes = _load_data_set(str(documents.path), split, "data.path", first=count)
    return rows, sizes.get(split)


def _load_data_set(path: str, split: str, key: str, first: int | None = None) -> tuple[Any, dict[str, int]]:
    """Load a split, or an expression like train[:10%]; return it and the number of rows of each split. `first`: only
    the first rows, without Arrow's padding."""
    datasets = extra("datasets")
    folder = Path(path)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
            return _part_of_saved(datasets, datasets.load_from_disk(path), split)
        hub = re.fullmatch(_HUB_NAME, path)
        if folder.is_dir() or hub is None:
            part = datasets.load_dataset(path, split=split)
        else:
            where = {"revision": hub["revision"], "split": split, "streaming": first is not None}
            part = datasets.load_dataset(hub["path"], hub["subset"], **where)
        sizes = {name: info.num_examples for name, info in (part.info.splits or {}).items()}
        return part if first is None else [without_nulls(row, part.features) for row in part.take(first)], sizes
    except Exception as error:  # many classes, those of HTTP libraries too: all concern this dataset
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise DataError(
            f"{key}: `datasets` can't open the dataset with the split {split}: {reason}\n"
            f"  data.path is {path}; a colon names a subset (org/name:subset). Offline, with HF_HUB_OFFLINE=1, the "
            "dataset must be in the cache." + (f" {AS_A_SHARE}" if key == "data.eval_split" else "")
        ) from error


def _part_of_saved(datasets: Any, saved: Any, split: str) -> tuple[Any, dict[str, int]]:
    """Select a part of a dataset of `load_from_disk`, which has no split expressions; also return each split's size."""
    parts = saved if isinstance(saved, dict) else {"train": saved}
    sizes = {name: len(part) for name, part in parts.items()}
    if split in parts:
        return parts[split], sizes
    taken = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
    rows = [parts[part.splitname].select(range(part.from_, part.to)) for part in taken]
    return datasets.concatenate_datasets(rows), sizes


def _all_read(columns: Columns, names: Collection[str], ignore: Collection[str]) -> dict[str, str]:
    """Return the columns, and those of `names` that matter for training: field -> name in the file. ShareGPT's
    `conversations` replaces `messages` if only that is in the file. Raises ValueError for the first missing column."""
    if columns.get("messages") == "messages" and "messages" not in names and SHAREGPT in names:
        columns = {**columns, "messages": SHAREGPT}
    for column, name in columns.items():
        if name not in names:
            raise ValueError(_missing(columns, column, name, names))
    unused = set(names) - {*ignore, *columns, *columns.values()}
    return {**columns, **{name: name for name in meaningful_columns(format_of(columns)) if name in unused}}


def _arrow_fields(
    read: Mapping[str, str], values: Mapping[str, Any], features: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the fields without Arrow's padding. `features`: types of the columns, in `datasets`."""
    return {field: without_nulls(values[name], (features or {}).get(name)) for field, name in read.items()}


def _notes(read: Mapping[str, str], names: Iterable[str], ignore: Collection[str]) -> tuple[str, ...]:
    """Return a note for each column that nothing reads."""
    used = {*read.values(), *ignore}
    return tuple(f"{LEFT_OUT}{name[:64]}" for name in names if name not in used)


def _checked(columns: Columns, names: Sequence[str], ignore: Collection[str], where: str) -> dict[str, str]:
    """Return the columns by their names in a file; raises DataError if one is missing."""
    try:
        return _all_read(columns, names, ignore)
    except ValueError as error:
        raise DataError(f"data.columns: {where}: {error}") from None


def _missing(columns: Columns, column: str, name: str, present: Collection[str]) -> str:
    """Say that `name`, the format's `column`, is missing, and how to name it."""
    shortened = at_most_20([each[:80] for each in present]) or "none"
    # Another format than the run's own, which data.columns may have misnamed.
    forms = (f for f, needed in FORMAT_COLUMNS.items() if set(needed) <= set(present) and not set(needed) <= {*columns})
    form = next(forms, None)
    if form is not None or SHAREGPT in present:
        advice = f"Set data.format={form or 'chat'}."
    elif near := difflib.get_close_matches(name, present, n=1):
        advice = f"nearest: {near[0]}. data.columns='{{{column}: {near[0]}}}'"
    else:
        advice = f"Name the column that holds it. data.columns='{{{column}: NAME}}'"
    return f"expected a column {name}, found {shortened}.\n  {advice}"
