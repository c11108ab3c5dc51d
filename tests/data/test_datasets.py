"""data.factory: map-style datasets in the order of every corpus, streams in their own, and what is refused."""

import json
import logging
import os
import random
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from portable_fsdp.config.data import Data
from portable_fsdp.data.batches import Batches
from portable_fsdp.data.build import Corpus, build_data
from portable_fsdp.data.packing import IGNORED, sample_indices
from portable_fsdp.runtime.errors import ConfigError, DataError, TrainingError

MODULE = """
import os
import random
import signal
import sys
import time
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

class Words(Dataset):
    # Rows of 3 to 12 tokens, with noise that their seeds determine.
    def __len__(self): return 40
    def __getitem__(self, index):
        ids = torch.arange(1, 4 + index % 10)
        noise = torch.rand(()) + random.random() + float(np.random.rand())
        return {"input_ids": ids, "labels": ids, "own": ids[:2].float(), "noise": noise}

class Stream(IterableDataset):
    def __init__(self, first=0): self.first = first
    def __iter__(self): return ({"x": torch.tensor([number])} for number in range(self.first, 10))

class Seeks(Stream):
    def skip(self, count): return Seeks(self.first + count)

class Slow(Dataset):
    def __len__(self): return 20
    def __getitem__(self, index):
        time.sleep(0.002)  # in which another thread may draw
        return {"x": torch.rand(3), "labels": index % 3}

class Noisy(IterableDataset):
    def __iter__(self): return ({"x": torch.rand(2) + random.random()} for _ in range(30))

def slow(split): return Slow()
def noisy(split): return Noisy()
def mixes(split): return Slow(), lambda items: {"x": torch.stack([i["x"] for i in items]) * random.random()}
def numbers(split): return Numbers({"train": 20, "test": 6}[split])
def doubled(split): return Numbers(20), lambda items: {"x": torch.stack([2 * item["x"] for item in items])}
def broken(split): return Numbers(1001)
def stream(split): return Stream()
def seeks(split): return Seeks()
def empty(split): return Numbers(0)
def empty_stream(split): return Stream(10)
def tuples(split): return [(1, 2), (3, 4)]
def uneven(split): return [{"x": torch.zeros(2)}, {"x": torch.zeros(3)}]
def nothing(split): return 7
def words(split):
    assert not torch.utils.data.get_worker_info() or not {"torch_xla", "torch_tpu"} & set(sys.modules)
    return Words()
def masked(split): return [{"input_ids": [5, 6, 7], "attention_mask": [1, 1, 0], "labels": 1}] * 4
def stacks(split): return Words(), lambda items: {"ids": torch.stack([item["input_ids"] for item in items])}
def breaks_in_a_worker(split):
    if torch.utils.data.get_worker_info():
        raise OSError("no such disk")
    return Words()
def dies(split):
    if torch.utils.data.get_worker_info():
        os.kill(os.getpid(), signal.SIGKILL)
    return Words()
def dies_with_a_lock(split):
    if torch.utils.data.get_worker_info():
        frame = sys._getframe()
        while "done_event" not in frame.f_locals:
            frame = frame.f_back
        frame.f_locals["done_event"]._cond.acquire()
    return dies(split)
"""

Corpora = Callable[..., Corpus]


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpora:
    name = f"datasets_{abs(hash(tmp_path)):x}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)

    def corpus(function: str, **keys: Any) -> Corpus:
        return build_data(Data(factory=f"{name}:{function}", **keys))

    corpus.__name__ = name  # of the module
    return corpus


def column(corpus: Corpus, seed: int, first: int, count: int, name: str = "x") -> torch.Tensor:
    positions = np.arange(first, first + count)
    return corpus.rows.rows(corpus.rows.order(seed, positions))[name]


