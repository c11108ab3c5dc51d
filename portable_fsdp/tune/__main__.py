"""Measure which settings are fastest on the devices that are here: `python -m portable_fsdp.tune --config=run.yaml`."""

import argparse
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from statistics import median

from portable_fsdp.backends.open import count_devices, resolve, spec_of
from portable_fsdp.backends.refusals import Deployment, refusals
from portable_fsdp.config.describe import AUTO, Settings, changed_values, with_settings, without_plan
from portable_fsdp.config.load import config_text
from portable_fsdp.config.schema import Config
from portable_fsdp.convert.read import read_config
from portable_fsdp.observe.run_files import versions
from portable_fsdp.parity.record import (
    Place,
    PlaceRecord,
    PlaceTask,
    RunTask,
    bounds,
    relative_difference,
    without_side_effects,
)
from portable_fsdp.plan.planner import fastest_that_fits, make_plan
from portable_fsdp.plan.result import Plan
from portable_fsdp.plan.target import Target, parse_target
from portable_fsdp.plan.time import rates_of
from portable_fsdp.runtime.child import Worker, WorkerFailedError
from portable_fsdp.runtime.command import (
    CommandParser,
    at_least,
    number_of,
    run_command,
    say_once_per_host,
    to_stderr,
    to_stdout,
)
from portable_fsdp.runtime.errors import (
    EXIT_FINISHED,
    EXIT_INTERRUPTED,
    ConfigError,
    PortableFSDPError,
    TrainingError,
    UsageError,
    table,
)
from portable_fsdp.runtime.files import write_text_atomically
from portable_fsdp.runtime.launchers import detect_launch, hosts_of
from portable_fsdp.runtime.signals import exit_on_signals
from portable_fsdp.train.preflight import check_config
from portable_fsdp.tune.processes import Runner
from portable_fsdp.tune.search import NEAR, axes, climb, own, references

DESCRIPTION = """Measure which settings are fastest on the devices that are here: a few steps each on the config's data.

Writes CONFIG.tuned.yaml: the config with the fastest settings, to start with launch, and all figures as comments."""
EXIT_CODES = "exit code: 0; 2 usage or config error; 1 if the reference fails; 130 for Ctrl-C"
FLAGS = {
    "device": "auto | cpu | cuda | tpu, as for launch",
    "backend": "auto | native | xla, as for launch",
    "num_devices": "auto | N, as for launch",
}

ELSEWHERE = "For devices that aren't here: python -m portable_fsdp.plan --on=..."
STEPS, WARM_UP = 7, 2
SLOWER = 1.5
"""A candidate this much slower by plan isn't run; plans are off by up to 21 % (docs/planning.md)."""
NOISE = 1.02
"""The config's own settings stay if the fastest takes this much less time, or less."""
TRIALS = 3
"""While time is left, each candidate within NEAR times the fastest's seconds is measured this many times."""
_WORKER = "portable_fsdp.parity"  # it trains a place's first steps
OUT_OF_MEMORY, TIME_IS_OVER = "out of memory", "not finished when the time was over"
LOSS = "loss"  # both problems of `_compared` begin so
_MARKS = ("out of memory", "OutOfMemoryError", "RESOURCE_EXHAUSTED", "MemoryError", "exit code -9")
_COMPILERS = ("torch._dynamo", "torch._inductor", "BackendCompilerFailed", "Mosaic", "INTERNAL: ")


def _parser() -> CommandParser:
    parser = CommandParser("tune", DESCRIPTION, epilog=EXIT_CODES)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides a key of the config")
    parser.config_flags("YAML file, as for portable_fsdp.launch")
    parser.add_argument("--minutes", type=at_least(0, float), default=5.0, metavar="M", help="time for all (default 5)")
    parser.auto_flags(FLAGS)
    return parser


