"""Compressed files give the documents of the plain ones; a damaged one is named with its line."""

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from portable_fsdp.config.schema import Data
from portable_fsdp.data.compressed import hash_of_files
from portable_fsdp.data.examples import Broken, Example
from portable_fsdp.data.sources import open_source
from portable_fsdp.runtime.errors import DataError

LINES = "".join(json.dumps({"text": f"{number} Grüße"}) + "\n" for number in range(5000)).encode()


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as file:
        file.write(content)
    return sink.getvalue().to_pybytes()


KINDS = {"gzip": gzip.compress, "zstd": zstd}
Compress = Callable[[bytes], bytes]


def read(path: Path, source: str = "jsonl") -> list[Example | Broken]:
    return list(open_source(Data.model_validate({"source": source, "path": str(path)})).read())


def texts(examples: list[Example | Broken]) -> list[str]:
    return [example.fields["text"] for example in examples if isinstance(example, Example)]


@pytest.mark.parametrize("compress", [bytes, *KINDS.values()], ids=["plain", *KINDS])
@pytest.mark.parametrize("source", ["text", "jsonl"])
def test_a_bom_is_no_text_and_makes_another_entry(tmp_path: Path, compress: Compress, source: str) -> None:
    path = tmp_path / "a"
    content = {"text": "Grüße".encode(), "jsonl": '{"text": "Grüße"}'.encode()}[source]
    path.write_bytes(compress(b"\xef\xbb\xbf" + content))
    assert texts(read(path, source)) == ["Grüße"]
    bare = hash_of_files([path], tmp_path / "cache")
    data = Data.model_validate({"source": source, "path": str(path)})
    assert open_source(data).content(tmp_path / "cache") != bare
    path.write_bytes(compress(content))
    assert open_source(data).content(tmp_path / "cache") == hash_of_files([path], tmp_path / "cache")


@pytest.mark.parametrize("compress", KINDS.values(), ids=KINDS)
def test_compressed_files_stand_among_plain_ones(tmp_path: Path, compress: Compress) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "1"}\n')
    (tmp_path / "b.jsonl.z").write_bytes(
        compress(b'{"text": "2"}\n\n{"te') + compress(b'xt": "3"}\nbroken')
    )  # appended
    examples = read(tmp_path / "*.jsonl*")
    assert texts(examples) == ["1", "2", "3"]
    assert [(example.number, Path(example.place).name) for example in examples] == [
        (0, "a.jsonl:1"),
        (1, "b.jsonl.z:1"),
        (2, "b.jsonl.z:3"),
        (3, "b.jsonl.z:4"),
    ]
    totals = [open_source(Data(source="jsonl", path=str(tmp_path / glob))).total for glob in ("a.jsonl", "*.jsonl*")]
    assert totals == [14, 0]  # 0: unknown


@pytest.mark.parametrize("compress", KINDS.values(), ids=KINDS)
def test_a_compressed_text_is_one_document(tmp_path: Path, compress: Compress) -> None:
    (tmp_path / "a.txt.z").write_bytes(compress("Grüße\r\n\n".encode()))
    (tmp_path / "b.txt.z").write_bytes(compress("Grüße".encode("latin-1")))
    good, bad = read(tmp_path / "*.txt.z", "text")
    assert isinstance(good, Example)
    assert (good.fields["text"], good.size) == ("Grüße\r\n\n", 10)
    assert isinstance(bad, Broken)
    assert bad.problem.startswith("expected UTF-8, found 0xfc at byte 2")


@pytest.mark.parametrize("source", ["jsonl", "text"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, kind: str, source: str) -> None:
    path = tmp_path / "a.z"
    path.write_bytes(KINDS[kind](LINES)[:-1000] if kind == "gzip" else zstd(LINES)[:-100])
    with pytest.raises(DataError, match=rf"data\.path: .*a\.z(:\d+)?: expected a whole {kind} file, found: ") as error:
        read(path, source)
    assert f"`{kind} --test {path}` checks it" in str(error.value)


def test_the_line_is_the_first_that_is_not_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(LINES)[:-4])  # all lines are there, and the length behind them is not
    with pytest.raises(DataError, match=r"a\.jsonl\.gz:5001: expected a whole gzip file, found: Compressed file ended"):
        read(path)
    damaged = bytearray(gzip.compress(LINES))
    damaged[-8:-4] = b"1234"
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=r"a\.jsonl\.gz:\d+: expected a whole gzip file, found: CRC check failed"):
        read(path)


WITHOUT = """
import sys
sys.modules["pyarrow"] = None  # what an import finds where it isn't installed
from pathlib import Path
from portable_fsdp.data.compressed import read_whole
read_whole(Path(sys.argv[1]))
"""


def test_zstd_without_a_library_says_what_to_install(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.zst"
    path.write_bytes(zstd(b"text"))
    done = subprocess.run([sys.executable, "-c", WITHOUT, str(path)], capture_output=True, text=True, check=False)
    assert f"DataError: data.source: expected the package pyarrow for {path}, which zstd compressed" in done.stderr
    assert "pip install 'portable-fsdp[data]'" in done.stderr
