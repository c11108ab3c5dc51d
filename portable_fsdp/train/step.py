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
from portable_fsdp.optim.optimizer import nothing_changed_if, set_step_numbers, step_numbers

Step = Callable[[Sequence[Batch], float | Tensor], Metrics]

Sums = dict[str, Tensor]
"""0-dim, over the count that is expected of the step: `loss`, the losses so far, and `share`, what was counted."""


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
    overflow changes no weight, and its `grad_norm` isn't finite. `is_empty` is 1 in a step in which nothing counts: its
    loss is 0, and it changes no weight, optimizer state or loss scale.

    Gradients that something else left in the model's weights are dropped. `lr` may be a 0-dim tensor, which the host
    reads; learning rates in the optimizer's groups stay the user's.

    One micro batch makes one program; several make two, `micro_batch` and `update`.
    """
    task = task if isinstance(task, Task) else Task(getattr(task, "__name__", "task"), task, counts_labels=False)
    # A compiled micro batch adds into gradients that exist, and drops what it finds in them if it is the first.
    drops_in_program = accumulation > 1 and backend.expected_compilations > 0
    scaler = backend.loss_scaler
    if scaler is not None:
        scaler.require_skippable(optimizer)

    def expected_count(batch: Batch) -> Tensor:
        """The count of the step's losses on all devices."""
        if "tokens" in batch or task.counts_labels:
            return backend.sum(batch["tokens"].sum())
        rows = next(iter(batch.values()))
        return backend.sum(rows.new_full(rows.shape[:1], accumulation, dtype=torch.float32).sum())

    def forward_backward(batch: Batch, sums: Sums, last: bool) -> Sums:
        """`sums` with those of this batch."""
        expected = expected_count(batch)
        expected = torch.where(expected == 0, 1.0, expected)
        with backend.accumulate(last, model):
            loss_sum, count, _ = task.scores(model, batch)
            mean = loss_sum / expected
            (mean if scaler is None else mean * scaler.scale).backward()
        return {"loss": sums["loss"] + mean.detach(), "share": sums["share"] + count.detach() / expected}

    def micro_batch(batch: Batch, sums: Sums, keeps: Tensor, last: bool) -> Metrics:
        if drops_in_program:
            with torch.no_grad():
                for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                    if parameter.grad is not None:
                        parameter.grad.copy_(torch.where(keeps > 0, parameter.grad, 0.0))
        return forward_backward(batch, sums, last)

    def update(batch: Batch, sums: Sums) -> Metrics:
        """`batch`: the whole step's rows; after several micro batches only the votes of the last."""
        if accumulation == 1:
            sums = forward_backward(batch, sums, last=True)
        votes = [batch["votes"].sum(dim=0)] if "votes" in batch else []
        totals = backend.sum(torch.cat([torch.stack([sums["loss"], sums["share"]]), *votes]))
        loss, is_empty = totals[0], totals[1] == 0
        if not task.counts_labels:
            share = torch.where(is_empty, 1.0, totals[1])
            loss = loss / share
            backend.scale_gradients(model, 1 / share)
        grad_norm = torch.where(is_empty, 0.0, backend.clip_grad_norm(model, max_grad_norm))
        metrics = {"loss": torch.where(is_empty, 0.0, loss), "grad_norm": grad_norm, "is_empty": is_empty.float()}
        skipped = is_empty
        if scaler is not None:
            overflows = ~grad_norm.isfinite()
            metrics |= scaler.update(overflows, is_empty)
            skipped = is_empty | overflows
        with nothing_changed_if(skipped, optimizer):
            optimizer.step()
        if accumulation == 1 or drops_in_program:
            backend.zero_gradients(optimizer, keep=accumulation > 1)
        return metrics | ({"votes": totals[2:]} if votes else {})

    run_micro_batch = backend.compile(micro_batch, "micro_batch")
    run_update = backend.compile(update, "train_step" if accumulation == 1 else "update")

    def step(batches: Sequence[Batch], lr: float | Tensor) -> Metrics:
        if len(batches) != accumulation:
            raise ValueError(f"step: expected {accumulation} micro batches (accumulation), found {len(batches)}")
        numbers, groups = step_numbers(optimizer, float(lr)), optimizer.param_groups
        numbers |= {"loss": 0.0, "share": 0.0, "first": 0.0, "later": 1.0}
        placed = backend.place({name: torch.tensor(number) for name, number in numbers.items()})
        rates = [group["lr"] for group in groups]
        set_step_numbers(optimizer, numbers, placed)
        if not drops_in_program:
            backend.zero_gradients(optimizer, keep=accumulation > 1)
        sums, last = {name: placed[name] for name in ("loss", "share")}, batches[-1]
        if accumulation > 1:
            for number, batch in enumerate(batches, start=1):
                keeps = placed["first" if number == 1 else "later"]
                sums = run_micro_batch(batch, sums, keeps, number == accumulation)
            last = {"votes": last["votes"]} if "votes" in last else {}
        metrics = run_update(last, sums)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        return metrics

    return step
