"""The train step: the algorithm and nothing else. One for all engines.

The loss is a sum over the global batch divided by its count, so that gradients are sums too and neither the number of
devices nor that of micro batches changes them. Where only the loss itself can tell the count (the user's own task), the
number of rows stands for it in backward, and gradients are corrected once all counts are known.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from portable_fsdp.backends.base import Backend, Batch, Metrics
from portable_fsdp.models.tasks import CAUSAL_LM, Task, TaskFunction
from portable_fsdp.optim.optimizer import set_step_numbers, step_numbers

Step = Callable[[Sequence[Batch], float], Metrics]

Sums = dict[str, Tensor]
"""0-dim: `loss`, of the losses so far over the count that is expected of the step; where only the loss can tell the
count, also `share`, of what was counted."""


def train_step(
    backend: Backend,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    accumulation: int,
    max_grad_norm: float | None,
    task: Task | TaskFunction = CAUSAL_LM,
) -> Step:
    """Make the step of a run: `step(batches, lr)` with `accumulation` placed micro batches, one optimizer update.

    `task`: how a batch becomes a loss. A function of your own may get batches without `tokens`, of any keys, with as
    many rows in each micro batch.

    It returns `loss` (mean over all that the task counts in the global batch, before the update), `grad_norm` (before
    clipping) and, where the batches hold `votes` [rows, n], their sum over the rows of all data shards [n]: device
    tensors that nobody has waited for. In float16 also `loss_scale`, and `skipped_steps` so far: a step whose gradients
    overflow changes no weight, and its `grad_norm` isn't finite.

    One micro batch makes one program; several make two, `micro_batch` and `update`.
    """
    task = task if isinstance(task, Task) else Task(getattr(task, "__name__", "task"), task, counts_labels=False)
    summed = ("loss",) if task.counts_labels else ("loss", "share")
    scaler = backend.loss_scaler
    if scaler is not None:
        scaler.require_skippable(optimizer)

    def expected_count(batch: Batch) -> Tensor:
        """Of the step's losses, on all devices."""
        if "tokens" in batch or task.counts_labels:
            return backend.sum(batch["tokens"].sum())
        rows = next(iter(batch.values()))
        return backend.sum(rows.new_full(rows.shape[:1], accumulation, dtype=torch.float32).sum())

    def forward_backward(batch: Batch, sums: Sums, last: bool) -> Sums:
        """`sums` with those of this batch."""
        expected = expected_count(batch)
        with backend.accumulate(last):
            loss_sum, count, _ = task.scores(model, batch)
            mean = loss_sum / expected
            (mean if scaler is None else mean * scaler.scale).backward()
        totals = {"loss": sums["loss"] + mean.detach()}
        return totals if task.counts_labels else {**totals, "share": sums["share"] + count.detach() / expected}

    def micro_batch(batch: Batch, sums: Sums, last: bool) -> Metrics:
        return forward_backward(batch, sums, last)

    def update(batch: Batch, sums: Sums) -> Metrics:
        """`batch`: the whole step's rows; after several micro batches only the votes of the last."""
        if accumulation == 1:
            sums = forward_backward(batch, sums, last=True)
        votes = [batch["votes"].sum(dim=0)] if "votes" in batch else []
        totals = backend.sum(torch.cat([torch.stack([*sums.values()]), *votes]))
        loss = totals[0]
        if not task.counts_labels:
            loss = loss / totals[1]
            backend.scale_gradients(model, 1 / totals[1])
        grad_norm = backend.clip_grad_norm(model, max_grad_norm)
        scaling = {} if scaler is None else scaler.update(optimizer, grad_norm)
        optimizer.step()
        backend.zero_gradients(optimizer, keep=accumulation > 1)
        return {"loss": loss, "grad_norm": grad_norm, **scaling, **({"votes": totals[len(sums) :]} if votes else {})}

    run_micro_batch = backend.compile(micro_batch, "micro_batch")
    run_update = backend.compile(update, "train_step" if accumulation == 1 else "update")

    def step(batches: Sequence[Batch], lr: float) -> Metrics:
        if len(batches) != accumulation:
            raise ValueError(f"step: expected {accumulation} micro batches (accumulation), found {len(batches)}")
        numbers = step_numbers(optimizer, lr)
        tensors = {name: torch.tensor(number) for name, number in numbers.items()}
        placed = backend.place({**{name: torch.zeros(()) for name in summed}, **tensors})
        set_step_numbers(optimizer, numbers, placed)
        sums, last = {name: placed[name] for name in summed}, batches[-1]
        if accumulation == 1:
            return run_update(last, sums)
        for number, batch in enumerate(batches, start=1):
            sums = run_micro_batch(batch, sums, number == accumulation)
        return run_update({"votes": last["votes"]} if "votes" in last else {}, sums)

    return step
