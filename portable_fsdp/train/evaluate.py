"""Evaluation: the mean loss and metrics over the validation set, and the history of a run's evaluations.

Sums over all that the task counts are divided by the count, so they don't depend on the number of devices or batches.
All batches have one shape, `train.micro_batch` rows per device. Rows that don't count pad the last batch; if only the
loss itself can count, an incomplete batch is left out. Results are read one batch late and added up on the host.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from portable_fsdp.backends.contract import Backend, Batch, Metrics, Pending
from portable_fsdp.checkpoint.format import Evaluated
from portable_fsdp.config import schema
from portable_fsdp.data.packing import IGNORED, Rows
from portable_fsdp.models.tasks import CAUSAL_LM, SINGLE_LABEL, Task
from portable_fsdp.runtime.errors import ConfigError

log = logging.getLogger("portable_fsdp")


@dataclass(frozen=True)
class Evaluation:
    """Mean loss (cross entropy in nats; infinite if nothing counts), number of tokens or rows, and mean metrics."""

    loss: float
    tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite on overflow."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf


class Evaluator:
    """Evaluates a model on the same rows each time."""

    def __init__(
        self, backend: Backend, model: nn.Module, rows: Rows, train: schema.Train, task: Task = CAUSAL_LM
    ) -> None:
        """Choose all `rows` in order, or train.eval_batches * train.global_batch of them, evenly spread.

        Raises ConfigError if they don't fill one batch of a task that can't count its labels.
        """
        limit = len(rows) if train.eval_batches is None else train.eval_batches * train.global_batch
        count = min(len(rows), limit)
        self._backend, self._model, self._task = backend, model, task
        self._rows = rows
        self._batch = train.resolved_micro_batch * backend.row_shards
        if not task.counts_labels:
            count = _whole_batches(count, self._batch)
        self._chosen = np.arange(count, dtype=np.int64) * len(rows) // count
        self.fingerprint = f"{count} of {rows.fingerprint()}"
        """Identifies the evaluated rows: losses on other rows aren't comparable."""

        self._metrics: tuple[str, ...] = ()

        def evaluate(batch: Batch, control: Batch) -> Metrics:
            with backend.evaluate():
                loss_sum, count, metrics = task.scores(model, batch)
            self._metrics = tuple(metrics)
            sums = backend.sum(torch.stack([value.float() for value in (loss_sum, count, *metrics.values())]))
            return {"sums": torch.cat([sums, backend.sum_control(control["control"])])}

        self._evaluate = backend.compile(evaluate, "evaluate")

    def __call__(self, stop: Callable[[], bool] = lambda: False) -> Evaluation | None:
        """Evaluate; the result is identical on all processes. None if `stop` is true on any of them. *collective*"""
        training = [module for module in self._model.modules() if module.training]
        self._model.eval()
        try:
            return self._evaluated(stop)
        finally:
            for module in training:
                module.training = True

    def _evaluated(self, stop: Callable[[], bool]) -> Evaluation | None:
        sums: list[list[float]] = []
        pending: Pending | None = None
        for batch in self._batches():
            control = {"control": self._backend.place_control([float(stop())])}
            previous, pending = pending, self._backend.fetch(self._evaluate(self._backend.place(batch), control))
            if previous is not None:
                sums.append(previous.result()["sums"].tolist())
                if sums[-1][-1] > 0:
                    break
        assert pending is not None  # there is at least one row
        sums.append(pending.result()["sums"].tolist())
        *totals, stops = map(math.fsum, zip(*sums, strict=True))
        loss, count, *metrics = totals
        if stops:
            return None
        if count == 0:
            return Evaluation(math.inf, 0)
        means = {name: value / count for name, value in zip(self._metrics, metrics, strict=True)}
        return Evaluation(loss / count, round(count), means)

    def _batches(self) -> Iterator[Batch]:
        """Yield this process's rows of each batch."""
        shard, count = self._backend.data_shard, len(self._chosen)
        size = self._batch // shard.count
        for begin in range(shard.index * size, shard.index * size + count, self._batch):
            positions = np.arange(begin, begin + size)
            batch = self._rows.rows(self._chosen[np.minimum(positions, count - 1)])
            fill: float = IGNORED
            if self._task.problem != SINGLE_LABEL:  # any number counts
                batch["labels"], fill = batch["labels"].float(), math.nan
            if (filled := positions >= count).any():
                batch["labels"][torch.from_numpy(filled)] = fill
            yield batch


def _whole_batches(rows: int, batch: int) -> int:
    if rows < batch:
        raise ConfigError(
            f"data.eval_split: expected at least one batch of {batch} rows (train.micro_batch on each device), found "
            f"{rows}.\n  Hold out more rows, or lower train.micro_batch."
        )
    if rows % batch:
        log.info("evaluations skip the last %d of %d rows, which don't fill a batch of %d", rows % batch, rows, batch)
    return rows - rows % batch


def updated_history(history: Evaluated | None, step: int, loss: float, rows: str) -> Evaluated:
    """Return the history with the evaluation after `step` added. `rows`: `Evaluator.fingerprint`."""
    if history is None or loss < history.best_loss:
        return Evaluated(rows=rows, step=step, loss=loss, best_step=step, best_loss=loss, without_improvement=0)
    without = history.without_improvement + 1
    return history.model_copy(update={"step": step, "loss": loss, "without_improvement": without})
