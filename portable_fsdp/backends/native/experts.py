"""Expert parallelism on native: each process along the axis `expert` holds a part of each layer's experts.

`models/experts.py` has the algorithm, which reads nothing on the host; this file has its all-to-all.
"""

from functools import partial

from torch import nn

from portable_fsdp.attach import set_expert_groups
from portable_fsdp.backends.contract import ShardPolicy, parameter_slots, put_parameter
from portable_fsdp.backends.native.groups import Group, exchange
from portable_fsdp.runtime.errors import BackendError


def distribute_experts(model: nn.Module, policy: ShardPolicy, group: Group, shards: int) -> None:
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
            own = weight.new_empty((len(weight) // group.count, *weight.shape[1:]))
            put_parameter(slots, own, weight.requires_grad)
    assert policy.process_experts is not None
    groups = policy.process_experts(group.count, policy.expert_capacity, partial(exchange, group))
    set_expert_groups(model, policy.experts, groups)
