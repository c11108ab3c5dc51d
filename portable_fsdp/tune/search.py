"""The candidates of a tuning: the reference, the plan's choice, and then one key after the other.

Each key's other values are tried with the fastest values so far, so a dozen candidates cover a grid of hundreds.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from portable_fsdp.backends.open import spec_of
from portable_fsdp.backends.refusals import Deployment
from portable_fsdp.config.describe import Settings, default_of, value_of, yaml_value
from portable_fsdp.config.schema import Config
from portable_fsdp.layout import devices_per_row, micro_batches
from portable_fsdp.plan.planner import CHECKPOINTING, COMPILE, MODES, ROWS

COMPILER = (COMPILE, "compile.backend", "compile.cache_dir", "compile.scan_layers")
RECOMPUTATION = ("memory.save_ops", "memory.every", "memory.classes", "memory.budget")
STRATEGY, ATTENTION, PREFETCH = "sharding.strategy", "model.attention", "sharding.forward_prefetch"
OFFLOAD, CPU_OFFLOAD, REDUCE = "memory.offload", "memory.cpu_offload", "precision.reduce"
TUNED = (
    *(CHECKPOINTING, *RECOMPUTATION, OFFLOAD, CPU_OFFLOAD, *COMPILER, ROWS),
    *(STRATEGY, PREFETCH, ATTENTION, REDUCE),
)
"""The keys that a tuning may change: none changes the curve beyond the rounding of the config's dtypes."""
NEAR = 1.15
"""Equal trials mostly differ by less, even on shared machines (benchmarks/README.md)."""


class Axis(NamedTuple):
    """Values of one key, each as settings. `fastest_first`: the first that runs is the fastest; else neighbours are
    alike."""

    values: Sequence[Settings]
    fastest_first: bool = False

    def sides(self, best: Settings) -> Sequence[range]:
        """Return the positions of the values to try: those after the best one, and those before it."""
        at = next((n for n, value in enumerate(self.values) if value.items() <= best.items()), -1)
        if self.fastest_first:
            return [range(at if at >= 0 else len(self.values))]
        return range(at + 1, len(self.values)), range(at - 1, -1, -1)


def own(config: Config) -> Settings:
    """Return the config's own values of all keys that are varied."""
    return {key: yaml_value(value_of(config, key)) for key in TUNED}


def references(config: Config) -> Iterator[Settings]:
    """Yield settings of the reference, which compiles nothing; the next are for a device that lacks the memory, or a
    model without blocks to recompute. The last are the config's own."""
    mine, eager = own(config), {key: yaml_value(default_of(key)) for key in (*COMPILER, *RECOMPUTATION, OFFLOAD)}
    for mode, rows in (("full", mine[ROWS]), ("full", "1"), ("none", mine[ROWS])):
        yield mine | eager | {CHECKPOINTING: mode, ROWS: rows}
    yield mine


def axes(config: Config, place: Deployment) -> Iterator[Axis]:
    """Yield for each key, the most important first, the values to try: those that the engine accepts here."""
    devices, own_rows = place.devices or 1, config.train.resolved_micro_batch
    sizes = micro_batches(config.train.global_batch, devices // devices_per_row(config))
    strategies = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD") if devices > 1 else ()
    if (place.hosts or 1) > 1:
        strategies = ("HYBRID_SHARD", *strategies, "HYBRID_SHARD_ZERO2")
    reset: Settings = {key: yaml_value(default_of(key)) for key in RECOMPUTATION}
    choices = [
        Axis([{COMPILE: value} for value in ("true", "false")]),
        Axis([{"compile.scan_layers": value} for value in ("true", "false")]),
        Axis([{OFFLOAD: value} for value in dict.fromkeys((config.memory.offload, "none"))]),
        Axis([{CPU_OFFLOAD: value} for value in dict.fromkeys((yaml_value(config.memory.cpu_offload), "false"))]),
        Axis([reset | mode for mode in MODES], fastest_first=True),
        Axis([{ROWS: str(size)} for size in _doubling(sizes, own_rows)]),
        Axis([{STRATEGY: name} for name in strategies]),
        Axis([{ATTENTION: name} for name in (("auto", "static", "flex") if place.device == "cuda" else ())]),
        Axis([{PREFETCH: value} for value in ("0", "1")]),
        # Never less exact than the config states.
        Axis([{REDUCE: value} for value in (("bfloat16", "float32") if config.precision.reduce == "bfloat16" else ())]),
    ]
    delegated = spec_of(place.engine).delegated  # nothing would change
    yield from (axis for axis in choices if len(axis.values) > 1 and [*axis.values[0]][-1] not in delegated)


def _doubling(sizes: list[int], own_rows: int) -> list[int]:
    """Leave out sizes below twice the one before, but not the config's own; at most 64 rows, or four times its own."""
    taken: list[int] = []
    for size in (size for size in sizes if size <= max(64, 4 * own_rows)):
        if not taken or size >= 2 * taken[-1] or size == own_rows:
            taken.append(size)
    return taken


def climb(
    starts: Sequence[Settings],
    choices: Sequence[Axis],
    measure: Callable[[Settings], float | None],
    measure_again: Callable[[], tuple[Settings, float]],
) -> Iterator[Settings]:
    """Try each value of each key with the best of the others, again until nothing is faster; yield the best settings
    after each measurement.

    `measure` returns seconds, infinity for a candidate that needs too much memory, None for one that failed otherwise
    or is refused; it remembers what it measured. `measure_again` measures those near the best again, and returns what
    is the best then. Beside the best value of a key, a side ends with the first that is slower by more than NEAR. A
    value that failed once isn't tried again.
    """
    best, fastest = starts[0], math.inf
    failed = set[tuple[int, int]]()  # axis, position of the value

    def seconds_of(candidate: Settings) -> float | None:
        nonlocal best, fastest
        seconds = measure(candidate)
        if seconds is not None and seconds < fastest:
            best, fastest = candidate, seconds
        return seconds

    def each_axis() -> Iterator[Settings]:
        for number, axis in enumerate(choices):
            for side in axis.sides(best):
                for position in (each for each in side if (number, each) not in failed):
                    seconds = seconds_of(best | axis.values[position])
                    yield best
                    if seconds in (None, math.inf):
                        failed.add((number, position))
                    ends = seconds != math.inf if axis.fastest_first else (seconds or 0) > NEAR * fastest
                    if seconds is not None and ends:
                        break

    for settings in starts:
        seconds_of(settings)
        yield best
    before = None
    while best != before:
        before = best
        yield from each_axis()
        if best == before:
            best, fastest = measure_again()
