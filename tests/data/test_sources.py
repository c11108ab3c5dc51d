"""Each source gives real documents, in an order of its own; what can't be read is named by file and line."""

import gzip
import json
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, cast

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from portable_fsdp.config.schema import Data
from portable_fsdp.data.examples import Broken, DocumentSource, Example
from portable_fsdp.data.records import first_rows_of_hub
from portable_fsdp.data.render import conversation_of, messages_of
from portable_fsdp.data.sources import open_source
from portable_fsdp.runtime.errors import DataError


def opened(source: str, path: Path | str | None = None, **keys: Any) -> DocumentSource:
    return open_source(Data.model_validate({"source": source, "path": path and str(path), **keys}))


def read(source: str, path: Path | str | None = None, **keys: Any) -> list[Example | Broken]:
    return list(opened(source, path, **keys).read())


def texts(examples: list[Example | Broken]) -> list[str]:
    return [example.fields["text"] for example in examples if isinstance(example, Example)]


def lines(path: Path, *values: object) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def test_sources_of_python_are_its_reference_and_its_library_without_tests_and_packages() -> None:
    documents = texts(read("python_docs"))
    assert documents == sorted(documents)
    assert sum(map(len, documents)) > 400_000
    assert any(document.startswith('The "try" statement') for document in documents)
    documents = texts(read("python_source"))
    library = Path(sysconfig.get_path("stdlib"))
    places = [documents.index((library / name).read_text()) for name in ("abc.py", "json/decoder.py", "zipfile.py")]
    assert places == sorted(places)
    assert len(documents) < len(list(library.glob("*.py"))) + 1500
    packages = Path(sysconfig.get_path("purelib"))
    left_out = [packages / "pytest/__init__.py", *library.glob("test/test_json/__init__.py")]
    assert not {path.read_text() for path in left_out} & {*documents}


def test_a_glob_is_sorted_and_goes_to_any_depth(tmp_path: Path) -> None:
    (tmp_path / "b" / "deep.txt").mkdir(parents=True)
    for name in ("c.txt", "b/deep.txt/z.txt", "a [1].txt", "b/y.txt", "b/other.md"):
        (tmp_path / name).write_bytes(f"{name}\r\n\n".encode())
    names = ["a [1].txt", "b/deep.txt/z.txt", "b/y.txt", "c.txt"]
    assert texts(read("text", tmp_path / "**" / "*.txt")) == [f"{name}\r\n\n" for name in names]
    assert texts(read("text", tmp_path / "a [1].txt")) == ["a [1].txt\r\n\n"]


def test_text_that_is_not_utf8_is_broken_and_content_follows_bytes_and_their_cut_into_files(tmp_path: Path) -> None:
    """The broken one keeps its number; names don't count."""
    for name, written in (("a", b"a"), ("b", "abc Grüße".encode("latin-1")), ("c", b"c")):
        (tmp_path / f"{name}.txt").write_bytes(written)
    first, broken, last = read("text", tmp_path / "*.txt")
    assert isinstance(broken, Broken)
    assert (first.number, broken.number, last.number) == (0, 1, 2)
    assert broken.place == f"{tmp_path}/b.txt"
    assert broken.problem == "expected UTF-8, found 0xfc at byte 6; `iconv -f latin1 -t utf-8` may convert it"

    def content(*files: str) -> str:
        for old in tmp_path.glob("*.txt"):
            old.unlink()
        for number, file in enumerate(files):
            (tmp_path / f"{len(files)}{number}.txt").write_text(file)
        return opened("text", tmp_path / "*.txt").content(tmp_path / "cache")

    assert content("ab", "c") == content("ab", "c")
    assert len({content("ab", "c"), content("a", "bc"), content("abc"), content("abc", ""), content("c", "ab")}) == 5


