"""Profiles of steps: those of `observe.profile`, and the next steps when a file `PROFILE` appears.

Only process 0 records itself, between two steps. A profile that fails is dropped, and so is an unfinished one when the
run ends early: a launcher gives a stopped run only seconds, which its save needs.
"""

import logging
import shutil
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from portable_fsdp.observe.callbacks import Callback, Callbacks, ProfileEnd, RunStart
from portable_fsdp.runtime.command import stderr_file, stderr_into
from portable_fsdp.runtime.signals import StopRequest

if TYPE_CHECKING:
    from portable_fsdp.backends.contract import Backend, Operation, Pending

log = logging.getLogger("portable_fsdp")

_STEPS = 3  # steps per PROFILE file


class Profiles:
    """Starts and ends the profiles of process 0; does nothing on other processes."""

    def __init__(self, engine: "Backend", start: RunStart, callbacks: Callbacks, request: StopRequest) -> None:
        self._engine, self._start, self._callbacks, self._request = engine, start, callbacks, request
        self._last = min(start.steps, start.config.train.stop_at or start.steps)
        first, last = start.config.observe.profile.steps if start.config.observe.profile else (0, 0)
        self._planned = max(first, start.step + 1), last  # the rest of observe.profile
        self._file, self._is_on = start.folder / "PROFILE", engine.process.index == 0
        self._stop: Callable[[], Callable[[], list[Operation]]] | None = None

    def before_step(self, step: int, previous: "Pending | None") -> float:
        """Begin or end a profile between two steps, after waiting for the `previous` step. Returns the end of the
        previous step (seconds of time.perf_counter)."""
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
        """End a profile whose last step has ended (`step`); after the run's last step drop an unfinished one."""
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
        shutil.rmtree(self._folder, ignore_errors=True)  # left by an earlier start
        self._folder.mkdir(parents=True)
        with stderr_into(stderr_file(self._start.folder, 0)):
            self._stop = self._engine.start_trace(self._folder)
        self._began = time.perf_counter()
        self._cost = self._began - began

    def _end(self, *, drop: bool) -> None:
        ended, stop, (first, last) = time.perf_counter(), self._stop, self._steps
        self._stop, wall = None, ended - self._began
        assert stop is not None
        with stderr_into(stderr_file(self._start.folder, 0)):
            read = stop()
        if drop or self._request.requested:
            shutil.rmtree(self._folder, ignore_errors=True)
            log.warning("dropped the profile of steps %d to %d: the run ends", first, last)
            return
        from portable_fsdp.observe.profile_summary import summarize, summary_text

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
