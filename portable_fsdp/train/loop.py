"""A run: build, resume, step, save. Read it top to bottom.

Everything that can be refused is refused before the first file is written. Metrics are read a step late, so that the
device never waits for the host; they are drained before a save, so that nothing that isn't finite is ever saved.
"""

import logging
import os
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from portable_fsdp.backends.base import Backend, Batch, ShardPolicy
from portable_fsdp.backends.open import open_backend
from portable_fsdp.checkpoint.foreign.huggingface import export_huggingface, require_replaceable
from portable_fsdp.checkpoint.format import committed_steps
from portable_fsdp.checkpoint.manager import Checkpoints, Fingerprint, Resumed
from portable_fsdp.config.load import check_batch, total_steps
from portable_fsdp.config.schema import Config
from portable_fsdp.data.batches import Batches
from portable_fsdp.data.build import Corpus, build_data
from portable_fsdp.data.order import Position
from portable_fsdp.models.build import BuiltModel, build_model
from portable_fsdp.models.wrap import find_layers, find_units, modules_of_own_dtype, recomputed_layers
from portable_fsdp.optim.optimizer import make_optimizer, parameter_groups
from portable_fsdp.optim.schedule import check_schedule, learning_rate
from portable_fsdp.runtime.errors import (
    EXIT_FINISHED,
    EXIT_STOPPED,
    CheckpointError,
    ConfigError,
    TrainingError,
    UsageError,
)
from portable_fsdp.runtime.lock import sole_run
from portable_fsdp.runtime.log import configure
from portable_fsdp.runtime.process import StopRequest
from portable_fsdp.train.records import Asked, InFlight, Records, checkpoint_folder
from portable_fsdp.train.step import Step, train_step
from portable_fsdp.train.when import SaveRequests

log = logging.getLogger("portable_fsdp")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


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
    with (
        StopRequest() as stop,
        open_backend(config, device=device, backend=backend, num_devices=num_devices) as engine,
    ):
        check_devices(engine.data_parallel_size)
        configure(engine.process.index)
        _on_process_0(engine, lambda: _check_folders(config))
        corpus = build_data(config.data)
        steps = total_steps(config, len(corpus.rows))
        check_schedule(config.optim, steps)
        with _sole_run(config, engine):
            return _train(config, engine, corpus, steps, stop)


def _train(config: Config, engine: Backend, corpus: Corpus, steps: int, stop: StopRequest) -> int:
    training = build(config, engine, corpus.tokenizer.vocab_size)
    with closing(_checkpoints(config, engine, training, corpus)) as checkpoints:
        resumed = _resume(config, training, checkpoints)
        records = Records(config, engine, training.built, steps, lambda: _last_saved(checkpoints))
        _on_process_0(engine, lambda: records.begin(resumed.step if resumed else 0, resumed))
        requests = SaveRequests(Path(config.run.dir), config.checkpoint.every_minutes)
        run = _Run(config, engine, corpus, steps, training, checkpoints, records, requests, stop)
        with _commits_noted(run):
            saved, stopped = _loop(run, resumed)
    newest = saved or (resumed.path if resumed else None)
    if config.checkpoint.export and not stopped and newest is not None:
        _export(config, engine, corpus, newest)
    return EXIT_STOPPED if stopped else EXIT_FINISHED


@contextmanager
def _sole_run(config: Config, backend: Backend) -> Generator[None]:
    """Hold run.dir against other runs, from before the checkpoint to go on from is looked for. *collective*"""
    with ExitStack() as held:
        _on_process_0(backend, lambda: held.enter_context(sole_run(Path(config.run.dir))))
        yield


def _on_process_0(backend: Backend, work: Callable[[], None]) -> None:
    """What `work` refuses there is refused on all processes: other hosts need not see run.dir. *collective*"""
    refusal: UsageError | OSError | None = None
    if backend.process.index == 0:
        try:
            work()
        except (UsageError, OSError) as error:
            refusal = error
    refusal = backend.agree(refusal)
    if refusal is not None:
        raise refusal


