"""The train step: only the algorithm, the same for all engines.

The loss is a sum over the global batch divided by its count, so gradients are sums too and don't depend on the number
of devices or micro batches. If only the loss itself can count (the user's own task), backward divides by the number of
rows, and gradients are corrected once all counts are known.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from numbers import Real
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from portable_fsdp.backends.contract import Backend, Batch, Metrics, as_batch
from portable_fsdp.models.tasks import CAUSAL_LM, Task, TaskFunction, run_layers
from portable_fsdp.optim.counting import nothing_changed_if, set_step_numbers, step_numbers
from portable_fsdp.runtime.errors import ConfigError

if TYPE_CHECKING:  # models without dropout and experts don't load these
    from portable_fsdp.models.dropout import Draws
    from portable_fsdp.models.routers import Routers

Sums = dict[str, Tensor]
"""0-dim sums divided by the expected count of the step: `loss`, the losses so far, and `share`, the actual count. With
experts also `loads`, and for a router loss `balance`, see `models.routers.Routers`."""


def drop_gradients(optimizer: torch.optim.Optimizer, keeps: Tensor) -> None:
    """Zero gradients in place unless `keeps` (0-dim, 0 or 1), for a program that accumulates into them."""
    with torch.no_grad():
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None:
                parameter.grad.copy_(torch.where(keeps > 0, parameter.grad, 0.0))


def expected_count(backend: Backend, task: Task, batch: Batch, counts: Tensor, accumulation: int) -> Tensor:
    """Return the divisor of the step's losses, 0-dim, at least 1: `counts` of all processes, or if only the task can
    count, the rows of the global batch. *collective*"""
    if not task.counts_labels:
        rows = next(iter(batch.values()))
        counts = backend.sum(rows.new_full(rows.shape[:1], accumulation, dtype=torch.float32).sum())
    return torch.where(counts == 0, 1.0, counts)


def mean_loss(backend: Backend, model: nn.Module, task: Task, sums: Sums) -> tuple[Tensor, Tensor]:
    """Return (mean loss of the global batch, whether nothing counts in it), 0-dim. Corrects gradients by the count that
    the task returned, if it wasn't known before. *collective*"""
    loss, share = backend.sum(torch.stack([sums["loss"], sums["share"]])).unbind()
    is_empty = share == 0
    if not task.counts_labels:
        share = torch.where(is_empty, 1.0, share)
        loss = loss / share
        backend.scale_gradients(model, 1 / share)
    return torch.where(is_empty, 0.0, loss), is_empty


