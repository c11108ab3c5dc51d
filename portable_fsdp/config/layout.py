"""How the batch and the model are laid out over the devices of a run."""

import math

from portable_fsdp.config.schema import Config
from portable_fsdp.runtime.errors import ConfigError


def check_batch(config: Config, data_parallel_size: int) -> int:
    """Micro batches per step (gradient accumulation): global_batch / (micro_batch * data_parallel_size devices).

    Raises ConfigError when that leaves a remainder, and names the nearest batch sizes that fit.
    """
    train = config.train
    micro_batch = train.resolved_micro_batch
    rows = micro_batch * data_parallel_size
    if train.global_batch % rows == 0:
        return train.global_batch // rows
    below = train.global_batch // rows * rows
    global_batches = [str(size) for size in (below, below + rows) if size > 0]
    fits = f"train.global_batch={' or '.join(global_batches)}"
    divisors = micro_batches(train.global_batch, data_parallel_size)
    if near := [d for d in divisors if d < micro_batch][-1:] + [d for d in divisors if d > micro_batch][:1]:
        fits += f", or train.micro_batch={' or '.join(map(str, near))}"
    raise ConfigError(
        f"train.global_batch: expected a multiple of train.micro_batch * devices = {micro_batch} * "
        f"{data_parallel_size} = {rows} sequences, found {train.global_batch}.\n  Set {fits}."
    )


def mesh_axes(config: Config, devices: int, hosts: int) -> dict[str, int]:
    """Devices per mesh axis, outermost first: `replicate` copies of the model, each sharded over `shard` devices.

    HYBRID_SHARD* has one copy per host by default. Further axes (tensor, context, expert) belong here.
    """
    match config.sharding.strategy:
        case "FULL_SHARD" | "SHARD_GRAD_OP":
            replicas = 1
        case "NO_SHARD":
            replicas = devices
        case "HYBRID_SHARD" | "HYBRID_SHARD_ZERO2":
            replicas = config.sharding.replicas or hosts
    return {"replicate": replicas, "shard": devices // replicas}


def micro_batches(global_batch: int, devices: int) -> list[int]:
    """The divisors of a device's share of the global batch, ascending; none where the devices leave a remainder."""
    share, rest = divmod(global_batch, devices)
    if rest:
        return []
    small = [size for size in range(1, math.isqrt(share) + 1) if share % size == 0]
    return sorted({*small, *(share // size for size in small)})
