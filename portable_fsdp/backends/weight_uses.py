"""Finds the modules that use each weight, and the dtypes in which it computes: for engines that cast at use.

Weights are replaced in a module's own table while its forward runs: no wrapper module, no changed name.
"""

# That table has no public name.
# pyright: reportPrivateUsage=false

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from portable_fsdp.backends.contract import Forward, ShardPolicy, dtype_name, parameter_slots
from portable_fsdp.backends.nested import floats_in
from portable_fsdp.runtime.errors import BackendError, ConfigError


class Use(NamedTuple):
    """A use of a weight, `module._parameters[leaf]`, and the dtype in which it computes there.

    `splits_gradient`: the module's forward asks for the copy, and gives the master its gradient itself (XLA's sums.py).
    """

    module: nn.Module
    leaf: str
    dtype: torch.dtype
    splits_gradient: bool = False

    @property
    def weight(self) -> nn.Parameter:
        return cast(nn.Parameter, self.module._parameters[self.leaf])

    @property
    def key(self) -> tuple[int, torch.dtype]:
        """Tied weights of one dtype share a copy."""
        return id(self.weight), self.dtype


def weight_uses(model: nn.Module, policy: ShardPolicy) -> dict[str, Use]:
    """FQN -> use, tied weights under each of their FQNs."""
    uses: dict[str, Use] = {}
    for fqn, _ in model.named_parameters(remove_duplicate=False):
        owner, _, leaf = fqn.rpartition(".")
        uses[fqn] = Use(model.get_submodule(owner), leaf, dtype_of(owner, policy))
    return uses


def dtype_of(name: str, policy: ShardPolicy) -> torch.dtype:
    """In which dtype a module computes: its own, or that of the module around it."""
    while name and name not in policy.modules:
        name = name.rpartition(".")[0]
    return policy.modules[name] if name else policy.compute


def check_statistics(model: nn.Module, policy: ShardPolicy) -> None:
    """Raises ConfigError for running statistics in another dtype than their module computes in: torch's batch norm
    refuses them in its first forward."""
    for name, module in model.named_modules():
        statistics = getattr(module, "running_mean", None)
        if isinstance(statistics, Tensor) and statistics.dtype != (computes := dtype_of(name, policy)):
            dtype = dtype_name(computes)
            own = f"precision.modules={{{name}: float32}} and precision.buffers=auto"
            raise ConfigError(
                f"precision.buffers: expected running statistics of {name} in {dtype}, in which it computes, found "
                f"{dtype_name(statistics.dtype)}.\n"
                f"  Set {own if dtype == 'float16' else f'precision.buffers={dtype}, or {own}'}."
            )


def uses_by_block(uses: Mapping[str, Use], blocks: Iterable[str]) -> dict[str, list[Use]]:
    """Block -> the weights that are in it and in no block inside it; "" is the model."""
    by_depth = sorted({"", *blocks}, key=len, reverse=True)
    owned: dict[str, list[Use]] = {block: [] for block in by_depth}
    for fqn, use in uses.items():
        owned[next(block for block in by_depth if not block or is_inside(fqn, (block,)))].append(use)
    return owned


def is_inside(name: str, modules: Iterable[str]) -> bool:
    """Whether a module or weight is one of `modules`, or inside one."""
    return any(f"{name}.".startswith(f"{module}.") for module in modules)


def distinct(uses: Iterable[Use]) -> Iterable[Use]:
    """One use of each weight and dtype."""
    return {use.key: use for use in uses}.values()


def cast_weight(use: Use) -> Tensor:
    """The weight in the dtype of its use; the weight itself where it has that dtype."""
    weight = use.weight.detach() if use.splits_gradient else use.weight
    return weight.to(use.dtype) if weight.is_floating_point() else weight


def eight_bit_layers(model: nn.Module, policy: ShardPolicy) -> list[str]:
    """FQNs of the linear layers for precision.products: inside the model's layers, outside of `policy.modules`, with
    weights of their own and sizes that 16 divides, as kernels ask for; no adapters. Raises BackendError where there is
    none."""
    if policy.products == "auto":
        return []
    tied = {slot.module for slots in parameter_slots(model).values() if len(slots) > 1 for slot in slots}
    linear = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    fitting = [name for name, m in linear if m not in tied and m.in_features % 16 == m.out_features % 16 == 0]
    own = [name for name in fitting if ".lora_" not in name]
    names = [name for name in own if is_inside(name, policy.layers) and not is_inside(name, policy.modules)]
    if not names:
        raise BackendError(
            f"precision.products={policy.products}: expected linear layers of sizes that 16 divides in the layers of "
            f"{type(model).__name__}, found none\n  outside of precision.modules. Set precision.products=auto."
        )
    return names


@contextmanager
def swapped(uses: Sequence[Use], tensors: Sequence[Tensor]) -> Generator[None]:
    """While `tensors` are what the modules find in place of their weights."""
    masters = [use.weight for use in uses]
    for use, tensor in zip(uses, tensors, strict=True):
        use.module._parameters[use.leaf] = cast(nn.Parameter, tensor)
    try:
        yield
    finally:
        for use, master in zip(uses, masters, strict=True):
            use.module._parameters[use.leaf] = master


def in_own_dtype(forward: Forward, dtype: torch.dtype, result: torch.dtype | None) -> Forward:
    """`forward` with what it takes cast to `dtype`, and what it gives to `result` (None: left as it is)."""

    @wraps(forward)  # with its signature: that of a head may have `loss_input`
    def run(*args: Any, **kwargs: Any) -> Any:
        inputs = floats_in(dtype)
        args, kwargs = inputs((args, kwargs))
        output = forward(*args, **kwargs)
        inputs.write_back()
        return output if result is None else floats_in(result)(output)

    return run
