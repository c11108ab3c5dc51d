"""An entry is made once, whole or not at all, whoever asks for it and whenever its maker ends; so is a file's hash."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from portable_fsdp.config.schema import Data
from portable_fsdp.data.build import build_data, renderer
from portable_fsdp.data.cache import BATCH_DOCUMENTS, Recipe, TokenizedDocuments, entry_key, refusal, tokenized
from portable_fsdp.data.compressed import SETTLED_S, hash_of_files, remembered
from portable_fsdp.data.document_rows import DocumentRows, Pieces, cut
from portable_fsdp.data.examples import Broken, Example
from portable_fsdp.data.packing import PackedRows
from portable_fsdp.data.tokenize import ByteTokenizer, Tokens
from portable_fsdp.runtime.errors import DataError

RENDER = renderer(Data(), ByteTokenizer(), stream=True)


class Texts:
    """Documents that are counted when they are read; `slow_s` seconds each."""

    name = "texts"
    unit = "rows"

    def __init__(self, *texts: str | Broken, slow_s: float = 0) -> None:
        self.texts = texts
        self.total = len(texts)
        self.slow_s = slow_s
        self.reads = 0

    def content(self, cache: Path) -> str:
        return str(self.texts)

    def read(self) -> Iterator[Example | Broken]:
        self.reads += 1
        for number, text in enumerate(self.texts):
            time.sleep(self.slow_s)
            yield Example(number, f"texts:{number}", 1, {"text": text}) if isinstance(text, str) else text


def recipe(source: Texts, *, key: str = "k", skip_broken: bool = False, even: bool = False) -> Recipe:
    return Recipe(
        key, source, lambda number: not even or number % 2 == 0, RENDER, np.dtype(np.uint8), skip_broken=skip_broken
    )


def documents(entry: TokenizedDocuments) -> list[bytes]:
    return [entry.tokens[begin:end].tobytes() for begin, end in zip(entry.starts, entry.starts[1:], strict=False)]


def test_documents_come_back_in_order_and_are_read_once_and_only_what_belongs_is_in_an_entry(tmp_path: Path) -> None:
    texts = [f"document {number}" * (number % 7) for number in range(3 * BATCH_DOCUMENTS + 5)]
    source = Texts(*texts)
    for _ in range(2):
        tokenized(tmp_path / "new" / "cache", recipe(source))
    entry = tokenized(tmp_path / "new" / "cache", recipe(source))
    assert documents(entry) == [text.encode() + b"\0" for text in texts]
    assert entry.numbers.tolist() == list(range(len(texts)))
    assert source.reads == 1
    assert isinstance(entry.tokens[:], np.memmap)
    assert not entry.tokens[:].flags.writeable
    entry = tokenized(tmp_path / "even", recipe(Texts("a", "b", "c"), even=True))
    assert documents(entry) == [b"a\0", b"c\0"]
    assert entry.numbers.tolist() == [0, 2]
    assert len(tokenized(tmp_path / "even", recipe(Texts(), key="empty"))) == 0


def test_what_is_broken_stops_or_is_counted(tmp_path: Path) -> None:
    source = Texts("a", Broken(1, "file:2", 1, "expected this, found that"), "c", Broken(3, "file:4", 1, "other"))
    with pytest.raises(DataError, match=r"data: file:2: expected this, found that\.\n  Correct .* data\.on_error=skip"):
        tokenized(tmp_path, recipe(source))
    assert [path.name for path in tmp_path.iterdir()] == ["k.lock"]
    entry = tokenized(tmp_path, recipe(source, skip_broken=True))
    assert documents(entry) == [b"a\0", b"c\0"]
    assert entry.numbers.tolist() == [0, 2]
    assert (entry.facts.skipped, entry.facts.first_skipped) == (2, "file:2: expected this, found that")


def test_other_code_makes_other_entries_and_an_error_has_one_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    key = entry_key(format="text", content="x")
    assert key == entry_key(content="x", format="text")
    monkeypatch.setattr("portable_fsdp.data.cache.FORMAT", 99)
    assert entry_key(format="text", content="x") != key
    end = "it: No such role!\n  Correct it, or set data.on_error=skip to leave it out."
    assert refusal(Broken(0, "file:2", 1, "the template refuses it: No such role!")).endswith(end)
    end = "found a.\n  Name it: 'b'. Or set data.on_error=skip to leave it out."
    assert refusal(Broken(0, "file:2", 1, "found a.\n  Name it: 'b'")).endswith(end)


def test_a_source_that_changes_and_a_folder_that_cannot_be_written_to_are_refused(tmp_path: Path) -> None:
    class Changing(Texts):
        def content(self, cache: Path) -> str:
            return str(self.reads)

    with pytest.raises(DataError, match="texts changed while it was read"):
        tokenized(tmp_path, recipe(Changing("a")))
    assert not (tmp_path / "k").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"data\.cache_dir: .*: can't be written: Not a directory\.\n .* set data"):
        tokenized(tmp_path / "file" / "cache", recipe(Texts("a")))


def test_a_damaged_entry_is_refused_with_the_way_out(tmp_path: Path) -> None:
    tokenized(tmp_path, recipe(Texts("abc")))
    facts = tmp_path / "k" / "facts.json"
    flipped = facts.read_bytes().replace(b'"skipped": 0', b'"skipped": 1')
    for damage, what in (
        (lambda: os.truncate(tmp_path / "k" / "tokens.bin", 2), r".*4 bytes, found 2\n"),
        (lambda: facts.write_bytes(flipped), ""),
        (lambda: facts.write_text('{"dtype": 1}'), ""),
        (facts.unlink, ""),
    ):
        damage()
        with pytest.raises(DataError, match=rf"written by an earlier run, is damaged: {what}"):
            tokenized(tmp_path, recipe(Texts("abc")))


@pytest.mark.parametrize(("name", "at"), [("tokens.bin", 9_000_001), ("starts.bin", 8), ("numbers.bin", 0)])
def test_a_flipped_bit_is_found_when_it_is_first_read(tmp_path: Path, name: str, at: int) -> None:
    """Protects a run from training on tokens that changed on disk, in whatever way it reads them."""
    source = recipe(Texts("x" * 10_000_000, "y"))
    tokenized(tmp_path, source)
    content = bytearray((tmp_path / "k" / name).read_bytes())
    content[at] ^= 4
    (tmp_path / "k" / name).write_bytes(content)

    def damage() -> Any:
        return pytest.raises(DataError, match=rf"{name}: bytes from .* changed .*\n  Delete .*/k; the next run")

    if name != "tokens.bin":
        with damage():
            tokenized(tmp_path, source)
        return
    entry = tokenized(tmp_path, source)
    rows = PackedRows(entry.tokens, 8)
    assert (rows.rows(np.array([0, 5_000_000 // 8]))["labels"] == ord("x")).all()  # in blocks that are whole
    for read in (
        lambda: rows.rows(np.array([0, at // 8])),
        rows.fingerprint,
        lambda: entry.tokens[at - 5_000_000 :],
        lambda: entry.tokens[at : at + 1],
    ):
        with damage():
            read()
    shutil.rmtree(tmp_path / "k")
    assert len(tokenized(tmp_path, source).tokens) == 10_000_003


@contextmanager
def limited(kind: int, limit: int) -> Generator[None]:
    """A limit of this process, as `ulimit` sets it."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def test_too_many_open_files_are_no_damage(tmp_path: Path) -> None:
    """Protects a whole entry from the advice to delete it."""
    tokenized(tmp_path, recipe(Texts("abc")))
    taken: list[int] = []
    with limited(resource.RLIMIT_NOFILE, max(map(int, os.listdir("/proc/self/fd"))) + 1):
        try:
            with suppress(OSError):
                while True:
                    taken.append(os.dup(0))
            for key in ("k", "new"):
                with pytest.raises(DataError, match=r"Too many open files\.\n  .*tart again"):
                    tokenized(tmp_path, recipe(Texts("abc"), key=key))
        finally:
            for descriptor in taken:
                os.close(descriptor)
    assert documents(tokenized(tmp_path, recipe(Texts("abc")))) == [b"abc\0"]


