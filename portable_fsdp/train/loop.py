"""The training loop. Read `_train_steps` first; `train` opens and checks what it needs.

Everything that can be refused is refused before the first file is written. Metrics are read a step late, so that the
device never waits for the host; they are read before a save, so that nothing that isn't finite is ever saved.
"""

import gc
import logging
import math
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from portable_fsdp.backends.base import Backend
from portable_fsdp.backends.open import open_backend
from portable_fsdp.checkpoint.format import Evaluated, committed_steps, step_folder
from portable_fsdp.checkpoint.manager import Checkpoints, Resumed
from portable_fsdp.config.schema import LEAST_LOSS_SCALE, Config
from portable_fsdp.data.batches import Batches, StepRows
from portable_fsdp.data.build import Corpus
from portable_fsdp.data.tokenize import Tokenizer
from portable_fsdp.observe.callbacks import (
    Callback,
    Callbacks,
    EvaluationEnd,
    Outcome,
    RunEnd,
    RunStart,
    SamplesEnd,
    StepEnd,
)
from portable_fsdp.observe.console import Console
from portable_fsdp.observe.profiles import Profiles
from portable_fsdp.observe.run_files import EventsFile, RunFiles, last_save
from portable_fsdp.optim.schedule import learning_rate
from portable_fsdp.runtime.collective_errors import on_process_0
from portable_fsdp.runtime.command import configure_log
from portable_fsdp.runtime.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_STOPPED,
    CheckpointError,
    ConfigError,
    DataError,
    PortableFSDPError,
    TrainingError,
)
from portable_fsdp.runtime.factory import UserExit, described, user_code
from portable_fsdp.runtime.lock import sole_run
from portable_fsdp.runtime.logs import RunLog, run_log
from portable_fsdp.runtime.process import Stopped, StopRequest
from portable_fsdp.train.build import (
    Training,
    build_evaluator,
    build_sampler,
    build_training,
    open_batches,
    open_checkpoints,
    total_steps,
)
from portable_fsdp.train.consistency import open_data, require_folders_and_model, require_same_model
from portable_fsdp.train.decision import Decision, Limits, Votes, decide, is_patience_over
from portable_fsdp.train.early_checks import check_profile
from portable_fsdp.train.evaluate import Evaluator, updated_history
from portable_fsdp.train.measures import InFlight, Measures, NotFiniteError, run_start
from portable_fsdp.train.save_triggers import SaveTriggers

if TYPE_CHECKING:  # a run without samples doesn't load it
    from portable_fsdp.train.sampling import Sampler

log = logging.getLogger("portable_fsdp")

_FULL_COLLECTION = 100  # steps; the others collect what is younger


@dataclass
class _Run:
    """What the loop works with, and how far it is."""

    start: RunStart
    engine: Backend
    corpus: Corpus
    training: Training
    evaluator: Evaluator | None
    sampler: "Sampler | None"
    checkpoints: Checkpoints
    limits: Limits
    measures: Measures
    triggers: SaveTriggers
    stop: StopRequest
    callbacks: Callbacks
    profiles: Profiles
    step: int  # the last one that is done
    history: Evaluated | None  # of the evaluations so far
    last_checkpoint: Path | None
    misses_evaluation: bool = False  # of the checkpoint that it resumes from: a stop came first


def _train_steps(run: _Run) -> Outcome:
    """Train until the last step, a stop request, or the end of patience; the last step is saved before it returns."""
    config, in_flight = run.start.config, None
    opened = open_batches(config, run.engine, run.training, run.corpus, run.start.resumed)
    with opened as batches, _no_collections():
        for step in range(run.step + 1, run.limits.last + 1):
            with run.measures.timed("wait"):
                ended = run.profiles.before_step(step, in_flight and in_flight.metrics)
            began = run.measures.begin_step()
            rows = _next_rows(run, batches, in_flight)
            waited, lr = time.perf_counter() - began, learning_rate(config.optim, step, run.start.steps)
            placed = [run.engine.place(batch) for batch in rows.micro_batches]
            control = run.measures.control(rows.count, _own_votes(run))
            with run.measures.timed("step"):
                metrics = run.engine.fetch(run.training.step(placed, lr, control))
            gc.collect(2 if step % _FULL_COLLECTION == 0 else 1)  # while devices work
            run.stop.begin_steps()
            previous, in_flight = in_flight, InFlight(step, lr, began, waited, metrics)
            votes = Votes()
            if previous is not None:
                end, votes = _read(run, previous, until=ended)
                run.callbacks.call(Callback.on_step, end)
            decision = decide(run.limits, step, votes, run.history)
            if decision.reads_metrics:
                decision, in_flight = _finish(run, in_flight, votes, batches.position), None
            _note_commits(run)
            if decision.end is not None:
                return decision.end
    raise AssertionError("the last step ends the loop")


