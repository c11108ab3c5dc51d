"""A run: the state of the loop, how it is opened, and how its end is recorded."""

import logging
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from portable_fsdp.backends.contract import Backend
from portable_fsdp.checkpoint.manager import Checkpoints, Resumed, ResumePoint
from portable_fsdp.checkpoint.manifests import Evaluated, committed_steps
from portable_fsdp.config.schema import Config
from portable_fsdp.data.build import Corpus
from portable_fsdp.data.tokenize import Tokenizer
from portable_fsdp.observe.callbacks import Callback, Callbacks, Outcome, RunEnd, RunStart
from portable_fsdp.observe.console import Console
from portable_fsdp.observe.profiles import Profiles
from portable_fsdp.observe.run_files import EventsFile, RunFiles, last_save
from portable_fsdp.optim.optimizer import in_steps
from portable_fsdp.runtime.collective_errors import on_process_0
from portable_fsdp.runtime.command import RunLog, configure_log, run_log
from portable_fsdp.runtime.errors import EXIT_FAILED, CheckpointError, DataError, PortableFSDPError
from portable_fsdp.runtime.factory import UserExit, described, user_code
from portable_fsdp.runtime.failures import record_failure
from portable_fsdp.runtime.files import sole_run
from portable_fsdp.runtime.signals import Stopped, StopRequest
from portable_fsdp.runtime.watchdog import Watchdog
from portable_fsdp.train.build import (
    Training,
    build_evaluator,
    build_sampler,
    build_training,
    check_model,
    open_checkpoints,
    total_steps,
)
from portable_fsdp.train.control import Grace, Limits, SaveTriggers
from portable_fsdp.train.evaluate import Evaluator, Sampler
from portable_fsdp.train.measures import Measures, NotFiniteError, run_start
from portable_fsdp.train.preflight import check_profile, check_with_engine, open_data, require_same_model

log = logging.getLogger("portable_fsdp")


class Exporter(Protocol):
    """Writes a finished run in another format."""

    def require_room(self, config: Config) -> None:
        """Raise, before the run, if its folder holds anything but an earlier export."""

    def export_run(
        self, config: Config, backend: Backend, tokenizer: Tokenizer | None, newest: Path, history: Evaluated | None
    ) -> None:
        """Export the checkpoint with the best evaluation, or the newest without evaluations. *collective*"""


@dataclass
class OpenRun:
    """State of the loop."""

    start: RunStart
    engine: Backend
    corpus: Corpus
    training: Training
    evaluator: Evaluator | None
    sampler: Sampler | None
    checkpoints: Checkpoints
    limits: Limits
    measures: Measures
    triggers: SaveTriggers
    stop: StopRequest
    callbacks: Callbacks
    profiles: Profiles
    watchdog: Watchdog
    grace: Grace
    step: int  # the last finished step
    history: Evaluated | None  # the evaluations so far
    last_checkpoint: Path | None
    misses_evaluation: bool = False  # the resumed checkpoint lacks its evaluation, because of a stop request
    outcome: Outcome = "finished"

    def call(self, method: Callable[..., Any], argument: object) -> None:
        """Call the callbacks; all processes call it, and those of process 0 run."""
        with self.watchdog.within("callbacks"):
            self.callbacks.call(method, argument)

    def wants_stop(self) -> bool:
        return self.stop.requested or self.checkpoints.failed


def open_run(
    config: Config,
    given: Config,
    engine: Backend,
    held: ExitStack,
    stop: StopRequest,
    callbacks: Sequence[Callback],
    keep_output: Callable[[Path, int], None],
    exporter: Exporter | None,
) -> OpenRun:
    """Check, build, and resume according to `checkpoint.resume`; for the arguments see `loop.train`.

    `given`: the config before `auto` was resolved. `held` closes the resources of the run. *collective*
    """
    run_file = _check(config, engine, held, exporter)
    config, corpus, steps, training = _build(config, engine, held)
    evaluator = build_evaluator(config, engine, training, corpus)
    sampler = build_sampler(config, engine, training, corpus.tokenizer)

    checkpoints = held.enter_context(open_checkpoints(config, engine, training, corpus))
    point, resumed = _resume(config, engine, training, checkpoints)
    cost = training.trial.cost if training.trial else None
    start = run_start(config, given, engine, training.built.size, steps, resumed, cost)
    is_new = resumed is None or any(change.name == "observe.profile" for change in resumed.changes)
    check_profile(config, steps, start.step, is_new=is_new)
    limits = _limits(config, steps, evaluates=evaluator is not None)
    prints = os.environ.get("LOCAL_RANK", "0") == "0"
    began, timeout = engine.agree(time.time()), config.run.step_timeout_s
    watchdog = held.enter_context(Watchdog(start.folder, engine.process.index, timeout, prints=prints, began=began))
    engine.watch(watchdog)
    checkpoints.on_part = watchdog.note_part
    grace = Grace()
    observers = Callbacks([RunFiles(), Console(), grace], [*_displays(config), *callbacks], engine)
    evaluated = resumed.evaluation.step if resumed and resumed.evaluation else 0
    is_own = point is not None and point.is_own
    run = OpenRun(
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
        watchdog,
        grace,
        step=start.step,
        history=_history(resumed, evaluator),
        last_checkpoint=resumed.path if resumed else None,
        misses_evaluation=is_own and evaluated < start.step and limits.evaluates(start.step),
    )
    _begin(run, run_file, keep_output)
    return run


