"""`observe.trackers`: start a process for each tracker, which reads the run's files (report/track.py).

A tracker that fails or hangs is dropped with one log line, and never delays a step. Imports none of the trackers.
"""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, cast

from portable_fsdp.observe.callbacks import Callback, RunEnd, RunStart, StepEnd
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.host import installed
from portable_fsdp.runtime.launchers import LAUNCH_VARIABLES

log = logging.getLogger("portable_fsdp")

PACKAGES = {
    "aim": ("aim",),
    "clearml": ("clearml",),
    "comet_ml": ("comet-ml",),
    "dvclive": ("dvclive",),
    "mlflow": ("mlflow-skinny", "mlflow"),
    "swanlab": ("swanlab",),
    "tensorboard": ("tensorboard",),
    "trackio": ("trackio",),
    "wandb": ("wandb",),
}
"""accelerate's name of a tracker -> distributions, one of which must be installed; messages suggest the first."""

END_S = 20.0
"""Seconds that a run waits for its trackers at its end."""


def require_installed(names: Iterable[str], key: str, way_out: str) -> None:
    """Raise ConfigError for trackers that aren't installed. `key`: where they are set; `way_out`: another fix."""
    missing = [name for name in names if not any(map(installed, PACKAGES[name]))]
    if missing:
        packages = " ".join(PACKAGES[name][0] for name in missing)
        raise ConfigError(f"{key}: {', '.join(missing)}: not installed: pip install {packages}\n  or {way_out}.")


class Trackers(Callback):
    """Starts the trackers of a run, notices those that failed, and lets them finish at its end."""

    def on_start(self, start: RunStart) -> None:
        self._folder = start.folder
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._begins: dict[str, int] = {}  # bytes that earlier starts wrote to the tracker's log
        for name in start.config.observe.trackers:
            try:
                self._running[name] = self._start(name)
            except OSError as error:
                log.warning("tracker %s can't start: %s", name, error)

    def on_step(self, step: StepEnd) -> None:
        if step.is_logged:
            self._drop_failed()

    def on_end(self, end: RunEnd) -> None:
        for tracker in self._running.values():
            cast(IO[bytes], tracker.stdin).close()  # the tracker sends the rest and exits
        deadline = time.monotonic() + END_S
        for name, tracker in list(self._running.items()):
            try:
                tracker.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                tracker.kill()
                tracker.wait()
                self._drop(name, f": not done after {END_S:.0f} s")
        self._drop_failed()

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        self._log(name).parent.mkdir(exist_ok=True)
        # Not a process of the launcher's job, and without a device.
        environ = {key: value for key, value in os.environ.items() if key not in LAUNCH_VARIABLES}
        environ |= {"USE_TORCH_XLA": "0", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "portable_fsdp.report", str(self._folder), f"--track={name}", "--follow"]
        with self._log(name).open("ab") as file:
            self._begins[name] = file.tell()
            # In its own session: Ctrl-C reaches only the run, which then lets its trackers finish.
            return subprocess.Popen(
                command, env=environ, stdin=subprocess.PIPE, stdout=file, stderr=file, start_new_session=True
            )

    def _log(self, name: str) -> Path:
        return self._folder / "logs" / f"tracker-{name}.log"

    def _drop_failed(self) -> None:
        for name, tracker in list(self._running.items()):
            if code := tracker.poll():
                lines = [f"exit code {code}"]
                with suppress(OSError):  # the file may have been deleted
                    written = self._log(name).read_bytes()[self._begins[name] :]
                    lines += written.decode(errors="replace").splitlines()
                self._drop(name, f" dropped: {lines[-1]}")

    def _drop(self, name: str, reason: str) -> None:
        cast(IO[bytes], self._running.pop(name).stdin).close()
        later = f"python -m portable_fsdp.report {self._folder} --track={name} sends the missing rows"
        log.warning("tracker %s%s; %s", name, reason, later)