@pytest.mark.parametrize(("size", "count"), [(100_000, 1), (1, 1000)], ids=["tokens", "places of documents"])
def test_no_room_for_the_cache_is_an_error_that_leaves_nothing(size: int, count: int, tmp_path: Path) -> None:
    """A file can grow no further, as on a full disk."""
    refused = pytest.raises(DataError, match=r": can't be written: File too large\.\n  Fix the cause and start again")
    with limited(resource.RLIMIT_FSIZE, 4096), refused:
        tokenized(tmp_path, recipe(Texts(*(["x" * size] * count))))
    assert [path.name for path in tmp_path.iterdir()] == ["k.lock"]


MAKER = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[3].split(":")
from test_cache import Texts, documents, recipe, tokenized
source = Texts(*(str(number) for number in range(2000)), slow_s=float(sys.argv[2]))
print("ready", flush=True)
entry = tokenized(Path(sys.argv[1]), recipe(source))
print(source.reads, len(documents(entry)), flush=True)
"""


def start(folder: Path, slow_s: float) -> "subprocess.Popen[str]":
    arguments = [str(folder), str(slow_s), str(Path(__file__).parent)]
    return subprocess.Popen([sys.executable, "-c", MAKER, *arguments], stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_of_several_processes_at_once_one_tokenizes(tmp_path: Path) -> None:
    makers = [start(tmp_path, 0.0005) for _ in range(3)]
    output = [maker.communicate(timeout=120)[0].split() for maker in makers]
    assert sorted(output) == [["ready", "0", "2000"], ["ready", "0", "2000"], ["ready", "1", "2000"]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["k", "k.lock"]


@pytest.mark.slow
def test_a_maker_that_is_killed_leaves_nothing_that_is_taken_for_whole(tmp_path: Path) -> None:
    maker = start(tmp_path, 0.05)
    deadline = time.monotonic() + 60
    while not (left := list(tmp_path.glob("k.tmp-*"))):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    waiting = start(tmp_path, 0)
    maker.send_signal(signal.SIGKILL)
    maker.communicate()
    assert waiting.communicate(timeout=120)[0].split() == ["ready", "1", "2000"]
    assert not left[0].exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["k", "k.lock"]


def later(seconds: float = 2 * SETTLED_S) -> int:
    """A time ahead of the clock: a file that is hashed then was written long before."""
    return time.time_ns() + int(seconds * 1e9)


def writes(text: str) -> Callable[[Path], object]:
    """Replace the content, with the time of the change set back: ctime tells."""
    return lambda file: (file.write_text(text), os.utime(file, ns=(0, 1)))


def replaces(file: Path) -> None:
    """Put another file of the same size and mtime in its place."""
    other = file.with_name("other")
    other.write_text("xyz")
    os.utime(other, ns=(0, file.stat().st_mtime_ns))
    other.replace(file)


def damages(memo: bytes) -> Callable[[Path], object]:
    return lambda file: next((file.parent / "hashes").iterdir()).write_bytes(memo)


Change = Callable[[Path], object]
LONG_S, DAMAGED = 2 * SETTLED_S, (b"", b"ab", b"\xff\xfe", b"abc", b"abd 0123456789abcdef")
NOTHING, IN_THE_WAY = (lambda file: None), (lambda file: (file.parent / "hashes").write_text("in the way"))


@pytest.mark.parametrize(
    ("before", "change", "ahead_s", "made"),
    [
        (NOTHING, NOTHING, LONG_S, ["abc"]),
        (NOTHING, writes("abd"), LONG_S, ["abc", "abd"]),
        (writes("abd"), writes("abe"), LONG_S, ["abd", "abe"]),
        (NOTHING, replaces, LONG_S, ["abc", "xyz"]),
        (NOTHING, NOTHING, SETTLED_S - 5, ["abc"] * 3),  # a young file is hashed again
        (NOTHING, NOTHING, -60, ["abc"] * 3),  # a file server's clock is ahead
        *((NOTHING, damages(memo), LONG_S, ["abc"] * 2) for memo in DAMAGED),
        (IN_THE_WAY, NOTHING, LONG_S, ["abc"] * 3),  # a folder that can't be written to only costs time
    ],
)
def test_a_memo_is_of_the_files_it_was_made_of(
    tmp_path: Path, before: Change, change: Change, ahead_s: float, made: list[str]
) -> None:
    """`made`: what is hashed by a first call, and by two more after `change`."""
    file, hashed = tmp_path / "corpus.txt", list[str]()
    file.write_text("abc")
    before(file)

    def make() -> str:
        hashed.append(file.read_text())
        return hashed[-1]

    for number in range(3):
        assert remembered(tmp_path / "hashes", [file], "text", make, clock=lambda: later(ahead_s)) == file.read_text()
        if number == 0:
            change(file)
    assert hashed == made


def test_a_corpus_is_not_read_a_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's own library, which nobody has written to for 10 seconds. And a run remembers its rows."""
    data = Data(source="python_docs", cache_dir=str(tmp_path / "run"))
    fingerprints = set[object]()
    for _ in range(2):
        fingerprints.add(build_data(data).fingerprint)
        assert len(list((tmp_path / "run/hashes").iterdir())) == 1  # the rows'; that corpus has no files
    assert len(fingerprints) == 1
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    digest = hash_of_files(files, tmp_path)
    assert hash_of_files(files[1:], tmp_path) != digest == hash_of_files(files, tmp_path / "2")
    monkeypatch.setattr("portable_fsdp.data.compressed._hash_of_files", None)
    assert hash_of_files(files, tmp_path) == digest
    # Nor are tokens for a fingerprint: the second rows don't even have those that it is of.
    file = tmp_path / "tokens.bin"
    file.write_bytes(bytes(range(200)))
    remember = partial(remembered, tmp_path / "rows", [file], clock=later)
    tokens, none = np.frombuffer(file.read_bytes(), np.uint8), np.zeros(200, np.uint8)
    assert PackedRows(tokens, 8, remember).fingerprint() == PackedRows(tokens, 8).fingerprint()
    assert PackedRows(none, 8, remember).fingerprint() == PackedRows(tokens, 8).fingerprint()
    assert PackedRows(tokens, 9, remember).fingerprint() == PackedRows(tokens, 9).fingerprint()
    pieces = cut(np.array([0, 5]), np.array([5, 6]), 8)
    fewer = cut(np.array([0, 5]), np.array([5, 5]), 8)

    def rows(of: Tokens, pieces: Pieces = pieces, **keys: Any) -> str:
        return DocumentRows(of, None, pieces, seq_len=8, padding=0, several=True, **keys).fingerprint()

    assert rows(tokens, remember=remember) == rows(tokens) == rows(none, remember=remember)
    assert rows(tokens, fewer, remember=remember) == rows(tokens, fewer) != rows(tokens)
