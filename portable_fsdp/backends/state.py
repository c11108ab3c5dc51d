"""Parameters, buffers and optimizer state of a model: what all engines do alike with them."""

import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]

from portable_fsdp.layout import Spec, state_spec
from portable_fsdp.optim.counting import CountingOptimizer, MakeOptimizer
from portable_fsdp.runtime.errors import BackendError


def output_head(model: nn.Module) -> nn.Module | None:
    """The module that computes the logits of a transformers model; None for other models, which don't name theirs."""
    get = getattr(model, "get_output_embeddings", None)
    return None if get is None else get()


def dropouts(model: nn.Module, *, by_keys: bool = False) -> list[str]:
    """FQNs of the modules that draw random numbers in training: torch's dropouts, and any with a rate named *drop*.

    `by_keys`: those that draw from a generator although `ShardPolicy.draws`.
    """
    names: list[str] = []
    for name, module in model.named_modules():
        rates = [value for attribute, value in vars(module).items() if "drop" in attribute]
        if by_keys:  # of whole layers and paths, and torch's recurrent layers
            rates = [module.dropout] if isinstance(module, nn.RNNBase) else []
            rates += [rate for key, rate in vars(module).items() if "layerdrop" in key or "drop_p" in key]
        is_by_keys = by_keys and type(module) is nn.Dropout
        rates += [module.p] if isinstance(module, _DropoutNd) and not is_by_keys else []
        if any(isinstance(rate, float) and rate > 0 for rate in rates):
            names.append(name or type(module).__name__)
    return names


class ParameterSlot(NamedTuple):
    """A slot that holds a parameter: `module._parameters[leaf]`."""

    module: nn.Module
    leaf: str


def parameter_slots(model: nn.Module) -> dict[str, list[ParameterSlot]]:
    """First FQN of each parameter -> all its slots; tied weights have several."""
    first: dict[int, str] = {}
    slots: dict[str, list[ParameterSlot]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, leaf = fqn.rpartition(".")
        name = first.setdefault(id(parameter), fqn)
        slots.setdefault(name, []).append(ParameterSlot(model.get_submodule(owner), leaf))
    return slots


def put_parameter(slots: Sequence[ParameterSlot], data: Tensor, requires_grad: bool) -> None:
    """Put one new parameter into all slots: tied weights stay tied."""
    parameter = nn.Parameter(data, requires_grad)
    for slot in slots:
        cast(Any, slot.module)._parameters[slot.leaf] = parameter


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """FQN -> buffer, for the buffers in the state dict."""
    kept = set(model.state_dict(keep_vars=True))
    return {fqn: buffer for fqn, buffer in model.named_buffers() if fqn in kept}


def is_count(buffer: Tensor) -> bool:
    """Whether it counts on the host (AveragedModel's models, BatchNorm's batches), where Python may read it."""
    return buffer.dim() == 0 and not buffer.is_floating_point()


def state_key(name: str, fqn: str) -> str:
    """The key of a parameter's optimizer state in a checkpoint: `exp_avg/model.norm.weight`."""
    return f"{name}/{fqn}"


class CheckpointTensor(NamedTuple):
    """A tensor of a checkpoint, and the axes that shard it."""

    tensor: Tensor
    spec: Spec
    fqn: str  # of the parameter, also for its optimizer state


def checkpoint_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, layouts: Mapping[str, Spec]
) -> dict[str, CheckpointTensor]:
    """Key -> tensor of a checkpoint: parameters (tied ones once), persistent buffers, optimizer state.

    `layouts`: `ShardPolicy.layouts`, without those of parameters that no checkpoint holds; buffers are replicated.
    """
    if isinstance(optimizer, CountingOptimizer):
        optimizer.settle_counts()
    weights = {fqn: weight for fqn, weight in model.named_parameters() if fqn in layouts}
    tensors = {fqn: CheckpointTensor(weight, layouts[fqn], fqn) for fqn, weight in weights.items()}
    for fqn, buffer in persistent_buffers(model).items():
        tensors[fqn] = CheckpointTensor(buffer, ((),) * buffer.dim(), fqn)
    for fqn, weight in weights.items():
        for name, state in tensors_of(optimizer.state.get(weight, {})).items():
            spec = state_spec(layouts[fqn], weight.shape, state.shape)
            tensors[state_key(name, fqn)] = CheckpointTensor(state, spec, fqn)
    return tensors


def tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors in the optimizer state of one parameter."""
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def name_groups(groups: list[dict[str, Any]], parameters: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Return optimizer groups with parameters in place of their FQNs."""
    return [{**group, "params": [parameters[fqn] for fqn in group["params"]]} for group in groups]


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in configs and checkpoints: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def optimizer_state_twins(
    make: MakeOptimizer,
    groups: list[dict[str, Any]],
    parameters: Mapping[str, nn.Parameter],
    *,
    compiled: bool = False,
) -> dict[str, dict[str, Tensor]]:
    """FQN -> state name -> a tensor with the shape and dtype of that state and arbitrary values.

    It is on the host if the optimizer keeps that state there (step counts), else on meta. The same optimizer steps on
    meta twins, which works for any torch optimizer whose state starts at zero. Raises BackendError, with the line, for
    an optimizer whose step reads a tensor's value: meta tensors have none.
    """
    if not groups:
        return {}
    trained = {fqn: p for fqn, p in parameters.items() if p.is_floating_point()}  # integers train nowhere
    twins = {fqn: nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta")) for fqn, p in trained.items()}
    for twin in twins.values():
        twin.grad = torch.zeros_like(twin)
    optimizer = make(name_groups(groups, twins), compiled)
    for group in optimizer.param_groups if compiled else ():
        group["lr"] = torch.empty((), device="meta")
    step_on_meta(optimizer, optimizer.step)
    return {fqn: tensors_of(optimizer.state[twin]) for fqn, twin in twins.items()}


def step_on_meta(optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
    """Run `step` on meta tensors. Raises BackendError, with the line, where it reads a value."""
    try:
        step()
    except Exception as error:
        inside = str(Path(torch.__file__).parent)
        frames = traceback.extract_tb(error.__traceback__)
        frame = [f for f in frames if f"{inside}/optim" in f.filename or not f.filename.startswith(inside)][-1]
        raise BackendError(
            f"optim: {type(optimizer).__name__} reads a tensor's value on the host in step(): {error}\n"
            f"  in {frame.filename}:{frame.lineno}: {frame.line}\n"
            "  Each step would wait for the device, and XLA couldn't compile it.\n"
            "  Compute with tensors there, or use another optimizer: optim.name=adamw."
        ) from error


def zero_optimizer(
    make: MakeOptimizer,
    groups: list[dict[str, Any]],
    parameters: Mapping[str, nn.Parameter],
    zeros: Callable[[str, Tensor, dict[str, Any]], Tensor],
    *,
    compiled: bool,
) -> torch.optim.Optimizer:
    """Build the optimizer with all its state. `zeros(fqn, twin, group)` allocates each state tensor of a parameter."""
    optimizer = make(name_groups(groups, parameters), compiled)
    for group in optimizer.param_groups if compiled else ():
        group["lr"] = group["lr"].clone()  # else groups share one, which a scheduler changes in place
    group_of = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    for fqn, state in optimizer_state_twins(make, groups, parameters, compiled=compiled).items():
        parameter = parameters[fqn]
        for name, twin in state.items():
            optimizer.state[parameter][name] = zeros(fqn, twin, group_of[id(parameter)])
    return optimizer
