"""The evaluation of rows in batches of one shape, and what a run's evaluations tell."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_step import ARCHITECTURE, SEQ_LEN, VOCABULARY
from torch import Tensor

from portable_fsdp.backends.contract import Backend
from portable_fsdp.backends.open import open_backend
from portable_fsdp.config.schema import Config
from portable_fsdp.data.packing import Rows
from portable_fsdp.train.build import Training, build_training
from portable_fsdp.train.evaluate import Evaluation, Evaluator, updated_history

GLOBAL_BATCH = 4


class HeldOut(Rows):
    """Rows with different numbers of counted labels; keeps the numbers of those that were read."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.requested: list[list[int]] = []

    def __len__(self) -> int:
        return self.count

    def rows(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        self.requested.append(indices.tolist())
        generator = torch.Generator().manual_seed(5)
        ids = torch.randint(0, VOCABULARY, (self.count, SEQ_LEN + 1), generator=generator)[indices]
        labels = ids[:, 1:].clone()
        for row, index in enumerate(indices.tolist()):
            labels[row, : index % SEQ_LEN] = -100
        return {"input_ids": ids[:, :-1], "labels": labels}

    def order(self, seed: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        raise AssertionError("held-out rows come in their own order")

    def fingerprint(self) -> str:
        return "held out"


Opened = tuple[Backend, Training]


def config(**train: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"architecture": ARCHITECTURE},
            "data": {"seq_len": SEQ_LEN, "eval_split": "10%"},
            "train": {"steps": 10, "global_batch": GLOBAL_BATCH, "eval_every": 2, **train},
        }
    )


@pytest.fixture(scope="module")
def opened() -> Iterator[Opened]:
    with open_backend(config(), device="cpu", backend="native") as backend:
        yield backend, build_training(config(), backend, VOCABULARY)


def evaluator(opened: Opened, rows: HeldOut, **train: Any) -> Evaluator:
    return Evaluator(opened[0], opened[1].model, rows, config(**train).train)


def whole(opened: Opened, rows: HeldOut, indices: list[int]) -> Evaluation:
    """All of them in one batch. That a batch's loss is a plain model's, the contract's tests say."""
    batch = HeldOut(rows.count).rows(np.array(indices))
    with opened[0].evaluate():
        loss, tokens = opened[1].model(batch["input_ids"], batch["labels"])
    return Evaluation((loss / tokens).item(), int(tokens))


def test_the_rows_are_those_and_the_cut_into_batches_changes_nothing(opened: Opened) -> None:
    cases: list[tuple[int, dict[str, int], list[int], int]] = [
        *((7, {"micro_batch": size}, [*range(7)], size) for size in (1, 2, 4)),
        (21, {"eval_batches": 2, "micro_batch": 4}, [0, 2, 5, 7, 10, 13, 15, 18], 4),  # spread over the rows
        (3, {"eval_batches": 5}, [0, 1, 2], 1),  # fewer than that
    ]
    for count, train, chosen, size in cases:
        rows = HeldOut(count)
        actual, expected = evaluator(opened, rows, **train)(), whole(opened, rows, chosen)
        assert actual is not None, train
        assert (actual.tokens, actual.loss) == (expected.tokens, pytest.approx(expected.loss, rel=1e-6)), train
        assert {len(batch) for batch in rows.requested} == {size}  # one shape
        assert list(chain.from_iterable(rows.requested))[: len(chosen)] == chosen
        assert len(rows.requested) == -(-len(chosen) // size)


def test_a_request_to_stop_ends_it(opened: Opened) -> None:
    rows = HeldOut(50)
    assert evaluator(opened, rows)(lambda: len(rows.requested) >= 3) is None
    assert len(rows.requested) == 4  # it is read a batch late


def test_only_losses_over_the_same_rows_can_be_compared(opened: Opened) -> None:
    prints = [evaluator(opened, HeldOut(n), eval_batches=k).fingerprint for n, k in ((21, 2), (21, 3), (21, 2))]
    assert prints[0] == prints[2] != prints[1]


def test_the_history_of_evaluations() -> None:
    assert Evaluation(2.0, 1).perplexity == pytest.approx(7.389056)
    assert Evaluation(1e4, 1).perplexity == float("inf")
    history = None
    for step, loss, best_step, best_loss, without_improvement in (
        *((2, 3.0, 2, 3.0, 0), (4, 2.0, 4, 2.0, 0)),
        (6, 2.0, 4, 2.0, 1),  # as good is no improvement
        *((8, 2.5, 4, 2.0, 2), (10, 1.5, 10, 1.5, 0)),
    ):
        history = updated_history(history, step, loss, "rows")
        assert (history.step, history.loss) == (step, loss)
        actual = (history.best_step, history.best_loss, history.without_improvement)
        assert actual == (best_step, best_loss, without_improvement), step