@contextmanager
def _no_collections() -> Generator[None]:
    """Python collects garbage when the loop says so: not in the middle of a step, for which other processes would wait,
    and without what was there before the first step."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _next_rows(run: _Run, batches: Batches, in_flight: InFlight | None) -> StepRows:
    """The rows of the next step. Where they can't be read, the step in flight still gets its row of metrics."""
    try:
        with user_code():
            return next(batches)
    except (DataError, UserExit):
        if in_flight is not None:
            end, _ = _read(run, in_flight)
            with suppress(Exception):  # the disk may be full too: the error of the data goes first
                run.callbacks.call(Callback.on_step, end)
        raise


def _own_votes(run: _Run) -> Votes:
    """This process's. Process 0's clock and its view of the run's folder decide for all."""
    return Votes(_wants_stop(run), run.engine.process.index == 0 and run.triggers.due)


def _read(run: _Run, late: InFlight, until: float | None = None) -> tuple[StepEnd, Votes]:
    """Wait for a step that must be finite, or that float16 skipped."""
    end, votes = run.measures.read(late, until)
    run.step = end.step
    values = {"loss": end.loss, "grad_norm": end.grad_norm}
    if end.is_skipped and (end.loss_scale or 0) > LEAST_LOSS_SCALE:
        del values["grad_norm"]  # the next steps have a smaller scale
    _require_finite(run, end.step, values, end.loss_scale)
    return replace(end, last_checkpoint=run.last_checkpoint), votes


def _finish(run: _Run, in_flight: InFlight, votes: Votes, position: tuple[int, int]) -> Decision:
    """Wait for the step itself; evaluate, sample and save as decided once its own votes are known."""
    end, own_votes = _read(run, in_flight)
    votes |= own_votes
    with run.measures.timed("wait"):
        run.profiles.after_step(end.step)
    decision = decide(run.limits, end.step, votes, run.history)
    if decision.evaluate:
        is_complete, evaluation = _evaluate(run, end.step)
        votes |= Votes(stop=not is_complete)
        decision = decide(run.limits, end.step, votes, run.history)
        end = replace(end, evaluation=evaluation)
    if decision.sample:
        votes |= Votes(stop=not _sample(run, end.step))
        decision = decide(run.limits, end.step, votes, run.history)
    run.callbacks.call(Callback.on_step, end)
    if decision.save:
        _save(run, position, wait=decision.end is not None)
    return decision


def _evaluate(run: _Run, step: int) -> tuple[bool, EvaluationEnd | None]:
    """False where a stop request came before its end; None also where nothing counts in the validation set."""
    evaluator, began = cast(Evaluator, run.evaluator), time.perf_counter()
    with run.measures.timed("wait"):
        evaluation = evaluator(lambda: _wants_stop(run))
    if evaluation is None:
        return False, None
    if evaluation.tokens == 0 and math.isinf(evaluation.loss):
        if run.engine.process.index == 0:
            log.warning("step: %d  nothing counts in the validation set (labels of -100): it has no loss", step)
        return True, None
    _require_finite(run, step, {"eval_loss": evaluation.loss})
    if step > 0:  # the initial weights are never the best
        run.history = updated_history(run.history, step, evaluation.loss, evaluator.fingerprint)
    is_best = run.history is not None and run.history.best_step == step
    figures = evaluation.loss, evaluation.perplexity, evaluation.tokens
    end = EvaluationEnd(step, *figures, time.perf_counter() - began, is_best, evaluation.metrics)
    run.callbacks.call(Callback.on_evaluate, end)
    return True, end


