"""data.factory: map-style datasets in the order of every corpus, streams in their own, and what is refused."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from portable_fsdp.config.data import Data
from portable_fsdp.data.build import Corpus, build_data
from portable_fsdp.data.order import sample_indices
from portable_fsdp.runtime.errors import ConfigError, DataError

MODULE = """
import random
import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

class Numbers(Dataset):
    def __init__(self, count): self.count = count
    def __len__(self): return self.count
    def __getitem__(self, index):
        if index == 1000:
            raise OSError("a broken file")
        noise = [torch.rand(()), torch.tensor(random.random()), torch.tensor(np.random.rand())]
        return {"x": torch.tensor([float(index)]), "noise": torch.stack(noise).float(), "labels": index % 3}

class Stream(IterableDataset):
    def __init__(self, first=0): self.first = first
    def __iter__(self): return ({"x": torch.tensor([number])} for number in range(self.first, 10))

class Seeks(Stream):
    def skip(self, count): return Seeks(self.first + count)

def numbers(split): return Numbers({"train": 20, "test": 6}[split])
def doubled(split): return Numbers(20), lambda items: {"x": torch.stack([2 * item["x"] for item in items])}
def broken(split): return Numbers(1001)
def stream(split): return Stream()
def seeks(split): return Seeks()
def empty(split): return Numbers(0)
def empty_stream(split): return Stream(10)
def tuples(split): return [(1, 2), (3, 4)]
def uneven(split): return [{"x": torch.zeros(2)}, {"x": torch.zeros(3)}]
def reserved(split): return [{"votes": torch.zeros(2)}] * 4
def nothing(split): return 7
"""


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Corpus]:
    name = f"datasets_{abs(hash(tmp_path)):x}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)

    def corpus(function: str, **keys: Any) -> Corpus:
        return build_data(Data(factory=f"{name}:{function}", **keys))

    return corpus


def column(corpus: Corpus, seed: int, first: int, count: int, name: str = "x") -> torch.Tensor:
    positions = np.arange(first, first + count)
    return corpus.rows.rows(corpus.rows.order(seed, positions))[name]


def test_rows_come_in_the_order_of_every_corpus(corpus: Callable[..., Corpus]) -> None:
    numbers = corpus("numbers")
    expected = torch.tensor(sample_indices(3, np.arange(50), 20)).float()[:, None]
    assert torch.equal(column(numbers, 3, 0, 50), expected)
    assert torch.equal(column(corpus("doubled"), 3, 0, 50), 2 * expected)
    batch = numbers.rows.rows(np.array([4, 5]))
    assert (batch["labels"].tolist(), batch["noise"].dtype) == ([1, 2], torch.float32)
    assert numbers.tokenizer is None


def test_augmentation_depends_on_row_and_epoch_alone(corpus: Callable[..., Corpus]) -> None:
    numbers = corpus("numbers")
    together = column(numbers, 0, 0, 40, "noise")
    alone = torch.cat([column(numbers, 0, position, 1, "noise") for position in reversed(range(40))]).flip(0)
    assert torch.equal(together, alone)
    assert len({tuple(row) for row in together.tolist()}) == 40  # another one in the second epoch


@pytest.mark.parametrize(("name", "way"), [("stream", "read again"), ("seeks", "skipped")])
def test_a_stream_resumes_where_it_was(
    corpus: Callable[..., Corpus], caplog: pytest.LogCaptureFixture, name: str, way: str
) -> None:
    whole = column(corpus(name), 0, 0, 8).flatten().tolist()
    assert whole == list(range(8))
    caplog.set_level(logging.INFO)
    assert column(corpus(name), 0, 5, 3).flatten().tolist() == [5, 6, 7]
    assert f"5 items {way}" in caplog.text
    endless = corpus(name)
    assert [column(endless, 0, first, 2).flatten().tolist() for first in (8, 12)] == [[8, 9], [2, 3]]  # others between
    assert corpus(name).fingerprint == endless.fingerprint != corpus("numbers").fingerprint


def test_rows_are_held_out_by_share_or_split(corpus: Callable[..., Corpus]) -> None:
    by_share = corpus("numbers", eval_split="25%")
    assert by_share.eval_rows is not None
    parts = [rows.rows(np.arange(len(rows)))["x"].flatten().tolist() for rows in (by_share.rows, by_share.eval_rows)]
    assert sorted(parts[0] + parts[1]) == list(range(20))
    by_split = corpus("numbers", eval_split="test")
    assert by_split.eval_rows is not None
    assert (len(by_split.rows), len(by_split.eval_rows)) == (20, 6)


@pytest.mark.parametrize(
    ("name", "keys", "words"),
    [
        ("empty", {}, "expected at least one row in split 'train', found none"),
        ("empty_stream", {}, "found a stream without any"),
        ("tuples", {}, "expected items that are dicts of tensors, found a batch of type list"),
        ("uneven", {}, "the rows don't make a batch: RuntimeError: stack expects each tensor to be equal size"),
        ("reserved", {}, "and other names than stop, tokens, votes; found votes: [2, 2]"),
        ("broken", {}, "row 1000 can't be read: OSError: a broken file"),
        ("nothing", {}, "to return a Dataset, or a Dataset and a collate function, found int"),
        ("stream", {"eval_split": "5%"}, "a stream has no share"),
        ("stream", {"eval_split": "test"}, "expected a dataset with a length, found a stream"),
        ("numbers", {"split": "other"}, "KeyError: 'other'"),
    ],
)
def test_refused(corpus: Callable[..., Corpus], name: str, keys: dict[str, Any], words: str) -> None:
    def read() -> None:
        rows = corpus(name, **keys).rows
        rows.rows(np.array([len(rows) - 1 if name == "broken" else 0, 1]))

    with pytest.raises((DataError, ConfigError)) as error:
        read()
    assert words in str(error.value)


def test_keys_of_text_are_refused_beside_it() -> None:
    with pytest.raises(ValueError, match=r"seq_len goes with text; data\.factory makes the rows by itself"):
        Data(factory="a:b", seq_len=64)