def test_rows_come_in_the_order_of_every_corpus_with_noise_of_row_and_epoch_alone(corpus: Corpora) -> None:
    """And are held out by share or split."""
    numbers = corpus("numbers")
    expected = torch.tensor(sample_indices(3, np.arange(50), 20)).float()[:, None]
    assert torch.equal(column(numbers, 3, 0, 50), expected)
    assert torch.equal(column(corpus("doubled"), 3, 0, 50), 2 * expected)
    batch = numbers.rows.rows(np.array([4, 5]))
    assert (batch["labels"].tolist(), batch["noise"].dtype) == ([1, 2], torch.float32)
    assert numbers.tokenizer is None
    together = column(numbers, 0, 0, 40, "noise")
    alone = torch.cat([column(numbers, 0, position, 1, "noise") for position in reversed(range(40))]).flip(0)
    assert torch.equal(together, alone)
    assert len({tuple(row) for row in together.tolist()}) == 40  # another one in the second epoch
    by_share, by_split = (corpus("numbers", eval_split=split) for split in ("25%", "test"))
    assert by_share.eval_rows is not None
    assert by_split.eval_rows is not None
    parts = [rows.rows(np.arange(len(rows)))["x"].flatten().tolist() for rows in (by_share.rows, by_share.eval_rows)]
    assert sorted(parts[0] + parts[1]) == list(range(20))
    assert (len(by_split.rows), len(by_split.eval_rows)) == (20, 6)


def test_threads_that_read_at_once_draw_as_one_alone_and_leave_the_generators_alone(corpus: Corpora) -> None:
    """A script may evaluate in a second thread."""
    trained, held_out = corpus("slow"), corpus("slow")
    alone = column(trained, 0, 0, 20), column(held_out, 1, 20, 20)
    torch.manual_seed(5)
    expected = torch.rand(())
    torch.manual_seed(5)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(column, trained, 0, 0, 20), pool.submit(column, held_out, 1, 20, 20)]
        read = [part.result() for part in both]
    assert all(map(torch.equal, alone, read))
    assert torch.equal(torch.rand(()), expected)


@pytest.mark.parametrize("name", ["slow", "mixes", "noisy"])
def test_no_reader_draws_beside_a_task_that_draws(corpus: Corpora, name: str) -> None:
    """Protects mixup and diffusion: their draws are those of a loop without us, and batches those of a run before."""

    def draw() -> tuple[float, float, float]:
        time.sleep(0.001)  # in which a reader may draw
        return random.random(), float(np.random.rand()), torch.rand(()).item()

    def seed() -> None:
        for function in (random.seed, np.random.seed, torch.manual_seed):
            function(7)

    seed()
    expected, drawn, read = [draw() for _ in range(60)], list[tuple[float, float, float]](), list[torch.Tensor]()
    evaluated = corpus(name).rows
    for _ in range(2):
        seed()
        with open_steps(corpus, name) as batches:
            for _ in range(6):
                read += [micro["x"] for micro in next(batches).micro_batches]
                evaluated.rows(np.arange(4))
                drawn += [draw() for _ in range(10)]
        evaluated.fingerprint()
    assert drawn == 2 * expected
    assert torch.equal(*(torch.cat(half) for half in (read[:18], read[18:])))


@pytest.mark.parametrize(("name", "way"), [("stream", "read and dropped"), ("seeks", "skipped")])
def test_a_stream_resumes_where_it_was(corpus: Corpora, caplog: pytest.LogCaptureFixture, name: str, way: str) -> None:
    whole = column(corpus(name), 0, 0, 8).flatten().tolist()
    assert whole == list(range(8))
    caplog.set_level(logging.INFO)
    assert column(corpus(name), 0, 5, 3).flatten().tolist() == [5, 6, 7]
    assert f"5 items {way}" in caplog.text
    endless = corpus(name)
    assert [column(endless, 0, first, 2).flatten().tolist() for first in (8, 12)] == [[8, 9], [2, 3]]  # others between
    assert corpus(name).fingerprint == endless.fingerprint != corpus("numbers").fingerprint
    first, again = column(corpus("noisy"), 0, 0, 8), column(corpus("noisy"), 0, 4, 4)
    assert torch.equal(first[4:], again)  # noise depends on the item alone
    assert corpus("noisy").rows.fingerprint() == corpus("noisy").rows.fingerprint()


