"""Adafactor: the second moment of a matrix as its row means and column means."""

from typing import Any

import torch
from torch import Tensor

from portable_fsdp.optim.counting import CountingOptimizer, Number

EPS = 1e-30  # the paper's first epsilon


class Adafactor(CountingOptimizer):
    """Adafactor (Shazeer and Stern, arXiv 1804.04235, algorithms 4 and 5) with the learning rate of the schedule.

    That is transformers' with scale_parameter=False and relative_step=False, as its Trainer has it: no first moment, no
    step relative to the weights. With k = t^-0.8 in the t-th step of a parameter, R and C (state `exp_avg_sq_row`,
    `exp_avg_sq_col`) move by k towards the means of gradient^2 + 1e-30 over columns and rows of the last two
    dimensions; u = gradient / sqrt(R C / mean(R)); parameter = parameter * (1 - lr * w) - lr * u / max(1, rms(u)).
    Vectors have the whole second moment. torch's reads the norm of each parameter back to the host.
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: Number) -> None:
        super().__init__(groups, {"lr": lr})

    def prepare(self, group: dict[str, Any], count: Number) -> tuple[Number, ...]:
        return (count**-0.8,)

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], *prepared: Number) -> None:
        state, (share,) = self.state[parameter], prepared
        if not state:
            state["step"] = torch.zeros(())
            state |= {name: gradient.new_zeros(shape) for name, shape in _shapes(parameter).items()}
        state["step"] += 1
        square = gradient.square() + EPS
        if parameter.dim() >= 2:
            rows, columns = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
            rows.add_((_mean(square, -1) - rows) * share)
            columns.add_((_mean(square, -2) - columns) * share)
            root = (rows / _mean(rows, -1)[..., None]).rsqrt()[..., None] * columns.rsqrt()[..., None, :]
        else:
            root = state["exp_avg_sq"].add_((square - state["exp_avg_sq"]) * share).rsqrt()
        update = gradient * root
        rms = (update.square().sum() / update.numel()).sqrt()
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(update * (group["lr"] / rms.clamp(min=1.0)))


def _shapes(parameter: Tensor) -> dict[str, list[int]]:
    shape = list(parameter.shape)
    if len(shape) < 2:
        return {"exp_avg_sq": shape}
    return {"exp_avg_sq_row": shape[:-1], "exp_avg_sq_col": [*shape[:-2], shape[-1]]}


def _mean(tensor: Tensor, dim: int) -> Tensor:
    """The mean by a sum: DTensor's mean over uneven shards would weigh each process alike."""
    return tensor.sum(dim) / tensor.shape[dim]
