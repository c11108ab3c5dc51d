"""Status line at the bottom of a terminal with the newest metrics, while other lines scroll above it."""

import logging
import os
import sys
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from rich.console import Console as Terminal
from rich.console import ConsoleOptions, RenderResult
from rich.file_proxy import FileProxy
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column
from rich.text import Text

from portable_fsdp.checkpoint.manifests import step_of
from portable_fsdp.observe.callbacks import Callback, RunEnd, RunStart, StepEnd
from portable_fsdp.observe.goodput import duration
from portable_fsdp.runtime.command import stderr_file

log = logging.getLogger("portable_fsdp")


class LiveDisplay(Callback):
    """Status line, drawn by rich a few times per second."""

    def on_start(self, start: RunStart) -> None:
        self._eval, self._undo = "", ExitStack()
        # Use a duplicate: the run's logs redirect the descriptor of stderr.
        file = self._undo.enter_context(os.fdopen(os.dup(2), "w", encoding="utf-8", errors="replace"))
        terminal = Terminal(file=file)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            *([BarColumn(20)] if terminal.width >= 100 else []),
            TimeElapsedColumn(),
            _Figures(terminal),
            console=terminal,
            refresh_per_second=4,
            transient=True,
            expand=True,
            redirect_stdout=False,  # rich would fold long lines at the terminal's width
            redirect_stderr=False,
        )
        self._task = self._progress.add_task("", total=start.steps, completed=start.step, now=[])
        self._undo.enter_context(self._progress)
        if sys.stdout.isatty():
            self._undo.enter_context(redirect_stdout(_LinesAbove(terminal, sys.stdout)))
        above: Any = _LinesAbove(terminal, sys.stderr, stderr_file(start.folder, 0))
        self._undo.enter_context(redirect_stderr(above))
        for handler in log.handlers:  # they hold the old stderr
            if isinstance(handler, logging.StreamHandler):
                self._undo.callback(handler.setStream, cast(Any, handler).setStream(above))

    def on_step(self, step: StepEnd) -> None:
        if step.evaluation is not None:
            self._eval = f" (eval {step.evaluation.loss:.4f})"
        saved = step.last_checkpoint and step_of(step.last_checkpoint)
        parts = [  # the most important first: the last ones may not fit
            "" if step.seconds_left is None else f"eta {duration(step.seconds_left)}",
            f"loss {step.loss:.4f}{self._eval}",
            "" if saved is None else f"saved {saved}",
            f"{step.tokens_per_second:,.0f} tokens/s",
            "" if step.mfu is None else f"MFU {step.mfu:.1%}",
            "" if step.memory_bytes is None else f"{step.memory_bytes / 2**30:.2f} GiB",
            f"data {step.data_seconds:.2f} s",
        ]
        self._progress.update(self._task, completed=step.step, now=[*filter(None, parts)])

    def on_end(self, end: RunEnd) -> None:
        self._undo.close()


class _Figures(ProgressColumn):
    """The newest metrics, as many as fit. Erases a line that a narrower terminal has wrapped."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(table_column=Column(ratio=1, no_wrap=True))
        self._terminal, self._width = terminal, terminal.width

    def render(self, task: Task) -> "_Fitting":
        width, before = self._terminal.width, self._width
        if width < before:  # rich moves up by the lines that it drew, not by those that the terminal made of them
            self._terminal.file.write(f"\r\x1b[{-(-before // width) - 1}A\x1b[J")
        self._width = width
        return _Fitting(task.fields["now"])


class _Fitting(NamedTuple):
    """The first of some texts that fit on a line."""

    texts: list[str]

    def __rich_console__(self, console: Terminal, options: ConsoleOptions) -> RenderResult:
        lines = ("  ".join(self.texts[:count]) for count in range(len(self.texts), -1, -1))
        yield Text(next(line for line in lines if len(line) <= options.max_width))


class _LinesAbove(FileProxy):
    """Prints whole lines unchanged above the display, and appends them to the file `copy` if it exists."""

    def __init__(self, terminal: Terminal, stream: IO[str], copy: Path | None = None) -> None:
        super().__init__(terminal, stream)
        self._terminal, self._copy, self._rest = terminal, copy, ""

    def write(self, text: str) -> int:
        whole, newline, self._rest = (self._rest + text).rpartition("\n")
        if newline:
            self._terminal.out(whole, highlight=False)
            with suppress(OSError):
                if self._copy and self._copy.exists():
                    with self._copy.open("a", encoding="utf-8", errors="replace") as file:
                        file.write(f"{whole}\n")
        return len(text)
