"""torch's optimizers, made for a config: which parameters decay, and which variant fits where they live."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from portable_fsdp.config.schema import Optim

MakeOptimizer = Callable[[list[dict[str, Any]], bool], torch.optim.Optimizer]


def parameter_groups(shapes: Mapping[str, tuple[int, ...]], optim: Optim) -> list[dict[str, Any]]:
    """Groups of FQNs under `params`: matrices (embedding tables are some) decay, biases and norms don't."""
    matrices = [fqn for fqn, shape in shapes.items() if len(shape) >= 2]
    vectors = [fqn for fqn, shape in shapes.items() if len(shape) < 2]
    groups = [{"params": matrices, "weight_decay": optim.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def make_optimizer(optim: Optim) -> MakeOptimizer:
    """`make(groups, capturable)`: the optimizer over groups of parameters.

    AdamW decays decoupled from the gradient; torch's SGD adds weight_decay * weight to the gradient (L2), which is the
    same for SGD without momentum. With `capturable`, AdamW keeps its step counts and its lr on the device, so that a
    compiled step never holds a number that changes; SGD has no such variant.
    """

    def make(groups: list[dict[str, Any]], capturable: bool) -> torch.optim.Optimizer:
        if optim.name == "sgd":
            return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum)
        device = groups[0]["params"][0].device
        lr = torch.tensor(optim.lr, dtype=torch.float32, device=device) if capturable else optim.lr
        fused = device.type == "cuda" or None  # None: torch's own choice
        return torch.optim.AdamW(groups, lr=lr, betas=optim.betas, eps=optim.eps, capturable=capturable, fused=fused)

    return make


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the lr of all groups; one that lives on a device gets a new value, and stays the same tensor."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].copy_(torch.tensor(lr, dtype=group["lr"].dtype))
        else:
            group["lr"] = lr