def main(argv: list[str], worker: str = _WORKER) -> int:
    """Run the command with the arguments after the program's name; return the exit code."""

    def tune(options: argparse.Namespace) -> int:
        path, config, place = _read(options)
        runner = Runner(timedelta(minutes=options.minutes + 10))
        if runner.launch.rank > 0:
            runner.follow()
            return EXIT_FINISHED
        try:
            with Worker(60 * options.minutes) as plans:
                tuner = Tuner(path, config, place, runner, plans, 60 * options.minutes, worker)
                tuner.run()
        finally:
            runner.end()
        to_stdout(tuner.table)
        if tuner.problem_of_file:
            raise TrainingError(tuner.problem_of_file)
        to_stdout(f"written: {tuner.file}\nstart it: python -m portable_fsdp.launch --config={tuner.file}")
        return EXIT_INTERRUPTED if tuner.is_interrupted else EXIT_FINISHED

    return run_command(_parser(), argv, tune, say=say_once_per_host)


def _read(options: argparse.Namespace) -> tuple[Path, Config, Deployment]:
    if options.config is None:
        raise UsageError("tune: --config=FILE is required.")
    path = Path(options.config)
    devices = number_of("num_devices", options.num_devices)
    config = read_config(options.config, options.overrides, options.imports, os.environ, devices=devices).config
    try:
        device, engine = resolve(options.device, options.backend)
    except PortableFSDPError as error:
        raise UsageError(f"{error}\n  {ELSEWHERE}") from None
    launch, hosts = detect_launch(os.environ), 1
    if launch.is_alone:
        if (hosts := hosts_of(device, os.environ)) > 1:
            raise UsageError(f"tune: expected the TPUs of one host, found a slice of {hosts} hosts.\n  {ELSEWHERE}")
        most = count_devices(device)
        devices = number_of("num_devices", options.num_devices) or most
        if device != "cpu" and devices > most:
            raise UsageError(f"tune: --num_devices: expected at most {most}, found {devices}.\n  {ELSEWHERE}")
    elif not spec_of(engine).launcher_counts_devices:
        raise UsageError(f"tune: backend {engine}: expected a start without a launcher, found {launch.description}.")
    else:
        devices = launch.world_size
        hosts = max(1, devices // int({**os.environ, **launch.variables}.get("LOCAL_WORLD_SIZE", devices)))
    place = Deployment(engine, device, devices, hosts)
    check_config(without_plan(without_side_effects(config)), place)
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"tune: {path.parent}: not writable; {_tuned_file(path).name} goes there.")
    return path, config, place


def _tuned_file(path: Path) -> Path:
    return path.with_suffix(".tuned.yaml")


@dataclass
class Candidate:
    """Settings with what was measured, or why they were not used."""

    settings: Settings  # what differs from the config
    expected: float | None = None  # seconds of a step, by plan; None: the hardware's speed isn't known
    seconds: float = math.inf  # median of a step; on CPUs process 0's processor time, which others disturb less
    spread: float | None = None  # largest less smallest, seconds
    trials: int = 0  # `seconds` and `spread` are those of the fastest
    memory_bytes: int | None = None  # peak of the fullest device of process 0
    loss_difference: float | None = None  # largest relative one from the reference
    problem: str = ""
    trial_s: float = 0.0  # seconds of the first trial, with start and compilation

    @property
    def words(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.settings.items()) or "the config's own settings"


