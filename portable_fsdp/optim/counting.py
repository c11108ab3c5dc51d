"""Optimizers that count steps on the host: their base, AdamW (and Adam), and SGD. The others have a module each.

They run in eager and in compiled steps; of torch's own, only AdamW and Adam do better in eager ones.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

Number = float | Tensor
"""Of a step: Python's own, or a compiled step's input."""


class CountingOptimizer(torch.optim.Optimizer):
    """Counts each parameter's steps on the host, in its state `step` if it has one, and reads nothing of the device.

    Without `step`, it can skip a step on the device, as torch's fused optimizers do: `found_inf`, set by whoever scales
    losses, is 1 in a step that changes nothing.

    torch's `capturable` optimizers count on the device and correct by each count, which nearly doubles compile time.
    Here parameters of equal counts share what follows from them: numbers, or inputs that `set_step_numbers` sets.
    """

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
        super().__init__(groups, {"weight_decay": 0.0, **defaults})
        self.placed: Mapping[str, Number] = {}

    def numbers(self, group: dict[str, Any], count: int) -> list[tuple[str, float]]:
        """What follows from the count of a group's next step, by name."""
        return []

    def prepare(self, group: dict[str, Any], *numbers: Number) -> tuple[Number, ...]:
        """What `update` takes for all parameters of one group and count; `numbers`: those of `numbers`."""
        return numbers

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], *prepared: Number) -> None:
        """Change `parameter` and its state, which begins as zeros."""
        raise NotImplementedError

    def corrections(self) -> dict[str, float]:
        """The numbers of the next step by name, for each group and count that there is."""
        groups = [(group, count) for group in self.param_groups for count in self._by_count(group)]
        return dict(pair for group, count in groups for pair in self.numbers(group, count))

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient. There is no closure: nothing here evaluates a loss again."""
        numbers, found_inf = self.placed or self.corrections(), cast(Tensor | None, getattr(self, "found_inf", None))
        with torch.no_grad():
            for group in self.param_groups:
                for count, parameters in self._by_count(group).items():
                    prepared = self.prepare(group, *(numbers[name] for name, _ in self.numbers(group, count)))
                    for parameter in parameters:
                        if parameter.grad is None:
                            continue
                        before = [] if found_inf is None else [value.clone() for value in self._changed(parameter)]
                        self.update(parameter, parameter.grad, group, *prepared)
                        if found_inf is not None:
                            for value, old in zip(self._changed(parameter), before, strict=True):
                                value.copy_(torch.where(found_inf > 0, old, value))

    def _changed(self, parameter: Tensor) -> list[Tensor]:
        """What an update changes: a parameter and its state."""
        return [parameter, *(value for value in self.state[parameter].values() if isinstance(value, Tensor))]

    def _by_count(self, group: dict[str, Any]) -> dict[int, list[Tensor]]:
        """A group's parameters by the number that their next step has, from 1."""
        grouped: dict[int, list[Tensor]] = {}
        for parameter in group["params"]:
            steps = self.state.get(parameter, {}).get("step")
            grouped.setdefault(1 if steps is None else int(steps.item()) + 1, []).append(parameter)
        return grouped


def adamw_numbers(group: dict[str, Any], count: int) -> list[tuple[str, float]]:
    """The bias corrections of a group's step `count`, by name."""
    return [(f"1 - {beta} ** {count}", 1 - beta**count) for beta in group["betas"]]


def adamw_prepare(group: dict[str, Any], first: Number, second: Number) -> tuple[Number, ...]:
    """What `adamw_update` takes for all parameters of one group and count, from both corrections."""
    return 1 - group["lr"] * group["weight_decay"], group["lr"] / first, second**0.5


def adamw_update(
    state: dict[str, Any],
    parameter: Tensor,
    gradient: Tensor,
    group: dict[str, Any],
    prepared: tuple[Number, ...],
    decoupled: bool = True,
) -> None:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2), as torch's.

    m = b1 * m + (1 - b1) * gradient; v = b2 * v + (1 - b2) * gradient^2; in the t-th step of a parameter
    parameter = parameter * (1 - lr * w) - lr * m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps).
    Not `decoupled` it is torch's Adam: w * parameter is added to the gradient.
    """
    (beta1, beta2), (shrink, size, root) = group["betas"], prepared
    if not state:
        state["step"] = torch.zeros(())
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
    state["step"] += 1
    if group["weight_decay"] and not decoupled:
        gradient = gradient + group["weight_decay"] * parameter
    mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
    square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    if group["weight_decay"] and decoupled:
        parameter.mul_(shrink)
    parameter.sub_(size * mean / (square.sqrt() / root + group["eps"]))


class AdamW(CountingOptimizer):
    """AdamW, or Adam, for a compiled step."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        lr: Number,
        betas: tuple[float, float],
        eps: float,
        decoupled: bool = True,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self._decoupled = decoupled

    def numbers(self, group: dict[str, Any], count: int) -> list[tuple[str, float]]:
        return adamw_numbers(group, count)

    def prepare(self, group: dict[str, Any], *numbers: Number) -> tuple[Number, ...]:
        return adamw_prepare(group, *numbers)

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], *prepared: Number) -> None:
        adamw_update(self.state[parameter], parameter, gradient, group, prepared, self._decoupled)


class SGD(CountingOptimizer):
    """SGDW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 1), weight decay w scaled by lr as in torch's AdamW:
    b = m * b + gradient; parameter = parameter * (1 - lr * w) - lr * b.

    torch's SGD couples the decay to the gradient, and reads a device's learning rate back to the host in each step.
    """

    _step_supports_amp_scaling = True

    def __init__(self, groups: list[dict[str, Any]], *, lr: Number, momentum: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum})

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], *prepared: Number) -> None:
        if group["momentum"]:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            gradient = state["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(gradient * group["lr"])
