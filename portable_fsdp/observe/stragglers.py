"""Names the process that the others wait for.

All processes end a step together, so wall time doesn't tell them apart. Each one's own time does: the part of a step in
which it waits for no other, but for rows, prepares the step, computes, or runs callbacks. Where the engine can't tell
computing from waiting, the time to dispatch the step stands for it.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

WINDOW, ENOUGH, RATIO = 10, 9, 1.3
"""A straggler takes `RATIO` times the median or more in `ENOUGH` of the last `WINDOW` steps."""

SHARE = 0.03
"""Share of a step. Less time than that above the median delays nobody, whatever its ratio."""


class Straggler(NamedTuple):
    """A process that was slow in `slow` of the last `steps` steps."""

    process: int
    host: str
    ratio: float  # of its own time to the median; the median over the slow steps
    slow: int
    steps: int

    def __str__(self) -> str:
        slower = f"{self.ratio:.1f}x slower than the median in {self.slow} of the last {self.steps} steps"
        return f"process {self.process} on {self.host} is {slower}"


class StragglerWatch:
    """Names each straggler once."""

    def __init__(self, hosts: Sequence[str]) -> None:
        """`hosts`: of each process."""
        self._hosts = hosts
        self._ratios = [deque[float](maxlen=WINDOW) for _ in hosts]
        self._named = set[int]()

    def add(self, own: Sequence[float], seconds: float) -> tuple[Straggler, ...]:
        """A step: each process's own time, and the whole step's. Returns the stragglers that nobody has named yet."""
        if imbalance(own) is None:
            return ()
        median, new = statistics.median_low(own), list[Straggler]()
        for process, (value, ratios) in enumerate(zip(own, self._ratios, strict=True)):
            ratios.append(value / median if value - median >= SHARE * seconds else 1.0)
            slow = [ratio for ratio in ratios if ratio >= RATIO]
            if len(slow) >= ENOUGH and process not in self._named:
                self._named.add(process)
                new.append(Straggler(process, self._hosts[process], statistics.median(slow), len(slow), len(ratios)))
        return tuple(new)


def imbalance(
    values: Sequence[float], median: Callable[[Sequence[float]], float] = statistics.median_low
) -> float | None:
    """The greatest value over the `median` (of two values: over the smaller); 1 is even. None: some are unknown."""
    if not all(math.isfinite(value) and value > 0 for value in values):
        return None
    return max(values) / median(values)
