"""How evenly a run's processes are loaded, for metrics.jsonl."""

import math
import statistics
from collections.abc import Sequence
from typing import TypedDict


class ProcessLoads(TypedDict):
    """How evenly the processes are loaded, as each saw it at the start of this step; by process index.

    All wait for the slowest process of a step, so `seconds` show a straggler only by its work outside collectives (its
    data, its host). An imbalance is the greatest value over the median; 1 is even.
    """

    seconds: list[float | None]  # wall time of the last step that had ended; None in the first
    memory_bytes: list[float | None]  # peak of its fullest device; None where the engine doesn't tell
    seconds_imbalance: float | None
    memory_imbalance: float | None


def processes_row(seconds: Sequence[float], memory_bytes: Sequence[float]) -> ProcessLoads:
    """From one value a process; NaN stands for one that is unknown."""
    return ProcessLoads(
        seconds=[value if math.isfinite(value) else None for value in seconds],
        memory_bytes=[value if math.isfinite(value) else None for value in memory_bytes],
        seconds_imbalance=_imbalance(seconds),
        memory_imbalance=_imbalance(memory_bytes),
    )


def _imbalance(values: Sequence[float]) -> float | None:
    if not all(math.isfinite(value) and value > 0 for value in values):
        return None
    return max(values) / statistics.median(values)