class Tuner:
    """Measures candidates one after the other, within `limit_s` seconds, and writes the tuned config after each."""

    def __init__(
        self, path: Path, config: Config, place: Deployment, runner: Runner, plans: Worker, limit_s: float, worker: str
    ) -> None:
        self._path, self.file, self._untuned = path, _tuned_file(path), config
        self._given = without_side_effects(config)
        self._config = without_plan(self._given)
        self._place, self._runner, self._worker = place, runner, worker
        self._began, self._limit_s = time.monotonic(), limit_s
        self.candidates: list[Candidate] = []  # the reference first
        self._reference: PlaceRecord | None = None
        self._bound = bounds(config).loss
        self._plans = plans
        self._target: Target | None = None  # of plans; None: the speed that this hardware reaches isn't known
        self._numbers = count(1)  # of trials, for the log
        self.is_interrupted, self.problem_of_file = False, ""

    def run(self) -> None:
        """Measure the reference, the config's own settings, the plan's choice, and then candidates while time is left.
        Raises TrainingError if no reference runs, ConfigError if the time is too short for one."""
        usable = (each for each in references(self._config) if self._measure(each) not in (None, math.inf))
        first = next(usable, None)
        if first is None or self._reference is None:
            if not self._has_time:
                raise ConfigError(
                    f"tune: --minutes={self._limit_s / 60:g} is less than one candidate needs: the reference had not "
                    "finished.\n  Give it more."
                )
            raise TrainingError(f"tune: no reference ran: {self.candidates[-1].problem}")
        if self._place.device in spec_of(self._place.engine).planned_by:
            with suppress(ConfigError):  # hardware that no plan knows
                target = parse_target(f"{self._reference.device_name}:{self._place.devices}")
                self._target = target if rates_of(target) else None
        try:
            starts, choices = [first, own(self._config), *self._choice_of_plan(first)], axes(self._config, self._place)
            for _ in climb(starts, [*choices], self._measure, self._measure_again):
                if not self._has_time:
                    break
        except KeyboardInterrupt:
            to_stderr("interrupted: the candidates so far")
            self.is_interrupted = True

    def _measure_again(self) -> tuple[Settings, float]:
        """Measure those near the fastest again; return the settings and seconds of the one that is the fastest then."""
        while self._has_time:
            usable = [each for each in self.candidates if not each.problem]
            limit_s = NEAR * min(each.seconds for each in usable)
            near = [each for each in usable if each.seconds <= limit_s and each.trial_s < self._left]
            candidate = min(near, key=lambda each: (each.trials, each.seconds), default=None)
            if candidate is None or candidate.trials >= TRIALS:
                break
            again = Candidate(candidate.settings, trial_s=candidate.trial_s)
            self._try(again, is_first=False)
            candidate.trials += again.problem != TIME_IS_OVER
            if again.problem.startswith((OUT_OF_MEMORY, LOSS)) and len(usable) > 1:
                candidate.problem = again.problem  # other problems, as of a busy host, say less than what ran before
            elif again.seconds < candidate.seconds:
                candidate.seconds, candidate.spread = again.seconds, again.spread
            self._write()
        fastest = _fastest(self.candidates)
        return own(with_settings(self._config, fastest.settings)), fastest.seconds

    @property
    def table(self) -> str:
        """A row per candidate, the fastest first."""
        seconds_title = "processor s a step" if self._place.device == "cpu" else "s a step"
        rows = [("settings", "expected s", seconds_title, "spread", "trials", "GiB", "loss differs by", "")]
        for each in sorted(self.candidates, key=lambda each: (bool(each.problem), each.seconds)):
            figures = (each.expected, each.seconds, each.spread)
            expected, seconds, spread = ("-" if value in (None, math.inf) else f"{value:.4f}" for value in figures)
            memory = "-" if each.memory_bytes is None else f"{each.memory_bytes / 2**30:.2f}"
            loss = "-" if each.loss_difference is None else f"{each.loss_difference:.1g}"
            rows.append((each.words, expected, seconds, spread, str(each.trials), memory, loss, each.problem))
        return table(rows, right=(1, 2, 3, 4, 5))

    @property
    def text(self) -> str:
        """The tuned config, with what was measured as comments."""
        assert self._reference is not None
        mine = self._settings(own(self._config))  # with auto: what a run takes without a plan
        chosen = _chosen(self.candidates, mine)
        seconds, before = (_seconds_of(self.candidates, each) for each in (chosen, mine))
        where = f"{self._place.devices or 1} x {self._reference.device_name}, backend {self._place.engine}"
        lines = [f"{self._path}, measured on {where}:"]
        if seconds is None:
            lines.append("The time was too short to measure the config's own settings, so nothing changes.")
        else:
            ratio = f", {before / seconds:.2f} times as fast as {Candidate(mine).words}" if before else ""
            lines.append(f"{seconds:.4f} s a step{ratio}.")
            lines.append(f"Changed: {Candidate(chosen).words}" if chosen else "Nothing was faster, so nothing changes.")
        lines += ["", *self.table.splitlines(), "", ", ".join(f"{name} {of}" for name, of in versions().items())]
        comments = "\n".join(f"# {line}".rstrip() for line in lines)
        return f"{comments}\n{config_text(with_settings(self._untuned, chosen), only_set=True)}"

    @property
    def _left(self) -> float:
        return self._limit_s - (time.monotonic() - self._began)

    @property
    def _has_time(self) -> bool:
        """Whether a trial like that of the fastest would fit into the time that is left."""
        return self._left > self._usual_s

    @property
    def _usual_s(self) -> float:
        """Seconds of the trial of the fastest; 0 if nothing ran."""
        return _fastest(self.candidates).trial_s if self._reference else 0.0

    def _settings(self, settings: Settings) -> Settings:
        """Return what these settings change in the config as it was given."""
        return changed_values(self._given, with_settings(self._given, settings))

    def _choice_of_plan(self, first: Settings) -> Iterator[Settings]:
        """Yield what `auto` takes on these devices; nothing if no plan knows their speed."""
        if self._target is None:
            return
        config = with_settings(self._config, first | dict.fromkeys(AUTO, "auto"))
        least_s = 0.6 * self._left  # most of the time is for measurements

        def plan_of(settings: Settings) -> Plan:
            if self._left < least_s:
                raise TrainingError("planning takes too much of --minutes")
            return self._plan(with_settings(config, settings))

        try:
            best = fastest_that_fits(config, self._target, plan_of, self._plans, lambda line: None)
        except (PortableFSDPError, WorkerFailedError) as error:
            to_stderr(f"no candidates by plan: {error}")
        else:
            yield first | best.settings

    def _plan(self, config: Config) -> Plan:
        assert self._target is not None
        return make_plan(config, self._target, self._plans, backend=self._place.engine)

    def _measure(self, settings: Settings) -> float | None:
        """Run a candidate, unless an equal one ran; return the median seconds of a step, infinity if memory is short,
        None if it is refused, can't be used, or no time is left."""
        settings = self._settings(settings)
        known = next((c for c in self.candidates if c.settings == settings), None)
        if known is None:
            if not self._has_time or refusals(with_settings(self._given, settings), self._place):
                return None
            known = Candidate(settings)
            self._try(known)
            self.candidates.append(known)
            self._write()
        if known.problem:
            return math.inf if known.problem.startswith(OUT_OF_MEMORY) else None
        return known.seconds

    def _try(self, candidate: Candidate, *, is_first: bool = True) -> None:
        """Run a candidate, unless its plan shows a problem, and fill in what it shows."""
        to_stderr(f"{next(self._numbers)}: {candidate.words}{'' if is_first else ' (again)'}")
        config = with_settings(self._given, candidate.settings)
        if is_first:
            candidate.expected, candidate.problem = self._expected(config)
        began = time.monotonic()
        try:
            check_config(config, self._place)
            limit = self._left
            if self._reference is not None:  # one that hangs must not take all, but a compiler may take long
                limit = min(limit, max(2 * candidate.trial_s, 2 * self._usual_s, limit / 4))
            if not candidate.problem:
                place = Place(device=self._place.device, engine=self._place.engine, devices=self._place.devices or 1)
                task = RunTask(config=config.model_dump_json(), steps=STEPS)
                candidate.trials = 1
                record = self._runner.run(PlaceTask(place=place, runs=[task], module=self._worker), limit)
                self._add_figures(candidate, record)
        except PortableFSDPError as error:
            candidate.problem = _reason(f"{error}") if self._left > 0 else TIME_IS_OVER
        candidate.trial_s = time.monotonic() - began
        to_stderr(f"   {candidate.problem or f'{candidate.seconds:.3f} s a step'}")

    def _write(self) -> None:
        """Write the file. A full disk doesn't end the tuning: its table is worth having."""
        self.problem_of_file = ""
        if self._reference is not None:
            try:
                write_text_atomically(self.file, self.text)
            except OSError as error:
                self.problem_of_file = f"{self.file}: can't be written: {error.strerror}"

    def _expected(self, config: Config) -> tuple[float | None, str]:
        """Return the expected seconds, None if unknown, and why the candidate isn't worth a run, if it isn't."""
        try:
            plan = None if self._target is None else self._plan(config)
        except (PortableFSDPError, WorkerFailedError):  # what can't be planned may still run
            plan = None
        if plan is None:
            return None, ""
        seconds = plan.expected.seconds if plan.expected else None
        if plan.memory.verdict == "does not fit":
            return seconds, f"{OUT_OF_MEMORY} by plan: {plan.memory.peak_bytes / 2**30:.1f} GiB"
        best = _fastest(self.candidates).expected
        if seconds and best and seconds > SLOWER * best:
            return seconds, f"by plan {seconds / best:.2f} times the time of the fastest"
        return seconds, ""

    def _add_figures(self, candidate: Candidate, record: PlaceRecord) -> None:
        times = record.cpu_seconds if self._place.device == "cpu" else record.seconds
        times = times[WARM_UP:] or times[-1:]  # a run may have fewer steps
        candidate.memory_bytes = record.memory_bytes
        expected = record.losses if self._reference is None else self._reference.losses
        candidate.loss_difference, candidate.problem = _compared(expected, record.losses, self._bound)
        if not candidate.problem:
            self._reference = self._reference or record
            candidate.seconds, candidate.spread = median(times), max(times) - min(times)


