"""Which settings fit: a grid over the keys that decide memory and time, and the nearest or largest that fits."""

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from pydantic import BaseModel

from portable_fsdp.config.describe import default_of, with_value
from portable_fsdp.config.schema import Config
from portable_fsdp.layout import check_batch, micro_batches
from portable_fsdp.plan.result import Plan
from portable_fsdp.runtime.errors import BackendError, PortableFSDPError

MODES = ("none", "selective", "full")
FREE = 0.05  # share of a device's memory for what a plan can't see: code, drivers, gaps

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
    micro_batches = {size for size in (1, 2, 4, 8) if rows % size == 0} | ({config.train.micro_batch} - {"auto"})
    unrolled = {"compile.scan_layers": "false"} if scan else {}
    if scan and config.memory.offload == "activations":  # XLA offloads inputs of scanned layers alone
        unrolled["memory.offload"] = "none"
    layers = [unrolled | checkpointing(config, mode) for mode in MODES]
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
    if memory.gradient_checkpointing == "budget":
        settings["memory.budget"] = f"{default_of('memory.budget')}"
    if memory.classes and mode not in ("full", "selective"):
        settings["memory.classes"] = "[]"
    if memory.offload == "activations" and mode not in ("full", "selective"):
        settings["memory.offload"] = "none"
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


def largest_that_fits(config: Config, devices: int, plan_of: PlanOf, note: Callable[[Tried], None]) -> Tried:
    """The plan of the largest `train.micro_batch` that fits and leaves FREE; else of 1, whether it fits or not.

    Bisects the divisors of a device's rows: at most 2 + log2 of their number plans, each given to `note`. Raises
    ConfigError where the devices don't divide the global batch, BackendError for a plan without a verdict, and what
    planning the result raises.
    """
    check_batch(with_value(config, "train.micro_batch", 1), devices)
    *smaller, largest = sizes = micro_batches(config.train.global_batch, devices)
    tried: dict[int, Tried] = {}

    def has_room(size: int) -> bool:
        tried[size] = _try({"train.micro_batch": str(size)}, plan_of)
        note(tried[size])
        plan = tried[size].plan
        if plan is not None and plan.memory.verdict == "unknown":
            why = "is a lower bound" if plan.memory.is_least else "of a device isn't known; give --memory"
            raise BackendError(f"plan on {plan.on}: no plan can say that a train.micro_batch fits: memory {why}.")
        return plan is not None and plan.memory.peak_bytes <= (1 - FREE) * (plan.memory.limit_bytes or 0)

    if has_room(largest):  # first: one micro batch a step needs no sums of gradients, and may need less than half of it
        return tried[largest]
    fitting = bisect_left(smaller, True, key=lambda size: not has_room(size))
    best = tried[sizes[max(0, fitting - 1)]]
    return best if best.plan is not None else best.model_copy(update={"plan": plan_of(best.settings)})


def _measures(config: Config, *, offload: bool) -> Iterator[Settings]:
    if config.memory.gradient_checkpointing != "full":
        yield checkpointing(config, "full")
    size = config.train.resolved_micro_batch
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
