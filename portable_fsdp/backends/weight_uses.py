"""Find the modules that use each weight, and the compute dtype of each use: for engines that cast at use.

Weights are replaced in a module's own table while its forward runs: no wrapper module, no changed name.
"""

# That table has no public name.
# pyright: reportPrivateUsage=false

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from portable_fsdp.backends.contract import Forward, ShardPolicy
from portable_fsdp.backends.nested import are_cast, floats_in
from portable_fsdp.backends.state import dtype_name, parameter_slots
from portable_fsdp.config.describe import is_inside
from portable_fsdp.layout import Spec, weight_spec
from portable_fsdp.runtime.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from portable_fsdp.quantised import AtUse


class Use(NamedTuple):
    """A use of a weight, `module._parameters[leaf]`, its compute dtype there, and the weight's layout.

    `splits_gradient`: the module's forward makes the copy, and sets the master's gradient itself (XLA's sums.py).
    """

    module: nn.Module
    leaf: str
    dtype: torch.dtype
    spec: Spec
    splits_gradient: bool = False

    @property
    def weight(self) -> nn.Parameter:
        return cast(nn.Parameter, self.module._parameters[self.leaf])

    @property
    def key(self) -> tuple[int, torch.dtype]:
        """Key of the cast copy: tied weights of one dtype share it."""
        return id(self.weight), self.dtype


def weight_uses(model: nn.Module, policy: ShardPolicy) -> dict[str, Use]:
    """FQN -> use, tied weights under each of their FQNs."""
    uses: dict[str, Use] = {}
    specs = {w: policy.layouts.get(fqn, weight_spec(w.dim())) for fqn, w in model.named_parameters()}
    for fqn, weight in model.named_parameters(remove_duplicate=False):
        owner, _, leaf = fqn.rpartition(".")
        uses[fqn] = Use(model.get_submodule(owner), leaf, dtype_of(owner, policy), specs[weight])
    return uses


def dtype_of(name: str, policy: ShardPolicy) -> torch.dtype:
    """The compute dtype of a module: its own, or that of the module around it."""
    while name and name not in policy.modules:
        name = name.rpartition(".")[0]
    return policy.modules[name] if name else policy.compute


def check_statistics(model: nn.Module, policy: ShardPolicy) -> None:
    """Raise ConfigError for running statistics whose dtype isn't their module's compute dtype: torch's batch norm
    refuses them in its first forward."""
    for name, module in model.named_modules():
        statistics = getattr(module, "running_mean", None)
        if isinstance(statistics, Tensor) and statistics.dtype != (computes := dtype_of(name, policy)):
            dtype = dtype_name(computes)
            own = f"precision.modules={{{name}: float32}} and precision.buffers=auto"
            raise ConfigError(
                f"precision.buffers: expected running statistics of {name} in its compute dtype {dtype}, found "
                f"{dtype_name(statistics.dtype)}.\n"
                f"  Set {own if dtype == 'float16' else f'precision.buffers={dtype}, or {own}'}."
            )


def uses_by_block(uses: Mapping[str, Use], blocks: Iterable[str]) -> dict[str, list[Use]]:
    """Block -> the weights in it that are in no inner block; "" is the model."""
    by_depth = sorted({"", *blocks}, key=len, reverse=True)
    owned: dict[str, list[Use]] = {block: [] for block in by_depth}
    for fqn, use in uses.items():
        owned[next(block for block in by_depth if not block or is_inside(fqn, (block,)))].append(use)
    return owned


def distinct(uses: Iterable[Use]) -> Iterable[Use]:
    """One use of each weight and dtype."""
    return {use.key: use for use in uses}.values()


def cast_weight(use: Use) -> Tensor:
    """Return the weight in the dtype of its use; the weight itself if it has that dtype."""
    weight = use.weight.detach() if use.splits_gradient else use.weight
    return weight.to(use.dtype) if weight.is_floating_point() else weight


def quantised(use: Use) -> "AtUse | None":
    """The module's tables if the weight is one of them."""
    at_use = cast("AtUse | None", getattr(use.module, "quantised", None))
    return at_use if at_use is not None and use.leaf in at_use.tables else None


def eight_bit_layers(model: nn.Module, policy: ShardPolicy) -> list[str]:
    """FQNs of the linear layers for precision.products: inside the model's layers, outside `policy.modules`, with
    untied weights and sizes that are multiples of 16, as the kernels need; no adapters. Raises BackendError if there
    are none."""
    if policy.products == "auto":
        return []
    tied = {slot.module for slots in parameter_slots(model).values() if len(slots) > 1 for slot in slots}
    linear = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    fitting = [name for name, m in linear if m not in tied and m.in_features % 16 == m.out_features % 16 == 0]
    own = [name for name in fitting if ".lora_" not in name]
    names = [name for name in own if is_inside(name, policy.layers) and not is_inside(name, policy.modules)]
    if not names:
        raise BackendError(
            f"precision.products={policy.products}: the layers of {type(model).__name__} have no linear layer whose "
            "sizes are multiples of 16\n  outside precision.modules. Set precision.products=auto."
        )
    return names


@contextmanager
def swapped(uses: Sequence[Use], tensors: Sequence[Tensor]) -> Generator[None]:
    """Context in which the modules use `tensors` in place of their weights."""
    masters = [use.weight for use in uses]
    for use, tensor in zip(uses, tensors, strict=True):
        use.module._parameters[use.leaf] = cast(nn.Parameter, tensor)
    try:
        yield
    finally:
        for use, master in zip(uses, masters, strict=True):
            use.module._parameters[use.leaf] = master


def in_own_dtype(forward: Forward, dtype: torch.dtype, result: torch.dtype | None) -> Forward:
    """Wrap `forward`: cast its inputs to `dtype`, and its outputs to `result` (None: unchanged)."""

    @wraps(forward)  # with its signature: that of a head may have `loss_input`
    def run(*args: Any, **kwargs: Any) -> Any:
        inputs = None if are_cast((*args, *kwargs.values()), dtype) else floats_in(dtype)
        args, kwargs = inputs((args, kwargs)) if inputs else (args, kwargs)
        output = forward(*args, **kwargs)
        if inputs:
            inputs.write_back()
        return output if result is None else floats_in(result)(output)

    return run
