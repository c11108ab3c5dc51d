"""Measure which settings are fastest on the devices that are here: `python -m portable_fsdp.tune --config=run.yaml`."""

import argparse
import json
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from pydantic import BaseModel

from portable_fsdp.backends.open import count_devices, local_processes, resolve
from portable_fsdp.backends.refusals import Deployment
from portable_fsdp.config.describe import changed_values, with_settings, with_value, yaml_value
from portable_fsdp.config.schema import Config
from portable_fsdp.config.yaml_text import parse
from portable_fsdp.convert.read import read_config
from portable_fsdp.parity.__main__ import run_place
from portable_fsdp.parity.record import Place, PlaceRecord, PlaceTask, RunTask, bounds
from portable_fsdp.plan.result import Settings
from portable_fsdp.runtime.command import CommandParser, at_least, number_of, run_command, to_stderr, to_stdout
from portable_fsdp.runtime.errors import EXIT_FINISHED, ConfigError, PortableFSDPError, TrainingError, UsageError, table
from portable_fsdp.runtime.files import write_text_atomically
from portable_fsdp.runtime.launchers import detect_launch
from portable_fsdp.train.preflight import check_config
from portable_fsdp.tune.search import axes, climb, reference

DESCRIPTION = """Measure which settings are fastest on the devices that are here: a few steps each on the config's data.

Writes CONFIG.tuned.yaml with the keys that changed, and CONFIG.tuning.json with all figures."""
EXIT_CODES = "exit code: 0; 2 usage or config error; 1 if the reference fails; 130 for Ctrl-C"
FLAGS = {
    "device": "auto | cpu | cuda | tpu, as for launch",
    "backend": "auto | native | xla, as for launch",
    "num_devices": "auto | N, as for launch",
}

STEPS, WARM_UP = 7, 2
_WORKER = "portable_fsdp.parity"  # it trains a place's first steps
OUT_OF_MEMORY = "out of memory"
_MARKS = ("out of memory", "OutOfMemoryError", "RESOURCE_EXHAUSTED", "MemoryError", "exit code -9")
_COMPILERS = ("torch._dynamo", "torch._inductor", "BackendCompilerFailed", "Mosaic", "INTERNAL: ")


class Candidate(BaseModel):
    """Settings with what was measured, or why they were not used."""

    settings: Settings
    seconds: float | None = None  # median of a step
    spread: float | None = None  # largest less smallest, seconds
    cpu_seconds: float | None = None  # median processor time of process 0
    memory_bytes: int | None = None
    loss_difference: float | None = None  # largest relative one from the reference
    problem: str = ""
    trial_s: float = 0.0  # of the whole trial, with start and compilation

    @property
    def words(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.settings.items()) or "the config's own"


class Tuning(BaseModel):
    """All of a tuning, as in CONFIG.tuning.json."""

    schema_version: int = 1
    config: str  # path
    place: Place
    device_name: str
    versions: dict[str, str]
    candidates: list[Candidate]  # the reference first
    chosen: Settings


def _parser() -> CommandParser:
    parser = CommandParser("tune", DESCRIPTION, epilog=EXIT_CODES)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides a key of the config")
    parser.config_flags("YAML file, as for portable_fsdp.launch")
    parser.add_argument("--minutes", type=at_least(0, float), default=5.0, metavar="M", help="time for all (default 5)")
    parser.auto_flags(FLAGS)
    parser.switch("--json", "print CONFIG.tuning.json too")
    return parser


