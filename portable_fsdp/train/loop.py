"""A run: build, resume, step, save. Read it top to bottom.

Everything that can be refused is refused before the first file is written. Metrics are read a step late, so that the
device never waits for the host; they are drained before a save, so that nothing that isn't finite is ever saved.
"""

import logging
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from portable_fsdp.backends.base import Backend, Batch
from portable_fsdp.backends.open import open_backend
from portable_fsdp.checkpoint.format import Evaluated, committed_steps, is_committed, step_folder
from portable_fsdp.checkpoint.manager import Checkpoints, Resumed
from portable_fsdp.checkpoint.write_errors import with_cause
from portable_fsdp.config.schema import Config
from portable_fsdp.data.build import Corpus
from portable_fsdp.models.architecture import check_architecture
from portable_fsdp.optim.schedule import learning_rate
from portable_fsdp.runtime.collective_errors import on_each_process, on_process_0
from portable_fsdp.runtime.command import configure_log
from portable_fsdp.runtime.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_STOPPED,
    CheckpointError,
    TrainingError,
)
from portable_fsdp.runtime.lock import sole_run
from portable_fsdp.runtime.process import Stopped, StopRequest
from portable_fsdp.train.build import (
    Training,
    build_evaluator,
    build_training,
    open_batches,
    open_checkpoints,
    total_steps,
)
from portable_fsdp.train.consistency import open_data, require_same_model
from portable_fsdp.train.early_checks import require_writable
from portable_fsdp.train.evaluate import Evaluation, Evaluator, evaluated
from portable_fsdp.train.records import Asked, InFlight, Records
from portable_fsdp.train.save_triggers import SaveTriggers

log = logging.getLogger("portable_fsdp")


def train(
    config: Config,
    *,
    device: str = "auto",
    backend: str = "auto",
    num_devices: int | None = None,
    check_devices: Callable[[int], None] = lambda devices: None,
) -> int:
    """Run the config on an engine, resuming what `checkpoint.resume` finds; returns the exit code of `launch`.

    Called by every process of the run. `check_devices` gets the number of devices as soon as the engine has counted
    them, and may raise. Raises the errors of runtime/errors.py.
    """
    architecture = config.model.architecture
    if isinstance(architecture, dict):  # the same on all processes, before they have met
        _check_model(architecture)
    with StopRequest() as stop:
        try:
            with open_backend(config, device=device, backend=backend, num_devices=num_devices) as engine:
                check_devices(engine.data_parallel_size)
                configure_log(engine.process.index)
                on_process_0(engine, lambda: _check_folders(config))
                if isinstance(architecture, str):  # a file, which may be another one on each host
                    on_each_process(engine, lambda: _check_model(architecture))
                corpus = open_data(config, engine)
                steps = total_steps(config, len(corpus.rows))
                with _sole_run(config, engine):
                    return _train(config, engine, corpus, steps, stop)
        except Stopped as request:
            log.error("stopped before the first step on request (%s): there was nothing to save", request)
            return EXIT_FAILED


def _train(config: Config, engine: Backend, corpus: Corpus, steps: int, stop: StopRequest) -> int:
    training = build_training(config, engine, corpus.tokenizer.vocab_size)
    require_same_model(engine, training.built.config)
    with open_checkpoints(config, engine, training, corpus) as checkpoints:
        resumed = _resume(config, training, checkpoints)
        records = Records(config, engine, training.built, steps, lambda: _last_saved(checkpoints))
        on_process_0(engine, lambda: records.begin(resumed.step if resumed else 0, resumed))
        requests = SaveTriggers(Path(config.run.dir), config.checkpoint.every_minutes)
        evaluator = build_evaluator(config, engine, training, corpus)
        if corpus.eval_rows is not None and evaluator is None:
            log.warning(
                "data.eval_split: %d rows are held out and not used: set train.eval_every", len(corpus.eval_rows)
            )
        run = _Run(config, engine, corpus, steps, training, evaluator, checkpoints, records, requests, stop)
        with _commits_noted(run):
            if resumed is None and config.train.eval_on_start:
                _evaluate_first(run)
            end = _loop(run, resumed)
    newest = end.saved or (resumed.path if resumed else None)
    if config.checkpoint.export and not end.is_stopped and newest is not None:
        _export(config, engine, corpus, newest, end.told)
    return EXIT_STOPPED if end.is_stopped else EXIT_FINISHED


@contextmanager
def _sole_run(config: Config, backend: Backend) -> Generator[None]:
    """Hold run.dir against other runs, from before the checkpoint to go on from is looked for. *collective*"""
    with ExitStack() as held:

        def take() -> None:
            held.enter_context(sole_run(Path(config.run.dir)))

        on_process_0(backend, take)
        yield


