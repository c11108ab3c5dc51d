"""The train step: the algorithm and nothing else. One for all engines.

The loss is a sum over the global batch divided by its token count, so that gradients are sums too and neither the
number of devices nor that of micro batches changes them.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from portable_fsdp.backends.base import Backend, Batch, Metrics
from portable_fsdp.optim.optimizer import set_step_numbers, step_numbers

Step = Callable[[Sequence[Batch], float], Metrics]


def forward(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """(loss_sum, token_count) of a placed batch, as the model's loss gives them."""
    documents = [batch["positions"], batch["segments"]] if "segments" in batch else []
    return model(batch["input_ids"], batch["labels"], *documents)


def train_step(
    backend: Backend,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    accumulation: int,
    max_grad_norm: float | None,
) -> Step:
    """Make the step of a run: `step(batches, lr)` with `accumulation` placed micro batches, one optimizer update.

    The step returns `loss` (mean over the counted tokens of the global batch, before the update), `grad_norm` (before
    clipping) and, where the batches bring `votes` [rows, n], its sum over the rows of all data shards [n]: device
    tensors that nobody has waited for.
    With one micro batch it is one program, with several two: one for a micro batch, one for the update.
    """

    def forward_backward(batch: Batch, loss: Tensor, last: bool) -> Tensor:
        tokens = backend.sum(batch["tokens"].sum())
        with backend.accumulate(last):
            loss_sum, _ = forward(model, batch)
            mean = loss_sum / tokens
            mean.backward()
        return loss + mean.detach()

    def update(loss: Tensor, *votes: Tensor) -> Metrics:
        grad_norm = backend.clip_grad_norm(model, max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=accumulation == 1)
        totals = backend.sum(torch.cat([loss[None], *(one.sum(dim=0) for one in votes)]))
        told = {"votes": totals[1:]} if votes else {}
        return {"loss": totals[0], "grad_norm": grad_norm, **told}

    def whole(batch: Batch, loss: Tensor) -> Metrics:
        return update(forward_backward(batch, loss, last=True), *_votes(batch))

    def micro(batch: Batch, loss: Tensor, last: bool) -> Metrics:
        return {"loss": forward_backward(batch, loss, last)}

    run_whole = backend.compile(whole, "train_step")
    run_micro = backend.compile(micro, "micro_batch")
    run_update = backend.compile(update, "update")

    def step(batches: Sequence[Batch], lr: float) -> Metrics:
        numbers = step_numbers(optimizer, lr)
        tensors = {name: torch.tensor(number) for name, number in numbers.items()}
        placed = backend.place({"loss": torch.zeros(()), **tensors})
        set_step_numbers(optimizer, numbers, placed)
        loss = placed["loss"]
        if accumulation == 1:
            return run_whole(batches[0], loss)
        for number, batch in enumerate(batches, start=1):
            loss = run_micro(batch, loss, number == accumulation)["loss"]
        return run_update(loss, *_votes(batches[-1]))

    return step


def _votes(batch: Batch) -> list[Tensor]:
    return [batch["votes"]] if "votes" in batch else []