def _check(config: Config, engine: Backend, held: ExitStack, exporter: Exporter | None) -> RunLog:
    """Open the log and check what needs no data; returns the run's own log. *collective*"""
    process = engine.process.index
    configure_log(process)
    log.info("loading transformers and the data")
    run_file = held.enter_context(run_log(process))
    log.debug("transformers imported")
    held.push(lambda _, error, __: _record_early(config, engine, run_file, error))
    check_with_engine(config, engine)
    if config.checkpoint.export and exporter is not None:
        on_process_0(engine, partial(exporter.require_room, config))
    return run_file


def _begin(run: OpenRun, run_file: RunLog, keep_output: Callable[[Path, int], None]) -> None:
    """Tell the callbacks, and keep the output in the run's folder. *collective*"""
    try:
        on_process_0(run.engine, lambda: run.callbacks.call(Callback.on_start, run.start))
    except UserExit as error:
        _record_failure(run, error)
        raise
    if run.engine.process.index == 0:
        run_file.open(run.start.folder)
    keep_output(run.start.folder, run.engine.process.index)


def _build(config: Config, engine: Backend, held: ExitStack) -> tuple[Config, Corpus, int, Training]:
    """Return the config of `open_data`, the data, the steps of the whole run, and the training. *collective*"""
    check_model(config, engine)
    config, corpus = open_data(config, engine)
    log.info("building the model")
    steps = total_steps(config, len(corpus.rows))
    # Lock out other runs before the search for a checkpoint.
    on_process_0(engine, lambda: held.enter_context(sole_run(Path(config.run.dir))))
    training = build_training(config, engine, corpus.tokenizer, rows=corpus.rows)
    require_same_model(engine, training.built.saved_config)
    log.debug("model and optimizer built")
    return config, corpus, steps, training


def _resume(
    config: Config, engine: Backend, training: Training, checkpoints: Checkpoints
) -> tuple[ResumePoint | None, Resumed | None]:
    """Find the checkpoint of `checkpoint.resume` and load it. *collective*"""
    named = on_process_0(engine, lambda: last_save(Path(config.run.dir) / "events.jsonl"))
    point = checkpoints.find(config.checkpoint.resume, named)
    resumed = None if point is None else checkpoints.load(point, training.model, training.optimizer)
    log.debug("checkpoint loaded" if resumed else "no checkpoint found")
    if resumed is not None and resumed.drops_nothing and training.step.draws is not None:
        training.step.draws.switch_off()
        if engine.process.index == 0:
            log.info("model.dropout: 0, as in the run so far; model.dropout=published would change it")
    return point, resumed


def _limits(config: Config, steps: int, *, evaluates: bool) -> Limits:
    train, intervals = config.train, (config.checkpoint.every, config.train.eval_every if evaluates else None)
    save_every, eval_every = (None if every is None else max(1, in_steps(every, steps)) for every in intervals)
    return Limits(min(steps, train.stop_at or steps), save_every, eval_every, train.patience, train.sample_every)


def _history(resumed: Resumed | None, evaluator: Evaluator | None) -> Evaluated | None:
    """Return the evaluations so far, unless the evaluation data changed."""
    history = resumed.evaluation if resumed and evaluator else None
    if history is not None and evaluator is not None and history.rows != evaluator.fingerprint:
        log.info("the evaluation data changed; discarding the previous best (step %d)", history.best_step)
        return None
    return history


def _record_early(config: Config, engine: Backend, run_file: RunLog, error: BaseException | None) -> None:
    """Record the event `fail` if user code failed while the run was built; creates the run's folder."""
    is_recorded = run_file.path is not None or getattr(error, "run_has_started", False)
    # An error of user code names a line of it.
    is_of_user = isinstance(error, Exception) and "\n  in " in f"{error}\n{described(error)}"
    if engine.process.index == 0 and is_of_user and not is_recorded:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        with suppress(PortableFSDPError, OSError), sole_run(Path(config.run.dir)):
            EventsFile(Path(config.run.dir, "events.jsonl")).write("fail", step=0, reason=reason, is_early=True)


