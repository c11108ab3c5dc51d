"""The training loop: `train` opens a run (`run.py`), and `_train_steps` trains it.

All checks run before the first file is written (`preflight.py`). Metrics are read one step late, so that the device
never waits for the host. They are read before a save, so that values that aren't finite are never saved.
"""

import gc
import logging
import math
import os
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import cast

from portable_fsdp.backends.open import open_backend
from portable_fsdp.checkpoint.manifests import Evaluated, step_folder
from portable_fsdp.config.describe import autos, without_plan
from portable_fsdp.config.schema import LEAST_LOSS_SCALE, Config
from portable_fsdp.data.batches import Batches
from portable_fsdp.data.packing import StepRows
from portable_fsdp.observe.callbacks import Callback, EvaluationEnd, Outcome, SamplesEnd, StepEnd
from portable_fsdp.optim.optimizer import learning_rate
from portable_fsdp.runtime.command import configure_log
from portable_fsdp.runtime.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_STOPPED,
    CheckpointError,
    ConfigError,
    DataError,
    TrainingError,
)
from portable_fsdp.runtime.factory import UserExit, user_code
from portable_fsdp.runtime.signals import Stopped, StopRequest, end_agent
from portable_fsdp.train.build import open_batches
from portable_fsdp.train.control import Votes, decide, is_patience_over
from portable_fsdp.train.evaluate import Evaluator, Sampler, updated_history
from portable_fsdp.train.measures import InFlight, NotFiniteError
from portable_fsdp.train.run import Exporter, OpenRun, newest_checkpoint, note_commits, open_run, patience_of, recorded

log = logging.getLogger("portable_fsdp")

_FULL_COLLECTION = 100  # steps; other steps collect only the younger generations


def train(
    config: Config,
    *,
    device: str = "auto",
    backend: str = "auto",
    num_devices: int | None = None,
    callbacks: Sequence[Callback] = (),
    keep_output: Callable[[Path, int], None] = lambda run, process: None,
    exporter: Exporter | None = None,
) -> int:
    """Run the config on an engine, resuming according to `checkpoint.resume`; returns the exit code of `launch`.

    Every process of the run calls it. `callbacks` observe the run, see `observe/callbacks.py`. `keep_output` is called
    with the run's folder, once it exists, and the index of this process. `exporter` implements `checkpoint.export`:
    `portable_fsdp.formats.exporting`. Raises the errors of runtime/errors.py.
    """
    if config.checkpoint.export and exporter is None:
        raise ConfigError("checkpoint.export=true: call train(config, exporter=portable_fsdp.formats.exporting).")
    with StopRequest() as stop, user_code():
        try:
            given = config
            opened = open_backend(without_plan(config), device=device, backend=backend, num_devices=num_devices)
            with opened as engine, ExitStack() as held, user_code():
                log.debug("engine opened")
                if autos(config):
                    from portable_fsdp.train.auto import resolve_auto

                    config = resolve_auto(config, engine)
                    log.debug("auto resolved")
                run = open_run(config, given, engine, held, stop, callbacks, keep_output, exporter)
                with recorded(run):
                    run.outcome = _train_steps(run)
                if run.outcome == "stopped":
                    if not stop.is_by_signal:
                        end_agent(os.environ)
                    return EXIT_STOPPED
                newest = run.last_checkpoint
                if run.step > run.start.step:  # only process 0 knows the commits
                    newest = step_folder(run.checkpoints.folder, run.step)
                if config.checkpoint.export and newest is not None and exporter is not None:
                    with run.watchdog.within("the export"):
                        exporter.export_run(config, engine, run.corpus.tokenizer, newest, run.history)
                return EXIT_FINISHED
        except Stopped as request:
            if not log.handlers:  # the engine, which knows the index of this process, is not open yet
                configure_log(int(os.environ.get("RANK", "0")))
            log.error("stopped before the first step (%s): nothing to save", request)
            return EXIT_FAILED


