"""Nothing that is held out is trained on; a part without rows says why."""

import logging
from pathlib import Path
from typing import Any, cast

import datasets
import pytest
from test_data_build import data, numbers, write

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
    assert (
        sum(f"not trained on, though data.path names it too: {held_out} and 1 more" in one for one in caplog.messages)
        == 1
    )
    for held in (tmp_path / "a.jsonl", tmp_path / "*.jsonl"):
        with pytest.raises(DataError, match=r"data\.eval_split: expected files beside those to train on, found all of"):
            build_data(data(tmp_path / "a.jsonl", eval_split=str(held)))


@pytest.mark.parametrize(
    ("split", "eval_split", "meet"),
    [
        (None, "train", True),
        (None, "train[:5%]", True),
        ("train[:70%]", "train[60%:]", True),
        ("train[:14]", "train[70%:]", False),
        ("train[:-3]+test", "train[-3:]", False),
        ("train+test[:1]", "test", True),
        ("train", "test", False),
    ],
)
def test_splits_that_have_rows_in_common_are_refused(
    tmp_path: Path, split: str | None, eval_split: str, *, meet: bool
) -> None:
    parts = {name: datasets.Dataset.from_dict({"text": ["0001"] * 20}) for name in ("train", "test")}
    cast(Any, datasets).DatasetDict(parts).save_to_disk(tmp_path / "saved")
    keys = data(tmp_path / "saved", source="huggingface", packing="none", split=split, eval_split=eval_split)
    if not meet:
        assert build_data(keys).eval_rows is not None
        return
    with pytest.raises(DataError, match=r"data\.eval_split: expected a split .*, found (?s:.)*train\[5%:\]"):
        build_data(keys)
