"""Cache of tokenized documents on disk: written once, mapped by every process that needs them.

An entry is a folder named by a hash of everything that determines its content: the documents' bytes, the tokenizer, the
format, the selected part of the documents, the versions of the libraries, and `FORMAT`. One process writes it under a
lock into a temporary folder, syncs it and renames it. So a folder with the entry's name is complete; a killed process
leaves only a temporary folder, which the next process deletes. On a file system without locks, several processes may
write the same entry, and one of them wins. facts.json holds a hash of every 4 MiB of the other files; each process
checks a block when it first reads it, and damage is an error.
"""

import errno
import json
import logging
import os
import shutil
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self, cast

import numpy as np
import xxhash
from numpy.typing import DTypeLike, NDArray
from tqdm import tqdm

from portable_fsdp.data.examples import Broken, DocumentSource, Example, Render, Rendered, texts_in
from portable_fsdp.data.tokenize import Tokens
from portable_fsdp.runtime.errors import DataError
from portable_fsdp.runtime.files import sync_folder, try_lock
from portable_fsdp.runtime.host import begin
from portable_fsdp.runtime.hub import panic_as_error

log = logging.getLogger("portable_fsdp")

FORMAT = 5
"""The version of an entry and of the code that makes it; raise it when either changes."""

BATCH_CHARACTERS = 200_000
BATCH_DOCUMENTS = 100
MAX_NOTES = 1000
"""Limit on distinct notes: each row may have other keys."""
_THREADS = 4
"""Batches rendered at once, so the tokenizer's own threads (one per core) don't wait for the last text of each."""

_HASHED_BYTES = 1 << 22
_HEX_DIGITS = 16  # of a hash


@dataclass(frozen=True)
class Facts:
    """Content of an entry's facts.json."""

    dtype: str
    documents: int
    tokens: int
    has_counted: bool
    skipped: int
    first_skipped: str
    """Place and problem of the first skipped document; empty if none was skipped."""
    notes: dict[str, int] = field(default_factory=dict[str, int])
    """Note (`Example.notes`) -> number of documents that have it."""
    hashes: dict[str, str] = field(default_factory=dict[str, str])
    """File -> the 64-bit XXH3 of each `_HASHED_BYTES`, in hexadecimal, concatenated."""