def _sample(run: _Run, step: int) -> bool:
    """False where a stop request came before its end."""
    began = time.perf_counter()
    with run.measures.timed("wait"):
        texts = cast("Sampler", run.sampler)(lambda: _wants_stop(run))
    if texts is None:
        return False
    prompts = run.start.config.train.sample_prompts
    run.callbacks.call(Callback.on_samples, SamplesEnd(step, prompts, tuple(texts), time.perf_counter() - began))
    return True


def _save(run: _Run, position: tuple[int, int], *, wait: bool) -> None:
    """`position`: of the data. `wait`: until the commit."""
    run.triggers.began(run.step)
    try:
        with run.measures.timed("wait"):
            run.checkpoints.save(run.step, run.training.model, run.training.optimizer, position, run.history)
            if wait:
                run.checkpoints.wait()
    except CheckpointError as error:  # not the user's mistake any more: the run has started
        raise TrainingError(str(error)) from error


def _note_commits(run: _Run) -> None:
    finished = run.checkpoints.finished()
    run.triggers.committed(saved.step for saved in finished)
    for saved in finished:
        run.last_checkpoint = saved.path
        run.callbacks.call(Callback.on_save, saved)


def _wants_stop(run: _Run) -> bool:
    return run.stop.requested or run.checkpoints.failed


def _require_finite(run: _Run, step: int, values: dict[str, float], loss_scale: float | None = None) -> None:
    """Raises NotFiniteError, on all processes alike."""
    if all(map(math.isfinite, values.values())):
        return
    run.checkpoints.close()  # a background save may be under way
    raise NotFiniteError(step, values, _newest(run), loss_scale)


def _newest(run: _Run) -> str:
    """A sentence that names the newest checkpoint. Reads the folder: only process 0 gets the commits."""
    try:
        saved = committed_steps(run.checkpoints.folder)
    except Exception as error:  # of a store, of many classes
        return f"{run.checkpoints.folder} doesn't answer ({type(error).__name__}): look there for checkpoints."
    return f"The last good checkpoint is {saved[0]}." if saved else "No checkpoint was saved before it."


# ------------------------------------------------------------------------------------------------------- start and end


class Exporter(Protocol):
    """Writes a finished run in another format."""

    def require_room(self, config: Config) -> None:
        """Raises, before the run, where something else than an earlier export lies in its place."""

    def export_run(
        self, config: Config, backend: Backend, tokenizer: Tokenizer | None, newest: Path, history: Evaluated | None
    ) -> None:
        """Export the best checkpoint by its evaluation, the newest where there was none. *collective*"""


def train(
    config: Config,
    *,
    device: str = "auto",
    backend: str = "auto",
    num_devices: int | None = None,
    check_devices: Callable[[int], None] = lambda devices: None,
    callbacks: Sequence[Callback] = (),
    keep_output: Callable[[Path, int], None] = lambda run, process: None,
    exporter: Exporter | None = None,
) -> int:
    """Run the config on an engine, resuming what `checkpoint.resume` finds; returns the exit code of `launch`.

    Every process of the run calls it. `check_devices` gets the number of devices as soon as the engine has counted
    them, and may raise. `callbacks` observe the run, see `observe/callbacks.py`. `keep_output` gets the run's
    folder, once it is there, and this process's index. `exporter` writes what `checkpoint.export` asks for:
    `portable_fsdp.formats.run_export`. Raises the errors of runtime/errors.py.
    """
    if config.checkpoint.export and exporter is None:
        text = "checkpoint.export=true: expected train(config, exporter=portable_fsdp.formats.run_export), found none."
        raise ConfigError(text)
    with StopRequest() as stop, user_code():
        try:
            if config.train.micro_batch == "auto":
                from portable_fsdp.train.batch_size import with_resolved_micro_batch

                config = with_resolved_micro_batch(config, device=device, backend=backend, num_devices=num_devices)
            opened = open_backend(config, device=device, backend=backend, num_devices=num_devices)
            with opened as engine, ExitStack() as held, user_code():
                check_devices(engine.devices)
                configure_log(engine.process.index)
                run_file = held.enter_context(run_log(engine.process.index))
                held.push(lambda _, error, __: _record_early(config, engine, run_file, error))
                require_folders_and_model(config, engine)
                if config.checkpoint.export and exporter is not None:
                    on_process_0(engine, partial(exporter.require_room, config))
                corpus = open_data(config, engine)
                steps = total_steps(config, len(corpus.rows))
                # Against other runs, from before the search for a checkpoint.
                on_process_0(engine, lambda: held.enter_context(sole_run(Path(config.run.dir))))

                def begin_logs(run: Path) -> None:
                    if engine.process.index == 0:
                        run_file.open(run)
                    keep_output(run, engine.process.index)

                return _train(config, engine, corpus, steps, stop, callbacks, begin_logs, exporter)
        except Stopped as request:
            log.error("stopped before the first step (%s): nothing to save", request)
            return EXIT_FAILED