def _check_folders(config: Config) -> None:
    _check_folder(Path(config.run.dir))
    if config.checkpoint.export:
        require_replaceable(_export_folder(config))


def _check_folder(folder: Path) -> None:
    """Refuse, before anything is built, a run.dir that can't be made or written to."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        found = "a folder that this user may not write to" if nearest.is_dir() else "a file"
        raise ConfigError(
            f"run.dir: expected a folder that can be written to, or a new one: {folder}\n  found {found}: {nearest}\n"
            "  Set run.dir to another folder. Nothing was started."
        )


# ---------------------------------------------------------------------------------------------------------- build


@dataclass(frozen=True)
class Training:
    """What a step needs, laid out on the engine. The planner and the tests build the same."""

    built: BuiltModel
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Step
    accumulation: int  # micro batches in a step
    ties: dict[str, str]  # FQN -> the first FQN of the same weight


def build(config: Config, backend: Backend, vocabulary: int, *, fill: bool = True) -> Training:
    """Model, optimizer and step, in that order; writes nothing. *collective*

    `vocabulary`: ids of the tokenizer. Without `fill` the weights are placeholders that hold no memory.
    """
    accumulation = check_batch(config, backend.data_parallel_size)
    built = build_model(
        config.model,
        config.precision,
        seed=config.run.seed,
        seq_len=config.data.seq_len,
        vocabulary=vocabulary,
        chunked_loss=backend.expected_compilations == 0,
    )
    shapes = {fqn: tuple(weight.shape) for fqn, weight in built.model.named_parameters() if weight.requires_grad}
    frozen = [fqn for fqn, weight in built.model.named_parameters() if not weight.requires_grad]
    ties = _ties(built.model)
    groups = parameter_groups(shapes, config.optim, ties=ties, frozen=frozen)
    model = backend.shard_model(built.model, shard_policy(config, built.model), built.fill if fill else None)
    optimizer = backend.build_optimizer(make_optimizer(config.optim), groups)
    step = train_step(backend, model, optimizer, accumulation=accumulation, max_grad_norm=config.train.max_grad_norm)
    return Training(built, model, optimizer, step, accumulation, ties)


def _ties(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    names = [(fqn, first.setdefault(id(p), fqn)) for fqn, p in model.named_parameters(remove_duplicate=False)]
    return {fqn: name for fqn, name in names if fqn != name}


def shard_policy(config: Config, model: nn.Module) -> ShardPolicy:
    """The config's words as plain values for this model; raises ConfigError for a name that the model doesn't have."""
    sharding, precision, memory = config.sharding, config.precision, config.memory
    layers = find_layers(model, sharding)
    return ShardPolicy(
        units=find_units(model, sharding),
        layers=layers,
        compute=DTYPES[precision.compute],
        reduce=DTYPES["float32" if precision.reduce == "auto" else precision.reduce],
        modules={name: DTYPES[dtype] for name, dtype in modules_of_own_dtype(model, precision).items()},
        recompute=recomputed_layers(layers, memory),
        save_ops=memory.save_ops,
        reshard_after_forward=sharding.reshard_after_forward
        or sharding.strategy not in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"),
        forward_prefetch=sharding.forward_prefetch,
        backward_prefetch=sharding.backward_prefetch,
        backward_prefetch_units=sharding.backward_prefetch_units,
        cpu_offload=memory.cpu_offload,
        compile_backend=config.compile.backend if config.compile.enabled else None,
        scan_layers=config.compile.scan_layers,
    )


# --------------------------------------------------------------------------------------------------------- resume


def _checkpoints(config: Config, backend: Backend, training: Training, corpus: Corpus) -> Checkpoints:
    return Checkpoints(
        checkpoint_folder(config),
        backend,
        config=config.model_dump(mode="json"),
        model_config=training.built.config,
        settings=config.checkpoint,
        data=Fingerprint(*corpus.fingerprint),
        ties=training.ties,
    )


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
    checkpoints: Checkpoints
    records: Records
    requests: SaveRequests
    stop: StopRequest


def _loop(run: _Run, resumed: Resumed | None) -> tuple[Path | None, bool]:
    """Train on; returns the newest checkpoint of these steps, and whether a request ended them early.

    The last step run is saved.
    """
    start = resumed.step if resumed else 0
    last = min(run.steps, run.config.train.stop_at or run.steps)
    if start >= last:
        log.info("step %d of %d is saved already: nothing left to train", start, last)
    path: Path | None = None
    in_flight: InFlight | None = None
    with _batches(run, resumed) as batches:
        for step in range(start + 1, last + 1):
            previous, in_flight = in_flight, _dispatch(run, step, batches)
            asked = Asked() if previous is None else run.records.report(previous, until=in_flight.began)
            if asked.stop or asked.save or step == last or step % (run.config.checkpoint.every or last) == 0:
                asked = Asked(stop=run.records.report(in_flight).stop or asked.stop)
                in_flight = None
                path = _save(run, step, batches.consumed, wait=asked.stop or step == last)
            _note_commits(run)
            if asked.stop:
                run.records.stopped(step, run.stop.reason)
                return path, True
    return path, False


def _batches(run: _Run, resumed: Resumed | None) -> Batches:
    rows, shard = run.corpus.rows, run.backend.data_shard
    position = Position(*resumed.position) if resumed else Position(0, 0)
    return Batches(
        rows,
        seed=run.config.run.seed,
        global_batch=run.config.train.global_batch,
        shard=(shard.index, shard.count),
        accumulation=run.training.accumulation,
        start=position.samples(len(rows)),
    )


def _dispatch(run: _Run, step: int, batches: Iterator[list[Batch]]) -> InFlight:
    """Start a step, without waiting for the device."""
    began = time.perf_counter()
    lr = learning_rate(run.config.optim, step, run.steps)
    news = _News(run.stop.requested or run.checkpoints.failed, run.records.seen(run.requests))
    placed = [run.backend.place(_with_news(batch, news)) for batch in next(batches)]
    return InFlight(step, lr, began, run.backend.fetch(run.training.step(placed, lr)))


def _save(run: _Run, step: int, consumed: int, *, wait: bool) -> Path:
    """Save the state after `step`, for which `consumed` samples were taken; `wait`: until it is committed."""
    position = Position.after(consumed, len(run.corpus.rows))
    run.requests.began(step)
    try:
        path = run.checkpoints.save(step, run.training.model, run.training.optimizer, (position.epoch, position.index))
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


class _News(NamedTuple):
    """What a process tells all others with the next step."""

    stop: bool
    seen: Tensor


def _with_news(batch: Batch, news: _News) -> Batch:
    """They ride with the batch, so that all processes learn of them in the same step."""
    processes = torch.zeros(len(batch["tokens"]), len(news.seen))
    processes[0] = news.seen
    return {**batch, "stop": torch.full_like(batch["tokens"], float(news.stop)), "processes": processes}


def _last_saved(checkpoints: Checkpoints) -> str:
    """For the message of a run that ends by its own numbers: a background save may be under way."""
    checkpoints.close()
    try:
        saved = committed_steps(checkpoints.folder)
    except Exception as error:  # of a store, of many classes
        return f"What is saved can't be told, since {checkpoints.folder} doesn't answer ({type(error).__name__})."
    return f"The last good checkpoint is {saved[0]}." if saved else "No checkpoint was saved before it."


def _export(config: Config, backend: Backend, corpus: Corpus, checkpoint: Path) -> None:
    failure = None
    if backend.process.index == 0:
        try:
            export_huggingface(checkpoint, _export_folder(config), corpus.tokenizer.save)
            log.info("exported %s to %s", checkpoint, _export_folder(config))
        except (OSError, CheckpointError) as error:
            failure = f"checkpoint.export: {error}"
    failure = backend.agree(failure)  # nobody leaves before the folder is whole
    if failure is not None:
        raise TrainingError(
            f"{failure}\n  The run itself is saved: python -m portable_fsdp.checkpoint export repeats it."
        )


def _export_folder(config: Config) -> Path:
    return Path(config.run.dir) / "export"
