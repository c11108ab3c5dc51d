"""Expert parallelism on native: each process along the axis `expert` holds a part of each layer's experts.

`models/experts.py` has the algorithm, which reads nothing on the host; this file has its all-to-all.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from portable_fsdp.backends.contract import ShardPolicy, parameter_slots
from portable_fsdp.runtime.errors import BackendError


def distribute_experts(model: nn.Module, policy: ShardPolicy, group: dist.ProcessGroup, shards: int) -> None:
    """Replace the weights of experts, on meta, by the part of this process in `group`, and let them exchange rows.

    `shards`: devices over which FSDP shards each part, along dimension 1. Raises BackendError if they don't divide it.
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
    assert policy.grouped_linear is not None
    groups = ProcessExperts(group, policy.expert_capacity, policy.grouped_linear)
    for name in policy.experts:
        cast(Any, model.get_submodule(name)).groups = groups


class ProcessExperts:
    """`models.experts.Groups` of this process: its one device, in a process group along `expert`."""

    devices, multiple = 1, 1

    def __init__(self, group: dist.ProcessGroup, capacity: float | None, grouped_linear: Callable[..., Tensor]) -> None:
        self._group, self._grouped_linear = group, grouped_linear
        self.divisions, self.capacity = group.size(), capacity

    def on_each(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        with torch.no_grad():
            return function(*(tensor[0] for tensor in tensors))[None]

    def exchange(self, buffer: Tensor) -> Tensor:
        return cast(Tensor, _AllToAll.apply(buffer[0], self._group))[None]

    def linear(self, experts: Any, sizes: Tensor, active: int, rows: Tensor, name: str) -> Tensor:
        return self._grouped_linear(experts, sizes[0].cumsum(dim=0, dtype=torch.int32), rows[0], name)[None]


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
