"""Which settings fit: a grid over the keys that decide memory and time, and the nearest setting that fits."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from pydantic import BaseModel

from portable_fsdp.config.schema import Config
from portable_fsdp.plan.result import Plan
from portable_fsdp.runtime.errors import PortableFSDPError

MODES = ("none", "selective", "full")

Settings = dict[str, str]
"""Key of the config -> value, as an override writes it."""

PlanOf = Callable[[Settings], Plan]
"""Plans the config with these settings laid over it. Raises what planning raises."""


class Tried(BaseModel):
    """A setting of the grid: its plan, or why there is none."""

    settings: Settings
    plan: Plan | None = None
    refusal: str | None = None

    @property
    def fits(self) -> bool:
        """Unknown is no."""
        return self.plan is not None and self.plan.memory.verdict in ("fits", "fits by recomputing")


def usual_grid(config: Config, devices: int, *, scan: bool) -> list[Settings]:
    """What a sweep tries by default; smaller micro batches first.

    Scanned layers are recomputed all or none, since all turns of the loop run one program.
    """
    rows = max(config.train.global_batch // devices, 1)
    micro_batches = {size for size in (1, 2, 4, 8) if rows % size == 0} | {config.train.micro_batch}
    layers = [({"compile.scan_layers": "false"} if scan else {}) | checkpointing(config, mode) for mode in MODES]
    if scan:
        layers += [{"compile.scan_layers": "true"} | checkpointing(config, mode) for mode in ("none", "full")]
    strategies = ["NO_SHARD"]
    if devices > 1:
        strategies = list(dict.fromkeys(("SHARD_GRAD_OP", "FULL_SHARD", config.sharding.strategy)))
    return [
        {"sharding.strategy": strategy, **layer_settings, "train.micro_batch": str(size)}
        for strategy, layer_settings, size in itertools.product(strategies, layers, sorted(micro_batches))
    ]


def grid(axes: Mapping[str, Sequence[str]]) -> list[Settings]:
    """Each value of each key with each of the others."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def checkpointing(config: Config, mode: str) -> Settings:
    """The mode with what it needs, without what only another takes; selective: every second layer by default."""
    memory = config.memory
    is_selective = memory.every is not None or bool(memory.save_ops)
    settings = {"memory.gradient_checkpointing": mode}
    if mode == "selective":
        return settings if is_selective else {**settings, "memory.every": "2"}
    return settings | ({"memory.every": "null", "memory.save_ops": "[]"} if is_selective else {})


def sweep(points: Iterable[Settings], plan_of: PlanOf) -> Iterator[Tried]:
    """Plan one after the other. Where a `train.micro_batch` doesn't fit, leave out larger ones."""
    too_many: dict[tuple[tuple[str, str], ...], int] = {}  # settings but for the micro batch -> rows that don't fit
    for settings in points:
        rows = settings.get("train.micro_batch", "")
        others = tuple(item for item in settings.items() if item[0] != "train.micro_batch")
        if rows.isdecimal() and int(rows) >= too_many.get(others, int(rows) + 1):
            continue
        tried = _try(settings, plan_of)
        if tried.plan is not None and tried.plan.memory.verdict == "does not fit" and rows.isdecimal():
            too_many[others] = int(rows)
        yield tried


def nearest_that_fits(config: Config, plan_of: PlanOf, *, offload: bool) -> Iterator[Tried]:
    """Ever stronger measures, each on top of those before, up to the first that fits; the last may not fit either.

    In the order of what they cost: recomputing layers, fewer rows at once, sharding all, and with `offload` the
    optimizer's state on the host. None of them changes what the model learns.
    """
    settings: Settings = {}
    for measure in _measures(config, offload=offload):
        settings = settings | measure
        tried = _try(settings, plan_of)
        yield tried
        if tried.fits:
            return


def _measures(config: Config, *, offload: bool) -> Iterator[Settings]:
    if config.memory.gradient_checkpointing != "full":
        yield checkpointing(config, "full")
    size = config.train.micro_batch
    while size > 1:
        size = size // 2 if size % 2 == 0 else 1
        yield {"train.micro_batch": str(size)}
    if config.sharding.strategy != "FULL_SHARD":
        yield {"sharding.strategy": "FULL_SHARD"}
    if offload and not config.memory.cpu_offload:
        yield {"memory.cpu_offload": "true"}


def _try(settings: Settings, plan_of: PlanOf) -> Tried:
    try:
        return Tried(settings=settings, plan=plan_of(settings))
    except PortableFSDPError as error:
        return Tried(settings=settings, refusal=str(error))
