"""On a terminal: the newest figures in one line that stays at its bottom, while other lines scroll above it."""

import logging
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console as Terminal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from portable_fsdp.metrics.goodput import Pace, duration
from portable_fsdp.train.callbacks import Callback, RunEnd, RunStart, StepEnd
from portable_fsdp.train.records import steps_left

log = logging.getLogger("portable_fsdp")


class LiveDisplay(Callback):
    """Drawn by rich, a few times a second."""

    def on_start(self, start: RunStart) -> None:
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(20),
            TimeElapsedColumn(),
            TextColumn("{task.fields[now]}", table_column=Column(ratio=1, no_wrap=True)),  # it alone is cut short
        )
        self._start, self._pace, self._eval = start, Pace(), ""
        self._progress = Progress(
            *columns, console=Terminal(stderr=True), refresh_per_second=4, transient=True, expand=True
        )
        self._task = self._progress.add_task("", total=start.steps, completed=start.step, now="")
        self._progress.start()
        self._restore = _log_through_stderr()

    def on_step(self, step: StepEnd) -> None:
        if step.evaluation is not None:
            self._eval = f" (eval {step.evaluation.loss:.4f})"
        left = self._pace.time_left(step.seconds, steps_left(step, self._start))
        parts = [
            "" if left is None else f"eta {duration(left)}",
            f"loss {step.loss:.4f}{self._eval}",
            f"{step.tokens_per_second:,.0f} tokens/s",
            "" if step.mfu is None else f"MFU {step.mfu:.1%}",
            "" if step.memory_bytes is None else f"{step.memory_bytes / 2**30:.2f} GiB",
            f"data {step.data_seconds:.2f} s",
            "" if step.last_checkpoint is None else f"saved {step.last_checkpoint.name}",
        ]
        self._progress.update(self._task, completed=step.step, now="  ".join(filter(None, parts)))

    def on_end(self, end: RunEnd) -> None:
        self._progress.stop()
        self._restore()


def _log_through_stderr() -> Callable[[], None]:
    """While a display is live rich replaces sys.stderr, to print above it; log handlers have kept the one before."""
    handlers: list[Any] = [handler for handler in log.handlers if isinstance(handler, logging.StreamHandler)]
    before = [handler.setStream(sys.stderr) for handler in handlers]

    def restore() -> None:
        for handler, stream in zip(handlers, before, strict=True):
            handler.setStream(stream or sys.stderr)

    return restore