def main(argv: list[str], worker: str = _WORKER) -> int:
    """Run the command with the arguments after the program's name; return the exit code."""

    def tune(options: argparse.Namespace) -> int:
        path, config, place = _read(options)
        tuning = Tuner(config, place, 60 * options.minutes, worker).run(str(path))
        to_stdout(_table(tuning))
        write_text_atomically(path.with_suffix(".tuning.json"), tuning.model_dump_json(indent=1) + "\n")
        write_text_atomically(path.with_suffix(".tuned.yaml"), tuned_yaml(tuning))
        to_stdout(f"written: {path.with_suffix('.tuned.yaml')}, {path.with_suffix('.tuning.json')}")
        if options.json:
            to_stdout(json.dumps(tuning.model_dump(mode="json")))
        return EXIT_FINISHED

    return run_command(_parser(), argv, tune)


def _read(options: argparse.Namespace) -> tuple[Path, Config, Place]:
    if options.config is None:
        raise UsageError("tune: --config=FILE is required.")
    if not detect_launch(os.environ).is_alone:
        raise UsageError("tune: a launcher started this process; start tune directly: it starts all processes.")
    config = read_config(options.config, options.overrides, options.imports, os.environ).config
    for key, value in {"checkpoint.resume": "none", "observe.trackers": (), "observe.profile": None}.items():
        config = with_value(config, key, value)
    try:
        device, engine = resolve(options.device, options.backend)
    except PortableFSDPError as error:
        raise UsageError(f"{error}\n  For devices that aren't here: python -m portable_fsdp.plan --on=...") from None
    number = number_of("num_devices", options.num_devices)
    devices = number or (count_devices(device) if device != "cpu" else local_processes(device, engine, None))
    place = Place(device=device, engine=engine, devices=devices)
    check_config(config, Deployment(engine, device, devices, 1))
    return Path(options.config), config, place


class Tuner:
    """Measures candidates one after the other, within `limit_s` seconds."""

    def __init__(self, config: Config, place: Place, limit_s: float, worker: str = _WORKER) -> None:
        self._config, self._place, self._worker = config, place, worker
        self._began, self._limit_s = time.monotonic(), limit_s
        self._candidates: list[Candidate] = []
        self._reference: PlaceRecord | None = None
        self._bound = bounds(config).loss

    def run(self, path: str) -> Tuning:
        """Measure the reference, and then candidates while time is left. Raises TrainingError if the reference fails
        or takes all the time."""
        first = reference(self._config)
        self._measure(first)
        if self._reference is None:
            (failed,) = self._candidates
            if self._left <= 0:
                raise ConfigError(
                    f"tune: --minutes={self._limit_s / 60:g} is less than one candidate needs: the reference had not "
                    "finished.\n  Give it more."
                )
            raise TrainingError(f"tune: the reference ({failed.words}) failed: {failed.problem}")
        base = with_settings(self._config, first)
        place = Deployment(self._place.engine, self._place.device, self._place.devices, 1)
        for _ in climb(first, axes(base, place), self._measure):
            if self._left <= 0:
                break
        return Tuning(
            config=path,
            place=self._place,
            device_name=self._reference.device_name,
            versions=self._reference.versions,
            candidates=self._candidates,
            chosen=_fastest(self._candidates).settings,
        )

    @property
    def _left(self) -> float:
        return self._limit_s - (time.monotonic() - self._began)

    def _measure(self, settings: Settings) -> float | None:
        """Run a candidate, unless an equal one ran; return the median seconds of a step, infinity if memory is short,
        None if it can't be used or no time is left."""
        settings = changed_values(self._config, with_settings(self._config, settings))
        known = next((c for c in self._candidates if c.settings == settings), None)
        if known is None:
            if self._left <= 0:
                return None
            known = self._tried(settings)
            self._candidates.append(known)
            to_stderr(f"{len(self._candidates)}: {known.words}: {known.problem or f'{known.seconds:.3f} s a step'}")
        if known.problem:
            return math.inf if known.problem == OUT_OF_MEMORY else None
        return known.seconds

    def _tried(self, settings: Settings) -> Candidate:
        config, began = with_settings(self._config, settings), time.monotonic()
        # One that hangs must not take all the time, and a compiler may take longer than the eager reference.
        limit = self._left if self._reference is None else max(3 * self._candidates[0].trial_s, self._left / 4)
        candidate = Candidate(settings=settings)
        try:
            check_config(config, Deployment(self._place.engine, self._place.device, self._place.devices, 1))
            with TemporaryDirectory(prefix="portable_fsdp_tune_") as folder:
                task = RunTask(config=config.model_dump_json(), steps=STEPS)
                place = PlaceTask(place=self._place, runs=[task], module=self._worker, out=f"{folder}/record")
                (record,) = run_place(place, min(limit, self._left))
        except PortableFSDPError as error:
            candidate.problem = _reason(f"{error}")
        else:
            self._reference = self._reference or record
            seconds = record.seconds[WARM_UP:]
            candidate.seconds, candidate.spread = median(seconds), max(seconds) - min(seconds)
            candidate.cpu_seconds = median(record.cpu_seconds[WARM_UP:])
            candidate.memory_bytes = record.memory_bytes
            candidate.loss_difference, candidate.problem = _compared(self._reference.losses, record.losses, self._bound)
        candidate.trial_s = time.monotonic() - began
        return candidate


