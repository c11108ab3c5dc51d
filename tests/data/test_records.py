"""Documents of named columns: each row once, in order; what can't be read is named by file and line."""

import gzip
import json
import re
from pathlib import Path
from typing import Any, cast

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from portable_fsdp.config.schema import Data
from portable_fsdp.data.examples import Broken, Example
from portable_fsdp.data.messages import messages_of
from portable_fsdp.data.sources import open_source
from portable_fsdp.runtime.errors import DataError


def read(**keys: Any) -> list[Example | Broken]:
    given: dict[str, Any] = {key: str(value) if isinstance(value, Path) else value for key, value in keys.items()}
    return list(open_source(Data(**given)).read())


def texts(examples: list[Example | Broken]) -> list[str]:
    return [example.fields["text"] for example in examples if isinstance(example, Example)]


def lines(path: Path, *values: object) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def test_json_lines_of_several_files_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    lines(tmp_path / "b.jsonl", {"text": "3"})
    (tmp_path / "a.jsonl").write_text('{"text": "1"}\n\n  \n{"text": "2", "other": [1]}')  # no last newline
    examples = read(source="jsonl", path=tmp_path / "*.jsonl")
    assert texts(examples) == ["1", "2", "3"]
    assert [example.number for example in examples] == [0, 1, 2]
    assert [example.place.rpartition("/")[2] for example in examples] == ["a.jsonl:1", "a.jsonl:4", "b.jsonl:1"]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"text": "x"', "expected a JSON object on one line, found at column 13: Expecting ',' delimiter"),
        (b"[1, 2]", r"expected a JSON object on one line, found \[1, 2\]"),
        (b'{"text": "\xff"}', "expected UTF-8, found 0xff at byte 10"),
        (b'{"text": "\\ud800"}', "expected text, found half of a surrogate pair"),
        (b"[" * 300_000, "expected a JSON object on one line: expected fewer levels"),
        (b'{"a":' * 5000, "expected a JSON object on one line: expected fewer levels"),
        (b'{"text": "x", "text": "y"}', "expected a JSON object on one line: the key 'text' stands twice"),
        (b'{"text": "x", "a": [{"b": 1, "b": 2}]}', "expected a JSON object on one line: the key 'b' stands twice"),
        (b'{"messages": []}', r"expected a column text, found messages.\n  Set data.format=chat\."),
        (b'{"conversations": []}', r"expected a column text, found conversations.\n  Set data.format=chat\."),
        (b'{"prompt": "x", "completion": "y"}', r"expected a column text.*\n  Set data.format=prompt_completion\."),
        (b'{"txt": "x"}', r"expected a column text, found txt.\n  nearest: txt. data.columns='{text: txt}'"),
        (b'{"body": "x"}', r"expected a column text, found body.\n  Name the column.* data.columns='{text: NAME}'"),
    ],
)
def test_a_broken_line_keeps_its_number_and_says_what_is_wrong(tmp_path: Path, line: bytes, problem: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "1"}\n' + line + b'\n{"text": "2"}\n')
    good, bad, after = read(source="jsonl", path=path)
    assert isinstance(bad, Broken)
    assert re.search(problem, bad.problem), bad.problem
    assert (bad.place, bad.number) == (f"{path}:2", 1)
    assert (good.number, after.number) == (0, 2)


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


def test_an_optional_column_may_be_missing_in_some_rows_but_not_in_all(tmp_path: Path) -> None:
    rows = [{"instruction": "a", "context": None, "output": "b"}, {"instruction": "a", "output": "b"}]
    path, keys = lines(tmp_path / "a.jsonl", *rows), {"source": "jsonl", "format": "instruction"}
    assert [type(item) for item in read(path=path, columns={"input": "context"}, **keys)] == [Example] * 2
    with pytest.raises(DataError, match=r"data\.columns: expected columns that a row has, found none with contex: "):
        read(path=path, columns={"input": "contex"}, **keys)


def test_columns_have_other_names(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"instruction": "q", "output": "a"})
    columns = {"prompt": "instruction", "completion": "output"}
    [example] = read(source="jsonl", path=path, format="prompt_completion", columns=columns)
    assert isinstance(example, Example)
    assert example.fields == {"prompt": "q", "completion": "a"}