def _train_steps(run: OpenRun) -> Outcome:
    """Train until the last step, a stop request, or early stopping; saves the last step before it returns."""
    config, in_flight = run.start.config, None
    if run.engine.expected_compilations and run.step < run.limits.last:
        log.info("compiling step %d; the steps after it reuse its programs", run.step + 1)
    if (ended := _evaluate_before(run)) is not None:
        return ended
    opened = open_batches(config, run.engine, run.training, run.corpus, run.start.resumed)
    with opened as batches, _collecting_between_steps():
        for step in range(run.step + 1, run.limits.last + 1):
            with run.measures.timed("wait"), run.watchdog.within("the profile"):
                until = run.profiles.before_step(step, in_flight and in_flight.metrics)
            began = run.measures.begin_step()
            run.watchdog.begin_step(step, "waiting for its rows")
            rows = _next_rows(run, batches, in_flight)
            waited, lr = time.perf_counter() - began, learning_rate(config.optim, step, run.start.steps)
            shapes = tuple(value.shape for value in rows.micro_batches[0].values())
            run.watchdog.doing("computing", shapes)
            placed = [run.engine.place(batch) for batch in rows.micro_batches]
            # A request from here on travels with the next step, whose votes are read a step later.
            run.stop.last_step = f"step {min(step + 2, run.limits.last)}"
            # The clock of process 0 and its view of the run's folder decide for all processes.
            own_votes = Votes(run.wants_stop(), run.engine.process.index == 0 and run.triggers.due)
            control = run.measures.control(rows.count, own_votes)
            with run.measures.timed("step"):
                metrics = run.engine.fetch(run.training.step(placed, lr, control))
            gc.collect(2 if step % _FULL_COLLECTION == 0 else 1)  # while devices work
            run.stop.begin_steps()

            previous, in_flight, votes = in_flight, InFlight(step, lr, began, waited, metrics), Votes()
            if previous is not None:
                end, votes = _read(run, previous, until)
                run.call(Callback.on_step, end)
            decision = decide(run.limits, step, votes, run.history)
            if decision.reads_metrics:  # wait now for the metrics of this step
                end, own_votes = _read(run, in_flight)
                votes, in_flight = votes | own_votes, None
                with run.measures.timed("wait"):
                    run.profiles.after_step(step)
                decision = decide(run.limits, step, votes, run.history)
                if decision.evaluate:
                    stopped, evaluation = _evaluate(run, step)
                    votes, end = votes | Votes(stopped), replace(end, evaluation=evaluation)
                    decision = decide(run.limits, step, votes, run.history)
                if decision.sample:
                    votes |= Votes(stop=_sample(run, step))
                    decision = decide(run.limits, step, votes, run.history)
                run.call(Callback.on_step, end)
                if decision.end == "stopped":
                    saves = 1 + run.checkpoints.is_saving
                    run.grace.before_last_save(run.stop.requested_at, saves, run.last_checkpoint)
                if decision.save:
                    _save(run, batches.position, wait=decision.end is not None)
            note_commits(run)
            if decision.end is not None:
                return decision.end
    raise AssertionError("the last step ends the loop")


@contextmanager
def _collecting_between_steps() -> Generator[None]:
    """Context without Python's own garbage collections: other processes would wait for one in the middle of a step."""
    gc.collect()
    gc.freeze()  # what exists before the first step is never collected
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _evaluate_before(run: OpenRun) -> Outcome | None:
    """Evaluate the initial weights, or the resumed checkpoint if a stop prevented that. Returns the outcome of the run
    if nothing is left to train, else None."""
    if run.start.resumed is None and run.start.config.train.eval_on_start:
        _evaluate(run, 0)
    if run.misses_evaluation:
        run.stop.begin_steps()
        stopped, evaluation = _evaluate(run, run.step)
        if stopped:
            return "stopped"
        if evaluation is not None:
            run.checkpoints.note_evaluation(cast(Path, run.last_checkpoint), cast(Evaluated, run.history))
    is_over = is_patience_over(run.limits, run.history)
    if run.misses_evaluation and is_over:
        return "no improvement"
    if run.step < run.limits.last and not is_over:
        return None
    why = f" ({patience_of(run)})" if is_over and run.step < run.limits.last else ""
    log.info("step %d of %d is already saved: nothing left to train%s", run.step, run.limits.last, why)
    return "finished"


