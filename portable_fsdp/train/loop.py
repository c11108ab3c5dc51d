"""A run: build, resume, step, save. Read it top to bottom.

Everything that can be refused is refused before the first file is written. Metrics are read a step late, so that the
device never waits for the host; they are drained before a save, so that nothing that isn't finite is ever saved.
"""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from portable_fsdp.backends.base import Backend, Batch, Pending, ShardPolicy
from portable_fsdp.backends.open import open_backend
from portable_fsdp.checkpoint.foreign.huggingface import export_huggingface, require_replaceable
from portable_fsdp.checkpoint.format import committed_steps
from portable_fsdp.checkpoint.manager import Checkpoints, Fingerprint, Resumed, Saved
from portable_fsdp.checkpoint.storage import locate
from portable_fsdp.config.load import check_batch, config_text, total_steps
from portable_fsdp.config.schema import Config
from portable_fsdp.data.batches import Batches
from portable_fsdp.data.build import Corpus, build_data
from portable_fsdp.data.order import Position
from portable_fsdp.metrics.flops import model_flops_per_token, peak_flops
from portable_fsdp.metrics.meter import Meter, processes_row
from portable_fsdp.metrics.sinks import EventsFile, MetricsFile
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
from portable_fsdp.runtime.files import write_text_atomically
from portable_fsdp.runtime.lock import sole_run
from portable_fsdp.runtime.log import configure
from portable_fsdp.runtime.process import StopRequest
from portable_fsdp.train.step import Step, train_step
from portable_fsdp.train.when import SaveRequests

log = logging.getLogger("portable_fsdp")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def train(config: Config, *, device: str = "auto", backend: str = "auto", num_devices: int | None = None) -> int:
    """Run the config on an engine, resuming what `checkpoint.resume` finds; returns the exit code of `launch`.

    Called by every process of the run. Raises the errors of runtime/errors.py.
    """
    with (
        StopRequest() as stop,
        open_backend(config, device=device, backend=backend, num_devices=num_devices) as engine,
    ):
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
        start = resumed.step if resumed else 0
        records = Records(config, engine, training.built, steps)
        records.begin(start, resumed)
        last = min(steps, config.train.stop_at or steps)
        if start >= last:
            log.info("step %d of %d is saved already: nothing left to train", start, last)
        saved, stopped = _loop(config, engine, corpus, training, checkpoints, records, stop, resumed, last)
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
    refusal: UsageError | None = None
    if backend.process.index == 0:
        try:
            work()
        except UsageError as error:
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
        _checkpoint_folder(config),
        backend,
        config=config.model_dump(mode="json"),
        model_config=training.built.config,
        settings=config.checkpoint,
        data=Fingerprint(*corpus.fingerprint),
        ties=training.ties,
    )


def _checkpoint_folder(config: Config) -> Path:
    return locate(config.checkpoint.dir or Path(config.run.dir) / "checkpoints")


def _resume(config: Config, training: Training, checkpoints: Checkpoints) -> Resumed | None:
    """Load what `checkpoint.resume` names; None for a new run."""
    found = checkpoints.find(config.checkpoint.resume)
    return None if found is None else checkpoints.load(found, training.model, training.optimizer)


# ----------------------------------------------------------------------------------------------------------- loop


@dataclass(frozen=True)
class _InFlight:
    """A step that was dispatched and whose metrics nobody has read."""

    step: int
    lr: float
    began: float  # seconds of time.perf_counter
    metrics: Pending


