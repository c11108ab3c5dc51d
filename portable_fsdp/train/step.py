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

    It returns `loss` (mean over the counted tokens of the global batch, before the update), `grad_norm` (before
    clipping) and, where the batches hold `votes` [rows, n], their sum over the rows of all data shards [n]: device
    tensors that nobody has waited for. One micro batch makes one program; several make two, `micro_batch` and `update`.
    """

    def forward_backward(batch: Batch, loss: Tensor, last: bool) -> Tensor:
        tokens = backend.sum(batch["tokens"].sum())
        with backend.accumulate(last):
            loss_sum, _ = forward(model, batch)
            mean = loss_sum / tokens
            mean.backward()
        return loss + mean.detach()

    def micro_batch(batch: Batch, loss: Tensor, last: bool) -> Metrics:
        return {"loss": forward_backward(batch, loss, last)}

    def update(batch: Batch, loss: Tensor) -> Metrics:
        """`batch`: the whole step's rows; after several micro batches only the votes of the last."""
        if accumulation == 1:
            loss = forward_backward(batch, loss, last=True)
        grad_norm = backend.clip_grad_norm(model, max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=accumulation == 1)
        votes = [batch["votes"].sum(dim=0)] if "votes" in batch else []
        totals = backend.sum(torch.cat([loss[None], *votes]))
        return {"loss": totals[0], "grad_norm": grad_norm, **({"votes": totals[1:]} if votes else {})}

    run_micro_batch = backend.compile(micro_batch, "micro_batch")
    run_update = backend.compile(update, "train_step" if accumulation == 1 else "update")

    def step(batches: Sequence[Batch], lr: float) -> Metrics:
        numbers = step_numbers(optimizer, lr)
        tensors = {name: torch.tensor(number) for name, number in numbers.items()}
        placed = backend.place({"loss": torch.zeros(()), **tensors})
        set_step_numbers(optimizer, numbers, placed)
        loss, last = placed["loss"], batches[-1]
        if accumulation == 1:
            return run_update(last, loss)
        for number, batch in enumerate(batches, start=1):
            loss = run_micro_batch(batch, loss, number == accumulation)["loss"]
        return run_update({"votes": last["votes"]} if "votes" in last else {}, loss)

    return step