@dataclass(frozen=True)
class TrainStep:
    """The step that `train_step` makes. `dataclasses.replace` makes another step of the same model."""

    backend: Backend
    model: nn.Module
    optimizer: torch.optim.Optimizer
    accumulation: int
    max_grad_norm: float | None
    task: Task
    draws: "Draws | None" = None  # dropout by keys of the batch
    routers: "Routers | None" = None  # of experts

    def __call__(
        self, batches: Sequence[Batch], lr: float | Tensor | None = None, control: Sequence[float] = ()
    ) -> Metrics:
        """Run one step, see `train_step`. *collective*"""
        value = self._checked_rate(batches, lr, control)
        count, *votes = control or (0.0,)
        numbers, groups = step_numbers(self.optimizer, value), self.optimizer.param_groups
        numbers |= {"loss": 0.0, "share": 0.0, "first": 0.0, "later": 1.0}
        placed = self.backend.place({name: torch.tensor(number) for name, number in numbers.items()})
        numbers_of_process = [count if self.backend.counts_rows else 0.0, *votes]
        placed_control = {"control": self.backend.place_control(numbers_of_process)}
        rates = [group["lr"] for group in groups]
        set_step_numbers(self.optimizer, numbers, placed)
        if not self._drops_in_program:
            self.backend.zero_gradients(self.optimizer, keep=self.accumulation > 1)
        sums = {name: placed[name] for name in ("loss", "share")}
        if self.routers is not None and self.accumulation > 1:
            sums |= self.backend.place(self.routers.zeros(), axes=())
            if self.routers.has_loss:
                for batch in batches:
                    sums["balance"] = self._run_count_choices(batch, sums["balance"])["balance"]
        if self.accumulation == 1:
            metrics = self._run_update(sums, batches[0], placed_control, placed["first"])
        else:
            results = sums
            for number, batch in enumerate(batches, start=1):
                keeps = placed["first" if number == 1 else "later"]
                results = self._run_micro_batch(batch, placed_control, sums, keeps, number == self.accumulation)
                sums = {name: results[name] for name in sums}
            metrics = self._run_update(results)
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        return metrics

    def _checked_rate(self, batches: object, lr: object, control: object) -> float:
        """Return the learning rate, which a tensor may hold on the device: reading it waits. Raises ConfigError for
        arguments that aren't those of a step."""
        if not isinstance(lr, Real | Tensor):
            raise ConfigError("step: needs the learning rate, a number.\n  Write step(batches, config.optim.lr).")
        if (isinstance(lr, Tensor) and lr.numel() != 1) or not math.isfinite(value := float(cast(float, lr))):
            raise ConfigError(f"step: expected one finite learning rate, found {lr}.")
        if not isinstance(control, Sequence):
            raise ConfigError(f"step: expected a list of counts, found {control}.\n  Write step(..., lr, [{control}]).")
        each = cast(Sequence[object], batches) if isinstance(batches, list | tuple) else None
        if each is None or len(each) != self.accumulation:
            actual = f"a {type(batches).__name__}" if each is None else len(each)
            fix = "Write step([batch], lr), with as many batches as train_step(accumulation=...) says"
            raise ConfigError(f"step: expected a list of {self.accumulation} micro batches, found {actual}.\n  {fix}.")
        placed = [value for batch in each for value in as_batch(batch).values()]
        if any(value.device.type != self.backend.device.type for value in placed):
            raise ConfigError("step: a batch isn't on the engine's device.\n  Write step([engine.place(batch)], lr).")
        if self.task.counts_labels and not control:
            fix = "Write step(batches, lr, [count]), or for a loss of your own train_step(..., task=your_function)"
            raise ConfigError(f"step: {self.task.name} needs the count of losses.\n  {fix}.")
        return value

    @property
    def _drops_in_program(self) -> bool:
        """A compiled micro batch accumulates into existing gradients; the first one zeroes them."""
        return self.accumulation > 1 and self.backend.expected_compilations > 0

    @cached_property
    def _run_micro_batch(self) -> Callable[..., Metrics]:
        return self.backend.compile(self._micro_batch, "micro_batch")

    @cached_property
    def _run_update(self) -> Callable[..., Metrics]:
        return self.backend.compile(self._update, "train_step" if self.accumulation == 1 else "update")

    @cached_property
    def _run_count_choices(self) -> Callable[..., Metrics]:
        return self.backend.compile(self._count_choices, "count_choices")

    def drawing(self) -> AbstractContextManager[Callable[..., Any]]:
        """Context of forward and backward, with `run(function, batch)`, which returns `function(batch)`: torch's
        dropouts draw by the keys of the batch, see `models.dropout`."""
        return nullcontext(lambda function, batch: function(batch)) if self.draws is None else self.draws.drawing()

    def _count_choices(self, batch: Batch, balance: Tensor) -> Metrics:
        """Count the choices of routers in a forward without gradients. *collective*"""
        assert self.routers is not None
        self.routers.open(self.backend.device)
        with self.backend.evaluate(), self.drawing() as run:
            run(partial(run_layers, self.model), batch)
        return {"balance": balance + self.routers.take(self.backend.sum)["balance"]}

    def _micro_batch(self, batch: Batch, control: Batch, sums: Sums, keeps: Tensor, last: bool) -> Metrics:
        if self._drops_in_program:
            drop_gradients(self.optimizer, keeps)
        totals = self.backend.sum_control(control["control"])
        expected = expected_count(self.backend, self.task, batch, totals[0], self.accumulation)
        return self._add_gradients(batch, expected, sums, last=last) | {"votes": totals[1:]}

    def _add_gradients(self, batch: Batch, expected: Tensor, sums: Sums, *, last: bool) -> Sums:
        """Run forward and backward of a micro batch; returns `sums` plus those of this batch. *collective*"""
        routers, scaler, of_routers = self.routers, self.backend.loss_scaler, Sums()
        scale = 1.0 if scaler is None else scaler.scale
        with self.backend.accumulate(last, self.model), self.drawing() as run:
            if routers is not None:
                routers.open(self.backend.device)
            loss_sum, count, _ = run(partial(self.task.scores, self.model), batch)
            mean = loss_sum / expected
            if routers is not None:
                of_routers = routers.take(self.backend.sum, balance=sums.get("balance"))
                if "loads" in sums:
                    of_routers["loads"] = of_routers["loads"] + sums["loads"]
                if routers.has_loss:
                    routers.prepare_backward(of_routers["balance"], scale)
            (mean if scaler is None else mean * scale).backward()
        return {"loss": sums["loss"] + mean.detach(), "share": sums["share"] + count.detach() / expected, **of_routers}

    def _update(self, sums: Metrics, *only: Any) -> Metrics:
        """Run after the last micro batch; `only`: arguments of the only micro batch, which runs in the same program."""
        backend, optimizer = self.backend, self.optimizer
        if only:
            batch, control, keeps = only
            sums = self._micro_batch(batch, control, sums, keeps, last=True)
        loss, is_empty = mean_loss(backend, self.model, self.task, sums)
        grad_norm = backend.clip_grad_norm(self.model, self.max_grad_norm)  # undoes loss scaling too
        grad_norm = torch.where(is_empty, 0.0, grad_norm)
        metrics: Metrics = {}
        is_skipped = is_empty
        if backend.loss_scaler is not None:
            overflows = ~grad_norm.isfinite()
            metrics, is_skipped = backend.loss_scaler.update(overflows, is_empty), is_empty | overflows
        with nothing_changed_if(is_skipped, optimizer):
            optimizer.step()
        if self.routers is not None:
            metrics |= self.routers.finish_step(sums, is_skipped, backend.sum)
        if self.accumulation == 1:
            backend.zero_gradients(optimizer, keep=False)
        metrics |= {"loss": loss, "grad_norm": grad_norm, "is_empty": is_empty.float()}
        return metrics | ({"votes": sums["votes"]} if len(sums["votes"]) else {})


