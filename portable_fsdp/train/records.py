"""Our own callbacks: the files of a run's folder, and the lines that a run prints."""

import json
import logging
import platform
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version

import psutil

from portable_fsdp.checkpoint.manager import Saved
from portable_fsdp.config.describe import default_of, option_names, shortened, value_of, yaml_value
from portable_fsdp.config.load import config_text
from portable_fsdp.config.schema import Config
from portable_fsdp.metrics.goodput import duration, goodput
from portable_fsdp.metrics.sinks import EventsFile, MetricsFile, read_jsonl, utc_text
from portable_fsdp.runtime.errors import printable, without_passwords
from portable_fsdp.runtime.files import write_text_atomically
from portable_fsdp.train.callbacks import Callback, EvaluationEnd, ProfileEnd, RunEnd, RunStart, SamplesEnd, StepEnd
from portable_fsdp.train.stragglers import imbalance

log = logging.getLogger("portable_fsdp")

_KEYS = (
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "tokens_per_second",
    "mfu",
    "memory_bytes",
    "seconds",
    "data_seconds",
    "imbalance",
)
"""Keys of metrics.jsonl, which people's scripts read; `processes`, `eval_*`, and in float16 `loss_scale` and
`skipped_steps`, where they are known; `is_empty`, 1, in a step in which nothing counted."""


class RunFiles(Callback):
    """config.yaml, metrics.jsonl, samples.jsonl, events.jsonl, STOPPED."""

    def on_start(self, start: RunStart) -> None:
        """Makes the folder and drops the rows of steps that run again."""
        self._folder, self._hosts, self._first = start.folder, start.hosts, start.step
        self._folder.mkdir(parents=True, exist_ok=True)
        self._metrics = MetricsFile(self._folder / "metrics.jsonl")
        lost = self._metrics.truncate_after(start.step)  # first: it refuses a file that something else has written to
        self._samples = MetricsFile(self._folder / "samples.jsonl")
        self._samples.truncate_after(start.step)
        self._events = EventsFile(self._folder / "events.jsonl")
        for name in ("STOPPED", "PROFILE"):
            (self._folder / name).unlink(missing_ok=True)
        write_text_atomically(self._folder / "config.yaml", without_passwords(config_text(start.config)))
        self._events.write(
            "start",
            name=start.config.run.name,
            step=start.step,
            backend=start.engine,
            device=start.device,
            devices=start.devices,
            processes=start.processes,
            hosts=start.hosts,
            steps=start.steps,
            parameters=start.parameters,
            began=utc_text(_process_start()),
            environment=environment(),
            **({"lost": lost._asdict()} if lost else {}),
        )
        if (resumed := start.resumed) is not None:
            self._events.write(
                "resume",
                path=str(resumed.path),
                step=resumed.step,
                load="weights_only" if resumed.weights_only else "all",
                changes={change.name: {"saved": change.saved, "now": change.now} for change in resumed.changes},
                passed_over=list(resumed.passed_over),
            )

    def on_step(self, step: StepEnd) -> None:
        if (kinds := step.collectives) is not None:
            self._events.write("collectives", **{kind: traffic._asdict() for kind, traffic in kinds.items()})
        row = {name: getattr(step, name) for name in _KEYS} | {"time": utc_text(step.ended)}
        if step.is_logged:
            row["processes"] = processes_row(step, self._hosts)
        if step.loss_scale is not None:
            row |= {"loss_scale": step.loss_scale, "skipped_steps": step.skipped_steps}
        row |= {"is_empty": 1} if step.is_empty else {}
        if step.evaluation is not None:
            row |= _evaluation_row(step.evaluation)
        self._metrics.write(row)
        for straggler in step.stragglers:
            self._events.write("straggler", step=step.step, **straggler._asdict())

    def on_evaluate(self, evaluation: EvaluationEnd) -> None:
        figures = asdict(evaluation)
        self._events.write("evaluation", **{**figures, **figures.pop("metrics")})
        if 0 < evaluation.step == self._first:  # of the step before this start, which wrote its row
            self._metrics.add(evaluation.step, _evaluation_row(evaluation))

    def on_samples(self, samples: SamplesEnd) -> None:
        for prompt, text in zip(samples.prompts, samples.texts, strict=True):
            self._samples.write({"step": samples.step, "prompt": prompt, "text": text})
        self._events.write("samples", step=samples.step, seconds=samples.seconds)

    def on_save(self, save: Saved) -> None:
        self._events.write("save", **save._asdict() | {"path": save.path.absolute()})

    def on_profile(self, profile: ProfileEnd) -> None:
        figures = profile.summary._asdict()
        collectives = {kind.name: kind._asdict() for kind in figures.pop("collectives")}
        shares = {name: value for name, value in figures.items() if isinstance(value, float)}
        steps = {"step": profile.last, "first_step": profile.first, "seconds": profile.seconds}
        self._events.write("profile", **steps, path=profile.folder, **shares, collectives=collectives)

    def on_end(self, end: RunEnd) -> None:
        kind = {"finished": "finish", "failed": "fail"}.get(end.outcome, "stop")
        reason = {} if kind == "finish" else {"reason": end.reason}
        self._events.write(kind, step=end.step, **reason, **end.values)
        if end.outcome == "stopped":
            content = json.dumps({"reason": end.reason, "step": end.step})
            write_text_atomically(self._folder / "STOPPED", content + "\n")


