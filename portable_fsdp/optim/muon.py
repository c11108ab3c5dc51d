"""Muon for hidden matrices, AdamW for the rest, in one optimizer."""

from typing import Any

import torch
from torch import Tensor

from portable_fsdp.optim.counting import CountingOptimizer, Number, adamw_prepare, adamw_update

COEFFICIENTS, ITERATIONS, EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7  # Jordan's, and torch.optim.Muon's


class Muon(CountingOptimizer):
    """Muon (Jordan et al., kellerjordan.github.io/posts/muon) of groups with `is_hidden`, AdamW of the others.

    It is torch.optim.Muon(adjust_lr_fn="match_rms_adamw") (Liu et al., arXiv 2502.16982), so that one learning rate and
    one weight decay w serve both: m = b * m + (1 - b) * gradient; O = orthogonal((1 - b) * gradient + b * m);
    parameter = parameter * (1 - lr * w) - lr * 0.2 * sqrt(max(rows, columns)) * O.

    torch's iterates in bfloat16 always, and so its rounding, hence the loss curve, would depend on the devices. It also
    reads a device's learning rate back to the host. Here the iteration has the dtype `compute`.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: Number,
        betas: tuple[float, float],
        eps: float,
        momentum: float,
        compute: torch.dtype,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "momentum": momentum, "is_hidden": False}
        super().__init__(groups, defaults)
        self._compute = compute

    def prepare(self, group: dict[str, Any], count: Number) -> tuple[Number, ...]:
        return () if group["is_hidden"] else adamw_prepare(group, count)

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], *prepared: Number) -> None:
        state = self.state[parameter]
        if not group["is_hidden"]:
            adamw_update(state, parameter, gradient, group, prepared)
            return
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        mean = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        orthogonal = orthogonalized(gradient.lerp(mean, group["momentum"]), self._compute)
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(orthogonal * (group["lr"] * (0.2 * max(parameter.shape) ** 0.5)))


def orthogonalized(matrix: Tensor, compute: torch.dtype) -> Tensor:
    """The nearest matrix with singular values near 1 (0.7 to 1.2), by Newton and Schulz's iteration in `compute`."""
    a, b, c = COEFFICIENTS
    # A norm of its own: squares and one sum are the same over shards, and in XLA.
    x = (matrix / matrix.square().sum().sqrt().clamp(min=EPS)).to(compute)
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = x.T if is_tall else x
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if is_tall else x).to(matrix.dtype)
