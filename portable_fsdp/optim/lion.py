"""Lion: the sign of a momentum."""

from typing import Any

import torch
from torch import Tensor

from portable_fsdp.optim.counting import CountingOptimizer, Number


class Lion(CountingOptimizer):
    """Lion (Chen et al., arXiv 2302.06675, algorithm 2), weight decay w scaled by lr:
    parameter = parameter * (1 - lr * w) - lr * sign(b1 * m + (1 - b1) * gradient); m = b2 * m + (1 - b2) * gradient.
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: Number, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas})

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], *prepared: Number) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
        sign = state["exp_avg"].lerp(gradient, 1 - beta1).sign()
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(sign * group["lr"])
        state["exp_avg"].lerp_(gradient, 1 - beta2)
