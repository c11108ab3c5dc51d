"""Expert parallelism on native: each process along the axis `expert` holds a part of each layer's experts.

Tokens go to the processes of their experts and come back by two all-to-alls, whose buffers have the size of the worst
case, so that the host reads nothing. Rows are sorted by expert on arrival, and padding comes last, where the grouped
products don't reach it: they compute the rows that were sent, and no others.
"""

import math
from types import MethodType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from portable_fsdp.backends.contract import ShardPolicy, parameter_slots
from portable_fsdp.models.experts import copies_of, products_by_group, weighted_sum
from portable_fsdp.runtime.errors import BackendError


def distribute_experts(model: nn.Module, policy: ShardPolicy, group: dist.ProcessGroup, shards: int) -> None:
    """Replace the weights of experts, on meta, by the part of this process in `group`, and their forwards by exchanges.

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

    def forward(self: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return exchanged(self, hidden, top_k_index, top_k_weights, group, policy.expert_capacity)

    for name in policy.experts:
        module = model.get_submodule(name)
        module.forward = MethodType(forward, module)


def exchanged(
    experts: Any,
    hidden: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    group: dist.ProcessGroup,
    capacity: float | None = None,
) -> Tensor:
    """Return the weighted sum of the chosen experts; arguments as of `models.experts.dense_experts`. *collective*

    `capacity`: rows for each process, in multiples of an even load; rows beyond it give 0. None: rows for all.
    """
    processes, held = group.size(), experts.down_proj.shape[0]
    (tokens, top_k), device = top_k_index.shape, hidden.device
    room = tokens * min(top_k, held)  # a token has different experts
    if capacity is not None:
        room = min(room, math.ceil(tokens * top_k / processes * capacity))
    chosen, order = top_k_index.flatten().sort(stable=True)
    ends = torch.searchsorted(chosen, torch.arange(processes * held, device=device), right=True)
    ends = ends.view(processes, held)
    starts = torch.cat([ends.new_zeros(1), ends[:-1, -1]])  # of the rows for each process
    to = chosen // held
    at = torch.arange(len(chosen), device=device) - starts[to]
    slot = torch.where(at < room, to * room + at, processes * room)  # dropped rows share the last one
    sent = copies_of(hidden, top_k_index)[order]
    buffer = sent.new_zeros(processes * room + 1, hidden.shape[1]).index_copy(0, slot, sent)[:-1]
    sent_ends = (ends - starts[:, None]).clamp(max=room)
    received_ends = torch.empty_like(sent_ends)
    dist.all_to_all_single(received_ends, sent_ends, group=group)
    received = _all_to_all(buffer, group)
    places = torch.arange(room, device=device).expand(processes, room).contiguous()
    expert = torch.searchsorted(received_ends, places, right=True).flatten()  # `held`: padding
    expert, by_expert = expert.sort(stable=True)
    out = products_by_group(experts, received[by_expert], expert)
    out = torch.where((expert < held)[:, None], out, 0.0)
    back = _all_to_all(torch.empty_like(out).index_copy(0, by_expert, out), group)
    back = torch.cat([back, back.new_zeros(1, back.shape[1])])[slot]
    return weighted_sum(torch.empty_like(back).index_copy(0, order, back), top_k_weights).to(hidden.dtype)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(rows, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, rows.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _AllToAll.apply(gradients[0], ctx.group), None


def _all_to_all(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange equal parts of dimension 0."""
    return cast(Tensor, _AllToAll.apply(rows, group))
