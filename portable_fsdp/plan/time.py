"""How long a step takes at least, by roofline: what computes, what crosses the memory, what crosses each link.

A lower bound, never an estimate: each of the three is taken at the speed that the vendor names, at its most favourable
split and routing, and as if the others were free. Published runs take 1.3 to 3.5 times as long, mixtures of experts
more (benchmarks/results/time_bounds.md).
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from portable_fsdp.metrics.flops import model_flops_per_token, peak_flops
from portable_fsdp.plan.hardware import Target
from portable_fsdp.plan.result import Comparison, Moved, Time, Work
from portable_fsdp.runtime.errors import UsageError

ITEM_BYTES = {"float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2}

ON_CHIP_BYTES = 256 * 2**20
"""More than any device here keeps on its chip: 126 MB of L2 on B200, 128 MiB of VMEM on TPU v5e (jax-ml.github.io/
scaling-book, gpus and tpus). So much of what is read again and again need not cross the memory's interface."""

WARM_UP_STEPS = 5

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
    compute: str = "bfloat16"  # as `metrics.flops.peak_flops` names dtypes
    reduce: str = "float32"  # dtype in which gradients cross
    state_bytes: float = (
        12  # of a trained parameter at rest: the weight and the optimizer's values; 12: AdamW in float32
    )
    vector_parameters: int = 0  # norms and biases, which are factors of no matrix product
    active_parameters: int | None = None  # that a token meets; None: all (no experts)
    trained_parameters: int | None = None  # None: all
    keys_per_token: float | None = None  # that attention takes, in the mean over tokens and layers; None: causal, T/2


# ----------------------------------------------------------------------------------------------------------- bounds


def bound(
    work: Work, target: Target, *, tokens_per_step: int, model_flops_per_device: float | None, compute: str = "bfloat16"
) -> Time:
    """The bounds of a step that does `work` on each device of `target`.

    Args:
        work: of one device; `matmul_flops` by dtypes as `metrics.flops.peak_flops` names them (float16 besides),
            `sent_bytes` as `over_links` divides them.
        target: the hardware.
        tokens_per_step: of the global batch.
        model_flops_per_device: of the model in a step, as the trainer counts them for MFU (`model_flops` / devices).
        compute: dtype of whose peak MFU is a share.

    Where a link's switches do part of the work (`Target.in_switch`), half the bytes count: a gather then mostly
    receives and a reduction mostly sends, and an all-reduce sends once. Raises ValueError for a dtype it doesn't know.
    """
    name = target.hardware.device_name
    times = [_compute_seconds(name, dtype, flops) for dtype, flops in work.matmul_flops.items()]
    known = [seconds for seconds in times if seconds is not None]
    memory = target.hardware.memory_bandwidth
    links: dict[str, float] = {}
    for link, sent in work.sent_bytes.items():
        bandwidth = target.bandwidth(link)
        if bandwidth and sent:
            links[link] = sent / bandwidth / (2 if target.in_switch(link) else 1)
    return Time(
        compute_s=sum(known) if known else None,
        memory_s=work.memory_bytes / memory.value if memory else None,
        links_s=links,
        devices=target.devices,
        tokens_per_step=tokens_per_step,
        model_flops_per_device=model_flops_per_device,
        peak_flops=peak_flops(name, compute),
    )


def _compute_seconds(device_name: str, dtype: str, flops: float) -> float | None:
    """At the dtype's peak, or bfloat16's where the vendor names none: no product of 16 or 32 bits is faster."""
    if dtype not in ITEM_BYTES:
        raise ValueError(f"expected a dtype of {', '.join(ITEM_BYTES)}, found {dtype!r}")
    peak = peak_flops(device_name, dtype) or peak_flops(device_name, "bfloat16")
    return flops / peak if peak else None


def over_links(
    levels: Sequence[tuple[str, int]], full_bytes: float, *, members: int | None = None, stride: int = 1
) -> dict[str, float]:
    """Link -> bytes that one device sends when a tensor is gathered, or reduced and scattered; an all-reduce: twice.

    `levels` as `Target.levels`. A group's devices are `members` (None: all of them), each `stride` after the last in
    the order of hosts, so that neighbours share a host, a chip or a slice. Each part of the tensor crosses a network
    once per host or slice, divided over its devices, and goes on from there over the links inside; that is the least
    that can cross.
    Raises ValueError for a group that isn't a whole part of the target's levels.
    """
    left = members or math.prod(units for _, units in levels)
    sent: dict[str, float] = {}
    inside = 1  # members of the group within one unit of this level
    for link, units in levels:
        if stride % units == 0:
            stride //= units
            continue
        if units % stride or (left % (units // stride) and (units // stride) % left):
            raise ValueError(f"no groups of {members} devices, {stride} apart, fit {units} in {link}")
        taken = min(left, units // stride)
        sent[link] = full_bytes * (1 - 1 / taken) / inside
        inside, left, stride = inside * taken, left // taken, 1
    return {link: value for link, value in sent.items() if value and link not in ("chip", "host")}


# ------------------------------------------------------------------------------------------------------------- work


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
        collectives[name] = Moved(calls=calls, bytes=int(full), sent_bytes=int(ring))
        for link, sent in over_links(target.levels, full, members=members, stride=stride).items():
            links[link] = links.get(link, 0) + times * sent
    return collectives, links


# ------------------------------------------------------------------------------------------------------- comparison


def compare(time: Time, rows: Sequence[Mapping[str, Any]]) -> Comparison:
    """A run's metrics.jsonl, as `metrics.sinks.read_jsonl` reads it, beside the bounds of the step that it ran.

    The first steps, which compile and warm up, are left out: WARM_UP_STEPS of them, or all but the last. Raises
    UsageError for no rows, for rows that aren't a run's, and for a run of another batch.
    """
    if not rows or any(not isinstance(row.get("seconds"), int | float) or row["seconds"] <= 0 for row in rows):
        raise UsageError(
            f"--compare: expected the rows of a run's metrics.jsonl, each with `seconds`, found {len(rows)} rows"
            f"{' of something else' if rows else ''}.\n  Name the folder of a run that has made steps."
        )
    batches = {row.get("tokens") for row in rows}
    if batches != {time.tokens_per_step}:
        raise UsageError(
            f"--compare: expected a run with {time.tokens_per_step:,} tokens a step, as planned, found "
            f"{', '.join(str(tokens) for tokens in sorted(batches, key=str))}.\n  Plan with that run's own config.yaml."
        )
    measured = rows[min(WARM_UP_STEPS, len(rows) - 1) :]
    seconds = statistics.median(row["seconds"] for row in measured)
    shares = [row["mfu"] for row in measured if row.get("mfu") is not None]
    return Comparison(
        steps=len(measured),
        seconds=seconds,
        tokens_per_second=time.tokens_per_step / seconds,
        mfu=statistics.median(shares) if shares else None,
        ratio=seconds / time.seconds if time.seconds else None,
    )
