"""Optimizers: torch's AdamW, and an SGD with the same decoupled weight decay.

A backend makes the optimizer once its parameters are laid out: `make_optimizer` gives it the function to call.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from portable_fsdp.config.patterns import matching
from portable_fsdp.config.schema import Optim, OptimGroup
from portable_fsdp.runtime.errors import ConfigError

MakeOptimizer = Callable[[list[dict[str, Any]], bool], torch.optim.Optimizer]
"""`make(groups, capturable)`: groups hold parameters under `params`; capturable keeps step counts and lr on device."""


def parameter_groups(named_shapes: Mapping[str, tuple[int, ...]], optim: Optim) -> list[dict[str, Any]]:
    """The parameters that train, by what an update does to them; no group is empty.

    A group's `params` are FQNs, in the order of `named_shapes`; `weight_decay` and `lr_share` (its learning rate as a
    share of the schedule's) are those of the first of `optim.groups` that matches. Where none says: tensors of two or
    more dimensions decay, embedding tables among them; biases and the weights of norms don't. Raises ConfigError for a
    group of `optim.groups` that takes nothing.
    """
    own = _own_group(list(named_shapes), optim)
    grouped: dict[tuple[float, float], list[str]] = {}
    for fqn, shape in named_shapes.items():
        group = own.get(fqn)
        decay = optim.weight_decay if len(shape) >= 2 else 0.0
        if group is not None and group.weight_decay is not None:
            decay = group.weight_decay
        share = group.lr / optim.lr if group is not None and group.lr is not None else 1.0
        grouped.setdefault((decay, share), []).append(fqn)
    return [{"params": fqns, "weight_decay": decay, "lr_share": share} for (decay, share), fqns in grouped.items()]


def _own_group(fqns: list[str], optim: Optim) -> dict[str, OptimGroup]:
    """FQN -> the first of `optim.groups` that matches it."""
    own: dict[str, OptimGroup] = {}
    for index, group in enumerate(optim.groups):
        key = f"optim.groups[{index}].match"
        new = [fqn for fqn in matching(key, group.match, fqns) if fqn not in own]
        if not new:
            raise ConfigError(
                f"{key}: expected a pattern that names parameters which no earlier group has taken, found "
                f"{group.match!r}.\n  The first group that matches counts: put this one before. Nothing was started."
            )
        own.update(dict.fromkeys(new, group))
    return own


def make_optimizer(optim: Optim) -> MakeOptimizer:
    """The function that makes the config's optimizer from groups of parameters; raises ConfigError for wrong betas.

    `capturable` is for engines that compile the step, in which no number of the host may stand: step counts then live
    on the device, and lr is a float32 tensor, on the host until the first step (AdamW reads it once, to check it).
    """
    if not all(0 <= beta < 1 for beta in optim.betas):
        raise ConfigError(f"optim.betas: expected two numbers from 0 up to, but not, 1, found {list(optim.betas)}.")

    def make(groups: list[dict[str, Any]], capturable: bool) -> torch.optim.Optimizer:
        parameters = [cast(Tensor, parameter) for group in groups for parameter in group["params"]]
        lr = torch.tensor(optim.lr) if capturable else optim.lr
        if optim.name == "sgd":
            return SGD(groups, lr=lr, momentum=optim.momentum)
        on_cuda = all(parameter.device.type == "cuda" for parameter in parameters)
        return torch.optim.AdamW(
            groups,
            lr=lr,
            betas=optim.betas,
            eps=optim.eps,
            capturable=capturable,
            fused=True if on_cuda else None,  # None: torch's default, which refuses no device
        )

    return make


def learning_rate_shares(optimizer: torch.optim.Optimizer) -> list[float]:
    """The distinct shares of the schedule's learning rate that the optimizer's groups take."""
    return sorted({_share(group) for group in optimizer.param_groups})


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float, placed: Mapping[float, Tensor]) -> None:
    """Set the learning rate of each group for the next step: its share of `lr`.

    Groups whose lr is a tensor (`capturable`) take `placed[share]`, the same value on the device: a compiled step then
    reads it as an input, like its batch. A value copied into the old tensor would be a program of its own.
    """
    for group in optimizer.param_groups:
        share = _share(group)
        group["lr"] = placed[share] if isinstance(group["lr"], Tensor) else lr * share


def _share(group: dict[str, Any]) -> float:
    return group.get("lr_share", 1.0)  # groups that others made have none


class SGD(torch.optim.Optimizer):
    """Stochastic gradient descent with momentum m and decoupled weight decay w.

    As SGDW (Loshchilov and Hutter, arXiv 1711.05101, algorithm 1), with w scaled by lr as AdamW of torch does:
    b = m * b + gradient; parameter = parameter * (1 - lr * w) - lr * b. Without weight decay it is torch's SGD. That
    one couples the decay to the gradient, and reads a learning rate on the device back to the host in each step.
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
