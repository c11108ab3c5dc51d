"""A file's hash is made once, again when the file has changed, and never taken from a memo that isn't whole."""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from portable_fsdp.config.schema import Data
from portable_fsdp.data.build import build_data
from portable_fsdp.data.compressed import SETTLED_S, hash_of_files, remembered
from portable_fsdp.data.packing import DocumentRows, PackedRows, Pieces, cut
from portable_fsdp.data.tokenize import Tokens


def later(seconds: float = 2 * SETTLED_S) -> Callable[[], int]:
    """A clock that is ahead: what is hashed by it was written long before."""
    return lambda: time.time_ns() + int(seconds * 1e9)


class Hashes:
    """Hashes of one file, counted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "hashes"
        self.file = folder / "corpus.txt"
        self.file.write_text("abc")
        self.made = 0
        self.clock = later()

    def make(self) -> str:
        self.made += 1
        return self.file.read_text()

    def get(self, what: str = "text") -> str:
        return remembered(self.folder, [self.file], what, self.make, clock=self.clock)


@pytest.fixture
def hashes(tmp_path: Path) -> Hashes:
    return Hashes(tmp_path)


def test_a_file_is_hashed_once_for_each_purpose(hashes: Hashes) -> None:
    assert [hashes.get(), hashes.get(), hashes.get("other"), hashes.get("other")] == ["abc"] * 4
    assert hashes.made == 2


def test_a_change_of_the_same_size_is_noticed_also_with_the_time_set_back(hashes: Hashes) -> None:
    hashes.get()
    before = hashes.file.stat()
    hashes.file.write_text("abd")
    os.utime(hashes.file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert hashes.get() == "abd"
    hashes.file.write_text("abe")
    os.utime(hashes.file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))  # ctime tells
    assert hashes.get() == "abe"


def test_another_file_of_the_same_size_and_mtime_in_its_place_is_noticed(hashes: Hashes, tmp_path: Path) -> None:
    hashes.get()
    other = tmp_path / "other"
    other.write_text("xyz")
    os.utime(other, ns=(0, hashes.file.stat().st_mtime_ns))
    other.replace(hashes.file)
    assert hashes.get() == "xyz"


def test_a_young_file_is_hashed_again(hashes: Hashes) -> None:
    hashes.clock = later(SETTLED_S - 5)
    assert [hashes.get(), hashes.get()] == ["abc", "abc"]
    assert hashes.made == 2
    hashes.clock = later(-60)  # a file server's clock is ahead
    hashes.get()
    assert hashes.made == 3
    assert not hashes.folder.exists()


@pytest.mark.parametrize("damage", [b"", b"ab", b"abd 0123456789abcdef", b"\xff\xfe", b"abc", None])
def test_a_damaged_memo_is_none(hashes: Hashes, damage: bytes | None) -> None:
    """`None`: a pipe in its place, which nobody waits for."""
    hashes.get()
    [memo] = hashes.folder.iterdir()
    memo.unlink()
    if damage is None:
        os.mkfifo(memo)
    else:
        memo.write_bytes(damage)
    assert hashes.get() == "abc"
    assert hashes.made == 2
    assert hashes.get() == "abc"
    assert hashes.made == 2


def test_a_folder_that_cannot_be_written_to_only_costs_time(hashes: Hashes) -> None:
    hashes.folder.write_text("in the way")
    assert [hashes.get(), hashes.get()] == ["abc", "abc"]
    assert hashes.made == 2


def bytes_read(work: Callable[[], object]) -> int:
    """That this process asked the file system for."""

    def count() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = count()
    work()
    return count() - before


def test_a_corpus_is_not_read_a_second_time(tmp_path: Path) -> None:
    """The interpreter's own library: 5 MB that nobody has written to for 10 seconds."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    size = sum(file.stat().st_size for file in files)
    assert bytes_read(lambda: hash_of_files(files, tmp_path)) > size
    assert bytes_read(lambda: hash_of_files(files, tmp_path)) < 10_000
    assert hash_of_files(files[1:], tmp_path) != hash_of_files(files, tmp_path) == hash_of_files(files, tmp_path / "2")


def test_tokens_are_not_read_a_second_time_for_a_fingerprint(tmp_path: Path) -> None:
    """The second rows don't even have the tokens that the fingerprint is of."""
    file = tmp_path / "tokens.bin"
    file.write_bytes(bytes(range(200)))
    remember = partial(remembered, tmp_path / "hashes", [file], clock=later())
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


def test_a_run_remembers_its_corpus_and_its_rows(tmp_path: Path) -> None:
    data = Data(source="python_docs", cache_dir=str(tmp_path))
    fingerprint = build_data(data).fingerprint
    assert len(list((tmp_path / "hashes").iterdir())) == 1  # the rows'; that corpus has no files
    assert build_data(data).fingerprint == fingerprint
    assert len(list((tmp_path / "hashes").iterdir())) == 1
