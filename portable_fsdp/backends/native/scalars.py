"""Weights without a dimension, as CLIP's logit_scale: FSDP2 has nothing to cut.

Each process keeps them whole, and their gradients are summed as those of replicas are. A module reads them in the
dtype in which it computes.
"""

from functools import cache
from typing import Any, cast

import torch
from torch import nn

from portable_fsdp.backends.contract import ShardPolicy
from portable_fsdp.backends.weight_uses import dtype_of


def cast_scalars(model: nn.Module, policy: ShardPolicy, device: torch.device) -> None:
    """Modules read their scalars in their compute dtype, on the device; the masters stay their parameters."""
    for name, module in model.named_modules():
        own = {leaf: weight for leaf, weight in module.named_parameters(recurse=False) if weight.dim() == 0}
        dtype = dtype_of(name, policy)
        floats = tuple(leaf for leaf, weight in own.items() if weight.is_floating_point())
        if floats and (policy.cpu_offload or any(own[leaf].dtype != dtype for leaf in floats)):
            module.__class__ = _casting(type(module), floats, dtype, device)


@cache  # equal layers keep an equal class, so that torch.compile makes one program for all of them
def _casting(
    kind: type[nn.Module], leaves: tuple[str, ...], dtype: torch.dtype, device: torch.device
) -> type[nn.Module]:
    """A subclass of the same name. No forward is replaced: a recomputed or compiled one casts too."""

    def reading(leaf: str) -> property:
        def read(module: nn.Module) -> torch.Tensor:
            weight = cast(Any, module)._parameters[leaf]
            # A loop that changes the weight between steps, without gradients, has to reach the weight itself.
            is_changed = module.training and not torch.is_grad_enabled()
            return weight if is_changed else weight.to(device, dtype)

        return property(read)

    names: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), names | {leaf: reading(leaf) for leaf in leaves})
