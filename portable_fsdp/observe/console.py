"""The console output of a run."""

import logging
import shlex
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from portable_fsdp.checkpoint.manifests import Saved
from portable_fsdp.config.describe import changed_values, default_of, option_names, shortened, value_of, yaml_value
from portable_fsdp.observe.callbacks import Callback, EvaluationEnd, ProfileEnd, RunEnd, RunStart, SamplesEnd, StepEnd
from portable_fsdp.observe.goodput import duration, goodput
from portable_fsdp.observe.run_files import read_jsonl
from portable_fsdp.runtime.errors import printable

log = logging.getLogger("portable_fsdp")


class Console(Callback):
    """Logs a line per event, and every `train.log_every` steps."""

    _warned_of_empty = _has_display = False

    def on_start(self, start: RunStart) -> None:
        self._start, self._has_display = start, sys.stderr.isatty()
        if start.resumed is not None and start.resumed.weights_only:
            log.info("new run from the weights of %s", start.resumed.path)
        elif start.resumed is not None:
            log.info("resumed from %s: step %d", start.resumed.path, start.resumed.step)
            for change in (change for change in start.resumed.changes if change.makes_curve):
                log.warning("changed since the checkpoint (checkpoint.allow): %s", change)
        trained = "" if start.trained_parameters == start.parameters else f" ({start.trained_parameters:,} train)"
        log.info(
            f"{start.engine} on {start.devices} x {start.device} ({start.processes} process(es)): "
            f"{start.parameters:,} parameters{trained}, {start.steps} steps of {start.tokens:,} tokens"
        )
        # The options that differ from their default.
        config, names = start.config, (name for name in option_names() if name != "run.dir")
        changed = [name for name in names if value_of(config, name) != default_of(name)]
        settings = (f"{name}={shortened(yaml_value(value_of(config, name)))}" for name in changed)
        log.info("run folder: %s; %s", start.folder, " ".join(settings))
        if chosen := changed_values(start.given, config):
            log.info("chosen: %s", " ".join(f"{key}={value}" for key, value in chosen.items()))

    def on_step(self, step: StepEnd) -> None:
        if step.is_logged:
            # The live display has the time left.
            log.info(_step_line(replace(step, seconds_left=None) if self._has_display else step))
        if step.is_empty and not self._warned_of_empty:
            self._warned_of_empty = True
            log.warning("step: %d  no label counts, so the step changed nothing (is_empty in metrics.jsonl)", step.step)
        for straggler in step.stragglers:
            log.warning("step: %d  %s", step.step, straggler)
        if step.evaluation is not None:
            _log_evaluation(step.evaluation)

    def on_evaluate(self, evaluation: EvaluationEnd) -> None:
        if evaluation.step == self._start.step:  # no on_step follows that would log it
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
            log.info("ended after step %d of %d (train.stop_at)", end.step, self._start.steps)
        if end.outcome == "stopped":
            log.info("stopped after step %d (%s); rerun the same command to resume", end.step, end.reason)
        if end.outcome == "no improvement":
            log.info("ended after step %d: %s; the best was step %d", end.step, end.reason, end.best_step)
        if end.outcome != "failed":
            log.info("%s", _summary(self._start, end))


def _step_line(step: StepEnd) -> str:
    """Format a step with torchtitan's names, without what is unknown or 0: tps of all devices, tflops of one."""
    line = f"step: {step.step}/{step.steps}  loss: {step.loss:.4f}  grad_norm: {step.grad_norm:.4f}"
    if step.loss_scale is not None:
        line += f"  loss_scale: {step.loss_scale:.0f}  skipped: {step.skipped_steps}"
    if step.memory_bytes is not None:
        share = f"({step.memory_bytes / step.memory_limit:.0%})" if step.memory_limit else ""
        line += f"  memory: {step.memory_bytes / 2**30:.2f}GiB{share}"
    line += f"  tps: {step.tokens_per_second:,.0f}"
    tflops, mfu = f"{(step.device_flops or 0) / 1e12:,.2f}", f"{step.mfu or 0:.1%}"
    line += f"  tflops: {tflops}" * (tflops != "0.00") + f"  mfu: {mfu}" * (mfu != "0.0%")
    return line + ("" if step.seconds_left is None else f"  eta: {duration(step.seconds_left)}")


def _log_evaluation(evaluation: EvaluationEnd) -> None:
    scores = evaluation.metrics or {"perplexity": evaluation.perplexity}
    words = "  ".join(f"{name}: {value:.{2 if name == 'perplexity' else 4}f}" for name, value in scores.items())
    log.info(
        f"step: {evaluation.step}  eval_loss: {evaluation.loss:.4f}  {words}  "
        f"tokens: {evaluation.tokens:,}  seconds: {evaluation.seconds:.1f}{'  best so far' * evaluation.is_best}"
    )


def _summary(start: RunStart, end: RunEnd) -> str:
    """Summarize this start, the goodput of the whole run, the paths of its files, and what to type next."""
    steps, last, share = end.step - start.step, "", ""
    best = "" if end.best_step is None else f"; best eval loss {end.best_loss:.4f} (step {end.best_step})"
    with suppress(Exception):  # other programs may have changed the files; the run must not fail after its end
        rows = read_jsonl(start.folder / "metrics.jsonl")
        if accounts := goodput(read_jsonl(start.folder / "events.jsonl"), rows):
            share = f"; goodput {accounts.share:.0%} of {duration(accounts.wall_seconds)} since the first process start"
        empty = sum(row.get("is_empty", 0) for row in rows)
        last = f"; last loss {rows[-1]['loss']:.4f}"
        last += f"; nothing counted in {empty} of {len(rows)} steps" if empty else ""
    trackers = f"; trackers: {start.folder / 'trackers'}" if start.config.observe.trackers else ""
    return (
        f"{steps:,} steps, {steps * start.tokens:,} tokens in {duration(end.elapsed)} of training{last}{best}{share}\n"
        f"  last checkpoint: {end.last_checkpoint or 'none'}{trackers}\n  next:\n"
    ) + "\n".join(_next_commands(start, end))


def _next_commands(start: RunStart, end: RunEnd) -> Iterator[str]:
    """Yield commands as they are typed, without those that this run can't have."""
    config, data, run, last = start.config, start.config.data, shlex.quote(str(start.folder)), end.last_checkpoint
    saved = run if config.checkpoint.dir is None else shlex.quote(str(last))
    exports = config.checkpoint.export and end.outcome in ("finished", "no improvement")
    is_text = config.train.task == "causal_lm" and data.factory is None
    commands = {
        f"report {run}": True,
        f"evaluate {saved}": last and data.eval_split,
        f"evaluate {saved} {'' if data.path else 'data.source=text '}data.path=FILE": last
        and (is_text and not data.eval_split and not data.mixture),
        f"checkpoint export {saved} {shlex.quote(str(start.folder / 'export'))}": last and not exports,
        f'sample {run} --prompt="The "': last and is_text,
    }
    yield from (f"    python -m portable_fsdp.{command}" for command, fits in commands.items() if fits)