def _check_folders(config: Config) -> None:
    require_writable(Path(config.run.dir))
    if config.checkpoint.export:
        from portable_fsdp.formats.target import require_replaceable

        require_replaceable(_export_folder(config))


def _check_model(architecture: Mapping[str, Any] | str) -> None:
    """Before minutes of tokenizing."""
    os.environ.setdefault("USE_TORCH_XLA", "0")  # as build_model does, before transformers is imported
    check_architecture(architecture)


# --------------------------------------------------------------------------------------------------------- resume


def _resume(config: Config, training: Training, checkpoints: Checkpoints) -> Resumed | None:
    """Load what `checkpoint.resume` names; None for a new run."""
    found = checkpoints.find(config.checkpoint.resume)
    return None if found is None else checkpoints.load(found, training.model, training.optimizer)


# ----------------------------------------------------------------------------------------------------------- loop


@dataclass(frozen=True)
class _Run:
    """What the loop needs, open and ready."""

    config: Config
    backend: Backend
    corpus: Corpus
    steps: int  # of the whole run
    training: Training
    evaluator: Evaluator | None
    checkpoints: Checkpoints
    records: Records
    requests: SaveTriggers
    stop: StopRequest


@dataclass(frozen=True)
class _End:
    """How the loop ended."""

    saved: Path | None  # the newest checkpoint of its steps
    is_stopped: bool  # by a request
    told: Evaluated | None  # by the evaluations


def _loop(run: _Run, resumed: Resumed | None) -> _End:
    """Train on. The last step run is saved, and so is the best by its evaluation."""
    start, last = resumed.step if resumed else 0, min(run.steps, run.config.train.stop_at or run.steps)
    told = _told_before(run, resumed)
    if start >= last or _gives_up(run, told):
        why = f" (no improvement in {told.without_improvement} evaluations)" if told and start < last else ""
        log.info("step %d of %d is saved already: nothing left to train%s", start, last, why)
        return _End(None, False, told)
    path: Path | None = None
    in_flight: InFlight | None = None
    with open_batches(run.config, run.backend, run.training, run.corpus, resumed) as batches:
        for step in range(start + 1, last + 1):
            previous, in_flight = in_flight, _dispatch(run, step, batches)
            run.stop.begin_steps()
            asked = Asked() if previous is None else run.records.report(previous, until=in_flight.began)
            stops = asked.stop
            evaluates = run.evaluator is not None and _is_due(step, run.config.train.eval_every, last)
            saves = stops or asked.save or _is_due(step, run.config.checkpoint.every, last)
            if saves or evaluates:
                measured, in_flight = run.records.measure(in_flight), None
                stops, saves = stops or measured.asked.stop, saves or measured.asked.save
                evaluation = None
                if evaluates and not stops:
                    evaluation, told = _evaluate(run, step, told)
                    stops = evaluation is None
                run.records.write(measured, evaluation)
                ends = stops or step == last or _gives_up(run, told)
                if saves or ends or (told is not None and told.best_step == step):
                    path = _save(run, step, batches.position, told, wait=ends)
            _note_commits(run)
            if stops:
                run.records.stopped(step, run.stop.reason)
                return _End(path, True, told)
            if told is not None and _gives_up(run, told):
                run.records.gave_up(told)
                break
    return _End(path, False, told)


def _is_due(step: int, every: int | None, last: int) -> bool:
    return step == last or (every is not None and step % every == 0)


def _dispatch(run: _Run, step: int, batches: Iterator[list[Batch]]) -> InFlight:
    """Start a step, without waiting for the device."""
    began = time.perf_counter()
    lr = learning_rate(run.config.optim, step, run.steps)
    rows = next(batches)
    waited = time.perf_counter() - began
    stop, seen = _wants_stop(run), run.records.seen(run.requests)
    placed = [run.backend.place(with_votes(batch, stop, seen)) for batch in rows]
    return InFlight(step, lr, began, waited, run.backend.fetch(run.training.step(placed, lr)))


def _told_before(run: _Run, resumed: Resumed | None) -> Evaluated | None:
    """What evaluations over the same rows had told by the checkpoint."""
    told = resumed.evaluation if resumed else None
    if told is None or run.evaluator is None:
        return None
    if told.rows != run.evaluator.fingerprint:
        log.info("other rows are evaluated than before: the best so far, step %d, counts no more", told.best_step)
        return None
    return told