def _compared(expected: list[float], losses: list[float], bound: float) -> tuple[float | None, str]:
    """Return the largest relative difference of the losses, and the problem if they are not those of the reference."""
    for step, loss in enumerate(losses, start=1):
        if not math.isfinite(loss):
            return None, f"the loss of step {step} is {loss}"
    difference = max(abs(loss - other) / abs(other) for loss, other in zip(losses, expected, strict=True))
    return difference, f"losses differ by {difference:.2g}, more than {bound:g}" if difference > bound else ""


def _reason(text: str) -> str:
    """Return the problem of a candidate in one line."""
    lines = [re.sub(r"^\[rank\d+\]:", "", line.strip()).strip() for line in text.splitlines() if line.strip()]
    if any(mark in text for mark in _MARKS):
        return OUT_OF_MEMORY
    if "not finished after" in lines[0]:
        return lines[0].partition(": ")[2]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Failed)\b.*:", line)]
    last = errors[-1] if errors and "exit code" in lines[0] else lines[0]
    return f"doesn't compile: {last}" if any(mark in text for mark in _COMPILERS) else last


def _fastest(candidates: Sequence[Candidate]) -> Candidate:
    return min((each for each in candidates if not each.problem), key=lambda each: each.seconds or math.inf)


def _table(tuning: Tuning) -> str:
    """Format a row per candidate, the fastest first."""
    rows = [("settings", "s a step", "spread", "GiB", "loss differs by", "")]
    order = sorted(tuning.candidates, key=lambda c: (bool(c.problem), c.seconds or math.inf))
    for each in order:
        seconds, spread = ("-" if value is None else f"{value:.4f}" for value in (each.seconds, each.spread))
        memory = "-" if each.memory_bytes is None else f"{each.memory_bytes / 2**30:.2f}"
        loss = "-" if each.loss_difference is None else f"{each.loss_difference:.1g}"
        rows.append((each.words, seconds, spread, memory, loss, each.problem))
    return table(rows, right=(1, 2, 3))


def tuned_yaml(tuning: Tuning) -> str:
    """Format the keys that changed as YAML, with the figures as comments."""
    first, best = tuning.candidates[0], _fastest(tuning.candidates)
    ratio = (first.seconds or 0) / (best.seconds or 1)
    lines = [
        f"# {tuning.config}, measured on {tuning.place.devices} x {tuning.device_name}, backend {tuning.place.engine}:",
        f"# {best.seconds:.4f} s a step, {ratio:.2f} times as fast as the reference ({first.words}).",
    ]
    sections: dict[str, list[str]] = {}
    for key, value in tuning.chosen.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, []).append(f"  {name}: {yaml_value(parse(value)[1])}")
    for section, keys in sections.items():
        lines += [f"{section}:", *keys]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
