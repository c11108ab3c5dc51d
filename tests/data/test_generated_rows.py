"""Rows of every form, key and template family: what counts is found once, and nothing is dropped without a word."""

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from chat_templates import FAMILIES, MakeTokenizer

from portable_fsdp.config.schema import Data
from portable_fsdp.data.build import renderer
from portable_fsdp.data.examples import LEFT_OUT, Broken, Example, Rendered
from portable_fsdp.data.sources import open_source

Row = dict[str, Any]
CALL = {"name": "lookup", "arguments": {"city": "oslo-ten", "days": 2}}
SCHEMA = {
    "type": "function",
    "function": {"name": "lookup", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def messages() -> list[Row]:
    return [
        {"role": "system", "content": "system-one"},
        {"role": "user", "content": "question-two"},
        {"role": "assistant", "content": 'answer-three "quoted"'},
        {"role": "user", "content": "question-four"},
        {"role": "assistant", "content": "answer-five"},
    ]


def with_calls(arguments: Callable[[Any], Any]) -> list[Row]:
    call = {"id": "call00001", "type": "function", "function": {**CALL, "arguments": arguments(CALL["arguments"])}}
    tool = {"role": "tool", "content": "result-six", "tool_call_id": "call00001", "name": "lookup"}
    return [*messages()[1:4], {"role": "assistant", "content": None, "tool_calls": [call]}, tool, messages()[4]]


def sharegpt(turns: list[Row]) -> list[Row]:
    names = {"system": "system", "user": "human", "assistant": "gpt", "tool": "observation"}
    made: list[Row] = []
    for turn in turns:
        rest = {key: turn[key] for key in turn if key not in ("role", "content", "tool_calls")}
        sender, text = names[turn["role"]], turn["content"]
        if "tool_calls" in turn:
            sender, text = "function_call", json.dumps(turn["tool_calls"][0]["function"])
        made.append({"from": sender, "value": text, **rest})
    return made


def prompt_length(turns: list[Row]) -> int:
    """Up to the user's last message in rows with calls, else to the first."""
    users = [number for number, turn in enumerate(turns) if turn["role"] == "user"]
    return 1 + users[-1 if any("tool_calls" in turn for turn in turns) else 0]


def completion(turns: list[Row]) -> Row:
    return {"prompt": turns[: prompt_length(turns)], "completion": turns[prompt_length(turns) :]}


FORMS: dict[str, tuple[str, Callable[[list[Row]], Row]]] = {
    "openai": ("chat", lambda turns: {"messages": turns}),
    "sharegpt": ("chat", lambda turns: {"conversations": sharegpt(turns)}),
    "completion": ("prompt_completion", completion),
}


def variants() -> Iterator[tuple[str, list[Row], Row]]:
    """(name, messages, further columns)."""
    yield "plain", messages(), {}
    silent = ((2, "weight", 0), (2, "loss_mask", 0), (2, "trainable", False), (2, "weight", 0.5))
    texts = ((4, "reasoning_content"), (4, "thinking"), (4, "refusal"), (4, "name"), (2, "reasoning_content"))
    for number, key, value in (*silent, *((*each, "because-seven") for each in texts)):
        turns = messages()
        turns[number][key] = value
        yield f"{key} {value} in {number}", turns, {}
    yield "system column", messages()[1:], {"system": "column-eight"}
    yield "others", messages(), {"id": 3, "source": "web", "score": 0.5}
    yield "calls", with_calls(lambda arguments: arguments), {"tools": [SCHEMA]}
    yield "calls as text", with_calls(json.dumps), {"tools": json.dumps([SCHEMA])}


ROWS = [
    (f"{form}, {name}", FORMS[form][0], FORMS[form][1](copy.deepcopy(turns)), turns, extra)
    for form in FORMS
    for name, turns, extra in variants()
]


def written(folder: Path, rows: list[Row]) -> Iterator[tuple[str, Path]]:
    """The rows in each kind of file. Arrow gives each row the keys of all."""
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "a.json").write_text(json.dumps(rows, indent=1))
    keys = dict.fromkeys(key for row in rows for key in row)  # Arrow takes those of the first row
    full = [{key: row.get(key) for key in keys} for row in rows]
    pq.write_table(pa.Table.from_pylist(full), folder / "a.parquet")
    datasets.Dataset.from_list(full).save_to_disk(folder / "a")
    kinds = {"jsonl": "jsonl", "json": "jsonl", "parquet": "parquet"}
    yield from ((kind, folder / f"a.{end}") for end, kind in kinds.items())
    yield "huggingface", folder / "a"


@pytest.mark.parametrize("family", FAMILIES)
def test_what_counts_is_found_once_and_nothing_is_dropped_silently(make_tokenizer: MakeTokenizer, family: str) -> None:
    tokenizer: Any = make_tokenizer(FAMILIES[family])
    refused = 0
    for label, form, columns, turns, extra in ROWS:
        fields = {"messages" if key == "conversations" else key: value for key, value in columns.items()}
        data = Data(source="jsonl", path="a.jsonl", format=cast(Any, form))
        [item] = renderer(data, tokenizer, stream=False)([Example(0, "", 1, fields | extra)])
        if isinstance(item, Broken):
            refused += 1
            check_refusal(item.problem, label, family, turns, extra)
        else:
            check_rendered(tokenizer, item, f"{family}: {label}", form, turns, extra)
    assert refused <= len(ROWS) / 2


def check_refusal(problem: str, label: str, family: str, turns: list[Row], extra: Row) -> None:
    """It names a key, column or role of the row."""
    names = {key for turn in turns for key in turn} | set(extra) | {turn["role"] for turn in turns}
    named = {name for name in names - {"role", "content"} if re.search(rf"\b{name}\b", problem)}
    assert named or "begins and ends" in problem, (label, family, problem)


def check_rendered(tokenizer: Any, item: Rendered, where: str, form: str, turns: list[Row], extra: Row) -> None:
    assert item.counted is not None
    text = tokenizer._tokenizer.decode(item.ids)
    counted = tokenizer._tokenizer.decode(item.ids[item.counted])
    notes = " ".join(item.notes)
    silent = ("weight", "loss_mask", "trainable")
    for number, turn in enumerate(turns):
        is_silent = turn["role"] == "assistant" and any(turn.get(key, 1) == 0 for key in silent)
        counts = (turn["role"] == "assistant" or form != "chat") and not is_silent  # a completion counts as a whole
        content = turn["content"] or ""
        assert text.count(content) == 1 or not content, (where, content, text)
        if form == "chat" or number >= prompt_length(turns):
            assert not content or counted.count(content) == int(counts), (where, content, counted)
        else:
            is_moved = "mistral" in where and turn["role"] == "system"  # into the last turn of the user
            assert not content or is_moved or content not in counted, (where, content, counted)
        for key in turn.keys() - {"role", "content", "tool_calls", "tool_call_id", *silent}:
            assert turn[key] in text or key in notes, (where, key, notes)
        if "tool_calls" in turn:
            assert "oslo-ten" in counted, (where, counted)
            assert re.search(r'"arguments": \{"city": "oslo-ten", "days": 2\}', counted), (where, counted)
    assert extra.get("system", "") in text, where
    assert not extra.get("tools") or '"parameters"' in text, (where, text)


@pytest.mark.parametrize("kind", ["", "calls", "calls as text"])
@pytest.mark.parametrize("form", FORMS)
def test_every_kind_of_file_gives_the_same_rows(
    make_tokenizer: MakeTokenizer, tmp_path: Path, form: str, kind: str
) -> None:
    ours = [row for row in ROWS if (row[0] == f"{form}, {kind}" if kind else "calls" not in row[0])]
    rows = [columns | extra for label, _, columns, _, extra in ours if label.startswith(f"{form}, ")]
    tokenizer, format_name = make_tokenizer(FAMILIES["qwen"]), cast(Any, FORMS[form][0])
    results: list[list[object]] = []
    rendered: list[Rendered | Broken] = []
    for source, path in written(tmp_path / "rows", rows):
        data = Data(source=cast(Any, source), path=str(path), format=format_name)
        rendered = renderer(data, tokenizer, stream=False)(list(open_source(data).read()))
        results.append([outcome(item) for item in rendered])
    assert all(result == results[0] for result in results)
    if not kind:
        assert all(f"{LEFT_OUT}{name}" in cast(Any, rendered[-1]).notes for name in ("id", "source", "score"))


def outcome(item: Rendered | Broken) -> object:
    """Without notes on columns, which Arrow gives each row."""
    if isinstance(item, Broken):
        return item.problem
    notes = [note for note in item.notes if not note.startswith(LEFT_OUT) or "messages" in note]
    return item.ids.tolist(), cast(Any, item.counted).tolist(), notes
