"""From the config's section to rows and tokenizer: nothing lost or doubled, the held-out part apart, errors by name."""

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import datasets
import numpy as np
import pytest
import torch
from chat_templates import CHATML, DATED, TOOLS, MakeTokenizer

from portable_fsdp.config.schema import Data, Model
from portable_fsdp.data.batches import Batches
from portable_fsdp.data.build import build_data, predicts
from portable_fsdp.data.cache import Facts, TokenizedDocuments
from portable_fsdp.data.packing import IGNORED, Rows
from portable_fsdp.runtime.errors import DataError


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """200 documents of different lengths; document n begins with its number."""
    return write(tmp_path / "corpus.jsonl", [f"{number:04d}" + "x" * (number * 7 % 40) for number in range(200)])


def write(path: Path, rows: Sequence[str | dict[str, Any]]) -> Path:
    """JSON lines; a text is a row of that column."""
    given = [{"text": row} if isinstance(row, str) else row for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in given))
    return path


def data(path: Path, **keys: Any) -> Data:
    given: dict[str, Any] = {"source": "jsonl", "path": str(path), "seq_len": 64}
    given |= {"cache_dir": str(path.parent / "cache"), **keys}
    return Data(**given)


def numbers(rows: Rows | None, indices: Sequence[int] | None = None) -> list[int]:
    """The documents in these rows, told by the four figures that each begins with."""
    assert rows is not None
    batch = rows.rows(np.arange(len(rows)) if indices is None else np.array(indices, np.int64))
    begins = torch.nonzero((batch["positions"] == 0) & (batch["segments"] > 0)).tolist()
    return [int(bytes(batch["input_ids"][row, at : at + 4].tolist())) for row, at in begins]


def counted(rows: Rows) -> list[int]:
    labels = rows.rows(np.arange(len(rows)))["labels"]
    return labels[labels != IGNORED].tolist()


TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]


def test_a_stream_and_its_fingerprint_are_those_of_earlier_releases(tmp_path: Path) -> None:
    """Pinned: checkpoints hold it, and another one would refuse their resume."""
    for name, text in {"a.txt": "ab", "b.txt": "", "c.txt": "cdefg"}.items():
        (tmp_path / name).write_text(text)
    corpus = build_data(data(tmp_path / "*.txt", source="text", seq_len=4, cache_dir=str(tmp_path / "cache")))
    batch = corpus.rows.rows(np.arange(len(corpus.rows)))
    assert set(batch) == {"input_ids", "labels"}
    assert batch["input_ids"].flatten().tolist() == [*b"ab\0\0cdef"]
    assert batch["labels"].flatten().tolist() == [*b"b\0\0cdefg"]
    assert corpus.fingerprint == ("04bb859e5d3ed009b42886fdec53ac07", "95f64cad147d23ee983871c230125b12")


def test_texts_longer_than_a_row_are_cut_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "long.jsonl", ["a" * 150, "b" * 10, "c" * 64])
    with caplog.at_level(logging.INFO, "portable_fsdp"):
        corpus = build_data(data(path, packing="documents"))
    [line] = (line for line in caplog.messages if "cut into pieces" in line)
    assert line == f"data: 2 documents of {path} cut into pieces: longer than data.seq_len=64"
    assert Counter(counted(corpus.rows)) == Counter(b"a" * 149 + b"b" * 9 + b"c" * 63 + b"\0\0\0")
    ends = build_data(data(path, packing="documents", long_rows="cut"))
    assert Counter(counted(ends.rows)) == Counter(b"a" * 63 + b"b" * 9 + b"c" * 63 + b"\0")


def test_completions_longer_than_a_row_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    columns = {"prompt": "text", "completion": "completion"}
    texts = [{"text": "p", "completion": "c" * length} for length in (5, 62, 63, 200)]
    path = write(tmp_path / "a.jsonl", texts)
    keys = data(path, format="prompt_completion", columns=columns, long_rows="skip")
    with caplog.at_level(logging.INFO, "portable_fsdp"):
        corpus = build_data(keys)
    assert any("2 documents" in line and "too long" in line and "a.jsonl:3" in line for line in caplog.messages)
    assert Counter(counted(corpus.rows)) == Counter(b"c" * 67 + b"\0\0")
    cut = build_data(data(path, format="prompt_completion", columns=columns, long_rows="cut"))
    assert Counter(counted(cut.rows)) == Counter(b"c" * (67 + 2 * 63) + b"\0\0")
    with pytest.raises(DataError, match=r"a.jsonl:3: expected at most 64 tokens .*\n.*data.long_rows=skip to leave"):
        build_data(data(path, format="prompt_completion", columns=columns, on_error="skip"))


