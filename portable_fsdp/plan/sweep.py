"""Which settings fit: a grid over the keys that decide memory and time, and the nearest setting that fits."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from portable_fsdp.config.schema import Config
from portable_fsdp.plan.result import Plan
from portable_fsdp.runtime.errors import PortableFSDPError

Settings = dict[str, str]
"""Key of the config -> value, as an override writes it."""

PlanOf = Callable[[Settings], Plan]
"""Plans the config with these settings laid over it. Raises what planning raises."""


class Tried(NamedTuple):
    """A setting of the grid: its plan, or why there is none."""

    settings: Settings
    plan: Plan | None
    refusal: str = ""


def usual_axes(config: Config, devices: int, *, scan: bool) -> dict[str, list[str]]:
    """What a sweep tries if it isn't told: each key with its values, those that need less memory last."""
    rows = max(config.train.global_batch // devices, 1)
    micro_batches = {size for size in (1, 2, 4, 8) if rows % size == 0} | {config.train.micro_batch}
    return {
        "sharding.strategy": ["SHARD_GRAD_OP", "FULL_SHARD"] if devices > 1 else ["NO_SHARD"],
        "compile.scan_layers": ["false", "true"] if scan else ["false"],
        "memory.gradient_checkpointing": ["none", "selective", "full"],
        "data.seq_len": [str(config.data.seq_len)],
        "train.micro_batch": [str(size) for size in sorted(micro_batches)],
    }


def sweep(axes: Mapping[str, Sequence[str]], plan_of: PlanOf) -> Iterator[Tried]:
    """Plan the grid, a setting at a time. Where a `train.micro_batch` doesn't fit, larger ones are left out."""
    keys = list(axes)
    full: set[tuple[str, ...]] = set()  # settings but for the micro batch that have no room any more
    for values in itertools.product(*axes.values()):
        settings = dict(zip(keys, values, strict=True))
        others = tuple(value for key, value in settings.items() if key != "train.micro_batch")
        if others in full:
            continue
        tried = _tried(settings, plan_of)
        if tried.plan is not None and tried.plan.memory.verdict == "does not fit" and _ascends(axes):
            full.add(others)
        yield tried


def _ascends(axes: Mapping[str, Sequence[str]]) -> bool:
    sizes = [int(size) for size in axes.get("train.micro_batch", ()) if size.isdecimal()]
    return sizes == sorted(sizes)


def nearest_that_fits(config: Config, plan_of: PlanOf, *, offload: bool) -> Tried | None:
    """The first that fits of ever stronger measures, each on top of those before; None where even all together don't.

    In the order of what they cost: recomputing layers, fewer rows at once, sharding all, and with `offload` the
    optimizer's state on the host. None of them changes what is learnt.
    """
    settings: Settings = {}
    for key, value in _measures(config, offload=offload):
        settings = {**settings, key: value}
        tried = _tried(settings, plan_of)
        if tried.plan is not None and tried.plan.memory.verdict in ("fits", "fits by recomputing"):
            return tried
    return None


def _measures(config: Config, *, offload: bool) -> Iterator[tuple[str, str]]:
    if config.memory.gradient_checkpointing != "full":
        yield "memory.gradient_checkpointing", "full"
    size = config.train.micro_batch
    while size % 2 == 0:
        size //= 2
        yield "train.micro_batch", str(size)
    if size > 1:
        yield "train.micro_batch", "1"
    if config.sharding.strategy != "FULL_SHARD":
        yield "sharding.strategy", "FULL_SHARD"
    if offload and not config.memory.cpu_offload:
        yield "memory.cpu_offload", "true"


def _tried(settings: Settings, plan_of: PlanOf) -> Tried:
    try:
        return Tried(settings, plan_of(settings))
    except PortableFSDPError as error:
        return Tried(settings, None, str(error))