def _record_early(config: Config, engine: Backend, run_file: RunLog, error: BaseException | None) -> None:
    """The event `fail` of user code that failed while the run was built; it makes the run's folder."""
    is_recorded = run_file.path is not None or getattr(error, "run_has_started", False)
    # The error names a line of the user's code.
    is_of_user = isinstance(error, Exception) and "\n  in " in f"{error}\n{described(error)}"
    if engine.process.index == 0 and is_of_user and not is_recorded:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        with suppress(PortableFSDPError, OSError), sole_run(Path(config.run.dir)):
            EventsFile(Path(config.run.dir, "events.jsonl")).write("fail", step=0, reason=reason, is_early=True)


def _train(
    config: Config,
    engine: Backend,
    corpus: Corpus,
    steps: int,
    stop: StopRequest,
    callbacks: Sequence[Callback],
    begin_logs: Callable[[Path], None],
    exporter: Exporter | None,
) -> int:
    training = build_training(config, engine, corpus.tokenizer, rows=corpus.rows)
    require_same_model(engine, training.built.config)
    evaluator = build_evaluator(config, engine, training, corpus)
    sampler = build_sampler(config, engine, training, corpus.tokenizer)
    with open_checkpoints(config, engine, training, corpus) as checkpoints:
        named = on_process_0(engine, lambda: last_save(Path(config.run.dir) / "events.jsonl"))
        point = checkpoints.find(config.checkpoint.resume, named)
        resumed = None if point is None else checkpoints.load(point, training.model, training.optimizer)
        cost = training.trial.cost if training.trial else None
        start = run_start(config, engine, training.built.size, steps, resumed, cost)
        is_new = resumed is None or any(change.name == "observe.profile" for change in resumed.changes)
        check_profile(config, steps, start.step, is_new=is_new)
        last, eval_every = min(steps, config.train.stop_at or steps), config.train.eval_every if evaluator else None
        limits = Limits(last, config.checkpoint.every, eval_every, config.train.patience, config.train.sample_every)
        evaluated = resumed.evaluation.step if resumed and resumed.evaluation else 0
        misses = point is not None and point.is_own and evaluated < start.step and limits.evaluates(start.step)
        observers = Callbacks([RunFiles(), Console()], [*_displays(config), *callbacks], engine)
        run = _Run(
            start,
            engine,
            corpus,
            training,
            evaluator,
            sampler,
            checkpoints,
            limits,
            Measures(engine, start),
            SaveTriggers(start.folder, config.checkpoint.every_minutes),
            stop,
            observers,
            Profiles(engine, start, observers, stop),
            step=start.step,
            history=_earlier_history(resumed, evaluator),
            last_checkpoint=resumed.path if resumed else None,
            misses_evaluation=misses,
        )
        try:
            on_process_0(engine, lambda: run.callbacks.call(Callback.on_start, start))
        except UserExit as error:
            _record_failure(run, error)
            raise
        begin_logs(start.folder)
        outcome = _train_observed(run)
    if outcome == "stopped":
        return EXIT_STOPPED
    newest = step_folder(checkpoints.folder, run.step) if run.step > start.step else run.last_checkpoint
    if config.checkpoint.export and newest is not None and exporter is not None:
        exporter.export_run(config, engine, corpus.tokenizer, newest, run.history)
    return EXIT_FINISHED


