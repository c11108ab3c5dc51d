"""Optimizers: AdamW, torch's own or one for compiled steps, and an SGD with the same decoupled weight decay.

A backend makes the optimizer once its parameters are laid out: `make_optimizer` gives it the function to call. The loop
tells it the numbers of each step (`step_numbers`, `set_step_numbers`): a compiled step takes them as inputs.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from portable_fsdp.config.patterns import matching
from portable_fsdp.config.schema import Optim, OptimGroup
from portable_fsdp.runtime.errors import ConfigError


def parameter_groups(
    named_shapes: Mapping[str, tuple[int, ...]],
    optim: Optim,
    *,
    ties: Mapping[str, str] | None = None,
    frozen: Collection[str] = (),
) -> list[dict[str, Any]]:
    """The parameters that train, by what an update does to them; no group is empty.

    A group's `params` are FQNs in the order of `named_shapes`. The first of `optim.groups` that matches gives
    `weight_decay` and `lr_share` (its learning rate as a share of the schedule's). By default tensors of two or more
    dimensions decay, embedding tables included; biases and norm weights don't. `ties`: further FQN of a tied weight ->
    its first; any of them may match. `frozen`: FQNs of weights that don't train. Raises ConfigError for a group of
    `optim.groups` that takes nothing.
    """
    first = {fqn: fqn for fqn in (*named_shapes, *frozen)} | dict(ties or {})
    own = _own_group(first, named_shapes.keys(), optim)
    grouped: dict[tuple[float, float], list[str]] = {}
    for fqn, shape in named_shapes.items():
        group = own.get(fqn, OptimGroup(match=fqn))
        default = optim.weight_decay if len(shape) >= 2 else 0.0
        decay = default if group.weight_decay is None else group.weight_decay
        share = 1.0 if group.lr is None else group.lr / optim.lr
        grouped.setdefault((decay, share), []).append(fqn)
    return [{"params": fqns, "weight_decay": decay, "lr_share": share} for (decay, share), fqns in grouped.items()]


def _own_group(first: Mapping[str, str], trained: Collection[str], optim: Optim) -> dict[str, OptimGroup]:
    """Trained FQN -> the first of `optim.groups` that matches it; `first`: FQN -> the first one of its weight."""
    own: dict[str, OptimGroup] = {}
    for index, group in enumerate(optim.groups):
        key = f"optim.groups[{index}].match"
        names = list(dict.fromkeys(first[fqn] for fqn in matching(key, group.match, first)))
        trains = [fqn for fqn in names if fqn in trained]
        if not trains:
            raise ConfigError(
                f"{key}: expected a pattern that names parameters which train, found {group.match!r}: all that it "
                f"names, {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}, is frozen by model.freeze.\n"
                "  Leave the group out, or freeze less."
            )
        if own.keys() >= set(trains):
            raise ConfigError(
                f"{key}: expected a pattern that names parameters which no earlier group has taken, found "
                f"{group.match!r}.\n  The first group that matches counts: put this one before."
            )
        own = dict.fromkeys(trains, group) | own
    return own


def make_optimizer(optim: Optim) -> Callable[[list[dict[str, Any]], bool], torch.optim.Optimizer]:
    """`make(groups, compiled)`, which makes the config's optimizer from groups of parameters.

    A compiled step may hold no number that changes with the step: lr is then a float32 tensor, and AdamW the one below.
    The state of either AdamW has the same names, shapes and dtypes.
    """

    def make(groups: list[dict[str, Any]], compiled: bool) -> torch.optim.Optimizer:
        lr = torch.tensor(optim.lr) if compiled else optim.lr
        if optim.name == "sgd":
            return SGD(groups, lr=lr, momentum=optim.momentum)
        if isinstance(lr, Tensor):
            return AdamW(groups, lr=lr, betas=optim.betas, eps=optim.eps)
        parameters = [cast(Tensor, parameter) for group in groups for parameter in group["params"]]
        on_cuda = all(parameter.device.type == "cuda" for parameter in parameters)
        # fused=None: torch's default, which refuses no device
        return torch.optim.AdamW(groups, lr=lr, betas=optim.betas, eps=optim.eps, fused=True if on_cuda else None)

    return make


def step_numbers(optimizer: torch.optim.Optimizer, lr: float) -> dict[str, float]:
    """The host's numbers of the next step by name, for `set_step_numbers`: shares of `lr`, AdamW's bias corrections.

    Names may change with the step; how many there are doesn't while the same parameters train.
    """
    rates = {_rate(group): lr * _share(group) for group in optimizer.param_groups}
    return rates | optimizer.corrections() if isinstance(optimizer, AdamW) else rates


def set_step_numbers(
    optimizer: torch.optim.Optimizer, numbers: Mapping[str, float], placed: Mapping[str, Tensor]
) -> None:
    """Set the `step_numbers` of the next step; `placed` holds them as float32 tensors of the device.

    A compiled step reads these tensors as inputs. A copy into an old tensor would be a program of its own, and a number
    of Python could become part of the program.
    """
    for group in optimizer.param_groups:
        rate = _rate(group)
        group["lr"] = placed[rate] if isinstance(group["lr"], Tensor) else numbers[rate]
    if isinstance(optimizer, AdamW):
        optimizer.placed = placed


def _share(group: dict[str, Any]) -> float:
    return group.get("lr_share", 1.0)  # groups that others made have none


def _rate(group: dict[str, Any]) -> str:
    return f"lr * {_share(group)}"


def _correction(beta: float, count: int) -> str:
    return f"1 - {beta} ** {count}"


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2), as torch's, for a compiled step.

    m = b1 * m + (1 - b1) * gradient; v = b2 * v + (1 - b2) * gradient^2; in the t-th step of a parameter
    parameter = parameter * (1 - lr * w) - lr * m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps).

    Step counts rest on the host. torch's `capturable` AdamW keeps them on the device and corrects by each, which nearly
    doubles compile time. Here parameters of equal counts share two inputs, which `set_step_numbers` sets.
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: Tensor, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.placed: Mapping[str, Tensor] = {}

    def corrections(self) -> dict[str, float]:
        """The bias corrections of the next step by name, for each count and beta that there is."""
        return {
            _correction(beta, count): 1 - beta**count
            for group in self.param_groups
            for count in self._by_count(group)
            for beta in group["betas"]
        }

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient. There is no closure: nothing here evaluates a loss again."""
        with torch.no_grad():
            for group in self.param_groups:
                shrink = 1 - group["lr"] * group["weight_decay"]
                for count, parameters in self._by_count(group).items():
                    first, second = (self.placed[_correction(beta, count)] for beta in group["betas"])
                    size, root = group["lr"] / first, second.sqrt()
                    for parameter in parameters:
                        if parameter.grad is not None:
                            self._update(parameter, parameter.grad, group, shrink, size, root)

    def _by_count(self, group: dict[str, Any]) -> dict[int, list[Tensor]]:
        """A group's parameters by the number that their next step has, from 1."""
        grouped: dict[int, list[Tensor]] = {}
        for parameter in group["params"]:
            count = int(self.state.get(parameter, {}).get("step", 0)) + 1
            grouped.setdefault(count, []).append(parameter)
        return grouped

    def _update(
        self, parameter: Tensor, gradient: Tensor, group: dict[str, Any], shrink: Tensor, size: Tensor, root: Tensor
    ) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        mean = state["exp_avg"].lerp_(gradient, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        if group["weight_decay"]:
            parameter.mul_(shrink)
        parameter.sub_(size * mean / (square.sqrt() / root + group["eps"]))


class SGD(torch.optim.Optimizer):
    """SGDW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 1), weight decay w scaled by lr as in torch's AdamW:
    b = m * b + gradient; parameter = parameter * (1 - lr * w) - lr * b.

    torch's SGD couples the decay to the gradient, and reads a device's learning rate back to the host in each step.
    """

    def __init__(self, groups: list[dict[str, Any]], *, lr: float | Tensor, momentum: float) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient. There is no closure: nothing here evaluates a loss again."""
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, parameter.grad, group)

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if group["momentum"]:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            gradient = state["momentum_buffer"].mul_(group["momentum"]).add_(gradient)
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(gradient * group["lr"])
