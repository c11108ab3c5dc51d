"""Native: FSDP2 (`fully_shard`), one process per device. gloo on CPU, NCCL on CUDA, TorchTPU on TPUs.

Read `engine.py` first (the contract), then `units.py` (the order in which techniques are applied to a model) and
`prefetch.py` (which unit is gathered when). `unsharded.py` is the path of one shard: weights in place. `groups.py` has
collectives along the other axes, and sums the gradients of replicas in buckets. `torchtpu.py` has what TPUs need in
addition.
"""
