"""How evenly a run's processes are loaded, for metrics.jsonl."""

import math
import statistics
from collections.abc import Sequence
from typing import TypedDict


class ProcessLoads(TypedDict):
    """How evenly a run's processes are loaded, as each saw it when it began this step; by process index.

    A step ends for all when its slowest process ends, so in `seconds` a straggler shows only by what it does outside
    collectives: its data, its host. An imbalance is the greatest value over the median; 1 is even.
    """

    seconds: list[float | None]  # wall time of the last step that had ended; None in the first
    memory_bytes: list[float | None]  # peak of its fullest device; None where the engine doesn't tell
    seconds_imbalance: float | None
    memory_imbalance: float | None


def processes_row(seconds: Sequence[float], memory_bytes: Sequence[float]) -> ProcessLoads:
    """From one value a process; NaN stands for one that is unknown."""
    return ProcessLoads(
        seconds=[_known(value) for value in seconds],
        memory_bytes=[_known(value) for value in memory_bytes],
        seconds_imbalance=_imbalance(seconds),
        memory_imbalance=_imbalance(memory_bytes),
    )


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _imbalance(values: Sequence[float]) -> float | None:
    if not all(math.isfinite(value) and value > 0 for value in values):
        return None
    return max(values) / statistics.median(values)