def _loop(
    config: Config,
    backend: Backend,
    corpus: Corpus,
    training: Training,
    checkpoints: Checkpoints,
    records: "Records",
    stop: StopRequest,
    resumed: Resumed | None,
    last: int,
) -> tuple[Path | None, bool]:
    """Steps to `last`; returns the newest checkpoint of them, and whether a request ended them early.

    The last step run is saved.
    """
    rows = len(corpus.rows)
    steps = total_steps(config, rows)
    start, position = (resumed.step, Position(*resumed.position)) if resumed else (0, Position(0, 0))
    requests = SaveRequests(Path(config.run.dir), config.checkpoint.every_minutes)
    path: Path | None = None
    with Batches(
        corpus.rows,
        seed=config.run.seed,
        global_batch=config.train.global_batch,
        shard=(backend.data_shard.index, backend.data_shard.count),
        accumulation=training.accumulation,
        start=position.samples(rows),
    ) as batches:
        in_flight: _InFlight | None = None
        for step in range(start + 1, last + 1):
            began = time.perf_counter()
            lr = learning_rate(config.optim, step, steps)
            news = _News(stop.requested or checkpoints.failed, records.seen(requests))
            placed = [backend.place(_with_news(batch, news)) for batch in next(batches)]
            previous, in_flight = in_flight, _InFlight(step, lr, began, backend.fetch(training.step(placed, lr)))
            asked = records.report(previous, until=began) if previous is not None else Asked()
            if asked.stop or asked.save or step == last or step % (config.checkpoint.every or last) == 0:
                asked = Asked(stop=records.report(in_flight).stop or asked.stop)
                in_flight = None
                requests.began(step)
                path = _save(checkpoints, step, training, Position.after(batches.consumed, rows))
                if asked.stop or step == last:
                    _wait(checkpoints)
            finished = checkpoints.finished()
            records.saved(finished)
            requests.committed(one.step for one in finished)
            if asked.stop:
                records.stopped(step, stop.reason)
                return path, True
    return path, False


def _save(checkpoints: Checkpoints, step: int, training: Training, position: Position) -> Path:
    try:
        return checkpoints.save(step, training.model, training.optimizer, (position.epoch, position.index))
    except CheckpointError as error:  # not the user's mistake any more: the run has started
        raise TrainingError(str(error)) from error


def _wait(checkpoints: Checkpoints) -> None:
    try:
        checkpoints.wait()
    except CheckpointError as error:
        raise TrainingError(str(error)) from error


class _News(NamedTuple):
    """What a process tells all others with the next step."""

    stop: bool
    seen: Tensor


def _with_news(batch: Batch, news: _News) -> Batch:
    """They ride with the batch, so that all processes learn of them in the same step."""
    processes = torch.zeros(len(batch["tokens"]), len(news.seen))
    processes[0] = news.seen
    return {**batch, "stop": torch.full_like(batch["tokens"], float(news.stop)), "processes": processes}


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


# -------------------------------------------------------------------------------------------------------- records


class Asked(NamedTuple):
    """What any process asked for with a step."""

    stop: bool = False
    save: bool = False


