"""Optimizers that tests name in optim.factory."""

from typing import Any

import torch
from torch import Tensor, nn

from portable_fsdp.optim.own import Lion

Groups = list[dict[str, Any]]


def lion(groups: Groups, lr: float | Tensor) -> torch.optim.Optimizer:
    return Lion(groups, lr=lr, betas=(0.9, 0.99))


def torchs_sgd(groups: Groups, lr: float | Tensor) -> torch.optim.Optimizer:
    """Reads a learning rate that is a tensor: `_to_scalar` in torch/optim."""
    return torch.optim.SGD(groups, lr=lr, momentum=0.9, foreach=False)


class Stepping(torch.optim.Optimizer):
    """SGD with a momentum, which subclasses get wrong."""

    start: float = 0.0

    def __init__(self, groups: Groups, lr: float | Tensor) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()  # pyright: ignore[reportUntypedFunctionDecorator]
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.update(parameter, parameter.grad, group)

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["mean"] = torch.full_like(parameter, self.start)
        state["mean"].lerp_(gradient, 0.1)
        parameter.sub_(group["lr"] * (state["mean"] + group["weight_decay"] * parameter))


class Replaces(Stepping):
    """Makes a new state in each step."""

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        mean = self.state[parameter].get("mean", torch.zeros_like(parameter)).lerp(gradient, 0.1)
        self.state[parameter]["mean"] = mean
        parameter.sub_(group["lr"] * mean)


class Scaled(Stepping):
    """Scale gradients by the weight's norm, which the host reads."""

    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        super().update(parameter, gradient * parameter.norm().item(), group)


class FromOne(Stepping):
    start = 1.0


class HostState(Stepping):
    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        super().update(parameter, gradient, group)
        self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1


class GroupState(Stepping):
    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        super().update(parameter, gradient, group)
        group["count"] = group.get("count", 0) + 1


class FixedRate(Stepping):
    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        super().update(parameter, gradient, {**group, "lr": 0.1})


class NoDecay(Stepping):
    def update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        super().update(parameter, gradient, {**group, "weight_decay": 0.0})


class NeedsClosure(Stepping):
    def step(self, closure: Any = None) -> None:
        closure()


def a_model(groups: Groups, lr: float | Tensor) -> nn.Module:
    return nn.Linear(2, 2)


def broken(groups: Groups, lr: float | Tensor) -> torch.optim.Optimizer:
    raise ValueError("no such thing")
