"""Profiles of steps: those of `observe.profile`, and the next ones when a file `PROFILE` appears (`touch RUN/PROFILE`).

Process 0 records itself between two steps, without the others. A profile that fails is dropped with one line, and so is
one under way when the run ends early: a launcher gives a stopped run seconds, which belong to its save.
"""

import logging
import shutil
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from portable_fsdp.backends.base import Backend, Pending
from portable_fsdp.runtime.logs import stderr_file, stderr_into
from portable_fsdp.runtime.process import StopRequest
from portable_fsdp.train.callbacks import Callback, Callbacks, ProfileEnd, RunStart

if TYPE_CHECKING:
    from portable_fsdp.metrics.profile import Operation

log = logging.getLogger("portable_fsdp")

_STEPS = 3  # that one file asks for


class Profiles:
    """Starts and ends the profiles of process 0; does nothing on the others."""

    def __init__(self, engine: Backend, start: RunStart, callbacks: Callbacks, request: StopRequest) -> None:
        self._engine, self._start, self._callbacks, self._request = engine, start, callbacks, request
        self._last = min(start.steps, start.config.train.stop_at or start.steps)
        first, last = start.config.observe.profile.steps if start.config.observe.profile else (0, 0)
        self._planned = max(first, start.step + 1), last  # what is left of it
        self._file, self._noise = start.folder / "PROFILE", stderr_file(start.folder, 0)
        self._is_on = engine.process.index == 0
        self._stop: Callable[[], Callable[[], list[Operation]]] | None = None

    def before_step(self, step: int, previous: Pending | None) -> float:
        """Between two steps: waits for the `previous` one where a profile ends or begins. Returns when it ended, in
        seconds of time.perf_counter."""
        under_way = self._stop is not None
        if not self._is_on or (step <= self._steps[1] if under_way else self._due(step) is None):
            return time.perf_counter()
        if previous is not None:
            previous.result()
        ended = time.perf_counter()
        self.after_step(step - 1)
        if self._is_on and (steps := self._due(step)):
            self._try(lambda: self._begin(steps))
        return ended

    def after_step(self, step: int, *, is_last: bool = False) -> None:
        """End a profile that doesn't go beyond `step`, which has ended; after the run's last step drop any."""
        if self._stop is not None and (is_last or step >= self._steps[1]):
            self._try(lambda: self._end(drop=is_last))

    def _due(self, step: int) -> tuple[int, int] | None:
        if step == self._planned[0] <= self._planned[1]:
            return self._planned
        return (step, min(step + _STEPS - 1, self._last)) if self._file.is_file() else None

    def _begin(self, steps: tuple[int, int]) -> None:
        began, self._steps = time.perf_counter(), steps
        if steps != self._planned:
            self._file.unlink()
        self._folder = self._start.folder / "profile" / f"step-{steps[0]}-{steps[1]}"
        shutil.rmtree(self._folder, ignore_errors=True)  # of an earlier start
        self._folder.mkdir(parents=True)
        with stderr_into(self._noise):
            self._stop = self._engine.start_trace(self._folder)
        self._began = time.perf_counter()
        self._cost = self._began - began

    def _end(self, *, drop: bool) -> None:
        from portable_fsdp.metrics.profile import summarize, summary_text

        ended, stop, (first, last) = time.perf_counter(), self._stop, self._steps
        self._stop, wall = None, ended - self._began
        assert stop is not None
        with stderr_into(self._noise):
            read = stop()
        if drop or self._request.requested:
            shutil.rmtree(self._folder, ignore_errors=True)
            log.warning("the profile of steps %d to %d is dropped: the run ends", first, last)
            return
        summary, run = summarize(read(), wall), self._start
        title = f"steps {first} to {last}: {wall:.4f} s of process 0, {run.engine} on {run.devices} x {run.device}"
        (self._folder / "summary.txt").write_text(summary_text(summary, title), encoding="utf-8")
        seconds = self._cost + time.perf_counter() - ended
        self._callbacks.call(Callback.on_profile, ProfileEnd(first, last, self._folder, summary, seconds))

    def _try(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._is_on, self._stop = False, None
            log.warning("no more profiles in this run: %s: %s", type(error).__name__, error)
