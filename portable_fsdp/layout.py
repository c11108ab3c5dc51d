"""The named axes of the device mesh, and the part of a tensor that each device holds. Imports no torch.

The numbers of devices, processes and row shards (groups of devices that get the same rows) may differ. A new axis is
declared here: its size (`mesh_axes`), whether its devices get different rows (`ROW_AXES`), whether losses and gradients
are summed over it (`LOSS_AXES`), and how it shards weights (`weight_spec`, `tensor_plan.py`). A mesh may lack axes of
size 1. All axes that a mesh may have, outermost first: replicate, shard, expert, context, tensor.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from portable_fsdp.config.schema import TASKS, Config
from portable_fsdp.runtime.errors import ConfigError

ROW_AXES = ("replicate", "shard", "expert")
"""Devices along these get different rows of the batch."""

LOSS_AXES = (*ROW_AXES, "context")
"""Devices along these compute different parts of the loss: losses, counts and gradients are summed over them."""

FSDP_AXES = ("shard", "expert", "context")
"""FSDP shards weights over these, as over one axis: experts, which `expert` distributes, over the other two."""

INNER_AXES = ("expert", "context", "tensor")
"""The axes whose sizes the config sets, of neighbouring devices that belong to one copy of the model."""

Spec = tuple[tuple[str, ...], ...]
"""The axes that shard each dimension of a tensor, outermost first; () doesn't shard it."""

Region = tuple[slice, ...]
"""A box in a tensor, one slice with start and stop for each dimension."""