def test_refused(corpus: Corpora, tmp_path: Path, assert_golden: Callable[[Path, str], None]) -> None:
    """The golden file has, after each `$ `, a function and keys of data, and what is wrong."""
    golden, parts = Path(__file__).parent / "golden/datasets.txt", list[str]()
    for name, keys in re.findall(r"^\$ (\w+) (.*)$", golden.read_text(), re.MULTILINE):
        with pytest.raises((DataError, ConfigError)) as error:
            corpus(name, **json.loads(keys)).rows.rows(np.array([1000 if name == "broken" else 0, 1]))
        parts.append(f"$ {name} {keys}\n{error.value}\n".replace(f"{tmp_path}/", "").replace(corpus.__name__, "MODULE"))
    assert_golden(golden, "\n".join(parts))


SIZES = {"input_ids": [4, 8, 12], "labels": [4, 8, 12]}


def test_rows_are_padded_and_micro_batches_take_the_bucket_of_their_longest_row(corpus: Corpora) -> None:
    batch = corpus("words", buckets=SIZES).rows.rows(np.array([0, 2]))  # of 3 and 5 tokens
    ids = [[1, 2, 3, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 0, 0, 0]]
    assert batch["input_ids"].tolist() == ids
    assert batch["labels"].tolist() == [[value or IGNORED for value in row] for row in ids]
    assert batch["attention_mask"].tolist() == [[int(value > 0) for value in row] for row in ids]
    assert (batch["attention_mask"].dtype, batch["own"].shape) == (torch.int64, (2, 2))
    assert corpus("stacks", buckets=SIZES).rows.rows(np.array([0, 2]))["ids"].tolist() == ids
    own = corpus("masked", buckets={"input_ids": [4]}).rows.rows(np.array([0]))
    assert (own["attention_mask"].tolist(), own["labels"].tolist()) == ([[1, 1, 0, 0]], [1])
    assert "attention_mask" not in corpus("words", buckets={"labels": [12]}).rows.of_each_shape(np.array([0]))[0]
    rows = corpus("words", buckets=SIZES).rows
    lengths = [11, 0, 5, 1, 9, 3]  # rows of 4, 3, 8, 4, 12 and 6 tokens
    parts = rows.micro_batches(np.array(lengths), 3)
    assert [part.places.tolist() for part in parts] == [[0, 1], [3, 2], [5, 4]]  # stable within a bucket
    assert [part.tensors["labels"].shape[1] for part in parts] == [4, 8, 12]
    whole = corpus("words", buckets={key: [12] for key in SIZES}).rows.micro_batches(np.array(lengths), 3)
    assert [part.places.tolist() for part in whole] == [[0, 1], [2, 3], [4, 5]]
    shapes = [batch["input_ids"].shape for batch in rows.of_each_shape(np.array([9, 0]))]
    assert shapes == [(2, 4), (2, 8), (2, 12)]
    sizes, largest = (corpus("words", buckets=each).fingerprint for each in (SIZES, {key: [12] for key in SIZES}))
    assert sizes == largest != corpus("masked", buckets={"input_ids": [4]}).fingerprint  # no other data
    assert corpus("stream", buckets={"x": [2]}).fingerprint == corpus("stream").fingerprint


def open_steps(corpus: Corpora, function: str, start: int = 0, **keys: Any) -> Batches:
    data = Data(factory=f"{corpus.__name__}:{function}", **keys)
    steps: dict[str, Any] = {"seed": 3, "global_batch": 12, "shard": (1, 2), "accumulation": 3, "count_losses": None}
    return Batches(corpus(function, **keys).rows, **steps, start=start, data=data)