def _next_rows(run: OpenRun, batches: Batches, in_flight: InFlight | None) -> StepRows:
    """Return the rows of the next step. If they can't be read, the step in flight still gets its row of metrics."""
    try:
        with user_code():
            return next(batches)
    except (DataError, UserExit):
        if in_flight is not None:
            end, _ = _read(run, in_flight)
            with suppress(Exception):  # the disk may be full too: the error of the data takes precedence
                run.call(Callback.on_step, end)
        raise


def _read(run: OpenRun, late: InFlight, until: float | None = None) -> tuple[StepEnd, Votes]:
    """Wait for the metrics of a step. Raises NotFiniteError if they aren't finite, unless float16 skipped the step."""
    end, votes = run.measures.read(late, until)
    run.step = end.step
    if run.step == run.start.step + 1:
        log.debug("step %d ended", run.step)
    values = {"loss": end.loss, "grad_norm": end.grad_norm}
    if end.is_skipped and (end.loss_scale or 0) > LEAST_LOSS_SCALE:
        del values["grad_norm"]  # the next steps use a smaller scale
    _require_finite(run, end.step, values, end.loss_scale)
    return replace(end, last_checkpoint=run.last_checkpoint), votes


def _evaluate(run: OpenRun, step: int) -> tuple[bool, EvaluationEnd | None]:
    """Evaluate. Returns (whether a stop request interrupted it, the result or None); None also if nothing in the
    validation set counts."""
    evaluator, began = cast(Evaluator, run.evaluator), time.perf_counter()
    with run.measures.timed("wait"), run.watchdog.within(f"the evaluation after step {step}", "evaluation"):
        evaluation = evaluator(run.wants_stop)
    if evaluation is None:
        return True, None
    if evaluation.tokens == 0 and math.isinf(evaluation.loss):
        if run.engine.process.index == 0:
            log.warning("step: %d  no label in the validation set counts (all are -100): no evaluation loss", step)
        return False, None
    _require_finite(run, step, {"eval_loss": evaluation.loss})
    if step > 0:  # the initial weights are never the best
        run.history = updated_history(run.history, step, evaluation.loss, evaluator.fingerprint)
    is_best = run.history is not None and run.history.best_step == step
    figures = evaluation.loss, evaluation.perplexity, evaluation.tokens
    end = EvaluationEnd(step, *figures, time.perf_counter() - began, is_best, evaluation.metrics)
    run.call(Callback.on_evaluate, end)
    return False, end


def _sample(run: OpenRun, step: int) -> bool:
    """Generate samples. Returns whether a stop request interrupted it."""
    began = time.perf_counter()
    with run.measures.timed("wait"), run.watchdog.within(f"the samples after step {step}", "samples"):
        texts = cast(Sampler, run.sampler)(run.wants_stop)
    if texts is None:
        return True
    prompts = run.start.config.train.sample_prompts
    run.call(Callback.on_samples, SamplesEnd(step, prompts, tuple(texts), time.perf_counter() - began))
    return False


def _save(run: OpenRun, position: tuple[int, int], *, wait: bool) -> None:
    """Save a checkpoint. `position`: (epoch, samples) of the data; `wait`: wait for the commit."""
    run.triggers.began(run.step)
    try:
        with run.measures.timed("wait"), run.watchdog.within(f"the save of step {run.step}", "save"):
            run.checkpoints.save(run.step, run.training.model, run.training.optimizer, position, run.history)
            if wait:
                run.checkpoints.wait()
    except CheckpointError as error:  # no longer a usage error: the run has started
        raise TrainingError(str(error)) from error


def _require_finite(run: OpenRun, step: int, values: dict[str, float], loss_scale: float | None = None) -> None:
    """Raise NotFiniteError, identical on all processes, if a value isn't finite."""
    if all(map(math.isfinite, values.values())):
        return
    run.checkpoints.close()  # a background save may be in progress
    raise NotFiniteError(step, values, newest_checkpoint(run), loss_scale)
