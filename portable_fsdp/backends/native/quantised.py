"""Quantised weights on native: FSDP2 gathers their bytes, viewed as the compute dtype, since it refuses integers."""

# Parameters are replaced in a module's own table.
# pyright: reportPrivateUsage=false

from typing import Any, cast

from torch import nn

from portable_fsdp.backends.contract import ShardPolicy
from portable_fsdp.backends.native.unsharded import Casts
from portable_fsdp.backends.weight_uses import Use, dtype_of
from portable_fsdp.layout import weight_spec
from portable_fsdp.quantised.layers import quantised_modules
from portable_fsdp.runtime.errors import BackendError


def view_tables(model: nn.Module, policy: ShardPolicy) -> None:
    """View each table, on meta, as the compute dtype of its module, so that FSDP2 doesn't cast it. Raises BackendError
    for experts in compiled layers."""
    for name, module in quantised_modules(model).items():
        if policy.compile_backend is not None and not module.quantised.in_forward:
            raise BackendError(
                f"backend native: precision.frozen: {name}: a compiled layer would keep its dequantised experts until "
                "backward.\n  Set compile.enabled=false, or precision.frozen=bfloat16."
            )
        for leaf in module.quantised.tables:
            viewed = module._parameters[leaf].view(dtype_of(name, policy))
            module._parameters[leaf] = nn.Parameter(viewed, requires_grad=False)


def dequantise_experts(model: nn.Module, policy: ShardPolicy) -> None:
    """Let modules of experts in units use dequantised weights, which autograd doesn't keep."""
    casts, modules = Casts(), quantised_modules(model)
    experts = {name: module for name, module in modules.items() if not module.quantised.in_forward}
    for name, module in experts.items():
        uses = [Use(module, leaf, dtype_of(name, policy), weight_spec(2)) for leaf in module.quantised.tables]
        casts.around(module, uses)
    if experts:
        cast(Any, model).forward = casts.around_all(model.forward, keep=True, has_tables=True)