def test_json_lines_of_several_files_come_in_the_order_of_their_names_with_columns_that_may_miss(
    tmp_path: Path,
) -> None:
    lines(tmp_path / "b.jsonl", {"text": "3"})
    (tmp_path / "a.jsonl").write_text('{"text": "1"}\n\n  \n{"text": "2", "other": [1]}')  # no last newline
    examples = read(source="jsonl", path=tmp_path / "*.jsonl")
    assert texts(examples) == ["1", "2", "3"]
    assert [example.number for example in examples] == [0, 1, 2]
    assert [example.place.rpartition("/")[2] for example in examples] == ["a.jsonl:1", "a.jsonl:4", "b.jsonl:1"]
    # Other columns may hold what Python writes, and brackets inside a text are text.
    line = {"text": '[\\"{' * 600_000, "score": float("nan"), "boxes": [[1, 2, 3, 4]] * 11_000}
    assert texts(read(source="jsonl", path=lines(tmp_path / "c.jsonl", line))) == [line["text"]]
    # An optional column may be missing in some rows, but not in all.
    rows = [{"instruction": "a", "context": None, "output": "b"}, {"instruction": "a", "output": "b"}]
    path, keys = lines(tmp_path / "d.jsonl", *rows), {"source": "jsonl", "format": "instruction"}
    assert [type(item) for item in read(path=path, columns={"input": "context"}, **keys)] == [Example] * 2
    with pytest.raises(DataError, match=r"data\.columns: no row has the column contex: "):
        read(path=path, columns={"input": "contex"}, **keys)


def test_a_broken_line_keeps_its_number(tmp_path: Path, assert_golden: Callable[[Path, str], None]) -> None:
    """The golden file has, after each `$ `, a line in latin-1, and what is wrong with it."""
    golden, path, parts = Path(__file__).parent / "golden/broken_lines.txt", tmp_path / "a.jsonl", list[str]()
    for line in re.findall(r"^\$ (.*)$", golden.read_text(), re.MULTILINE):
        path.write_bytes(b'{"text": "1"}\n' + line.encode("latin-1") + b'\n{"text": "2"}\n')
        good, bad, after = read(source="jsonl", path=path)
        assert isinstance(bad, Broken), line
        assert (bad.place, good.number, bad.number, after.number) == (f"{path}:2", 0, 1, 2)
        parts.append(f"$ {line}\n{bad.problem}\n")
    assert_golden(golden, "\n".join(parts))


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_array_is_read_like_lines(tmp_path: Path, indent: int | None) -> None:
    """With brackets in texts, elements that are no objects, and an end that is missing or followed by more."""
    path, texts = tmp_path / "a.json", ['a ] } , " \\" b', "", "x" * 9]
    elements: list[object] = [{"text": text, "n": [1, {"m": [2]}]} for text in texts]
    whole = "\ufeff\n" + json.dumps(elements, indent=indent) + "\n"
    path.write_text(whole)
    examples = read(source="jsonl", path=path)
    assert [item.fields["text"] for item in examples if isinstance(item, Example)] == texts
    lines = whole.split("\n")
    assert all('"text"' in lines[int(item.place.rpartition(":")[2]) + bool(indent) - 1] for item in examples)
    with gzip.open(tmp_path / "a.json.gz", "wb") as file:
        file.write(json.dumps([*elements, 5, [1]], indent=indent).encode())
    *_, number, inner = read(source="jsonl", path=tmp_path / "a.json.gz")
    assert [item.problem[:31] for item in (number, inner) if isinstance(item, Broken)] == [
        "expected a JSON object, found 5",
        "expected a JSON object, found [",
    ]
    for broken in (whole.rstrip()[:-3], whole + "{}", whole.replace("},", "},,", 1)):
        path.write_text(broken)
        assert [type(item) for item in read(source="jsonl", path=path)].count(Broken) == 1