def _evaluate(run: _Run, step: int, told: Evaluated | None) -> tuple[Evaluation | None, Evaluated | None]:
    """The evaluation after `step`, and what all have told; none where a request to stop came before its end."""
    evaluator, began = cast(Evaluator, run.evaluator), time.perf_counter()
    evaluation = evaluator(lambda: _wants_stop(run))
    if evaluation is None:
        return None, told
    told = evaluated(told, step, evaluation.loss, evaluator.fingerprint)
    run.records.evaluated(step, evaluation, time.perf_counter() - began, is_best=told.best_step == step)
    return evaluation, told


def _evaluate_first(run: _Run) -> None:
    """Before the first step: written down, and never the best."""
    began = time.perf_counter()
    evaluation = cast(Evaluator, run.evaluator)(lambda: _wants_stop(run))
    if evaluation is not None:
        run.records.evaluated(0, evaluation, time.perf_counter() - began, is_best=False)


def _gives_up(run: _Run, told: Evaluated | None) -> bool:
    patience = run.config.train.patience
    return patience is not None and told is not None and told.without_improvement >= patience


def _wants_stop(run: _Run) -> bool:
    return run.stop.requested or run.checkpoints.failed


def _save(run: _Run, step: int, position: tuple[int, int], told: Evaluated | None, *, wait: bool) -> Path:
    """Save the state after `step`, with the data at `position`; `wait`: until it is committed."""
    run.requests.began(step)
    try:
        path = run.checkpoints.save(step, run.training.model, run.training.optimizer, position, told)
        if wait:
            run.checkpoints.wait()
    except CheckpointError as error:  # not the user's mistake any more: the run has started
        raise TrainingError(str(error)) from error
    return path


@contextmanager
def _commits_noted(run: _Run) -> Generator[None]:
    """Note the last of them too: an error may come between a commit and its event, and a save be under way by then."""
    try:
        yield
    finally:
        run.checkpoints.close()
        _note_commits(run)


def _note_commits(run: _Run) -> None:
    finished = run.checkpoints.finished()
    run.records.saved(finished)
    run.requests.committed(one.step for one in finished)


def with_votes(batch: Batch, stop: bool, seen: Tensor) -> Batch:
    """What this process tells all others rides with the batch, so that they learn of it in the same step.

    `seen`: float32 [n]. Adds `votes`, float32 [rows, 1 + n].
    """
    votes = torch.zeros(len(batch["tokens"]), 1 + len(seen))
    votes[0] = torch.cat([torch.tensor([float(stop)]), seen])
    return {**batch, "votes": votes}


def _last_saved(checkpoints: Checkpoints) -> str:
    """For the message of a run that ends by its own numbers: a background save may be under way."""
    checkpoints.close()
    try:
        saved = committed_steps(checkpoints.folder)
    except Exception as error:  # of a store, of many classes
        return f"What is saved can't be told, since {checkpoints.folder} doesn't answer ({type(error).__name__})."
    return f"The last good checkpoint is {saved[0]}." if saved else "No checkpoint was saved before it."


def _export(config: Config, backend: Backend, corpus: Corpus, newest: Path, told: Evaluated | None) -> None:
    """The best checkpoint by its evaluation; the newest where there was none."""
    from portable_fsdp.formats.base import ExportOptions, export_checkpoint

    alone = config.model.lora is not None and not config.checkpoint.merge_adapters

    def export() -> None:
        checkpoint, which = _to_export(newest, told)
        # The base may have moved since the checkpoint was saved.
        options = ExportOptions(save_tokenizer=corpus.tokenizer.save, base=config.model.pretrained)
        export_checkpoint(checkpoint, "peft" if alone else "huggingface", _export_folder(config), options)
        log.info("exported %s to %s%s", checkpoint, _export_folder(config), which)

    def as_error(error: Exception) -> TrainingError:
        again = f"python -m portable_fsdp.checkpoint export {newest.parent} FOLDER{' --format peft' if alone else ''}"
        reason = with_cause(error, _export_folder(config).parent)
        return TrainingError(f"checkpoint.export: {reason}\n  The run itself is saved: {again} repeats it.")

    on_process_0(backend, export, as_error)  # nobody leaves before the folder is whole


def _to_export(newest: Path, told: Evaluated | None) -> tuple[Path, str]:
    if told is None:
        return newest, ""
    best = step_folder(newest.parent, told.best_step)
    if not is_committed(best):
        return newest, f", since {best.name}, the best by its evaluation, is gone"
    return best, f": the best by its evaluation (eval_loss {told.best_loss:.4f})"


def _export_folder(config: Config) -> Path:
    return Path(config.run.dir) / "export"
