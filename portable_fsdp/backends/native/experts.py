"""Expert parallelism on native: each process along the axis `expert` holds a part of each layer's experts.

`models/experts.py` has the algorithm, which reads nothing on the host; this file has its all-to-all.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from portable_fsdp.backends.contract import ShardPolicy, parameter_slots
from portable_fsdp.runtime.errors import BackendError


def distribute_experts(model: nn.Module, policy: ShardPolicy, group: dist.ProcessGroup, shards: int) -> None:
    """Replace the weights of experts, on meta, by the part of this process in `group`, and let them exchange rows.

    Runs after the axis `tensor` has split them. `shards`: devices over which FSDP shards each part, along dimension 1.
    Raises BackendError if they don't divide it.
    """
    for fqn, slots in parameter_slots(model).items():
        if fqn.rpartition(".")[0] in policy.experts:
            weight = model.get_parameter(fqn)
            if weight.shape[1] % shards:
                raise BackendError(
                    f"backend native: sharding.expert: {fqn} {[*weight.shape]}: FSDP shards its dimension 1 over "
                    f"{shards} devices, which don't divide {weight.shape[1]}.\n  Use another number of devices, or "
                    "another sharding.expert."
                )
            own = weight.new_empty((len(weight) // group.size(), *weight.shape[1:]))
            for slot in slots:
                cast(Any, slot.module)._parameters[slot.leaf] = nn.Parameter(own, requires_grad=weight.requires_grad)

    def exchange(rows: Tensor) -> Tensor:
        return cast(Tensor, _AllToAll.apply(rows, group))

    assert policy.process_experts is not None
    groups = policy.process_experts(group.size(), policy.expert_capacity, exchange)
    for name in policy.experts:
        cast(Any, model.get_submodule(name)).groups = groups


class _AllToAll(torch.autograd.Function):
    """Exchange equal parts of dimension 0."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(rows, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, rows.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _AllToAll.apply(gradients[0], ctx.group), None