def _displays(config: Config) -> Iterator[Callback]:
    """Optional built-in callbacks. One that raises is removed and the run continues, as for user callbacks."""
    if sys.stderr.isatty():
        from portable_fsdp.observe.live_display import LiveDisplay

        yield LiveDisplay()
    if config.observe.trackers:
        from portable_fsdp.observe.trackers import Trackers

        yield Trackers()


def _earlier_history(resumed: Resumed | None, evaluator: Evaluator | None) -> Evaluated | None:
    """The checkpoint's, if it evaluated the same rows."""
    history = resumed.evaluation if resumed else None
    if history is None or evaluator is None:
        return None
    if history.rows != evaluator.fingerprint:
        log.info("the evaluation data changed; discarding the previous best (step %d)", history.best_step)
        return None
    return history


def _train_observed(run: _Run) -> Outcome:
    """Train the remaining steps. Callbacks see every commit, and then the end, also that of a failed run."""
    try:
        with user_code():
            try:
                outcome = _train_what_is_left(run)
            finally:  # an error may come between a commit and its event, and a save be under way by then
                run.profiles.after_step(run.step, is_last=True)
                run.checkpoints.close()
                _note_commits(run)
        end = _end_of(run, outcome, {})
        on_process_0(run.engine, lambda: run.callbacks.call(Callback.on_end, end))
    except (Exception, Stopped) as error:  # Stopped: before the first step has ended
        _record_failure(run, error)
        raise
    return outcome


def _record_failure(run: _Run, error: BaseException) -> None:
    """Tell the callbacks, and add the last step and checkpoint to the message of an error that lost work."""
    values = error.values if isinstance(error, NotFiniteError) else {}
    end = _end_of(run, "not finite" if values else "failed", values, error)
    with suppress(Exception), user_code():  # the disk may be full: the run's own error goes first
        run.callbacks.call(Callback.on_end, end)
    if not isinstance(error, PortableFSDPError):
        return
    error.run_has_started = True
    if isinstance(error, DataError) or run.step > run.start.step:
        error.exit_code = EXIT_FAILED  # 2 means that nothing was lost
    # CheckpointError and NotFiniteError name the checkpoint themselves.
    if error.exit_code == EXIT_FAILED and not isinstance(error.__cause__ or error, CheckpointError | NotFiniteError):
        ended = f"after step {run.step}" if run.step else "before its first step"
        error.args = (f"{error}\n  The run ended {ended}. {_newest(run)} Fix the cause, then rerun the same command.",)


def _train_what_is_left(run: _Run) -> Outcome:
    if run.start.resumed is None and run.start.config.train.eval_on_start:
        _evaluate(run, 0)
    if run.misses_evaluation:
        run.stop.begin_steps()
        is_complete, evaluation = _evaluate(run, run.step)
        if not is_complete:
            return "stopped"
        if evaluation is not None:
            run.checkpoints.note_evaluation(cast(Path, run.last_checkpoint), cast(Evaluated, run.history))
    is_over = is_patience_over(run.limits, run.history)
    if run.misses_evaluation and is_over:
        return "no improvement"
    if run.step < run.limits.last and not is_over:
        return _train_steps(run)
    why = f" ({_patience(run)})" if is_over and run.step < run.limits.last else ""
    log.info("step %d of %d is saved already: nothing left to train%s", run.step, run.limits.last, why)
    return "finished"


def _end_of(run: _Run, outcome: Outcome, values: Mapping[str, float], error: BaseException | None = None) -> RunEnd:
    reasons = {"stopped": run.stop.reason or "a signal to another process", "no improvement": _patience(run)}
    if error is not None and not values:
        reasons["failed"] = ": ".join([type(error).__name__, *str(error).splitlines()[:1]])
    reason = reasons.get(outcome, outcome)
    best = (run.history.best_step, run.history.best_loss) if run.history else (None, None)
    return RunEnd(outcome, run.step, reason, run.measures.elapsed, run.last_checkpoint, *best, values)


def _patience(run: _Run) -> str:
    return f"no improvement in {run.history.without_improvement if run.history else 0} evaluations"