def test_parquet_files_are_read_by_row_group(tmp_path: Path) -> None:
    messages = [[{"role": "user", "content": str(number)}] for number in range(2500)]
    pq.write_table(pa.table({"messages": messages, "other": range(2500)}), tmp_path / "a.parquet", row_group_size=700)
    pq.write_table(pa.table({"messages": messages[:1]}), tmp_path / "b.parquet")
    examples = read(source="parquet", path=tmp_path / "*.parquet", format="chat")
    assert [example.number for example in examples] == list(range(2501))
    read_messages = [example.fields["messages"] for example in examples if isinstance(example, Example)]
    assert read_messages == [*messages, messages[0]]
    assert examples[-1].place == f"{tmp_path}/b.parquet: row 0"
    assert opened("parquet", tmp_path / "*.parquet", format="chat").total == 2501
    pq.write_table(pa.table({"content": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"data.columns: .*a.parquet: expected a column text, found content"):
        read(source="parquet", path=tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 not at all")
    with pytest.raises(DataError, match=r"data.path: .*b.parquet: can't be opened as parquet: "):
        read(source="parquet", path=tmp_path / "b.parquet")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    parts = {
        name: datasets.Dataset.from_dict({"text": [f"{name} {number}" for number in range(20)], "n": range(20)})
        for name in ("train", "test")
    }
    cast(Any, datasets).DatasetDict(parts).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def test_a_saved_data_set_knows_splits_and_its_content_is_that_of_its_rows(saved: Path, tmp_path: Path) -> None:
    expected = {
        None: [f"train {n}" for n in range(20)],
        "test": [f"test {n}" for n in range(20)],
        "train[:10%]": ["train 0", "train 1"],
        "train[18:]+test[:1]": ["train 18", "train 19", "test 0"],
    }
    assert {split: texts(read(source="huggingface", path=saved, split=split)) for split in expected} == expected

    def content(split: str | None, path: Path = saved) -> str:
        return opened("huggingface", path, split=split).content(tmp_path / "cache")

    assert content(None) == content("train") == content(None)
    assert len({content(split) for split in ("train", "test", "train[:5]", "train[5:10]")}) == 4
    datasets.Dataset.from_dict({"text": ["other"] * 20}).save_to_disk(tmp_path / "other")
    assert content(None, tmp_path / "other") != content(None)


def test_a_data_set_or_split_that_is_not_there_is_refused_and_a_folder_of_files_is_one(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path, keys, message in (
        (saved, {"split": "validation"}, r"with the split validation: (?s:.*)data.path is .*saved"),
        ("nobody/nothing", {}, r"data.path: `datasets` can't open the dataset"),
        (saved, {"columns": {"text": "body"}}, r"columns: .*saved \(train\): expected a column body, found text, n"),
    ):
        with pytest.raises(DataError, match=message):
            read(source="huggingface", path=path, **keys)
    monkeypatch.setattr(cast(Any, datasets).config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "files"
    folder.mkdir()
    lines(folder / "train.jsonl", {"text": "1"}, {"text": "2"})
    assert texts(read(source="huggingface", path=folder, split="train[1:]")) == ["2"]


def test_sharegpts_conversations_are_messages(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]
    lines(tmp_path / "a.jsonl", {"conversations": turns})
    pq.write_table(pa.Table.from_pylist([{"conversations": turns}]), tmp_path / "a.parquet")
    for kind in ("jsonl", "parquet"):
        (example,) = read(source=kind, path=tmp_path / f"a.{kind}", format="chat")
        assert isinstance(example, Example)
        messages = messages_of(example.fields["messages"])
        assert [(message["role"], message["content"]) for message in messages] == [("user", "x"), ("assistant", "y")]
    with pytest.raises(ValueError, match="expected turns from human, user, gpt"):
        messages_of([{"from": "bing", "value": "x"}])


def test_only_nulls_that_arrow_added_are_dropped(tmp_path: Path) -> None:
    """Protects arguments and schemas that hold a null: without it the model learns other calls."""

    def row(arguments: object) -> dict[str, Any]:
        call = {"function": {"name": "f", "arguments": arguments}}
        return {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}], "tools": [TOOL]}

    rows, texts = [row({"a": None}), row({"a": 1, "b": {"c": None}})], [row('{"a": null}'), row('{"a": 1}')]
    lines(tmp_path / "a.jsonl", *rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    pq.write_table(pa.Table.from_pylist(texts), tmp_path / "b.parquet")
    typed = cast(Any, datasets)
    tools = typed.List({"function": {"name": typed.Value("string"), "default": typed.Value("string")}})
    features = typed.Features({"messages": typed.List(typed.Json()), "tools": tools})
    datasets.Dataset.from_list(rows, features=features).save_to_disk(tmp_path / "a")

    expected = {"a.jsonl": {"a": None}, "a.parquet": {}, "b.parquet": {"a": None}, "a": {"a": None}}
    for name, arguments in expected.items():
        kind = {"jsonl": "jsonl", "parquet": "parquet"}.get(name[2:], "huggingface")
        example = read(source=kind, path=tmp_path / name, format="chat")[0]
        assert isinstance(example, Example)
        conversation = conversation_of(example.fields, "messages")
        assert conversation.messages[0]["tool_calls"][0]["function"]["arguments"] == arguments
        assert conversation.tools is not None
        assert conversation.tools[0] == (TOOL if name == "a.jsonl" else {"function": {"name": "f"}})


TOOL = {"function": {"name": "f", "default": None}}
LINES = "".join(json.dumps({"text": f"{number} Grüße"}) + "\n" for number in range(5000)).encode()


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as file:
        file.write(content)
    return sink.getvalue().to_pybytes()


KINDS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "zstd": zstd}


@pytest.mark.parametrize("kind", ["plain", *KINDS])
def test_a_bom_is_no_text(tmp_path: Path, kind: str) -> None:
    for source, content in (("text", "Grüße"), ("jsonl", '{"text": "Grüße"}')):
        (tmp_path / source).write_bytes(KINDS.get(kind, bytes)(b"\xef\xbb\xbf" + content.encode()))
        assert texts(read(source=source, path=tmp_path / source)) == ["Grüße"], source


@pytest.mark.parametrize("kind", KINDS)
def test_compressed_files_stand_among_plain_ones(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "1"}\n')
    appended = KINDS[kind](b'{"text": "2"}\n\n{"te'), KINDS[kind](b'xt": "3"}\nbroken')
    (tmp_path / "b.jsonl.z").write_bytes(b"".join(appended))
    examples = read(source="jsonl", path=tmp_path / "*.jsonl*")
    assert texts(examples) == ["1", "2", "3"]
    assert [example.number for example in examples] == [0, 1, 2, 3]
    places = [Path(example.place).name for example in examples]
    assert places == ["a.jsonl:1", "b.jsonl.z:1", "b.jsonl.z:3", "b.jsonl.z:4"]
    totals = [opened("jsonl", tmp_path / glob).total for glob in ("a.jsonl", "*.jsonl*")]
    assert totals == [14, 0]  # 0: unknown


@pytest.mark.parametrize(("kind", "source"), [*product(KINDS, ("jsonl", "text"))])
def test_a_truncated_file_is_refused_by_name(tmp_path: Path, kind: str, source: str) -> None:
    path = tmp_path / "a.z"
    path.write_bytes(KINDS[kind](LINES)[:-1000] if kind == "gzip" else zstd(LINES)[:-100])
    message = (
        rf"data\.path: .*a\.z(:\d+)?: the {kind} file is damaged or incomplete: (?s:.*)`{kind} --test {path}` checks it"
    )
    with pytest.raises(DataError, match=message):
        read(source=source, path=path)


def test_the_line_is_the_first_that_is_not_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(LINES)[:-4])  # all lines are there, and the length behind them is not
    damage = "the gzip file is damaged or incomplete"
    with pytest.raises(DataError, match=rf"a\.jsonl\.gz:5001: {damage}: Compressed file ended"):
        read(source="jsonl", path=path)
    damaged = bytearray(gzip.compress(LINES))
    damaged[-8:-4] = b"1234"
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=rf"a\.jsonl\.gz:\d+: {damage}: CRC check failed"):
        read(source="jsonl", path=path)


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
    assert f"DataError: data.source: {path} (compressed by zstd) needs the package pyarrow, which isn" in done.stderr
    assert "pip install '.[data]'" in done.stderr


def test_first_rows_of_the_hub_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    message = {"role": "user", "content": "a", "name": None}

    def load(path: str, subset: str | None, **where: Any) -> Any:
        assert (path, subset, where) == ("org/set", "small", {"revision": None, "split": "test", "streaming": True})
        rows = [{"messages": [message]}, {"messages": [message | {"name": "b"}]}, {"messages": []}]
        return datasets.Dataset.from_list(rows).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load)
    rows, count = first_rows_of_hub(Data(source="huggingface", path="org/set:small", split="test"), 2)
    assert [[*row["messages"][0]] for row in rows] == [["role", "content"], ["role", "content", "name"]]
    assert count is None  # a stream doesn't know
