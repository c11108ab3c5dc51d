"""The train step: the algorithm and nothing else. One for all engines.

The loss is a sum over the global batch divided by its count, so that gradients are sums too and neither the number of
devices nor that of micro batches changes them. Where only the loss itself can tell the count (the user's own task), the
number of rows stands for it in backward, and gradients are corrected once all counts are known.

`train_step` puts the pieces together; they come first, in the order in which a step runs them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from portable_fsdp.backends.contract import Backend, Batch, Metrics
from portable_fsdp.models.tasks import CAUSAL_LM, Task, TaskFunction
from portable_fsdp.optim.counting import LossScaler, nothing_changed_if, set_step_numbers, step_numbers

Step = Callable[..., Metrics]
"""`step(batches, lr, control)`, see `train_step`."""

Sums = dict[str, Tensor]
"""0-dim, over the count that is expected of the step: `loss`, the losses so far, and `share`, what was counted."""


def drop_gradients(optimizer: torch.optim.Optimizer, keeps: Tensor) -> None:
    """Set gradients to zero unless `keeps` (0-dim, 0 or 1), in place: in a program that adds into them."""
    with torch.no_grad():
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None:
                parameter.grad.copy_(torch.where(keeps > 0, parameter.grad, 0.0))


def expected_count(backend: Backend, task: Task, batch: Batch, counts: Tensor, accumulation: int) -> Tensor:
    """What the losses of the step are divided by, 0-dim, at least 1: `counts` of all processes, or where only the task
    can count, the rows of the global batch. *collective*"""
    if not task.counts_labels:
        rows = next(iter(batch.values()))
        counts = backend.sum(rows.new_full(rows.shape[:1], accumulation, dtype=torch.float32).sum())
    return torch.where(counts == 0, 1.0, counts)


def add_gradients(
    backend: Backend, model: nn.Module, task: Task, batch: Batch, expected: Tensor, sums: Sums, *, last: bool
) -> Sums:
    """Forward and backward of a micro batch; `sums` with those of this batch. *collective*"""
    with backend.accumulate(last, model):
        loss_sum, count, _ = task.scores(model, batch)
        mean = loss_sum / expected
        (mean if backend.loss_scaler is None else mean * backend.loss_scaler.scale).backward()
    return {"loss": sums["loss"] + mean.detach(), "share": sums["share"] + count.detach() / expected}


def mean_loss(backend: Backend, model: nn.Module, task: Task, sums: Sums) -> tuple[Tensor, Tensor]:
    """(mean loss of the global batch, whether nothing counts in it), 0-dim. Gradients are corrected by the count that
    the task returned, where nobody knew it before. *collective*"""
    loss, share = backend.sum(torch.stack([sums["loss"], sums["share"]])).unbind()
    is_empty = share == 0
    if not task.counts_labels:
        share = torch.where(is_empty, 1.0, share)
        loss = loss / share
        backend.scale_gradients(model, 1 / share)
    return torch.where(is_empty, 0.0, loss), is_empty


def clip(backend: Backend, model: nn.Module, limit: float | None, is_empty: Tensor) -> Tensor:
    """Undo loss scaling and clip; the gradient norm before, 0-dim. *collective*"""
    return torch.where(is_empty, 0.0, backend.clip_grad_norm(model, limit))


def adapt_loss_scale(scaler: LossScaler | None, grad_norm: Tensor, is_empty: Tensor) -> tuple[Metrics, Tensor]:
    """(metrics of float16, whether the update is skipped): where gradients overflowed, or nothing counts."""
    if scaler is None:
        return {}, is_empty
    overflows = ~grad_norm.isfinite()
    return scaler.update(overflows, is_empty), is_empty | overflows


def train_step(
    backend: Backend,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    accumulation: int,
    max_grad_norm: float | None,
    task: Task | TaskFunction = CAUSAL_LM,
) -> Step:
    """Make the step of a run: `step(batches, lr, control)` with `accumulation` placed micro batches is one update.

    `control`: numbers of this process. The first counts the losses of its rows over all micro batches, as
    `Batches` gives it; the step sums the others over all processes (votes). A `task` of your own counts itself, and
    needs none: `step(batches, lr)`. It may get batches of any keys, with as many rows in each micro batch.

    It returns `loss` (mean over all that the task counts in the global batch, before the update), `grad_norm` (before
    clipping) and `votes` [n], the sums of the further control numbers: device tensors that nobody has waited for. In
    float16 also `loss_scale`, and `skipped_steps` so far: a step whose gradients overflow changes no weight, and its
    `grad_norm` isn't finite. `is_empty` is 1 in a step in which nothing counts: its loss is 0, and it changes no
    weight, optimizer state or loss scale.

    Gradients that something else left in the model's weights are dropped. `lr` may be a 0-dim tensor, which the host
    reads; learning rates in the optimizer's groups stay the user's.

    One micro batch makes one program; several make two, `micro_batch` and `update`.
    """
    task = task if isinstance(task, Task) else Task(getattr(task, "__name__", "task"), task, counts_labels=False)
    # A compiled micro batch adds into gradients that exist, and drops what it finds in them if it is the first.
    drops_in_program = accumulation > 1 and backend.expected_compilations > 0
    if backend.loss_scaler is not None:
        backend.loss_scaler.require_skippable(optimizer)

    def micro_batch(batch: Batch, control: Batch, sums: Sums, keeps: Tensor, last: bool) -> Metrics:
        if drops_in_program:
            drop_gradients(optimizer, keeps)
        totals = backend.sum_control(control["control"])
        expected = expected_count(backend, task, batch, totals[0], accumulation)
        return add_gradients(backend, model, task, batch, expected, sums, last=last) | {"votes": totals[1:]}

    def update(sums: Metrics, *only: Any) -> Metrics:
        """After the last micro batch; `only`: the arguments of the step's only one, in the same program."""
        if only:
            batch, control, keeps = only
            sums = micro_batch(batch, control, sums, keeps, last=True)
        loss, is_empty = mean_loss(backend, model, task, sums)
        grad_norm = clip(backend, model, max_grad_norm, is_empty)
        metrics, skipped = adapt_loss_scale(backend.loss_scaler, grad_norm, is_empty)
        with nothing_changed_if(skipped, optimizer):
            optimizer.step()
        if accumulation == 1 or drops_in_program:
            backend.zero_gradients(optimizer, keep=accumulation > 1)
        metrics |= {"loss": loss, "grad_norm": grad_norm, "is_empty": is_empty.float()}
        return metrics | ({"votes": sums["votes"]} if len(sums["votes"]) else {})

    run_micro_batch = backend.compile(micro_batch, "micro_batch")
    run_update = backend.compile(update, "train_step" if accumulation == 1 else "update")

    def step(batches: Sequence[Batch], lr: float | Tensor, control: Sequence[float] = ()) -> Metrics:
        if len(batches) != accumulation:
            raise ValueError(f"step: expected {accumulation} micro batches (accumulation), found {len(batches)}")
        if task.counts_labels and not control:
            raise ValueError(f"step: expected control=[count], the losses of this process's rows, for {task.name}")
        count, *votes = control or (0.0,)
        numbers, groups = step_numbers(optimizer, float(lr)), optimizer.param_groups
        numbers |= {"loss": 0.0, "share": 0.0, "first": 0.0, "later": 1.0}
        placed = backend.place({name: torch.tensor(number) for name, number in numbers.items()})
        placed_control = {"control": backend.place_control([count if backend.counts_rows else 0.0, *votes])}
        rates = [group["lr"] for group in groups]
        set_step_numbers(optimizer, numbers, placed)
        if not drops_in_program:
            backend.zero_gradients(optimizer, keep=accumulation > 1)
        sums = {name: placed[name] for name in ("loss", "share")}
        if accumulation == 1:
            metrics = run_update(sums, batches[0], placed_control, placed["first"])
        else:
            results = sums
            for number, batch in enumerate(batches, start=1):
                keeps = placed["first" if number == 1 else "later"]
                results = run_micro_batch(batch, placed_control, sums, keeps, number == accumulation)
                sums = {name: results[name] for name in sums}
            metrics = run_update(results)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        return metrics

    return step
