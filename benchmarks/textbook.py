"""What a train step must at least do, by the textbook's formulas: from the numbers of a model, nothing is traced.

For steps that this package can't build or that aren't its own: tensor parallelism, other people's models. What
`python -m portable_fsdp.plan` says doesn't come from here, but from the trainer's own step.
"""

from dataclasses import dataclass
from typing import Literal

from portable_fsdp.models.flops import model_flops_per_token
from portable_fsdp.plan.result import Moved, Work
from portable_fsdp.plan.target import Target
from portable_fsdp.plan.time import ITEM_BYTES, over_links

ON_CHIP_BYTES = 256 * 2**20
"""More than any device here keeps on its chip: 126 MB of L2 on B200, 128 MiB of VMEM on TPU v5e (jax-ml.github.io/
scaling-book, gpus and tpus). So much of what is read again and again need not cross the memory's interface."""

Strategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "other"]


@dataclass(frozen=True)
class Step:
    """What a step does, in numbers from which `work_of` counts it."""

    parameters: int  # all of them, a tied weight once
    embedding_parameters: int  # of tables that are only looked up
    layer_parameters: int  # of the layers alone: neither embeddings nor head nor last norm
    layers: int
    hidden: int  # attention heads * head_dim
    seq_len: int  # tokens
    sequences: int  # of the global batch
    strategy: Strategy = "FULL_SHARD"  # other: tensor or pipeline parallelism too; what it moves isn't counted
    replicas: int = 1  # of HYBRID_SHARD*
    accumulation: int = 1  # micro batches
    gradient_checkpointing: Literal["none", "full", "selective"] = "none"
    compute: str = "bfloat16"  # as `models.weights.peak_flops` names dtypes
    reduce: str = "float32"  # dtype in which gradients cross
    state_bytes: float = (
        12  # of a trained parameter at rest: the weight and the optimizer's values; 12: AdamW in float32
    )
    vector_parameters: int = 0  # norms and biases, which are factors of no matrix product
    active_parameters: int | None = None  # that a token meets; None: all (no experts)
    trained_parameters: int | None = None  # None: all
    keys_per_token: float | None = None  # that attention takes, in the mean over tokens and layers; None: causal, T/2


def model_flops(step: Step) -> float:
    """Of a whole step on all devices, as the trainer counts them for MFU."""
    met = step.parameters if step.active_parameters is None else step.active_parameters
    tokens = step.sequences * step.seq_len
    return tokens * model_flops_per_token(met, step.embedding_parameters, step.layers, step.hidden, step.seq_len)


def work_of(step: Step, target: Target) -> Work:
    """What each device of `target` must at least do in `step`, by formula: nothing is traced.

    - FLOPs: 2 for a weight that a token meets, 4 more where it is trained; attention with half of all keys (causal).
      Full gradient checkpointing computes a layer's forward again, but for its last product, whose result nobody
      needs: at least half of its weights. Selective: nothing is added. All devices get the same share.
    - Memory: each micro batch reads the layers' weights in forward and in backward; the update reads and writes
      weights and optimizer state once. Activations are left out.
    - Collectives: the strategy's textbook, of the layers alone, because an engine may use tables of the vocabulary
      where they lie. FULL_SHARD gathers in every micro batch, on GPUs in backward again, all but the last layer
      (XLA may keep what it gathered); SHARD_GRAD_OP once a step; both reduce and scatter gradients once a step.

    Raises ValueError where the replicas don't divide the devices.
    """
    tokens = step.sequences * step.seq_len
    if step.replicas < 1 or target.devices % step.replicas:
        raise ValueError(f"{step.replicas} replicas don't divide {target.devices} devices")
    collectives, sent = _collectives(step, target)
    return Work(
        matmul_flops={step.compute: tokens * _flops_per_token(step) / target.devices},
        memory_bytes=_memory_bytes(step, target),
        collectives=collectives,
        sent_bytes=sent,
    )


def _flops_per_token(step: Step) -> float:
    idle = 0 if step.active_parameters is None else step.parameters - step.active_parameters  # experts of other tokens
    met = step.parameters - idle - step.embedding_parameters - step.vector_parameters
    trained = met if step.trained_parameters is None else min(met, step.trained_parameters)
    keys = step.seq_len / 2 if step.keys_per_token is None else step.keys_per_token
    attention = 4 * step.layers * step.hidden * keys
    backward = 4 * trained + (2 * attention if step.trained_parameters is None else 0)
    again = step.layer_parameters - idle - step.vector_parameters if step.gradient_checkpointing == "full" else 0
    return 2 * met + attention + backward + again


def _memory_bytes(step: Step, target: Target) -> float:
    idle = 0 if step.active_parameters is None else step.parameters - step.active_parameters
    trained = step.parameters if step.trained_parameters is None else step.trained_parameters
    shards = 1 if step.strategy == "NO_SHARD" else target.devices // step.replicas
    weights = ITEM_BYTES[step.compute] * (step.layer_parameters - idle)
    weights /= target.devices if step.strategy == "other" else 1
    state = step.state_bytes * trained / shards
    return 2 * step.accumulation * max(0, weights - ON_CHIP_BYTES) + 2 * max(0, state - ON_CHIP_BYTES)


def _collectives(step: Step, target: Target) -> tuple[dict[str, Moved], dict[str, float]]:
    """By kind and dtype what is gathered and reduced, and by link what one device sends for it."""
    replicas = target.devices if step.strategy == "NO_SHARD" else step.replicas
    shards = target.devices // replicas
    if step.strategy == "other" or target.devices == 1:
        return {}, {}
    trained = step.parameters if step.trained_parameters is None else step.trained_parameters
    weights = step.layer_parameters * ITEM_BYTES[step.compute]
    gradients = min(step.layer_parameters, trained) * ITEM_BYTES[step.reduce]
    gathers = 1.0
    if step.strategy in ("FULL_SHARD", "HYBRID_SHARD"):
        again = 0 if target.hardware.kind == "tpu" else (step.layers - 1) / step.layers
        gathers = step.accumulation * (1 + again)
    parts: list[tuple[str, float, float, int, int]] = []  # name, full bytes, how often they are sent, members, stride
    if shards > 1:
        parts.append((f"all_gather {step.compute}", gathers * weights, 1, shards, 1))
        parts.append((f"reduce_scatter {step.reduce}", gradients, 1, shards, 1))
    if replicas > 1:
        parts.append((f"all_reduce {step.reduce}", gradients / shards, 2, replicas, shards))
    collectives: dict[str, Moved] = {}
    links: dict[str, float] = {}
    for name, full, times, members, stride in parts:
        calls = step.layers * (round(gathers) if name.startswith("all_gather") else 1)
        ring = times * full * (members - 1) / members
        collectives[name] = Moved(calls, int(full), int(ring))
        for link, sent in over_links(target.levels, full, members=members, stride=stride).items():
            links[link] = links.get(link, 0) + times * sent
    return collectives, links