def test_parquet_files_are_read_by_row_group(tmp_path: Path) -> None:
    messages = [[{"role": "user", "content": str(number)}] for number in range(2500)]
    pq.write_table(pa.table({"messages": messages, "other": range(2500)}), tmp_path / "a.parquet", row_group_size=700)
    pq.write_table(pa.table({"messages": messages[:1]}), tmp_path / "b.parquet")
    examples = read(source="parquet", path=tmp_path / "*.parquet", format="chat")
    assert [example.number for example in examples] == list(range(2501))
    assert [example.fields["messages"] for example in examples if isinstance(example, Example)] == [
        *messages,
        messages[0],
    ]
    assert examples[-1].place == f"{tmp_path}/b.parquet: row 0"
    assert open_source(Data(source="parquet", path=str(tmp_path / "*.parquet"), format="chat")).total == 2501


def test_a_parquet_file_without_the_column_or_that_is_none_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"content": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"data.columns: .*a.parquet: expected a column text, found content"):
        read(source="parquet", path=tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 not at all")
    with pytest.raises(DataError, match=r"data.path: .*b.parquet: expected a parquet file, found: "):
        read(source="parquet", path=tmp_path / "b.parquet")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    parts = {
        name: datasets.Dataset.from_dict({"text": [f"{name} {number}" for number in range(20)], "n": range(20)})
        for name in ("train", "test")
    }
    cast(Any, datasets).DatasetDict(parts).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        (None, [f"train {n}" for n in range(20)]),
        ("test", [f"test {n}" for n in range(20)]),
        ("train[:10%]", ["train 0", "train 1"]),
        ("train[18:]+test[:1]", ["train 18", "train 19", "test 0"]),
    ],
)
def test_a_saved_data_set_knows_split_expressions(saved: Path, split: str | None, expected: list[str]) -> None:
    assert texts(read(source="huggingface", path=saved, split=split)) == expected


def test_a_data_sets_content_is_that_of_its_rows(saved: Path, tmp_path: Path) -> None:
    def content(split: str | None, path: Path = saved) -> str:
        return open_source(Data(source="huggingface", path=str(path), split=split)).content(tmp_path / "cache")

    assert content(None) == content("train") == content(None)
    assert len({content(split) for split in ("train", "test", "train[:5]", "train[5:10]")}) == 4
    datasets.Dataset.from_dict({"text": ["other"] * 20}).save_to_disk(tmp_path / "other")
    assert content(None, tmp_path / "other") != content(None)


def test_a_data_set_or_split_that_is_not_there_is_refused(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"with the split validation, found: (?s:.*)data.path is .*saved"):
        read(source="huggingface", path=saved, split="validation")
    with pytest.raises(DataError, match=r"data.path: expected a data set that `datasets` opens"):
        read(source="huggingface", path="nobody/nothing")
    with pytest.raises(DataError, match=r"data.columns: .*saved \(train\): expected a column body, found text, n"):
        read(source="huggingface", path=saved, columns={"text": "body"})


def test_a_folder_of_files_is_a_data_set_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cast(Any, datasets).config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "files"
    folder.mkdir()
    lines(folder / "train.jsonl", {"text": "1"}, {"text": "2"})
    assert texts(read(source="huggingface", path=folder, split="train[1:]")) == ["2"]


def test_other_columns_may_hold_what_python_writes(tmp_path: Path) -> None:
    """And brackets inside a text are text."""
    line = {"text": '[\\"{' * 600_000, "score": float("nan"), "boxes": [[1, 2, 3, 4]] * 11_000}
    assert texts(read(source="jsonl", path=lines(tmp_path / "a.jsonl", line))) == [line["text"]]


def test_a_line_without_end_is_refused_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'{"text": "1"}\n{"text": "')
        for _ in range(40):
            file.write(b"x" * (1 << 20))
    with pytest.raises(DataError, match=r"a\.jsonl\.gz:2: expected a line of at most 33,554,432 bytes"):
        read(source="jsonl", path=path)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_sharegpts_conversations_are_messages(tmp_path: Path, kind: str) -> None:
    turns = [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]
    lines(tmp_path / "a.jsonl", {"conversations": turns})
    pq.write_table(pa.Table.from_pylist([{"conversations": turns}]), tmp_path / "a.parquet")
    (example,) = read(source=kind, path=tmp_path / f"a.{kind}", format="chat")
    assert isinstance(example, Example)
    messages = messages_of(example.fields["messages"])
    assert [(message["role"], message["content"]) for message in messages] == [("user", "x"), ("assistant", "y")]
    with pytest.raises(ValueError, match="expected turns from human, user, gpt"):
        messages_of([{"from": "bing", "value": "x"}])
