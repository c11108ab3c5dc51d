"""Compare `run.grace_s` with the time that a stopped run needs, by its measured steps and saves."""

import logging
import statistics
import time
from collections import deque
from pathlib import Path

from portable_fsdp.checkpoint.manifests import Saved
from portable_fsdp.observe.callbacks import Callback, RunStart, StepEnd
from portable_fsdp.observe.run_files import measured_seconds

log = logging.getLogger("portable_fsdp")

_STEPS = 4
"""A request travels with the next step. All processes read it a step later, while the device computes one more."""


class Grace(Callback):
    """Warns once if the grace period is too short: at the start if an earlier start measured a save."""

    _grace_s, _save_s, _has_warned = 0.0, 0.0, False

    def on_start(self, start: RunStart) -> None:
        self._grace_s, self._first = start.config.run.grace_s, start.step + 1
        self._steps = deque[float](maxlen=20)
        if start.resumed is not None:
            self._steps.extend(measured_seconds(start.folder / "metrics.jsonl", None))
            self._save_s = max(measured_seconds(start.folder / "events.jsonl", "save")[-3:], default=0.0)
        self._check()

    def on_step(self, step: StepEnd) -> None:
        if step.step > self._first:  # the first one compiles
            self._steps.append(step.seconds)

    def on_save(self, save: Saved) -> None:
        self._save_s = save.seconds
        self._check()

    def _check(self) -> None:
        step_s = statistics.median(self._steps or [0.0])
        needed_s = self._save_s + _STEPS * step_s
        if self._save_s and needed_s > self._grace_s and not self._has_warned:
            self._has_warned = True
            log.warning(
                f"a stop request may come too late: a save takes {self._save_s:.1f} s and a step {step_s:.2f} s, so "
                f"{_STEPS} steps and a save {needed_s:.1f} s, more than run.grace_s={self._grace_s:g} s.\n"
                "  Raise your platform's grace period and run.grace_s, or rely on the saves of checkpoint.every."
            )

    def before_last_save(self, requested_at: float | None, saves: int, newest: Path | None) -> None:
        """Warn if the time left seems too short for `saves` saves in a row. `requested_at`: by time.monotonic()."""
        left_s = self._grace_s - (0.0 if requested_at is None else time.monotonic() - requested_at)
        if self._save_s and self._save_s * saves > left_s:  # unknown on other processes than 0
            under_way = ", after one that is under way" if saves > 1 else ""
            saved = newest.name if newest else "none"
            log.warning(
                f"the save may take {self._save_s:.1f} s{under_way}, but {max(0.0, left_s):.1f} s of run.grace_s are "
                f"left. Newest checkpoint until then: {saved}"
            )
