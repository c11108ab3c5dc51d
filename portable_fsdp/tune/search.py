"""The candidates of a tuning: the reference, the plan's choice, and then one key after the other.

Each key's other values are tried with the fastest values so far, so a dozen candidates cover a grid of hundreds.
"""

from collections.abc import Callable, Iterator

from portable_fsdp.backends.open import spec_of
from portable_fsdp.backends.refusals import Deployment, refusals
from portable_fsdp.config.describe import value_of, with_settings, yaml_value
from portable_fsdp.config.schema import Config
from portable_fsdp.layout import devices_per_row, micro_batches
from portable_fsdp.plan.result import Settings
from portable_fsdp.plan.search import CHECKPOINTING, COMPILE, MODES, ROWS

EAGER: Settings = {
    COMPILE: "false",
    "compile.backend": "auto",
    "compile.scan_layers": "false",
    CHECKPOINTING: "full",
    "memory.save_ops": "[]",
    "memory.every": "null",
    ROWS: "1",
}
OTHERS = ("sharding.strategy", "sharding.forward_prefetch", "model.attention")


def reference(config: Config) -> Settings:
    """Return all settings of the reference: one row at a time, no layer compiled, all recomputed; else the config's."""
    own = {key: yaml_value(value_of(config, key)) for key in OTHERS}
    return own | EAGER


def axes(config: Config, place: Deployment) -> Iterator[list[Settings]]:
    """Yield for each key, the most important first, the values to try: those that the engine accepts here."""
    devices = place.devices or 1
    sizes = micro_batches(config.train.global_batch, devices // devices_per_row(config))
    strategies = dict.fromkeys((config.sharding.strategy, "FULL_SHARD", "SHARD_GRAD_OP")) if devices > 1 else ()
    reset: Settings = {"memory.save_ops": "[]", "memory.every": "null"}
    choices: list[list[Settings]] = [
        [{COMPILE: "true"}, {COMPILE: "false"}],
        [{"compile.scan_layers": "true"}, {"compile.scan_layers": "false"}],
        [reset | mode for mode in MODES],
        [{ROWS: str(size)} for size in _doubling(sizes)],
        [{"sharding.strategy": strategy} for strategy in strategies],
        [{"model.attention": name} for name in (("auto", "static", "flex") if place.device == "cuda" else ())],
        [{"sharding.forward_prefetch": "0"}, {"sharding.forward_prefetch": "1"}],
    ]
    for values in choices:
        accepted = [settings for settings in values if not _is_refused(config, settings, place)]
        if len(accepted) > 1:
            yield accepted


def _doubling(sizes: list[int]) -> list[int]:
    """Leave out sizes below twice the one before; at most 64 rows, which fill a device."""
    kept: list[int] = []
    for size in (size for size in sizes if size <= 64):
        if not kept or size >= 2 * kept[-1]:
            kept.append(size)
    return kept


def _is_refused(config: Config, settings: Settings, place: Deployment) -> bool:
    """Whether the engine refuses these settings here, or leaves the key to itself, so that nothing would change."""
    key = next(iter(settings))
    return key in spec_of(place.engine).delegated or bool(refusals(with_settings(config, settings), place))


def climb(
    start: Settings, choices: Iterator[list[Settings]], measure: Callable[[Settings], float | None]
) -> Iterator[Settings]:
    """Try each value of each key with the best of the others; yield the best settings after each measurement.

    `measure` returns seconds, infinity for a candidate that needs too much memory, None for one that failed otherwise.
    A key's values are in an order in which neighbours are alike: those next to the best are tried first, and a side
    ends with the first that isn't faster.
    """
    best, fastest = start, measure(start)
    yield best
    for values in choices:
        at = next((n for n, value in enumerate(values) if value.items() <= best.items()), -1)
        for side in (range(at + 1, len(values)), range(at - 1, -1, -1)):
            for number in side:
                candidate = best | values[number]
                seconds = measure(candidate)
                if seconds is None:
                    continue
                if fastest is not None and seconds >= fastest:
                    break
                best, fastest = candidate, seconds
                yield best