def _evaluation_row(evaluation: EvaluationEnd) -> dict[str, object]:
    """Its part of a row of metrics.jsonl."""
    values = {name: getattr(evaluation, name) for name in ("loss", "perplexity", "tokens")}
    return {f"eval_{name}": value for name, value in {**values, **evaluation.metrics}.items()}


def processes_row(step: StepEnd, hosts: Sequence[str]) -> dict[str, object]:
    """How evenly the processes are loaded, by process index, as each saw it at the start of this step.

    Own seconds leave out waiting for others, which makes wall times even (train/stragglers.py). An imbalance is the
    greatest value over the median; of `hosts`: of their mean own times, None for one host.
    """
    by_host = defaultdict[str, list[float]](list)
    for host, own in zip(hosts, step.process_own_seconds, strict=True):
        by_host[host].append(own)
    means = [statistics.fmean(own) for own in by_host.values()]
    return {
        "seconds": step.process_seconds,
        "own_seconds": step.process_own_seconds,
        "data_seconds": step.process_data_seconds,
        "memory_bytes": step.process_memory_bytes,
        "seconds_imbalance": imbalance(step.process_seconds, statistics.median),
        "memory_imbalance": imbalance(step.process_memory_bytes, statistics.median),
        "host_imbalance": imbalance(means, statistics.median) if len(means) > 1 else None,
    }


def _process_start() -> float:
    """Seconds since 1970. psutil counts from a boot time of whole seconds, the kernel's clock since boot doesn't."""
    if not hasattr(time, "CLOCK_BOOTTIME"):  # not Linux
        return psutil.Process().create_time()
    after_boot = psutil.Process().create_time() - psutil.boot_time()
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - after_boot)


