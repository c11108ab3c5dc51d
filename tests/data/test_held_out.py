"""Nothing that is held out is trained on; a part without rows says why."""

import logging
from pathlib import Path
from typing import Any, cast

import datasets
import pytest
from test_data_build import data, numbers, write

from portable_fsdp.config.data import Data
from portable_fsdp.data.build import build_data
from portable_fsdp.runtime.errors import DataError


def test_files_that_are_held_out_are_not_trained_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "a.jsonl", ["0001", "0002"])
    held_out = write(tmp_path / "b.jsonl", ["0003"])
    (tmp_path / "c.jsonl").symlink_to(held_out)
    with caplog.at_level(logging.INFO, "portable_fsdp"):
        corpus = build_data(data(tmp_path / "*.jsonl", packing="none", eval_split=str(held_out)))
    assert corpus.eval_rows is not None
    assert numbers(corpus.rows) == [1, 2]
    assert numbers(corpus.eval_rows) == [3]
    alone = build_data(data(tmp_path / "a.jsonl", packing="none"))
    beside = build_data(data(tmp_path / "a.jsonl", packing="none", eval_split=str(held_out)))
    assert beside.fingerprint == alone.fingerprint
    assert corpus.rows.fingerprint() != corpus.eval_rows.fingerprint()
    assert (
        sum(f"not trained on, though data.path names it too: {held_out} and 1 more" in line for line in caplog.messages)
        == 1
    )
    for held in (tmp_path / "a.jsonl", tmp_path / "*.jsonl"):
        with pytest.raises(DataError, match=r"data\.eval_split: expected files beside those to train on, found all of"):
            build_data(data(tmp_path / "a.jsonl", eval_split=str(held)))


@pytest.mark.parametrize(
    ("split", "eval_split", "expected"),
    [
        (None, "train", None),
        (None, "train[:5%]", None),
        ("train[:70%]", "train[60%:]", None),
        ("train[:14]", "train[70%:]", [*range(14, 20)]),
        ("train[:-3]+test", "train[-3:]", [17, 18, 19]),
        ("train+test[:1]", "test", None),
        ("train", "test", [*range(100, 120)]),
    ],
)
def test_splits_that_have_rows_in_common_are_refused(
    tmp_path: Path, split: str | None, eval_split: str, expected: list[int] | None
) -> None:
    texts = {name: [f"{first + at:04d}" for at in range(20)] for name, first in (("train", 0), ("test", 100))}
    parts = {name: datasets.Dataset.from_dict({"text": text}) for name, text in texts.items()}
    cast(Any, datasets).DatasetDict(parts).save_to_disk(tmp_path / "saved")
    keys = data(tmp_path / "saved", source="huggingface", packing="none", split=split, eval_split=eval_split)
    if expected is not None:
        corpus = build_data(keys)
        assert corpus.eval_rows is not None
        assert numbers(corpus.eval_rows) == expected
        assert not {*numbers(corpus.rows)} & {*expected}
        return
    with pytest.raises(DataError, match=r"data\.eval_split: expected a split .*, found (?s:.)*train\[5%:\]"):
        build_data(keys)


@pytest.mark.parametrize("eval_split", ["none.jsonl", "5 %", "0.05"])
def test_what_is_to_be_held_out_and_is_not_there_is_named_by_its_key(tmp_path: Path, eval_split: str) -> None:
    path, problem = write(tmp_path / "a.jsonl", ["0001"]), rf"nothing: {eval_split}\n  The path is .* is written 5%\."
    with pytest.raises(DataError, match=rf"data\.eval_split: expected a file or a glob .*, found {problem}"):
        build_data(data(path, eval_split=eval_split))
    datasets.Dataset.from_dict({"text": ["0001"] * 20}).save_to_disk(tmp_path / "saved")
    keys = data(tmp_path / "saved", source="huggingface", eval_split=eval_split)
    with pytest.raises(DataError, match=rf"data\.eval_split: .* split {eval_split}, (?s:.*) is written 5%\."):
        build_data(keys)


@pytest.mark.parametrize(
    ("lengths", "keys", "message"),
    [
        ([70, 99], {"packing": "documents"}, None),  # texts are cut
        (
            [70, 99],
            {"format": "prompt_completion", "columns": {"prompt": "text", "completion": "text"}, "on_error": "skip"},
            r"data: expected at least one document of 2 to 64 tokens \(data\.seq_len\) with something to predict, "
            r"found none among 2 in .*a\.jsonl\.\n  Change data\.seq_len, or give more text\.",
        ),
        (
            [70, 99],
            {"packing": "none", "eval_split": "1%"},
            r"data\.eval_split: expected at least one document .*found none among 0 in .*a\.jsonl\.\n.*the share",
        ),
        (
            [70, 99],
            {"eval_split": "99.9%"},
            r"data: expected at least 65 tokens .*, found 0 in .*a\.jsonl\.\n.* or change the share that is held out",
        ),
        (
            [4] * 40,
            {"eval_split": "20%"},
            r"data\.eval_split: expected at least 65 tokens \(data\.seq_len \+ 1, one row\), found \d+ in .*a\.jsonl\.",
        ),
        ([0, 0], {"packing": "none"}, r"data: expected at least one document of 2 to 64 .*, found none among 2 in "),
    ],
)
def test_a_part_without_rows_says_why(
    tmp_path: Path, lengths: list[int], keys: dict[str, Any], message: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    given = data(write(tmp_path / "a.jsonl", ["x" * length for length in lengths]), **keys)
    if message is None:
        assert len(build_data(given).rows)
        return
    with caplog.at_level(logging.INFO, "portable_fsdp"), pytest.raises(DataError, match=message):
        build_data(given)
    assert not [line for line in caplog.messages if " 0 rows" in line]


def test_a_mixture_of_streams_without_rows_names_its_parts(tmp_path: Path) -> None:
    mixture = [
        {"source": "jsonl", "path": str(write(tmp_path / f"{name}.jsonl", ["x" * 30] * count))}
        for name, count in (("a", 9), ("b", 12))
    ]
    keys = {"mixture": mixture, "seq_len": 64, "cache_dir": str(tmp_path / "cache")}
    with pytest.raises(
        DataError, match=r"data\.eval_split: .* found \d+ in .*a\.jsonl, \d+ in .*b\.jsonl in the share"
    ):
        build_data(Data.model_validate({**keys, "eval_split": "10%"}))
    with pytest.raises(
        DataError, match=r"data\.mixture: .* \(data.seq_len \+ 1, one row\), found 279 in .*a\.jsonl\.\n"
    ):
        build_data(Data.model_validate({**keys, "seq_len": 300}))