def _compared(expected: list[float], losses: list[float], bound: float) -> tuple[float | None, str]:
    """Return the largest relative difference of the losses, and the problem if they are not those of the reference."""
    for step, loss in enumerate(losses, start=1):
        if not math.isfinite(loss):
            return None, f"loss is {loss} in step {step}"
    difference = max(map(relative_difference, losses, expected))
    return difference, f"losses differ by {difference:.2g}, more than {bound:g}" if difference > bound else ""


def _reason(text: str) -> str:
    """Return the problem of a candidate in one line."""
    lines = [re.sub(r"^\[rank\d+\]:", "", line.strip()).strip() for line in text.splitlines() if line.strip()]
    if "not finished after" in lines[0]:
        return lines[0].partition(": ")[2]
    if any(mark in text for mark in _MARKS):
        return OUT_OF_MEMORY
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Failed)\b.*:", line)]
    last = errors[-1] if errors and "exit code" in lines[0] else lines[0]
    return f"doesn't compile: {last}" if any(mark in text for mark in _COMPILERS) else last


def _fastest(candidates: Sequence[Candidate]) -> Candidate:
    return min((each for each in candidates if not each.problem), key=lambda each: each.seconds)


def _chosen(candidates: Sequence[Candidate], mine: Settings) -> Settings:
    """Return the settings of the fastest, or `mine`, the config's own, if those aren't slower by more than NOISE; none
    if the time was too short to compare with them."""
    best, own_s = _fastest(candidates), _seconds_of(candidates, mine)
    if not any(each.settings == mine and each.problem != TIME_IS_OVER for each in candidates):
        return {}
    return mine if own_s and own_s <= NOISE * best.seconds else best.settings


def _seconds_of(candidates: Sequence[Candidate], settings: Settings) -> float | None:
    return next((each.seconds for each in candidates if each.settings == settings and not each.problem), None)


if __name__ == "__main__":
    exit_on_signals()
    sys.exit(main(sys.argv[1:]))