def mesh_axes(config: Config, devices: int, hosts: int) -> dict[str, int]:
    """Return the devices per mesh axis, outermost first: `replicate` model copies, each sharded over `shard` devices.

    HYBRID_SHARD* has one copy per host by default. The devices of `expert`, `context` and `tensor` belong to one copy.
    """
    inner = {axis: size for axis in INNER_AXES if (size := getattr(config.sharding, axis)) > 1}
    devices //= math.prod(inner.values())
    replicas = devices if config.sharding.strategy == "NO_SHARD" else 1
    if config.sharding.is_hybrid:
        replicas = config.sharding.replicas or hosts
    return {"replicate": replicas, "shard": devices // replicas} | inner


def devices_per_row(config: Config) -> int:
    """Number of devices that get the same rows."""
    return config.sharding.context * config.sharding.tensor


def describe_mesh(axes: Mapping[str, int], hosts: int) -> str:
    """Say which axes a mesh has, and whether each lies inside a host: `shard 4 (across hosts) x tensor 2`."""
    per_host, inside, words = math.prod(axes.values()) // hosts, 1, list[str]()
    for axis, size in reversed([*axes.items()]):
        inside *= size
        if size > 1:
            words.insert(0, f"{axis} {size}" + (" (across hosts)" if inside > per_host else ""))
    return " x ".join(words) or "one device"


def count_row_shards(axes: Mapping[str, int]) -> int:
    """Number of parts into which the rows of a batch are split."""
    return math.prod(size for axis, size in axes.items() if axis in ROW_AXES)


def coordinates(axes: Mapping[str, int], device: int) -> dict[str, int]:
    """Coordinate of a device along each axis; the last axis varies fastest."""
    place: dict[str, int] = {}
    for axis, size in reversed([*axes.items()]):
        device, place[axis] = divmod(device, size)
    return place


def weight_spec(dims: int) -> Spec:
    """FSDP's layout of a weight: dimension 0 over FSDP_AXES. A 0-dim weight is replicated."""
    return (FSDP_AXES, *((),) * (dims - 1)) if dims else ()


def expert_spec(dims: int) -> Spec:
    """Layout of the weights of experts under the axis `expert`: dimension 0, the experts, over it; dimension 1 by FSDP,
    since few experts are left on a device."""
    return (("expert",), ("shard", "context"), *((),) * (dims - 2))


def state_spec(spec: Spec, weight: Sequence[int], state: Sequence[int]) -> Spec:
    """Layout of an optimizer state of shape `state`: sharded like its weight along each dimension of equal size."""
    cuts = zip(state, (*weight, *(-1,) * len(state)), (*spec, *((),) * len(state)), strict=False)
    return tuple(axes if size == of_weight else () for size, of_weight, axes in cuts)


def cutting_axes(spec: Spec) -> tuple[str, ...]:
    """The axes that shard a tensor; a norm sums the squares of its elements over them."""
    return tuple(axis for axes in spec for axis in axes)


def batch_spec(dims: int, axes: Sequence[str] = ROW_AXES) -> Spec:
    """Layout of a batch tensor: dimension 0 over `axes`; a 0-dim tensor is replicated."""
    return (tuple(axes), *((),) * (dims - 1)) if dims else ()


def region(shape: Sequence[int], spec: Spec, axes: Mapping[str, int], place: Mapping[str, int]) -> Region:
    """Region of a tensor of this shape that the device at `place` (`coordinates`) holds.

    `tensor` splits first, and what it left is split over the other axes as over one.
    """
    parts: list[slice] = []
    for size, cuts in zip(shape, spec, strict=True):
        start, stop = 0, size
        for group in (cuts[:1], cuts[1:]) if cuts[:1] == ("tensor",) else (cuts,):
            index = 0
            for axis in group:
                index = index * axes.get(axis, 1) + place.get(axis, 0)
            part = rows_of_shard(stop - start, index, math.prod(axes.get(axis, 1) for axis in group))
            start, stop = start + part.start, start + part.stop
        parts.append(slice(start, stop))
    return tuple(parts)


def groups_over(axes: Mapping[str, int], over: Sequence[str]) -> list[list[int]]:
    """Group the mesh's devices so that the devices of a group differ only along the axes `over`."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for device in range(math.prod(axes.values())):
        rest = tuple(at for axis, at in coordinates(axes, device).items() if axis not in over)
        groups.setdefault(rest, []).append(device)
    return [*groups.values()]


def replica(spec: Spec, axes: Mapping[str, int], place: Mapping[str, int]) -> tuple[int, int]:
    """(index, count) of the equal copies of a tensor's part: the one at `place`, and how many there are."""
    index, cut = 0, cutting_axes(spec)
    for axis, size in axes.items():
        index = index if axis in cut else index * size + place[axis]
    return index, count_copies(spec, axes)


def count_copies(spec: Spec, axes: Mapping[str, int]) -> int:
    """Number of devices that hold the same part of a tensor."""
    cut = cutting_axes(spec)
    return math.prod(size for axis, size in axes.items() if axis not in cut)


def rows_of_shard(rows: int, index: int, count: int) -> slice:
    """Rows of a dimension that shard `index` of `count` holds: ceil(rows / count) each, the last ones fewer or none.

    torch.chunk, FSDP2 and XLA's tiled shardings split in the same way.
    """
    step = -(-rows // count)
    return slice(min(index * step, rows), min((index + 1) * step, rows))


def full_region(shape: Sequence[int]) -> Region:
    """The region that covers a whole tensor."""
    return tuple(slice(0, size) for size in shape)


@dataclass(frozen=True)
class RowParts:
    """One device of the axis `context`: of 2 * count pieces of a row it holds two, one from each end, so that all
    devices compute the same number of causal scores."""

    index: int
    count: int
    gather: Callable[[Any], Any]
    """`[tokens of the device, ...]` -> `[tokens of the row, ...]` in the row's order; collective"""

    @property
    def pieces(self) -> tuple[int, int]:
        return self.index, 2 * self.count - 1 - self.index

    def positions(self, length: int) -> list[int]:
        """The device's positions of a row of `length` tokens, ascending."""
        size = length // (2 * self.count)
        return [piece * size + at for piece in self.pieces for at in range(size)]


class BatchSplit(NamedTuple):
    """The rows of a step, over row shards and micro batches."""

    rows: int  # of a row shard in a micro batch
    accumulation: int  # micro batches
    padding: int  # rows of all devices that count nothing


def split_batch(config: Config, row_shards: int) -> BatchSplit:
    """Split `train.global_batch`: at most `train.micro_batch` rows for each row shard, in the fewest micro batches.

    If that leaves a remainder, rows that count nothing fill it up. Raises ConfigError, with sizes that fit, if a row
    shard has fewer rows than train.micro_batch, or such rows would change the loss.
    """
    train = config.train
    if train.global_batch == 0:  # `make_config` without it, for a loop that makes its own batches
        return BatchSplit(train.resolved_micro_batch, 0, 0)
    share = -(-train.global_batch // row_shards)
    if (micro_batch := train.resolved_micro_batch) > share:
        rows = f"the rows of each of {row_shards} {_row_shards(config)}" if row_shards > 1 else "all rows"
        raise ConfigError(
            f"train.micro_batch: expected at most {share}, {rows} (train.global_batch={train.global_batch}), "
            f"found {micro_batch}.\n"
            f"  Set train.micro_batch={share}, or train.global_batch={micro_batch * row_shards}."
        )
    accumulation = -(-share // micro_batch)
    rows = -(-train.global_batch // (row_shards * accumulation))
    split = BatchSplit(rows, accumulation, rows * row_shards * accumulation - train.global_batch)
    reasons = {
        f"train.task={train.task} counts its losses itself": train.task not in TASKS.split("|"),
        "padding would take the room of sharding.expert_capacity": config.sharding.expert_capacity is not None,
        "model.router_bias_rate would count the choices of padding": config.model.router_bias_rate > 0,
    }
    forbids = [reason for reason, holds in reasons.items() if holds]
    if split.padding and forbids:
        raise no_padding(config, row_shards, forbids[0])
    return split


def no_padding(config: Config, row_shards: int, reason: str) -> ConfigError:
    """The error of a global batch that needs padding where `reason` forbids it, with sizes that need none."""
    train, micro_batch = config.train, config.train.resolved_micro_batch
    rows = micro_batch * row_shards
    below = train.global_batch // rows * rows
    global_batches = [str(size) for size in (below, below + rows) if size > 0]
    fits = f"train.global_batch={' or '.join(global_batches)}"
    if near := _without_padding(config, row_shards):
        fits += f", or {near}"
    return ConfigError(
        f"train.global_batch: expected a multiple of train.micro_batch * {_row_shards(config)} = {micro_batch} * "
        f"{row_shards} = {rows} sequences, found {train.global_batch}: {reason}.\n  Set {fits}."
    )


def split_note(config: Config, row_shards: int) -> str:
    """Say what the padding of a step costs, and what avoids it, or that micro batches have fewer rows than
    train.micro_batch; else empty."""
    split, total, size = split_batch(config, row_shards), config.train.global_batch, config.train.resolved_micro_batch
    if not split.padding:
        rows = f"a step of {total} rows trains {split.accumulation} micro batches of {split.rows} rows"
        on = f" on each of {row_shards} {_row_shards(config)}" if row_shards > 1 else ""
        return f"train.micro_batch: {rows}{on}, not of {size}" if 0 < split.rows < size else ""
    near = _without_padding(config, row_shards)
    fix = f" ({near} needs none)" if near else ""
    computed = total + split.padding
    return (
        f"train.global_batch: a step of {total} rows computes {computed} on {row_shards} {_row_shards(config)}: "
        f"{split.padding} row(s) of padding ({split.padding / computed:.0%}) count nothing{fix}"
    )


def _row_shards(config: Config) -> str:
    return "devices" + "".join(f" / sharding.{a}" for a in ("context", "tensor") if getattr(config.sharding, a) > 1)


def _without_padding(config: Config, row_shards: int) -> str:
    """The nearest settings without padding: `train.micro_batch=2 or 4`; empty if the row shards don't divide the
    batch."""
    if config.train.global_batch % row_shards:
        return ""
    sizes, own = micro_batches(config.train.global_batch, row_shards), config.train.resolved_micro_batch
    near = [size for size in sizes if size < own][-1:] + [size for size in sizes if size > own][:1]
    return f"train.micro_batch={' or '.join(map(str, near))}" if near else ""


def micro_batches(global_batch: int, row_shards: int) -> list[int]:
    """Divisors of the rows of the fullest row shard, ascending."""
    share = -(-global_batch // row_shards)
    small = [size for size in range(1, math.isqrt(share) + 1) if share % size == 0]
    return sorted({*small, *(share // size for size in small)})
