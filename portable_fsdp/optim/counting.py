"""Optimizers that count steps on the host: their base, AdamW (and Adam), SGD and Lion. The others have a module each.

They run in eager and in compiled steps; of torch's own, only AdamW and Adam do better in eager ones.
"""

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

Number = float | Tensor
"""A step's number: Python's own, or a compiled step's input."""


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step changes nothing where the tensor `found_inf` is 1, as that of torch's fused optimizers."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


class CountingOptimizer(torch.optim.Optimizer):
    """Counts each parameter's steps on the host, in its state `step` if it has one, and reads nothing of the device.

    It can skip a step on the device, as torch's fused optimizers do: a step changes nothing where the tensor
    `found_inf` is 1. The host counts such steps too; `skips` has their number on the device, and `settle_counts`
    subtracts it before a save.

    torch's `capturable` optimizers count on the device and correct by each count, which nearly doubles compile time.
    Here parameters of equal counts share what follows from them; in a compiled step counts are inputs, which
    `set_step_numbers` sets.
    """

    _step_supports_amp_scaling = True

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> None:
        super().__init__(groups, {"weight_decay": 0.0, **defaults})
        self.placed: Mapping[str, Tensor] = {}
        self.skips: dict[Tensor, Tensor] = {}
        """Parameter -> how many of the steps that `step` counts changed nothing, 0-dim; absent: none."""

    def prepare(self, group: dict[str, Any], count: Number) -> tuple[Number, ...]:
        """What `update` takes for all parameters of one group whose next step is number `count`."""
        return ()

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], *prepared: Number) -> None:
        """Change `parameter` and its state, which begins as zeros."""
        raise NotImplementedError

    def counts(self) -> dict[str, float]:
        """What the host knows of the next step by name: the number that it has for each parameter, and 0 skips."""
        groups = [self._by_count(group) for group in self.param_groups]
        return {f"step {count}": float(count) for group in groups for count, _ in group} | {"skips": 0.0}

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient. There is no closure: nothing here evaluates a loss again."""
        found_inf, skips = cast(Tensor | None, getattr(self, "found_inf", None)), dict[int, Tensor]()
        with torch.no_grad():
            for group in self.param_groups:
                for (count, _), parameters in self._by_count(group).items():
                    known, number = self.skips.get(parameters[0], self.placed.get("skips")), count
                    if known is not None:
                        number = self.placed.get(f"step {count}", count) - known
                    prepared = self.prepare(group, number)
                    for parameter in parameters:
                        if parameter.grad is None:
                            continue
                        before = [] if found_inf is None else [value.clone() for value in self._changed(parameter)]
                        self.update(parameter, parameter.grad, group, *prepared)
                        if found_inf is not None:
                            for value, old in zip(self._changed(parameter), before, strict=True):
                                value.copy_(torch.where(found_inf > 0, old, value))
                            if "step" in self.state[parameter]:  # one tensor for all that counted alike so far
                                if id(known) not in skips:
                                    skips[id(known)] = found_inf if known is None else known + found_inf
                                self.skips[parameter] = skips[id(known)]

    def settle_counts(self) -> None:
        """Take steps that changed nothing out of the counts on the host. Waits for the device."""
        for parameter, skips in self.skips.items():
            self.state[parameter]["step"] -= skips.item()
        self.skips.clear()

    def _changed(self, parameter: Tensor) -> list[Tensor]:
        """What an update changes on the device: a parameter and its state."""
        state = self.state[parameter].items()
        return [parameter, *(value for name, value in state if isinstance(value, Tensor) and name != "step")]

    def _by_count(self, group: dict[str, Any]) -> dict[tuple[int, int], list[Tensor]]:
        """A group's parameters that counted alike so far, by the number of their next step, from 1, and `skips`."""
        grouped: dict[tuple[int, int], list[Tensor]] = {}
        for parameter in group["params"]:
            steps = self.state.get(parameter, {}).get("step")
            count = 1 if steps is None else int(steps.item()) + 1
            grouped.setdefault((count, id(self.skips.get(parameter))), []).append(parameter)
        return grouped


def adamw_prepare(group: dict[str, Any], count: Number) -> tuple[Number, ...]:
    """What `adamw_update` takes for all parameters of one group and count."""
    first, second = (_bias_correction(beta, count) for beta in group["betas"])
    return 1 - group["lr"] * group["weight_decay"], group["lr"] / first, second**0.5


def _bias_correction(beta: float, count: Number) -> Number:
    """1 - beta^count; on the device without the digits that float32 would lose where beta^count is about 1."""
    if isinstance(count, Tensor):
        return -torch.expm1(count * (math.log(beta) if beta else -math.inf))
    return 1 - beta**count


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

    def prepare(self, group: dict[str, Any], count: Number) -> tuple[Number, ...]:
        return adamw_prepare(group, count)

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], *prepared: Number) -> None:
        adamw_update(self.state[parameter], parameter, gradient, group, prepared, self._decoupled)


class SGD(CountingOptimizer):
    """SGDW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 1), weight decay w scaled by lr as in torch's AdamW:
    b = m * b + gradient; parameter = parameter * (1 - lr * w) - lr * b.

    torch's SGD couples the decay to the gradient, and reads a device's learning rate back to the host in each step.
    """

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
