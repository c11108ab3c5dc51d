"""What a train step must at least do, by the textbook's formulas: from the numbers of a model, nothing is traced.

To check plans by, which come from the trainer's own step: tests/plan/test_expected_times.py.
"""

from dataclasses import dataclass
from typing import Literal

from portable_fsdp.models.flops import model_flops_per_token
from portable_fsdp.plan.result import Moved, Work
from portable_fsdp.plan.target import Target
from portable_fsdp.plan.time import over_links

_ITEM_BYTES = {"float32": 4, "bfloat16": 2}

Strategy = Literal["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]


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
    vector_parameters: int = 0  # norms and biases, which are factors of no matrix product
    keys_per_token: float | None = None  # that attention takes, in the mean over tokens and layers; None: causal, T/2


def model_flops(step: Step) -> float:
    """Of a whole step on all devices, as the trainer counts them for MFU."""
    numbers = (step.parameters, step.embedding_parameters, step.layers, step.hidden, step.seq_len)
    return step.sequences * step.seq_len * model_flops_per_token(*numbers)


def work_of(step: Step, target: Target) -> Work:
    """What each device of `target` must at least do in `step`, by formula: nothing is traced.

    - FLOPs: 2 for a weight, 4 more in backward; attention with half of all keys (causal).
      Full gradient checkpointing computes a layer's forward again, but for its last product, whose result nobody
      needs: at least half of its weights. Selective: nothing is added. All devices get the same share.
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
        collectives=collectives,
        sent_bytes=sent,
    )


def _flops_per_token(step: Step) -> float:
    met = step.parameters - step.embedding_parameters - step.vector_parameters
    keys = step.seq_len / 2 if step.keys_per_token is None else step.keys_per_token
    attention = 4 * step.layers * step.hidden * keys
    again = step.layer_parameters - step.vector_parameters if step.gradient_checkpointing == "full" else 0
    return 6 * met + 3 * attention + again


def _collectives(step: Step, target: Target) -> tuple[dict[str, Moved], dict[str, float]]:
    """By kind and dtype what is gathered and reduced, and by link what one device sends for it."""
    replicas = target.devices if step.strategy == "NO_SHARD" else step.replicas
    shards = target.devices // replicas
    if target.devices == 1:
        return {}, {}
    weights = step.layer_parameters * _ITEM_BYTES[step.compute]
    gradients = step.layer_parameters * _ITEM_BYTES[step.reduce]
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
