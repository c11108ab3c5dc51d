"""Each source gives real documents, in an order that depends on their names alone."""

import sysconfig
from pathlib import Path

import pytest

from portable_fsdp.config.schema import Data
from portable_fsdp.data.examples import Broken, Example
from portable_fsdp.data.sources import open_source
from portable_fsdp.runtime.errors import DataError


def read_documents(data: Data) -> list[str]:
    return [example.fields["text"] for example in open_source(data).read() if isinstance(example, Example)]


def text(path: Path | str) -> Data:
    return Data(source="text", path=str(path))


def test_python_docs_are_the_reference() -> None:
    documents = read_documents(Data(source="python_docs"))
    assert documents == sorted(documents)
    assert sum(map(len, documents)) > 400_000
    assert any(document.startswith('The "try" statement') for document in documents)


def test_python_source_is_the_library_without_tests_and_packages() -> None:
    documents = read_documents(Data(source="python_source"))
    library = Path(sysconfig.get_path("stdlib"))
    places = [documents.index((library / name).read_text()) for name in ("abc.py", "json/decoder.py", "zipfile.py")]
    assert places == sorted(places)
    assert len(documents) < len(list(library.glob("*.py"))) + 1500
    packages, tests = (
        ("pytest/__init__.py", "numpy/__init__.py"),
        ("test/test_json/__init__.py", "unittest/test/support.py"),
    )
    for left_out in (*packages, *tests):
        for root in (library, Path(sysconfig.get_path("purelib"))):
            if (root / left_out).is_file():
                assert (root / left_out).read_text() not in documents


def test_a_glob_is_sorted_and_goes_to_any_depth(tmp_path: Path) -> None:
    (tmp_path / "b" / "deep.txt").mkdir(parents=True)
    for name in ("c.txt", "b/deep.txt/z.txt", "a [1].txt", "b/y.txt", "b/other.md"):
        (tmp_path / name).write_bytes(f"{name}\r\n\n".encode())
    names = ["a [1].txt", "b/deep.txt/z.txt", "b/y.txt", "c.txt"]
    assert read_documents(text(tmp_path / "**" / "*.txt")) == [f"{name}\r\n\n" for name in names]
    assert read_documents(text(tmp_path / "a [1].txt")) == ["a [1].txt\r\n\n"]


def test_text_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"data\.path: expected a file or a glob that matches some, found nothing: .*\*\.txt\n"
    ):
        read_documents(text(tmp_path / "*.txt"))
    with pytest.raises(DataError, match=r"found a folder: .*\n  Name its files: .*/\*\*/\*\.txt"):
        read_documents(text(tmp_path))


def test_text_that_is_not_utf8_is_broken_under_its_own_number(tmp_path: Path) -> None:
    for name, content in (("a", b"a"), ("b", "abc Grüße".encode("latin-1")), ("c", b"c")):
        (tmp_path / f"{name}.txt").write_bytes(content)
    first, broken, last = open_source(text(tmp_path / "*.txt")).read()
    assert isinstance(broken, Broken)
    assert (first.number, broken.number, last.number) == (0, 1, 2)
    assert broken.place == f"{tmp_path}/b.txt"
    assert broken.problem == "expected UTF-8, found 0xfc at byte 6; `iconv -t utf-8` converts it"


def test_content_follows_bytes_and_their_cut_into_files_and_not_names(tmp_path: Path) -> None:
    def content(*files: str) -> str:
        for old in tmp_path.glob("*.txt"):
            old.unlink()
        for number, file in enumerate(files):
            (tmp_path / f"{len(files)}{number}.txt").write_text(file)
        return open_source(text(tmp_path / "*.txt")).content(tmp_path / "cache")

    assert content("ab", "c") == content("ab", "c")
    assert len({content("ab", "c"), content("a", "bc"), content("abc"), content("abc", ""), content("c", "ab")}) == 5