class CheckedArray:
    """A memory-mapped file as a 1-D array. The first read of a block raises DataError if its hash differs."""

    def __init__(self, path: Path, dtype: DTypeLike, count: int, hashes: str) -> None:
        """Map the file. Raises OSError, and ValueError for a file of another length."""
        self._path, self._hashes, self.dtype = path, hashes, np.dtype(dtype)
        size = count * self.dtype.itemsize
        if path.stat().st_size != size or -(-size // _HASHED_BYTES) * _HEX_DIGITS != len(hashes):
            raise ValueError(f"{path}: expected {size} bytes, found {path.stat().st_size}")
        # An empty file can't be mapped.
        self._array: NDArray[Any] = np.memmap(path, self.dtype, mode="r") if count else np.empty(0, self.dtype)
        self._shift = (_HASHED_BYTES // self.dtype.itemsize).bit_length() - 1
        self._unchecked = np.ones(len(hashes) // _HEX_DIGITS, np.bool_)

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, index: slice | NDArray[np.int64]) -> NDArray[Any]:
        """Read; an array as `index` holds no negative numbers."""
        if isinstance(index, slice):
            begin, end, _ = index.indices(len(self))
            blocks = np.arange(begin >> self._shift, ((end - 1) >> self._shift) + 1)
        else:
            blocks = index >> self._shift
        for block in np.unique(blocks[self._unchecked[blocks]]):
            self._check(int(block))
        return self._array[index]

    def _check(self, block: int) -> None:
        part = self._array[block << self._shift : (block + 1) << self._shift]
        begin = block * _HEX_DIGITS
        if xxhash.xxh3_64_hexdigest(part.data) != self._hashes[begin : begin + _HEX_DIGITS]:
            raise DataError(
                f"data.cache_dir: {self._path}: bytes from {block * _HASHED_BYTES:,} on changed after they were "
                f"written: the tokens are damaged.\n  Delete {self._path.parent}; the next run builds it again."
            )
        self._unchecked[block] = False


@dataclass(frozen=True)
class TokenizedDocuments:
    """Concatenated documents: document d is `tokens[starts[d] : starts[d + 1]]`."""

    tokens: Tokens
    starts: NDArray[np.int64]
    numbers: NDArray[np.int64]
    """The number of each document in its source."""
    counted: NDArray[np.bool_] | None
    """Mask of the tokens that count in the loss; None: all do."""
    facts: Facts
    files: tuple[Path, ...] = ()
    """The files of `tokens` and `counted`."""

    def __len__(self) -> int:
        return len(self.numbers)

    @classmethod
    def mapped(cls, folder: Path) -> Self:
        """Map an entry. Raises OSError, ValueError, TypeError or KeyError for a damaged one."""
        text, _, digest = (folder / "facts.json").read_bytes().rpartition(b"\n")
        if digest != xxhash.xxh3_64_hexdigest(text).encode():
            raise ValueError("facts.json changed after it was written")
        facts = Facts(**json.loads(text))

        def checked(name: str, dtype: DTypeLike, count: int) -> NDArray[Any]:
            return cast(NDArray[Any], CheckedArray(folder / name, dtype, count, facts.hashes[name]))

        return cls(
            checked("tokens.bin", facts.dtype, facts.tokens),
            checked("starts.bin", np.int64, facts.documents + 1)[:],
            checked("numbers.bin", np.int64, facts.documents)[:],
            checked("counted.bin", np.bool_, facts.tokens) if facts.has_counted else None,
            facts,
            tuple(folder / name for name in facts.hashes if name in ("tokens.bin", "counted.bin")),
        )


@dataclass(frozen=True)
class Recipe:
    """Everything needed to build an entry."""

    key: str
    """Result of `entry_key`: equal for equal entries only."""
    source: DocumentSource
    takes: Callable[[int], bool]
    """Predicate: the document with this number belongs to the entry."""
    render: Render
    dtype: np.dtype[Any]
    """The dtype of the ids."""
    skip_broken: bool
    """Skip and count documents that can't be read or rendered; False: raise at the first."""


def entry_key(**parts: object) -> str:
    """Return the name of the entry with these parts: 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(
        json.dumps({"entry format": FORMAT, **parts}, sort_keys=True, default=str).encode()
    )


def tokenized(folder: Path, recipe: Recipe) -> TokenizedDocuments:
    """Return the entry in `folder`; build it first if it doesn't exist. Every process calls it; not a collective.

    Raises DataError for problems of the source or its documents, for a damaged entry, and if the folder can't be
    written to or read.
    """
    entry = folder / recipe.key
    try:
        if not entry.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder / f"{recipe.key}.lock") as is_locked:
                if not entry.is_dir():
                    _make(entry, recipe, alone=is_locked)
    except OSError as error:
        raise DataError(
            f"data.cache_dir: {error.filename or folder}: can't be written: {error.strerror}.\n"
            "  Fix the cause and start again, or set data.cache_dir to a folder on another disk."
        ) from error
    try:
        return TokenizedDocuments.mapped(entry)
    except (FileNotFoundError, ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"data.cache_dir: {entry}: this entry, written by an earlier run, is damaged: {error}\n"
            "  Delete that folder; the next run builds it again."
        ) from error
    except OSError as error:
        raise DataError(
            f"data.cache_dir: {error.filename or entry}: can't be read: {error.strerror}.\n"
            "  The entry may be intact: fix the cause and start again."
        ) from error


@contextmanager
def _locked(path: Path) -> Generator[bool]:
    """Wait until no other process builds the entry. Yields False if the file system has no locks."""
    # The owner is a launcher's run, which its other processes have too, or this process itself.
    launched = [os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")]
    owner = " ".join(filter(None, launched)).encode() or f"{socket.gethostname()} {os.getpid()}".encode()
    with path.open("ab+", buffering=0) as file:  # closing unlocks; the file stays for others
        lock, other = try_lock(file.fileno()), b""
        with suppress(OSError):  # on a full disk the owner stays unknown
            if lock:
                file.truncate(0)
                file.write(owner)
            other = os.pread(file.fileno(), len(owner) + 1, 0)
        if lock is False and other != owner:
            log.info("data: another process tokenizes this corpus; waiting for it (%s)", path)
        while lock is False:  # polled: NFS lets a blocked lock wait for up to 30 s
            time.sleep(0.1)
            lock = try_lock(file.fileno())
        yield lock is True


# ------------------------------------------------------------------------------------------------------------ make


def _make(entry: Path, recipe: Recipe, *, alone: bool) -> None:
    if alone:
        for left in entry.parent.glob(f"{entry.name}.tmp-*"):  # left by a killed process
            shutil.rmtree(left)
    temporary = entry.with_name(f"{entry.name}.tmp-{os.uname().nodename}-{os.getpid()}")
    source, before = recipe.source, recipe.source.content(entry.parent)
    try:
        temporary.mkdir()
        documents = (document for document in source.read() if recipe.takes(document.number))
        with closing(_rendered(documents, recipe.render)) as batches:
            _write(temporary, recipe, batches)
        if source.content(entry.parent) != before:
            raise DataError(
                f"data.path: {source.name} changed while it was read.\n"
                "  Start again when nothing writes to it any more."
            )
        sync_folder(temporary)
        try:
            temporary.rename(entry)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            shutil.rmtree(temporary)  # without locks, another process may have been faster
        sync_folder(entry.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _rendered(documents: Iterable[Example | Broken], render: Render) -> Generator[tuple[int, list[Rendered | Broken]]]:
    """Yield (size in the source's unit, documents) of each batch, in order; `_THREADS` batches are rendered at once."""
    in_work: deque[tuple[list[Example | Broken], Future[list[Rendered | Broken]]]] = deque()

    def oldest() -> tuple[int, list[Rendered | Broken]]:
        batch, future = in_work.popleft()
        with panic_as_error(f"data: {batch[0].place} to {batch[-1].place}"):
            return sum(document.size for document in batch), future.result()

    for batch in _batches(documents):
        in_work.append((batch, begin(partial(render, batch))))
        if len(in_work) > _THREADS:
            yield oldest()
    while in_work:
        yield oldest()


def _characters(document: Example | Broken) -> int:
    return sum(map(len, texts_in(document.fields))) if isinstance(document, Example) else 0


def _batches(documents: Iterable[Example | Broken]) -> Iterator[list[Example | Broken]]:
    batch: list[Example | Broken] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += _characters(document)
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _write(folder: Path, recipe: Recipe, batches: Iterable[tuple[int, list[Rendered | Broken]]]) -> None:
    """Write and sync all files of an entry; shows a progress bar on a terminal."""
    starts, numbers, broken = [0], list[int](), list[Broken]()
    has_counted, notes, source = False, Counter[str](), recipe.source
    with (
        tqdm(
            desc=f"tokenizing {Path(source.name).name}",
            total=source.total or None,
            unit=source.unit,
            unit_scale=source.unit == "B",
            disable=not sys.stderr.isatty(),
        ) as bar,
        (folder / "tokens.bin").open("wb") as tokens,
        (folder / "counted.bin").open("wb") as counted,
    ):
        for size, batch in batches:
            bar.update(size)
            for document in batch:
                if isinstance(document, Broken):
                    broken.append(document)
                    if not recipe.skip_broken:
                        raise DataError(refusal(document))
                    continue
                tokens.write(document.ids.astype(recipe.dtype, copy=False).data)
                if document.counted is not None:
                    counted.write(document.counted.data)
                    has_counted = True
                starts.append(starts[-1] + len(document.ids))
                numbers.append(document.number)
                notes.update(note for note in document.notes if note in notes or len(notes) < MAX_NOTES)
    first = f"{broken[0].place}: {broken[0].problem}" if broken else ""
    for name, values in (("starts.bin", starts), ("numbers.bin", numbers)):
        (folder / name).write_bytes(np.array(values, np.int64).data)
    hashes = {path.name: _hashes_of(path) for path in sorted(folder.glob("*.bin"))}
    counts = len(numbers), starts[-1], has_counted, len(broken)
    facts = Facts(recipe.dtype.name, *counts, first, dict(notes), hashes)
    text = json.dumps(asdict(facts)).encode()
    (folder / "facts.json").write_bytes(text + b"\n" + xxhash.xxh3_64_hexdigest(text).encode())
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _hashes_of(path: Path) -> str:
    with path.open("rb") as file:
        return "".join(map(xxhash.xxh3_64_hexdigest, iter(lambda: file.read(_HASHED_BYTES), b"")))


def refusal(broken: Broken) -> str:
    """Return the error message of `data.on_error: stop`."""
    problem, _, advice = broken.problem.partition("\n")
    end = "" if problem.endswith((".", "!", "?")) else "."
    fix = f"{advice.rstrip('.')}. Or" if advice else "  Correct it, or"
    return f"data: {broken.place}: {problem}{end}\n{fix} set data.on_error=skip to leave it out."
