"""Optimizers of the user's own (`optim.factory`), tried on the host before they train."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from portable_fsdp.config.schema import Optim
from portable_fsdp.runtime.errors import ConfigError, PortableFSDPError
from portable_fsdp.runtime.factory import call_user, described, load_factory

Make = Callable[[list[dict[str, Any]], bool], torch.optim.Optimizer]


def from_factory(optim: Optim, name: str) -> Make:
    """`make_optimizer` for a `function(groups, lr)`; lr is a number, or in compiled steps a float32 tensor.

    Raises ConfigError for a function that can't be used. So it does for an optimizer that keeps what a checkpoint
    doesn't hold, whose state doesn't start at zero, or that ignores `lr` or `weight_decay` of its groups: trials show
    it, each of two steps on small tensors.
    """
    function = load_factory("optim.factory", name)

    def make(groups: list[dict[str, Any]], compiled: bool) -> torch.optim.Optimizer:
        lr = torch.tensor(optim.lr) if compiled else optim.lr
        optimizer: object = call_user(f"optim.factory: {name}", function, groups, lr)
        if not isinstance(optimizer, torch.optim.Optimizer):
            actual = type(optimizer).__name__
            raise ConfigError(f"optim.factory: expected a torch.optim.Optimizer from {name}, found {actual}.")
        return optimizer

    if problem := _problem(lambda **changes: _trial(make, name, **changes), decays=optim.weight_decay > 0):
        raise ConfigError(f"optim.factory: {name}: {problem}.")
    return make


class Trial(NamedTuple):
    weights: list[Tensor]
    states: list[dict[str, Any]]  # of each weight
    group: dict[str, Any]


def _problem(run: Callable[..., Trial], *, decays: bool) -> str:
    """What keeps the optimizer from training here, or nothing. Engines lay out all state as zeros before a step."""
    plain = run()
    own = {key: value for state in plain.states for key, value in state.items() if value is not None}
    if others := sorted(key for key, value in own.items() if not isinstance(value, Tensor)):
        return f"expected tensors as its state, found {others}, which a checkpoint doesn't hold. Make them tensors"
    if counted := sorted(key for key, value in run(steps=1).group.items() if value != plain.group[key]):
        return f"expected groups that a step leaves alone, found {counted} changed. Keep them in the state, as tensors"
    zeroed = run(zeros=plain.states)
    if not _equal(zeroed.weights, plain.weights):
        pairs = [(a, b) for a, b in zip(plain.states, zeroed.states, strict=True)]
        differ = sorted({key for a, b in pairs for key in a if not _equal([a[key]], [b[key]])})
        return f"expected state that starts at zero, found {differ or sorted(own)} that doesn't. Let it start at zero"
    if _equal(run(lr=1e-3).weights, plain.weights):
        return "expected a step that reads `lr` of its groups, found one that doesn't. Read it in each step"
    if decays and _equal(run(weight_decay=0.0).weights, plain.weights):
        return "`weight_decay` of its groups has no effect. Read it in each step, or set optim.weight_decay=0"
    return ""


def _trial(
    make: Make,
    name: str,
    *,
    steps: int = 2,
    lr: float = 1e-2,
    weight_decay: float = 0.25,
    zeros: list[dict[str, Any]] | None = None,
) -> Trial:
    """`zeros`: state whose shapes and dtypes that of the trial has from the start, as zeros."""
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 4), (4,))]
    try:
        optimizer = make([{"params": list(weights), "weight_decay": weight_decay, "lr_share": 1.0}], False)
        optimizer.param_groups[0]["lr"] = lr
        for weight, state in zip(weights, zeros or [], strict=False):
            optimizer.state[weight] = {
                key: torch.zeros_like(value) for key, value in state.items() if value is not None
            }
        for _ in range(steps):
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=generator)
            optimizer.step()
    except PortableFSDPError:
        raise
    except Exception as error:
        raise ConfigError(f"optim.factory: a step of {name} failed: {described(error)}") from error
    group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    return Trial([weight.detach() for weight in weights], [dict(optimizer.state[weight]) for weight in weights], group)


def _equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))