def environment() -> dict[str, str]:
    """Host and versions, for whoever reads the run later."""
    versions = {"host": socket.gethostname(), "python": platform.python_version()}
    for package in ("portable_fsdp", "torch", "torch_xla", "transformers"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


class Console(Callback):
    """A line for what happens; of steps every `train.log_every`."""

    def on_start(self, start: RunStart) -> None:
        self._start, self._warned_of_empty = start, False
        if (resumed := start.resumed) is not None:
            if resumed.weights_only:
                log.info("a new run from the weights of %s", resumed.path)
            else:
                log.info("resumed from %s: step %d", resumed.path, resumed.step)
                for change in (change for change in resumed.changes if change.makes_curve):
                    log.warning("changed since it was saved, as checkpoint.allow says: %s", change)
        trained = "" if start.trained_parameters == start.parameters else f" ({start.trained_parameters:,} train)"
        log.info(
            f"{start.engine} on {start.devices} x {start.device} ({start.processes} process(es)): "
            f"{start.parameters:,} parameters{trained}, {start.steps} steps of {start.tokens:,} tokens"
        )
        log.info("run folder: %s; %s", start.folder, _own_settings(start.config))

    def on_step(self, step: StepEnd) -> None:
        if step.is_logged:
            log.info(_step_line(step))
        if step.is_empty and not self._warned_of_empty:
            self._warned_of_empty = True
            log.warning("step: %d  no label counts, so the step changed nothing (is_empty in metrics.jsonl)", step.step)
        for straggler in step.stragglers:
            log.warning("step: %d  %s", step.step, straggler)
        if step.evaluation is not None:
            _log_evaluation(step.evaluation)

    def on_evaluate(self, evaluation: EvaluationEnd) -> None:
        if evaluation.step == self._start.step:  # no step follows that would show it
            _log_evaluation(evaluation)

    def on_samples(self, samples: SamplesEnd) -> None:
        for text in samples.texts:
            log.info("step: %d  sample: %s", samples.step, printable(text).replace("\n", r"\n"))

    def on_save(self, save: Saved) -> None:
        log.info("saved %s in %.1f s (training waited %.1f s)", save.path, save.seconds, save.blocked_seconds)

    def on_profile(self, profile: ProfileEnd) -> None:
        summary, path = profile.summary, profile.folder / "summary.txt"
        busy, exposed = summary.busy / summary.wall, summary.exposed / summary.wall
        log.info(
            f"profile of {profile.first}-{profile.last}: busy {busy:.0%}, exposed communication {exposed:.0%}, "
            f"written in {duration(profile.seconds)}: {path}"
        )

    def on_end(self, end: RunEnd) -> None:
        if end.outcome == "finished" and end.step < self._start.steps:
            log.info("ended after step %d of %d, as train.stop_at says", end.step, self._start.steps)
        if end.outcome == "stopped":
            log.info("stopped after step %d (%s); rerun the same command to resume", end.step, end.reason)
        if end.outcome == "no improvement":
            log.info("ended after step %d: %s; the best was step %d", end.step, end.reason, end.best_step)
        if end.outcome != "failed":
            log.info("%s", _summary(self._start, end))


def _own_settings(config: Config) -> str:
    """Options that differ from their default, but for those that only name the run."""
    changed = [option for option in option_names() if value_of(config, option) != default_of(option)]
    settings = [f"{option}={shortened(yaml_value(value_of(config, option)))}" for option in changed]
    return " ".join(setting for setting in settings if not setting.startswith("run.dir="))


def _step_line(step: StepEnd) -> str:
    """In torchtitan's words, without what is unknown: tps is total over all devices, tflops is per device."""
    line = f"step: {step.step}/{step.steps}  loss: {step.loss:.4f}  grad_norm: {step.grad_norm:.4f}"
    if step.loss_scale is not None:
        line += f"  loss_scale: {step.loss_scale:.0f}  skipped: {step.skipped_steps}"
    if step.memory_bytes is not None:
        share = f"({step.memory_bytes / step.memory_limit:.0%})" if step.memory_limit else ""
        line += f"  memory: {step.memory_bytes / 2**30:.2f}GiB{share}"
    line += f"  tps: {step.tokens_per_second:,.0f}"
    line += "" if step.device_flops is None else f"  tflops: {step.device_flops / 1e12:,.2f}"
    line += "" if step.mfu is None else f"  mfu: {step.mfu:.1%}"
    return line + ("" if step.seconds_left is None else f"  eta: {duration(step.seconds_left)}")


def _log_evaluation(evaluation: EvaluationEnd) -> None:
    scores = evaluation.metrics or {"perplexity": evaluation.perplexity}
    words = "  ".join(
        f"{name}: {value:.4f}" if name != "perplexity" else f"{name}: {value:.2f}" for name, value in scores.items()
    )
    log.info(
        f"step: {evaluation.step}  eval_loss: {evaluation.loss:.4f}  {words}  "
        f"tokens: {evaluation.tokens:,}  seconds: {evaluation.seconds:.1f}{'  best so far' * evaluation.is_best}"
    )


def _summary(start: RunStart, end: RunEnd) -> str:
    """What this start did and the whole run's goodput, where things lie, and the command that shows more."""
    steps, last, share = end.step - start.step, "", ""
    best = "" if end.best_step is None else f"; best eval loss {end.best_loss:.4f} (step {end.best_step})"
    with suppress(Exception):  # a figure is no reason to fail a run that has ended: others may have changed the files
        rows = read_jsonl(start.folder / "metrics.jsonl")
        if accounts := goodput(read_jsonl(start.folder / "events.jsonl"), rows):
            share = f"; goodput {accounts.share:.0%} of {duration(accounts.wall_seconds)} since the first process start"
        empty = sum(row.get("is_empty", 0) for row in rows)
        last = f"; last loss {rows[-1]['loss']:.4f}"
        last += f"; nothing counted in {empty} of {len(rows)} steps" if empty else ""
    trackers = f"; trackers: {start.folder / 'trackers'}" if start.config.observe.trackers else ""
    return (
        f"{steps:,} steps, {steps * start.tokens:,} tokens in {duration(end.elapsed)} of training{last}{best}{share}\n"
        f"  last checkpoint: {end.last_checkpoint or 'none'}{trackers}\n"
        f"  python -m portable_fsdp.report {start.folder} draws the curves and where the time went"
    )