def take(batches: Batches, count: int) -> list[dict[str, torch.Tensor]]:
    """The micro batches of some steps."""
    return [micro for _ in range(count) for micro in next(batches).micro_batches]


MORE_WORKERS = [("words", 1, 0), ("words", 3, 0), ("words", 3, 2), ("seeks", 1, 0)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create . worker processes")
@pytest.mark.parametrize(
    ("name", "workers", "begun"),  # resumed after two steps, or from the start
    [("words", 2, 2), ("seeks", 1, 2), *(pytest.param(*row, marks=pytest.mark.proof) for row in MORE_WORKERS)],
)
def test_workers_read_the_steps_of_the_run_itself(corpus: Corpora, name: str, workers: int, begun: int) -> None:
    keys: dict[str, Any] = {"buckets": SIZES, "eval_split": "20%"} if name == "words" else {}
    with open_steps(corpus, name, **keys) as thread:
        expected = take(thread, 6)
    if name == "words":
        assert len({float(batch["noise"].sum()) for batch in expected}) == 18
    with open_steps(corpus, name, workers=workers, start=begun * 12, **keys) as batches:
        for batch, same in zip(take(batches, 6 - begun), expected[3 * begun :], strict=True):
            assert batch.keys() == same.keys()
            assert all(torch.equal(batch[key], same[key]) for key in batch)
        assert batches.consumed == 72
    assert not active_children()


@pytest.mark.slow
def test_errors_of_a_worker_are_the_sentences_of_the_run_itself(corpus: Corpora) -> None:
    messages: list[str] = []
    for workers in (0, 1):
        keys: dict[str, Any] = {"workers": workers, "buckets": {"input_ids": [11], "labels": [11]}}
        with open_steps(corpus, "words", **keys) as batches, pytest.raises(DataError) as error:
            take(batches, 8)
        messages.append(str(error.value))
    assert "expected at most input_ids 11" in messages[0]
    assert messages[0] == messages[1]
    with open_steps(corpus, "breaks_in_a_worker", workers=1) as batches, pytest.raises(ConfigError) as error:
        next(batches)
    assert "failed: OSError: no such disk" in str(error.value)
    assert "Traceback" not in str(error.value)
    assert not active_children()


@pytest.mark.slow
@pytest.mark.parametrize("factory", [pytest.param("dies", marks=pytest.mark.proof), "dies_with_a_lock"])
def test_a_worker_that_dies_ends_the_run_with_a_sentence(corpus: Corpora, factory: str) -> None:
    with open_steps(corpus, factory, workers=1, buckets=SIZES) as batches, pytest.raises(TrainingError) as error:
        next(batches)
    assert "a worker that reads data.factory died" in str(error.value)
    assert "by SIGKILL" in str(error.value)
    assert error.value.exit_code == 1
    assert not active_children()


@pytest.mark.proof
def test_one_of_two_workers_that_is_killed_is_named(corpus: Corpora) -> None:
    with open_steps(corpus, "words", workers=2, buckets=SIZES) as batches:
        next(batches)
        first, _ = (process.pid or 0 for process in active_children())
        os.kill(first, signal.SIGKILL)
        with pytest.raises(TrainingError, match=f"{first} by SIGKILL"):
            take(batches, 50)
    assert not active_children()


@pytest.mark.slow
def test_workers_read_on_when_the_run_is_asked_to_stop(corpus: Corpora) -> None:
    """Ctrl-C and a scheduler's SIGTERM reach all processes; the run still trains its last step."""
    with open_steps(corpus, "words", workers=1, buckets=SIZES) as batches:
        next(batches)
        for process in active_children():
            os.kill(process.pid or 0, signal.SIGINT)
            os.kill(process.pid or 0, signal.SIGTERM)
        for _ in range(12):
            next(batches)
