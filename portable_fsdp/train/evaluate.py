"""Evaluation: the mean loss over the rows that are held out, and what the evaluations of a run tell it.

The sum of the losses over the counted tokens, divided by their number: neither the number of devices nor the cut into
batches changes it. Every batch has one shape, `train.micro_batch` rows a device; the last one is filled up with rows
that count nothing. What a batch gives is read a batch late, and added up on the host.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from portable_fsdp.backends.base import Backend, Batch, Metrics, Pending
from portable_fsdp.checkpoint.format import Evaluated
from portable_fsdp.config import schema
from portable_fsdp.data.packing import IGNORED, Rows
from portable_fsdp.train.step import forward


@dataclass(frozen=True)
class Evaluation:
    """The mean loss in nats, and the tokens that were counted."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where no float holds it."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


class Evaluator:
    """Evaluates a model, over the same rows each time."""

    def __init__(self, backend: Backend, model: nn.Module, rows: Rows, train: schema.Train) -> None:
        """Over all `rows` in their order, or train.eval_batches * train.global_batch of them, evenly spread."""
        limit = len(rows) if train.eval_batches is None else train.eval_batches * train.global_batch
        count = min(len(rows), limit)
        self._backend = backend
        self._rows = rows
        self._chosen = np.arange(count, dtype=np.int64) * len(rows) // count
        self._batch = train.micro_batch * backend.data_parallel_size
        self.fingerprint = f"{count} of {rows.fingerprint()}"
        """Of the rows evaluated over: losses over others can't be compared."""

        def evaluate(batch: Batch) -> Metrics:
            with backend.evaluate():
                loss_sum, tokens = forward(model, batch)
            return {"told": backend.sum(torch.stack([loss_sum.float(), tokens.float(), batch["stop"].sum()]))}

        self._evaluate = backend.compile(evaluate, "evaluate")

    def __call__(self, stop: Callable[[], bool] = lambda: False) -> Evaluation | None:
        """The evaluation, the same on all processes; None once any of them was asked to `stop`. *collective*"""
        told: list[list[float]] = []
        pending: Pending | None = None
        for batch in self._batches(stop):
            previous, pending = pending, self._backend.fetch(self._evaluate(self._backend.place(batch)))
            if previous is not None:
                told.append(previous.result()["told"].tolist())
                if told[-1][2] > 0:
                    break
        assert pending is not None  # there is at least one row
        told.append(pending.result()["told"].tolist())
        losses, tokens, stops = zip(*told, strict=True)
        return None if any(stops) else Evaluation(math.fsum(losses) / math.fsum(tokens), round(math.fsum(tokens)))

    def _batches(self, stop: Callable[[], bool]) -> Iterator[Batch]:
        """This process's rows of each batch."""
        shard, count = self._backend.data_shard, len(self._chosen)
        size = self._batch // shard.count
        for begin in range(shard.index * size, shard.index * size + count, self._batch):
            positions = np.arange(begin, begin + size)
            batch = self._rows.rows(self._chosen[np.minimum(positions, count - 1)])
            labels = batch["labels"].masked_fill(torch.from_numpy(positions >= count)[:, None], IGNORED)
            yield {**batch, "labels": labels, "stop": torch.full((size,), float(stop()))}


def evaluated(before: Evaluated | None, step: int, loss: float, rows: str) -> Evaluated:
    """What the evaluations tell with that after `step`. `rows`: `Evaluator.fingerprint`."""
    if before is None or loss < before.best_loss:
        return Evaluated(rows=rows, step=step, loss=loss, best_step=step, best_loss=loss, without_improvement=0)
    without = before.without_improvement + 1
    return before.model_copy(update={"step": step, "loss": loss, "without_improvement": without})