def test_rows_of_padding_are_said_with_the_length_that_would_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "short.jsonl", ["x" * 9, "x" * 19])
    with caplog.at_level(logging.INFO, "portable_fsdp"):
        build_data(data(path, packing="none"))
    said = "77% of all tokens are padding: data.seq_len=20 would do, and data.packing=documents puts several documents"
    assert f"data: {path}: {said} in a row, if the model keeps them apart" in caplog.messages
    caplog.clear()
    build_data(data(path, packing="none", seq_len=20))
    assert not any("padding" in message for message in caplog.messages)


def test_a_document_predicts_if_a_token_behind_its_first_counts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Others are left out, with a word."""
    path = write(tmp_path / "few.jsonl", ["0000", "", "0002"])
    with caplog.at_level(logging.INFO, "portable_fsdp"):
        assert numbers(build_data(data(path, packing="documents")).rows) == [0, 2]
    assert any("1 document of" in line and "nothing to predict" in line for line in caplog.messages)
    random = np.random.default_rng(0)
    for _ in range(200):
        starts = np.concatenate([[0], np.cumsum(random.integers(0, 5, size=random.integers(0, 6)))])
        counted = random.random(starts[-1]) < 0.3
        facts = Facts("uint8", len(starts) - 1, int(starts[-1]), True, 0, "")
        drawn = TokenizedDocuments(np.zeros(starts[-1], np.uint8), starts, np.arange(len(starts) - 1), counted, facts)
        expected = [bool(counted[begin + 1 : end].any()) for begin, end in pairwise(starts.tolist())]
        assert predicts(drawn).tolist() == expected


def test_broken_lines_are_counted(lines: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = lines.read_text().splitlines(keepends=True)
    lines.write_text("".join([*content[:3], "{broken\n", *content[4:]]))
    keys = data(lines, packing="none", on_error="skip")
    with caplog.at_level(logging.INFO, "portable_fsdp"):
        build_data(keys)
        caplog.clear()
        corpus = build_data(keys)  # from the cache too
    assert sum("1 document of" in line and "skipped" in line and "jsonl:4" in line for line in caplog.messages) == 1
    assert sorted(numbers(corpus.rows)) == [number for number in range(200) if number != 3]


def test_chats_are_packed_and_tools_make_other_rows(make_tokenizer: MakeTokenizer, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    path = write(tmp_path / "chat.jsonl", [{"messages": TURNS * count} for count in (1, 2, 3)])
    corpus = build_data(data(path, format="chat", tokenizer=str(tmp_path / "tokenizer"), seq_len=128))
    assert counted(corpus.rows) == tokenizer.encode("Yes<|im_end|>\n").tolist() * 6
    assert int(corpus.rows.rows(np.arange(len(corpus.rows)))["segments"].max()) > 1
    make_tokenizer(TOOLS)
    schemas = [{"type": "function", "function": {}}]
    path = write(tmp_path / "chat.jsonl", [{"messages": TURNS, "schemas": schemas}])

    def tokens(**keys: Any) -> tuple[int, str]:
        keys = {"format": "chat", "tokenizer": str(tmp_path / "tokenizer"), "seq_len": 256, "packing": "none", **keys}
        corpus = build_data(data(path, **keys))
        return int(corpus.rows.rows(np.array([0]))["segments"].sum()), corpus.fingerprint[0]

    plain, silent = tokens(), tokens(chat_template_kwargs={"enable_thinking": False})
    called = tokens(columns={"tools": "schemas"})
    assert plain[0] < silent[0] < called[0]
    assert len({plain[1], silent[1], called[1]}) == 3
    assert tokens() == plain


def test_an_entry_is_of_the_day_only_where_the_template_asks_for_it(
    make_tokenizer: MakeTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.jsonl", ["a text of more than one token"] * 9)
    chats = write(tmp_path / "chat.jsonl", [{"messages": TURNS}])

    def entries() -> set[str]:
        keys = {"tokenizer": str(tmp_path / "tokenizer"), "seq_len": 128, "packing": "none"}
        for item, form in ((path, "text"), (chats, "chat")):
            build_data(data(item, format=form, **keys))
        return {item.name for item in (tmp_path / "cache").iterdir() if (item / "facts.json").is_file()}

    for template, made in ((CHATML, 2), (DATED, 3)):
        make_tokenizer(template)
        assert len(before := entries()) == made
        monkeypatch.setattr("portable_fsdp.data.chat.DATE", "2025-01-01")
        assert len(entries() - before) == (template == DATED)
        monkeypatch.undo()


def test_what_is_left_unread_or_uncounted_is_said_once_with_a_count(
    make_tokenizer: MakeTokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder = tmp_path / "tokenizer"
    make_tokenizer(TOOLS)
    turns = [{"role": role, "content": "Hi", "name": "Ann"} for role in ("user", "assistant", "user", "gpt")]
    chats = [{"messages": turns, "id": 5, "score": 0.5}, {"messages": turns[:2], "id": None, "score": 1}]
    path = write(tmp_path / "chat.jsonl", [*chats, chats[0]])
    for _ in range(2):  # the second from the cache
        caplog.clear()
        build_data(data(path, format="chat", tokenizer=str(folder), seq_len=128))
        left_out = f"data: {path}: ignoring columns and keys that nothing reads (with their number of rows): "
        columns = [line.removeprefix(left_out) for line in caplog.messages if line.startswith(left_out)]
        assert columns == ["id (2), score (3), messages[].name (3)"]
        [warning] = (item.getMessage() for item in caplog.records if item.levelno == logging.WARNING)
        gpt = "messages of the role gpt, which the chat template doesn't name; they don't count as the assistant's"
        assert warning == f"data: 2 documents of {path}: {gpt}"


def test_a_share_held_out_is_in_one_part_or_the_other(lines: Path) -> None:
    corpus = build_data(data(lines, packing="documents", eval_split="10%"))
    trained, held_out = numbers(corpus.rows), numbers(corpus.eval_rows)
    assert Counter([*trained, *held_out]) == Counter(range(200))
    assert 10 <= len(held_out) <= 32
    fewer = build_data(data(lines, packing="none", eval_split="5%"))
    assert set(numbers(fewer.eval_rows)) < set(held_out)  # by the document's number and nothing else
    corpus, whole = build_data(data(lines, eval_split="10%")), build_data(data(lines))  # a stream
    assert corpus.eval_rows is not None
    assert 0 < len(corpus.eval_rows) < 20
    assert len(whole.rows) - 2 <= len(corpus.rows) + len(corpus.eval_rows) <= len(whole.rows)
    assert corpus.fingerprint[0] != whole.fingerprint[0]


def read_steps(rows: Rows, start: int, steps: int, *, shards: int, accumulation: int) -> list[int]:
    """The documents of some steps of 12 rows, as all data shards see them together."""
    drawn: list[int] = []
    keys: dict[str, Any] = {"seed": 3, "global_batch": 12, "accumulation": accumulation, "start": start}
    for shard in range(shards):
        with Batches(rows, shard=(shard, shards), **keys) as batches:
            for _ in range(steps):
                for micro in next(batches).micro_batches:
                    begins = (micro["positions"] == 0) & (micro["segments"] > 0)
                    ids = [micro["input_ids"][row, at : at + 4] for row, at in torch.nonzero(begins).tolist()]
                    drawn += [int(bytes(each.tolist())) for each in ids]
    return drawn


@pytest.mark.parametrize("packing", ["documents", "none"])
def test_three_epochs_hold_every_document_three_times_across_a_resume_elsewhere(lines: Path, packing: str) -> None:
    rows = build_data(data(lines, packing=packing)).rows
    assert len(rows) == (200 if packing == "none" else pytest.approx(200 * 24.5 / 64, abs=2))
    steps = 3 * len(rows) // 12
    first = steps // 2  # in the middle of the second epoch
    drawn = read_steps(rows, 0, first, shards=2, accumulation=2)
    drawn += read_steps(rows, first * 12, steps - first, shards=3, accumulation=4)
    rest = rows.order(3, np.arange(steps * 12, 3 * len(rows)))  # less than a step: the next step carries it over
    assert Counter([*drawn, *numbers(rows, rest.tolist())]) == Counter(dict.fromkeys(range(200), 3))


def mixture(tmp_path: Path, *weights: float, **keys: Any) -> Data:
    parts: list[dict[str, Any]] = []
    for number, (weight, count) in enumerate(zip(weights, (60, 25), strict=True)):
        path = write(tmp_path / f"part{number}.jsonl", [f"{1000 * number + at:04d}" for at in range(count)])
        parts.append({"source": "jsonl", "path": str(path), "weight": weight})
    given = {"mixture": parts, "seq_len": 16, "packing": "none", "cache_dir": str(tmp_path / "cache"), **keys}
    return Data.model_validate(given)


def test_the_shares_of_a_mixture_are_held_out_of_each_part(tmp_path: Path) -> None:
    corpus = build_data(mixture(tmp_path, 1, 1, eval_split="20%"))
    held_out = numbers(corpus.eval_rows)
    assert Counter([*numbers(corpus.rows), *held_out]) == Counter([*range(60), *range(1000, 1025)])
    assert min(held_out) < 1000 <= max(held_out)
    assert corpus.fingerprint[0] != build_data(mixture(tmp_path, 1, 2, eval_split="20%")).fingerprint[0]


def test_an_automatic_tokenizer_is_the_models_own_and_one_without_an_end_is_said(
    make_tokenizer: MakeTokenizer, bpe: str, lines: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = make_tokenizer()
    folder = str(tmp_path / "tokenizer")

    def corpus(model: Model | None, **keys: Any) -> tuple[object, int]:
        corpus = build_data(data(lines, **keys), model)
        assert corpus.tokenizer is not None
        return corpus.fingerprint, corpus.tokenizer.vocab_size

    hub, own = Model(pretrained=folder), Model(architecture={"model_type": "llama"})
    assert corpus(hub) == corpus(hub, tokenizer=folder)
    assert corpus(hub)[1] == made.vocab_size > 256
    assert corpus(hub, tokenizer="bytes")[1] == corpus(own)[1] == corpus(None)[1] == 256
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "tokenizer.json").write_text(bpe)
    corpus(None, tokenizer=str(tmp_path / "bare"))
    assert sum("bare has no end of text" in line for line in caplog.messages) == 1


def test_files_that_are_held_out_are_not_trained_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "a.jsonl", ["0001", "0002"])
    held_out = write(tmp_path / "b.jsonl", ["0003"])
    (tmp_path / "c.jsonl").symlink_to(held_out)
    with caplog.at_level(logging.INFO, "portable_fsdp"):
        corpus = build_data(data(tmp_path / "*.jsonl", packing="none", eval_split=str(held_out)))
    assert (numbers(corpus.rows), numbers(corpus.eval_rows)) == ([1, 2], [3])
    alone, beside = (
        build_data(data(tmp_path / "a.jsonl", packing="none", eval_split=split)) for split in (None, str(held_out))
    )
    assert beside.fingerprint == alone.fingerprint
    assert corpus.eval_rows
    assert corpus.rows.fingerprint() != corpus.eval_rows.fingerprint()
    warning = f"not trained on, although data.path names it: {held_out} and 1 more"
    assert sum(warning in line for line in caplog.messages) == 1


def test_splits_with_rows_in_common_are_refused(tmp_path: Path, assert_golden: Callable[[Path, str], None]) -> None:
    """The golden file has, after each `$ `, a split and one to hold out; then the rows of both, or what is wrong."""
    golden, saved, shown = Path(__file__).parent / "golden/splits.txt", tmp_path / "saved", list[str]()
    texts = {name: [f"{first + at:04d}" for at in range(20)] for name, first in (("train", 0), ("test", 100))}
    parts = {name: datasets.Dataset.from_dict({"text": text}) for name, text in texts.items()}
    cast(Any, datasets).DatasetDict(parts).save_to_disk(saved)
    for split, held_out in re.findall(r"^\$ (\S+) (.*)$", golden.read_text(), re.MULTILINE):
        keys = {"packing": "none", "split": None if split == "null" else split, "eval_split": held_out}
        try:
            corpus = build_data(data(saved, source="huggingface", **keys))
            text = "\n".join(str(sorted(numbers(rows))) for rows in (corpus.rows, corpus.eval_rows))
        except DataError as error:
            text = re.sub(r"(with the split .*?: ).*", r"\1...", str(error).replace(f"{tmp_path}/", ""))
        shown.append(f"$ {split} {held_out}\n{text}\n")
    assert_golden(golden, "\n".join(shown))