def _displays(config: Config) -> Iterator[Callback]:
    """Yield built-in callbacks that, like a user's, are removed if they raise."""
    if sys.stderr.isatty():
        from portable_fsdp.observe.live_display import LiveDisplay

        yield LiveDisplay()
    if config.observe.trackers:
        from portable_fsdp.observe.trackers import Trackers

        yield Trackers()


@contextmanager
def recorded(run: OpenRun) -> Generator[None]:
    """Wrap the steps: callbacks get every commit, and then the end, also of a failed run."""
    try:
        with user_code():
            try:
                yield
            finally:  # an error may come between a commit and its event, while a save is in progress
                with run.watchdog.within("the end of the run"):
                    run.profiles.after_step(run.step, is_last=True)
                    run.checkpoints.close()
                    note_commits(run)
        if run.outcome == "stopped":  # perhaps at the request of another process
            reasons = dict.fromkeys(filter(None, run.engine.gather(run.stop.reason)))
            run.stop.reason = ", ".join(reasons) or None
        end = _end_of(run, run.outcome, {})
        on_process_0(run.engine, lambda: run.callbacks.call(Callback.on_end, end))
    except (Exception, Stopped) as error:  # Stopped: before the first step ended
        _record_failure(run, error)
        raise


def note_commits(run: OpenRun) -> None:
    """Pass newly committed checkpoints to the callbacks."""
    finished = run.checkpoints.finished()
    run.triggers.committed(saved.step for saved in finished)
    with run.watchdog.within("callbacks"):  # a phase on all processes: only process 0 knows the commits
        for saved in finished:
            run.last_checkpoint = saved.path
            run.callbacks.call(Callback.on_save, saved)


def _record_failure(run: OpenRun, error: BaseException) -> None:
    """Notify the callbacks; add the last step and checkpoint to the message of an error that lost work."""
    values = error.values if isinstance(error, NotFiniteError) else {}
    end = _end_of(run, "not finite" if values else "failed", values, error)
    if run.engine.process.index and not values:
        cause = run.start.folder, end.step, end.reason, run.watchdog.began
        record_failure(*cause, is_consequence=end.is_consequence, process=run.engine.process.index)
    with suppress(Exception), user_code():  # the disk may be full: the run's own error takes precedence
        run.call(Callback.on_end, end)
    if not isinstance(error, PortableFSDPError):
        return
    error.run_has_started = True
    if isinstance(error, DataError) or run.step > run.start.step:
        error.exit_code = EXIT_FAILED  # 2 means that nothing was lost
    # CheckpointError and NotFiniteError name the checkpoint themselves.
    if error.exit_code == EXIT_FAILED and not isinstance(error.__cause__ or error, CheckpointError | NotFiniteError):
        ended, newest = f"after step {run.step}" if run.step else "before its first step", newest_checkpoint(run)
        error.args = (f"{error}\n  The run ended {ended}. {newest} Fix the cause and rerun the same command.",)


def newest_checkpoint(run: OpenRun) -> str:
    """Return a sentence that names the newest checkpoint. Reads the folder: only process 0 knows the commits."""
    try:
        saved = committed_steps(run.checkpoints.folder)
    except Exception as error:  # stores raise exceptions of many classes
        return f"{run.checkpoints.folder} doesn't answer ({type(error).__name__}): look there for checkpoints."
    return f"The last good checkpoint is {saved[0]}." if saved else "No checkpoint was saved."


def _end_of(run: OpenRun, outcome: Outcome, values: Mapping[str, float], error: BaseException | None = None) -> RunEnd:
    reasons = {"stopped": run.stop.reason or "a signal to another process", "no improvement": patience_of(run)}
    is_consequence = isinstance(error, Stopped)  # a launcher ends the others with SIGTERM
    if error is not None and not values:
        lost = run.engine.lost_connection(error)
        is_consequence |= lost is not None
        reasons["failed"] = (lost or f"{type(error).__name__}: {error}").partition("\n")[0].removesuffix(": ")
    reason = reasons.get(outcome, outcome)
    best = (run.history.best_step, run.history.best_loss) if run.history else (None, None)
    return RunEnd(outcome, run.step, reason, run.measures.elapsed, run.last_checkpoint, *best, values, is_consequence)


def patience_of(run: OpenRun) -> str:
    return f"no improvement in {run.history.without_improvement if run.history else 0} evaluations"
