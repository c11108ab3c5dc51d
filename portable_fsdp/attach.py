"""All state that the package attaches to a model's modules and to an optimizer, besides wrapped forwards.

What a step needs travels in `ShardPolicy` and `Training`. Attributes remain where code of transformers or torch calls
ours with nothing but a module or an optimizer; each function says which. tests/test_layering.py keeps others away.
"""

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from portable_fsdp.layout import RowParts
from portable_fsdp.runtime.errors import BackendError

_ROW_PARTS, _DRAWS, _GROUPS, _LOAD = "row_parts", "draws_attention", "groups", "load"


def set_row_parts(model: nn.Module, parts: RowParts) -> None:
    """Set which tokens of a row this device has. transformers calls an attention function with its module, also when
    gradient checkpointing or a compiler runs it: no context of the forward would reach it."""
    for module in model.modules():
        setattr(module, _ROW_PARTS, parts)


def row_parts_of(module: nn.Module) -> RowParts | None:
    """Return the tokens of a row that this device has; None: all."""
    return getattr(module, _ROW_PARTS, None)


def switch_off_attention_dropout(model: nn.Module) -> None:
    """Let attention whose kernels can't draw drop nothing. Attention functions get their module's rate, and a rate of 0
    on the module would also switch off the dropout of its output."""
    for module in model.modules():
        setattr(module, _DRAWS, False)


def draws_attention(module: nn.Module) -> bool:
    """Whether a module's attention may drop."""
    return getattr(module, _DRAWS, True)


def set_expert_groups(model: nn.Module, names: Iterable[str], groups: object) -> None:
    """Let the modules of experts exchange rows (a `models.experts.Groups`). transformers calls the registered
    implementation with the module of the experts."""
    for name in names:
        setattr(model.get_submodule(name), _GROUPS, groups)


def expert_groups_of(experts: nn.Module) -> Any:
    """Return the `models.experts.Groups` of a module of experts; None: it runs on one device."""
    return getattr(experts, _GROUPS, None)


def set_load(experts: nn.Module, load: Tensor | None) -> None:
    """Set the tensor `[experts + 1]` that the next forward of a module of experts counts rows into, or none. A
    recomputation writes the same values again; an output of the forward would be kept for backward."""
    setattr(experts, _LOAD, load)


def load_of(experts: nn.Module) -> Tensor | None:
    """Return the tensor that a forward counts into."""
    return getattr(experts, _LOAD, None)


def change_attributes(module: nn.Module, values: Mapping[str, Any]) -> None:
    """Change numbers that a module's own forward reads: heads of this device, a rate of dropout. All must exist."""
    if missing := values.keys() - vars(module).keys():
        raise AttributeError(f"{type(module).__name__} has no {sorted(missing)[0]}")
    vars(module).update(values)


def refuse_copies(modules: Iterable[nn.Module]) -> None:
    """Make copy.deepcopy of each of these modules raise BackendError.

    A copied block would compute with the original's weights; torch copies no units either.
    """
    for module in modules:
        cast(Any, module).__deepcopy__ = _refuse_copy


def _refuse_copy(_: Any) -> NoReturn:
    raise BackendError(
        "a sharded model can't be copied (copy.deepcopy, torch's AveragedModel): the copy would compute with the "
        "original's weights.\n  Shard another, as in shard_model(lambda: AveragedModel(Net()), config, engine); "
        "other.load_state_dict(model.state_dict()) copies the weights."
    )


@contextmanager
def skipping_if(found_inf: Tensor, optimizer: torch.optim.Optimizer) -> Generator[None]:
    """Context of a step that the optimizer skips where `found_inf` (0-dim, float32) is 1: torch's fused optimizers read
    this attribute, which torch.amp.GradScaler sets too."""
    cast(Any, optimizer).found_inf = found_inf
    try:
        yield
    finally:
        del cast(Any, optimizer).found_inf  # else it would apply to the user's own steps too


def replace_step(optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> None:
    """Let `optimizer.step()` call `step(optimizer)`: the user's loop calls the optimizer that it holds. A bound method,
    which torch's schedulers wrap."""
    cast(Any, optimizer).step = MethodType(step, optimizer)


@contextmanager
def other_groups(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> Generator[None]:
    """Context in which torch's step, which takes nothing but the optimizer, sees `groups`."""
    before, optimizer.param_groups = optimizer.param_groups, groups
    try:
        yield
    finally:
        optimizer.param_groups = before