class Records:
    """What a run says of itself: metrics.jsonl, events.jsonl, config.yaml, the console. Process 0 writes."""

    def __init__(self, config: Config, backend: Backend, built: BuiltModel, steps: int) -> None:
        size = built.size
        self._config = config
        self._backend = backend
        self._size = size
        self._steps = steps
        self._seconds = math.nan  # of the last step that ended
        self._folder = Path(config.run.dir)
        self._writes = backend.process.index == 0
        self._tokens = config.train.global_batch * config.data.seq_len
        self._meter = Meter(
            devices=backend.data_parallel_size,
            peak_flops=peak_flops(backend.device_name, config.precision.compute),
            flops_per_token=None
            if size.has_experts
            else model_flops_per_token(
                size.parameters, size.embedding_parameters, size.layers, size.hidden, config.data.seq_len
            ),
        )

    def begin(self, step: int, resumed: Resumed | None) -> None:
        """Make the run's folder, drop the rows of steps that are run again, say what starts and from where."""
        if not self._writes:
            return
        self._first = step + 1
        self._folder.mkdir(parents=True, exist_ok=True)
        self._metrics = MetricsFile(self._folder / "metrics.jsonl")
        self._metrics.truncate_after(step)  # first: it refuses a file that something else has written to
        self._events = EventsFile(self._folder / "events.jsonl")
        (self._folder / "STOPPED").unlink(missing_ok=True)
        write_text_atomically(self._folder / "config.yaml", config_text(self._config))
        backend = self._backend
        self._events.write(
            "start",
            name=self._config.run.name,
            step=step,
            backend=backend.name,
            device=backend.device_name,
            devices=backend.data_parallel_size,
            processes=backend.process.count,
        )
        if resumed is not None:
            self._resumed(resumed)
        log.info(
            "%s on %d x %s (%d process(es)): %s parameters, %d steps of %s tokens",
            backend.name,
            backend.data_parallel_size,
            backend.device_name,
            backend.process.count,
            f"{self._size.parameters:,}",
            self._steps,
            f"{self._tokens:,}",
        )

    def _resumed(self, resumed: Resumed) -> None:
        self._events.write(
            "resume",
            path=str(resumed.path),
            step=resumed.step,
            load="weights_only" if resumed.weights_only else "all",
            changes={one.name: {"saved": one.saved, "now": one.now} for one in resumed.changes},
            passed_over=list(resumed.passed_over),
        )
        if resumed.weights_only:
            log.info("a new run from the weights of %s", resumed.path)
        else:
            log.info("resumed from %s: step %d", resumed.path, resumed.step)
        for change in resumed.changes:
            if change.makes_curve and not resumed.weights_only:
                log.warning("changed since it was saved, as checkpoint.allow says: %s", change)

    def report(self, late: _InFlight, until: float | None = None) -> Asked:
        """Wait for a step's metrics and write them; says what a process asked for.

        All processes read the same values, and so come to the same end. The step took until the next one began, or
        until now. Raises TrainingError for a loss or gradient norm that is not finite.
        """
        fetched = late.metrics.result()
        seconds, loads, saves = fetched.pop("processes").view(-1, 3).unbind(dim=1)
        values = {name: value.item() for name, value in fetched.items()}
        self._seconds = (until or time.perf_counter()) - late.began
        self._require_finite(late.step, values)
        if self._writes:
            memory = self._backend.memory()
            peak = memory.peak_bytes if memory else None
            row = self._meter.row(late.step, {**values, "lr": late.lr}, self._tokens, self._seconds, peak)
            if late.step == self._first:
                self._write_collectives()
            if late.step == 1 or late.step % self._config.train.log_every == 0:
                row["processes"] = processes_row(seconds.tolist(), loads.tolist())
                log.info(self._meter.console_line(row, memory.limit_bytes if memory else None))
            self._metrics.write(row)
        return Asked(values["stop"] > 0, bool((saves > 0).any()))

    def seen(self, requests: SaveRequests) -> Tensor:
        """What this process tells all with the next step: float32 [3 * processes], zeros but for its own three.

        Process 0's clock and its view of the run's folder decide for all.
        """
        index, count = self._backend.process.index, self._backend.process.count
        memory = self._backend.memory()
        save = index == 0 and requests.due
        seen = torch.zeros(count, 3)
        seen[index] = torch.tensor([self._seconds, memory.peak_bytes if memory else math.nan, float(save)])
        return seen.flatten()

    def _write_collectives(self) -> None:
        """What a step sends, once the first of this process has run; left out where the engine doesn't tell."""
        traffic = self._backend.collectives
        if traffic is not None:
            kinds = {kind: {"calls": one.calls, "bytes": one.bytes} for kind, one in traffic.items()}
            self._events.write("collectives", **kinds)

    def saved(self, finished: list[Saved]) -> None:
        """Of checkpoints that were committed since the last call, and of those deleted after them."""
        for one in finished if self._writes else ():
            self._events.write(
                "save",
                step=one.step,
                path=str(one.path),
                seconds=one.seconds,
                blocked_seconds=one.blocked_seconds,
                removed=list(one.removed),
            )
            log.info("saved %s in %.1f s (%.1f s of the training)", one.path, one.seconds, one.blocked_seconds)

    def stopped(self, step: int, reason: str | None) -> None:
        reason = reason or "a signal to another process"
        if self._writes:
            self._events.write("stop", step=step, reason=reason)
            write_text_atomically(self._folder / "STOPPED", json.dumps({"reason": reason, "step": step}) + "\n")
            log.info("stopped after step %d on request (%s); the same command goes on from here", step, reason)

    def _require_finite(self, step: int, values: dict[str, float]) -> None:
        if math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"]):
            return
        if self._writes:
            self._events.write("stop", step=step, reason="not finite", **values)
        saved = committed_steps(_checkpoint_folder(self._config))
        last = f"The last good checkpoint is {saved[0]}." if saved else "No checkpoint was saved before it."
        raise TrainingError(
            f"step {step}: expected a finite loss and gradient norm, found loss {values['loss']} and grad_norm "
            f"{values['grad_norm']}.\n  {last} Lower optim.lr or clip harder (train.max_grad_norm), with\n"
            "  checkpoint.allow='[optim.lr, train.max_grad_norm]', or look at the rows of this step."
        )
