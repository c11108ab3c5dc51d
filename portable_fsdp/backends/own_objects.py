"""Optimizers of the user's own: their state, allocated by a copy that steps on meta, and their steps. Tensors of their
objects."""

import copy
import logging
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from portable_fsdp.attach import other_groups, replace_step
from portable_fsdp.backends.contract import Allocate, Partition, Piece
from portable_fsdp.backends.state import step_on_meta
from portable_fsdp.runtime.errors import BackendError

log = logging.getLogger("portable_fsdp")

Owners = Mapping[Tensor, tuple[nn.Module, str]]
"""Parameter -> the sharded model that holds it, and its first FQN there."""


def owners_of(models: Iterable[nn.Module]) -> dict[Tensor, tuple[nn.Module, str]]:
    return {weight: (model, fqn) for model in models for fqn, weight in model.named_parameters()}


def refuse_unknown(optimizer: torch.optim.Optimizer) -> NoReturn:
    raise BackendError(
        f"zero_gradients: the engine doesn't know this {type(optimizer).__name__}.\n  Write "
        "engine.shard_optimizer(optimizer) before its first step."
    )


def require_sums(summed: Container[Tensor], peers: object, optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Raise BackendError for a replicated weight whose gradient isn't a sum over `peers` (None: there are none)."""
    weights = (weight for group in optimizer.param_groups for weight in group["params"])
    for weight in weights if peers is not None else ():
        if weight.grad is not None and weight not in summed and not isinstance(weight, DTensor):
            raise BackendError(
                f"step: the gradient of a weight of shape {list(weight.shape)} isn't summed over the devices.\n"
                "  Run each backward inside `with engine.accumulate(True):`, or by accelerator.backward."
            )


def warn_of_kept_gradients(
    optimizer: torch.optim.Optimizer, known: Collection[torch.optim.Optimizer], models: Iterable[nn.Module]
) -> None:
    """Warn at its second step of trained weights in none of `known` that still have the gradients of its first step."""
    steps: list[dict[Tensor, weakref.ref[Tensor]]] = []

    def note(*_: Any) -> None:
        if len(steps) == 2:
            return
        stepped = {weight for each in known for group in each.param_groups for weight in group["params"]}
        others = {p: owner for p, owner in owners_of(models).items() if p.requires_grad and p not in stepped}
        steps.append({p: weakref.ref(p.grad) for p in others if p.grad is not None})
        both = [others[p] for p, gradient in steps[0].items() if p in others and gradient() is p.grad is not None]
        kept = [f"{type(model).__name__}.{fqn}" for model, fqn in both]
        if len(steps) == 2 and kept:
            text = "%s%s: gradients of these weights stay and grow, since no optimizer has them: freeze or add them"
            log.warning(text, ", ".join(kept[:3]), ", ..." * (len(kept) > 3))

    if not known:  # the engine's first optimizer watches for all
        optimizer.register_step_post_hook(note)


def zero_state(
    optimizer: torch.optim.Optimizer,
    known: Collection[torch.optim.Optimizer],
    owners: Owners,
    zeros: Callable[[Tensor, Tensor, dict[str, Any]], Tensor],
) -> Allocate:
    """Allocate the state of an optimizer that has none. `zeros(parameter, twin, group)` makes each tensor of it.

    State that doesn't begin as zeros (NAdam's, SGD's with dampening) is left to the first step; the function that is
    returned allocates that of some parameters, for a load. Raises BackendError for a parameter without owner, for an
    optimizer that is `known` or has stepped, and as `step_on_meta`.
    """
    name = type(optimizer).__name__
    if any(parameter not in owners for group in optimizer.param_groups for parameter in group["params"]):
        raise BackendError(
            f"shard_optimizer: {name} has a parameter of no model that this engine sharded.\n"
            "  Shard the models first, and make the optimizer of their parameters."
        )
    if optimizer in known or _has_stepped(optimizer):
        raise BackendError(
            f"shard_optimizer: {name} was passed before, or has state.\n"
            "  Pass an optimizer once, before its first step."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise BackendError("shard_optimizer: LBFGS needs a closure, which runs forward many times. Use another one.")
    twin, twins = _copied(optimizer, lambda p: torch.empty(p.shape, dtype=p.dtype, device="meta"))
    step_on_meta(optimizer, partial(type(optimizer).step, twin))
    group_of = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}

    def allocate(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            for key, value in twin.state[twins[parameter]].items():
                is_tensor, group = isinstance(value, Tensor), group_of[parameter]
                optimizer.state[parameter][key] = zeros(parameter, value, group) if is_tensor else value
                if key == "sum" and group.get("initial_accumulator_value"):  # Adagrad's
                    optimizer.state[parameter][key].fill_(group["initial_accumulator_value"])

    if any(optimizer.state.values()) or _begins_as_zeros(optimizer):
        optimizer.state.clear()
        allocate(optimizer, group_of)
    return allocate


def _has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    if isinstance(optimizer, torch.optim.Adagrad):  # makes its state when it is made
        return any(bool(state["step"]) for state in optimizer.state.values())
    return any(optimizer.state.values())


def _begins_as_zeros(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step from zeros in place of no state gives the same small weights and state."""
    (plain, ends), (zeroed, others) = (_small(optimizer) for _ in range(2))
    type(optimizer).step(cast(Any, plain))
    for weight, twin in others.items():
        state = plain.state[ends[weight]].items()
        zeroed.state[twin] = {key: torch.zeros_like(v) if isinstance(v, Tensor) else v for key, v in state}
    type(optimizer).step(cast(Any, zeroed))
    pairs = [(plain.state[ends[weight]], zeroed.state[twin]) for weight, twin in others.items()]
    same = all(_equal(state[key], again.get(key)) for state, again in pairs for key in state)
    return same and all(map(torch.equal, ends.values(), others.values()))


def _equal(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)


def _small(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, dict[Tensor, nn.Parameter]]:
    """A copy over small weights on the host, and these."""
    copied, twins = _copied(optimizer, lambda p: torch.ones((2,) * p.dim(), dtype=torch.float64))
    for group in copied.param_groups:
        lr = group["lr"]  # a scheduler may begin at 0
        group["lr"] = torch.full_like(lr, 0.1) if isinstance(lr, Tensor) else 0.1
    return copied, twins


def _copied(
    optimizer: torch.optim.Optimizer, make: Callable[[Tensor], Tensor]
) -> tuple[torch.optim.Optimizer, dict[Tensor, nn.Parameter]]:
    """A copy of an optimizer over other parameters, which have a gradient; and these. Without its state, but for
    Adagrad's."""
    weights = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    twins = {weight: nn.Parameter(make(weight)) for weight in weights}
    for twin in twins.values():
        twin.grad = torch.ones_like(twin)
    groups: list[dict[str, Any]] = [
        {**group, "params": [twins[weight] for weight in group["params"]]}
        | ({"fused": None} if "fused" in group else {})
        for group in optimizer.param_groups
    ]
    hooks = {name: OrderedDict[int, Any]() for name in vars(optimizer) if name.startswith("_optimizer_step_")}
    copied = object.__new__(type(optimizer))
    own = {name: value for name, value in vars(optimizer).items() if name not in ("state", "param_groups", *hooks)}
    memo: dict[int, Any] = {id(weight): twin for weight, twin in twins.items()}
    for name, value in own.items():  # a step may change them
        with suppress(TypeError):  # bitsandbytes' managers, of the whole process: locks have no copy
            own[name], memo = copy.deepcopy(value, known := {**memo}), known
    state = defaultdict[Tensor, dict[str, Any]](dict)
    for group in groups if isinstance(optimizer, torch.optim.Adagrad) else ():
        for twin in group["params"]:
            total = torch.full_like(twin, group["initial_accumulator_value"], requires_grad=False)
            state[twin] = {"step": torch.zeros(()), "sum": total}
    vars(copied).update({**own, **hooks, "state": state, "param_groups": groups})
    return copied, twins


def step_kinds_apart(optimizer: torch.optim.Optimizer) -> None:
    """Let it step with DTensors and plain tensors in groups of their own, which torch's foreach functions can't mix,
    if small weights in more groups get the same step. The user's groups stay: schedulers know them."""
    (whole, ends), (apart, others) = (_small(optimizer) for _ in range(2))
    type(optimizer).step(cast(Any, whole))
    first = [group["params"][0] for group in apart.param_groups if group["params"]]
    _step_apart(apart, is_first=lambda weight: any(weight is each for each in first))
    if all(map(torch.equal, ends.values(), others.values())):
        replace_step(optimizer, _step_apart)


def _is_sharded(weight: Tensor) -> bool:
    return isinstance(weight, DTensor)


def _step_apart(
    optimizer: torch.optim.Optimizer, *args: Any, is_first: Callable[[Tensor], bool] = _is_sharded, **kwargs: Any
) -> Any:
    apart = [
        (group, {**group, "params": weights})
        for group in optimizer.param_groups
        for kind in (True, False)
        if (weights := [weight for weight in group["params"] if is_first(weight) is kind])
    ]
    with other_groups(optimizer, [part for _, part in apart]):
        out = type(optimizer).step(optimizer, *args, **kwargs)
    for group, part in apart:  # what the step wrote there
        group |= {key: value for key, value in part.items() if key != "params"}
    return out


def part_of(tensor: Tensor, process: Partition) -> Piece:
    """The part of a tensor that a process holds, with a number where others should hold an equal one."""
    if not isinstance(tensor, DTensor):
        return Piece((0,) * tensor.dim(), tensor.detach(), process.index if process.count > 1 else None)
    mesh, number, copies = tensor.device_mesh, 0, 1
    for placement, size, place in zip(tensor.placements, mesh.shape, mesh.get_coordinate() or (), strict=True):
        if not placement.is_shard():
            number, copies = number * size + place, copies * size
    number += copies * int(mesh.mesh.min())  # processes of other meshes have the same again
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    is_copied = copies > 1 or mesh.size() < process.count
    return Piece(offset, tensor.to_local().detach(), number if is_copied else None)
