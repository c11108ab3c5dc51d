"""Evaluation: the mean loss over the rows that are held out, and the history of a run's evaluations.

The sum of the losses over the counted tokens is divided by their number: neither the number of devices nor that of
batches changes it. All batches have one shape, `train.micro_batch` rows a device; rows that count nothing fill up the
last. Results are read a batch late and added up on the host.
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
        self._batch = train.resolved_micro_batch * backend.data_parallel_size
        self.fingerprint = f"{count} of {rows.fingerprint()}"
        """Of the rows evaluated over: losses over others can't be compared."""

        def evaluate(batch: Batch) -> Metrics:
            with backend.evaluate():
                loss_sum, tokens = forward(model, batch)
            return {"sums": backend.sum(torch.stack([loss_sum.float(), tokens.float(), batch["stop"].sum()]))}

        self._evaluate = backend.compile(evaluate, "evaluate")

    def __call__(self, stop: Callable[[], bool] = lambda: False) -> Evaluation | None:
        """The evaluation, the same on all processes; None once any of them was asked to `stop`. *collective*"""
        sums: list[list[float]] = []
        pending: Pending | None = None
        for batch in self._batches(stop):
            previous, pending = pending, self._backend.fetch(self._evaluate(self._backend.place(batch)))
            if previous is not None:
                sums.append(previous.result()["sums"].tolist())
                if sums[-1][2] > 0:
                    break
        assert pending is not None  # there is at least one row
        sums.append(pending.result()["sums"].tolist())
        losses, tokens, stops = zip(*sums, strict=True)
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


def updated_history(history: Evaluated | None, step: int, loss: float, rows: str) -> Evaluated:
    """With the evaluation after `step`. `rows`: `Evaluator.fingerprint`."""
    if history is None or loss < history.best_loss:
        return Evaluated(rows=rows, step=step, loss=loss, best_step=step, best_loss=loss, without_improvement=0)
    without = history.without_improvement + 1
    return history.model_copy(update={"step": step, "loss": loss, "without_improvement": without})
