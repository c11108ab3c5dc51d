"""Evaluation, the mean loss and metrics over the validation set, and samples, by greedy decoding.

Evaluation divides sums by the count of all that the task counts, so they don't depend on devices or batches. All
batches have one shape, `train.micro_batch` rows per device. Rows that don't count pad the last batch; if only the loss
itself can count, an incomplete batch is left out. Results are read one batch late and added up on the host.

Sampling computes the next token of each row in one program; the host appends it and runs the program again. Rows have
one shape, so XLA compiles it once. There is no KV cache: every engine runs the forward of training.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from portable_fsdp.backends.contract import Backend, Batch, Metrics, Pending
from portable_fsdp.checkpoint.manifests import Evaluated
from portable_fsdp.config import schema
from portable_fsdp.data.packing import Rows, ignore_rows
from portable_fsdp.data.tokenize import Tokenizer
from portable_fsdp.layout import rows_of_shard
from portable_fsdp.models.tasks import CAUSAL_LM, SINGLE_LABEL, Task
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.hub import panic_as_error

log = logging.getLogger("portable_fsdp")

_BLOCK = 128
"""Row lengths are multiples of it, as attention kernels require, or equal data.seq_len."""


@dataclass(frozen=True)
class Evaluation:
    """Mean loss (cross entropy in nats; infinite if nothing counts), number of tokens or rows, and mean metrics."""

    loss: float
    tokens: int
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite on overflow."""
        return torch.tensor(self.loss, dtype=torch.float64).exp().item()


class Evaluator:
    """Evaluates a model on the same rows each time."""

    def __init__(
        self, backend: Backend, model: nn.Module, rows: Rows, train: schema.Train, task: Task = CAUSAL_LM
    ) -> None:
        """Choose all `rows` in order, or train.eval_batches * train.global_batch of them, evenly spread. Raises
        ConfigError if they don't fill one batch of a task that can't count its labels."""
        count = len(rows) if train.eval_batches is None else min(len(rows), train.eval_batches * train.global_batch)
        self._backend, self._model, self._task, self._rows = backend, model, task, rows
        self._batch = batch = train.resolved_micro_batch * backend.row_shards
        if not task.counts_labels and count < batch:
            raise ConfigError(
                f"data.eval_split: expected at least one batch of {batch} rows (train.micro_batch on each device), "
                f"found {count}.\n  Hold out more rows, or lower train.micro_batch."
            )
        if not task.counts_labels and (rest := count % batch):
            log.info("evaluations skip the last %d of %d rows, which don't fill a batch of %d", rest, count, batch)
            count -= rest
        self._chosen = np.arange(count, dtype=np.int64) * len(rows) // count
        self.fingerprint = f"{count} of {rows.fingerprint()}"  # losses on other rows aren't comparable
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
        loss, count, *metrics, stops = map(math.fsum, zip(*sums, strict=True))
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
            if self._task.counts_labels:
                ignore_rows(batch, positions >= count, numbers=self._task.problem != SINGLE_LABEL)
            yield batch


def updated_history(history: Evaluated | None, step: int, loss: float, rows: str) -> Evaluated:
    """Return the history with the evaluation after `step` added. `rows`: `Evaluator.fingerprint`."""
    if history is None or loss < history.best_loss:
        return Evaluated(rows=rows, step=step, loss=loss, best_step=step, best_loss=loss, without_improvement=0)
    without = history.without_improvement + 1
    return history.model_copy(update={"step": step, "loss": loss, "without_improvement": without})


class Sampler:
    """Completes the prompts of `train`, in rows of at most `seq_len` tokens."""

    def __init__(
        self, backend: Backend, model: nn.Module, tokenizer: Tokenizer, train: schema.Train, seq_len: int
    ) -> None:
        """Tokenize the prompts. Raises ConfigError for a prompt without tokens, or too long for its text to fit."""
        self._backend, self._tokenizer, self._tokens = backend, tokenizer, train.sample_tokens
        if train.sample_tokens >= seq_len:
            raise ConfigError(f"train.sample_tokens: expected less than data.seq_len={seq_len}, found {self._tokens}.")
        with panic_as_error("train.sample_prompts"):
            encoded = tokenizer.encode_all(train.sample_prompts, special_tokens=True)
        self._prompts = [ids.tolist() for ids in encoded]
        for prompt, ids in zip(train.sample_prompts, self._prompts, strict=True):
            if not ids:
                raise ConfigError(f"train.sample_prompts: the prompt {prompt!r} has no tokens; give some text.")
            if len(ids) + train.sample_tokens > seq_len:
                raise ConfigError(
                    f"train.sample_prompts: expected at most {seq_len - train.sample_tokens} tokens in each "
                    f"(data.seq_len - train.sample_tokens), found {len(ids)} in {prompt[:40]!r}.\n"
                    "  Shorten it, or lower train.sample_tokens."
                )
        longest = max(map(len, self._prompts)) + train.sample_tokens
        block = math.lcm(_BLOCK, 2 * backend.devices // backend.row_shards)  # devices may split the tokens of a row
        self._length = min(seq_len, -(-longest // block) * block)
        shards = backend.row_shards
        self._rows = shards * min(train.resolved_micro_batch, -(-len(self._prompts) // shards))  # of all processes
        # Like transformers' `generate`, from the model's generation config: an id, several, or None.
        ends: Any = getattr(cast(Any, model).generation_config, "eos_token_id", None)
        self._ends = set[int | None](ends if isinstance(ends, list) else [ends])

        def sample(batch: Batch, control: Batch) -> Metrics:
            with backend.evaluate():
                tokens = model(batch["input_ids"], None, batch.get("positions")).argmax(dim=-1)
            newest = (tokens * batch["is_last"]).sum(dim=1, keepdim=True)
            by_row = (newest * batch["is_row"]).sum(dim=0).float()  # exact: ids are below 2**24
            return {"tokens": torch.cat([backend.sum(by_row), backend.sum_control(control["control"])])}

        self._next = backend.compile(sample, "sample")

    def __call__(self, stop: Callable[[], bool] = lambda: False) -> list[str] | None:
        """Return one completion per prompt (prompt included), identical on all processes; None after a stop request on
        any of them. *collective*"""
        texts: list[str] = []
        for begin in range(0, len(self._prompts), self._rows):
            rows = [list(prompt) for prompt in self._prompts[begin : begin + self._rows]]
            unfinished = list(range(len(rows)))
            for _ in range(self._tokens):
                placed = self._backend.place(self._batch(rows))
                control = {"control": self._backend.place_control([float(stop())])}
                *ids, stops = self._backend.fetch(self._next(placed, control)).result()["tokens"].tolist()
                if stops:
                    return None
                for number in unfinished:
                    rows[number].append(int(ids[number]))
                unfinished = [number for number in unfinished if rows[number][-1] not in self._ends]
                if not unfinished:
                    break
            texts += map(self._tokenizer.decode, rows)
        return texts

    def _batch(self, rows: Sequence[list[int]]) -> Batch:
        """Return this process's rows: int64 `[rows, length]` `input_ids` and `is_last` (1 at a row's last token); int64
        `[rows, rows of all processes]` `is_row`."""
        ids = torch.full((self._rows, self._length), self._tokenizer.padding)
        is_last = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row)
            is_last[number, len(row) - 1] = 1
        own = rows_of_shard(self._rows, self._backend.data_shard.index, self._backend.data_shard.count)
        is_row = torch.eye(self._rows, dtype=torch.int64)
        return {"input_ids": ids[own], "is_last": is_last[own], "is_row": is_row[own]}