def train_step(
    backend: Backend,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    accumulation: int,
    max_grad_norm: float | None,
    task: Task | TaskFunction = CAUSAL_LM,
    draws: "Draws | None" = None,
    routers: "Routers | None" = None,
) -> TrainStep:
    """Make the step of a run: `step(batches, lr, control)` with `accumulation` placed micro batches is one update.

    `control`: numbers of this process. The first is the count of its losses over all micro batches, from `Batches`; the
    step sums the others over all processes (votes). Your own `task` counts by itself and needs no control numbers:
    `step(batches, lr)`. Its batches may have any keys, with the same number of rows in each micro batch.

    The step returns `loss` (mean over all that the task counts in the global batch, before the update), `grad_norm`
    (before clipping) and `votes` `[n]`, the sums of the other control numbers: device tensors, without synchronization.
    In float16 also `loss_scale`, and `skipped_steps` so far: a step with overflowing gradients changes no weight, and
    its `grad_norm` isn't finite. `is_empty` is 1 in a step in which nothing counts: its loss is 0, and it changes no
    weight, optimizer state or loss scale. With experts: `expert_load` `[experts]`, their shares of all choices;
    `expert_load_max`, the largest load of an expert over the mean of its layer; `experts_dropped`, the share of rows
    that `sharding.expert_capacity` drops; and `router_loss`, which `loss` leaves out.

    A router loss is that of the global batch: several micro batches run a forward more, all of them before the first
    backward, to count choices.

    Earlier gradients in the model's weights are dropped. `lr` may be a 0-dim tensor, which the host reads; learning
    rates in the optimizer's groups are restored. Calling the step is collective. It raises ConfigError for a wrong
    number of micro batches, one that isn't placed, and missing numbers.

    `draws`, `routers`: of a model that `train.build` makes.

    One micro batch compiles to one program; several to two, `micro_batch` and `update`.
    """
    task = task if isinstance(task, Task) else Task(getattr(task, "__name__", "task"), task, counts_labels=False)
    if backend.loss_scaler is not None:
        backend.loss_scaler.require_skippable(optimizer)
    return TrainStep(backend, model, optimizer, accumulation, max_grad_norm, task, draws, routers)
