"""Recorder: trains the first steps of a run and records each module's tensors as statistics comparable across engines.

A tensor becomes its number of elements, its sum of squares and projections on fixed random signs. These are sums over
rows, so data shards and micro batches add up. The step's program returns them as one more output.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from portable_fsdp.backends.contract import Backend, Metrics
from portable_fsdp.backends.open import open_backend
from portable_fsdp.config.schema import Config
from portable_fsdp.observe.run_files import environment
from portable_fsdp.optim.optimizer import learning_rate
from portable_fsdp.parity.record import Place, PlaceRecord, RunTask
from portable_fsdp.runtime.command import configure_log
from portable_fsdp.train.build import Training, build_training, open_batches, total_steps
from portable_fsdp.train.preflight import open_data

PROJECTIONS = 8
_LARGE = 1e15
"""Clamp: masks hold infinities, which would spoil every sum. The square of this fits into float32."""

Statistics = dict[str, list[float]]
"""Key -> [element count, sum of squares, PROJECTIONS projections]; keys in the order in which the tensors appear."""


def run(place: Place, task: RunTask, prepare: Callable[[Training], None]) -> PlaceRecord:
    """Train the first steps of a run. *collective*"""
    config = Config.model_validate_json(task.config)
    with open_backend(config, device=place.device, backend=place.engine, num_devices=place.devices) as engine:
        configure_log(engine.process.index)
        config, corpus = open_data(config, engine)
        training = build_training(config, engine, corpus.tokenizer, rows=corpus.rows)
        prepare(training)
        record = PlaceRecord(place=place, device_name=engine.device_name, versions=environment())
        step, total = training.step, total_steps(config, len(corpus.rows))
        recorder = StepRecorder(engine, training) if task.records else None
        if recorder:
            record.state.append(state_statistics(engine, training))
        with open_batches(config, engine, training, corpus) as batches:
            for number in range(1, min(task.steps, total) + 1):
                rows, lr = next(batches), learning_rate(config.optim, number, total)
                began, cpu_began = time.perf_counter(), time.process_time()
                placed = [engine.place(batch) for batch in rows.micro_batches]
                metrics = engine.fetch(step(placed, lr, [rows.count])).result()
                record.losses.append(metrics["loss"].item())
                record.grad_norms.append(metrics["grad_norm"].item())
                record.seconds.append(time.perf_counter() - began)
                record.cpu_seconds.append(time.process_time() - cpu_began)
                if recorder:
                    record.modules.append(recorder.total)
                    recorder.total = {}
                    record.state.append(state_statistics(engine, training))
        memory = engine.memory()
        record.memory_bytes = memory.peak_bytes if memory else None
        return record


@cache
def signs(size: int, device: torch.device) -> Tensor:
    """Return float32 `[size, PROJECTIONS]` of +1 and -1, the same in every process."""
    bits = torch.randint(0, 2, (size, PROJECTIONS), generator=torch.Generator().manual_seed(size))
    return (bits * 2.0 - 1.0).to(device)


def statistics(tensor: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """Return `[2 + PROJECTIONS]` in the dtype of `weights`: one `[size, PROJECTIONS]` for each of the last dimensions.

    Sums over the dimensions before these. The product of the weights is a random sign for each element; a projection's
    expected square is the sum of squares (Achlioptas, 2003, Database-friendly random projections).
    """
    values = tensor.detach().to(weights[0].dtype).clamp(-_LARGE, _LARGE)
    total = values @ weights[-1]
    for weight in reversed(weights[:-1]):
        total = (total * weight).sum(-2)
    projections = total.reshape(-1, PROJECTIONS).sum(0)
    return torch.cat([torch.full_like(projections[:1], values.numel()), values.square().sum()[None], projections])


class StepRecorder:
    """Hooks on all modules of a training, whose engine's programs also return the statistics from now on.

    Keys are `direction|place|module|call|leaf`: `forward|in`, `forward|out`, `backward|out` (the gradient of the
    output), `backward|in`. `call` counts a module's calls in a micro batch. Tensors of fewer than two dimensions are
    left out, integer tensors except the model's own inputs, and the model's output, a sum over a process's rows.
    """

    def __init__(self, engine: Backend, training: Training) -> None:
        self._engine, self._compile = engine, engine.compile
        engine.compile = self.compile
        self._seen: dict[str, Tensor] = {}
        self._calls = Counter[str]()
        self._records_forward = True
        self.total: Statistics = {}  # sum over all programs since the caller last reset it
        for name, module in training.model.named_modules():
            module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True)
            module.register_forward_hook(partial(self._leave, name))

    def compile(self, fn: Callable[..., Metrics], name: str) -> Callable[..., Metrics]:
        """Compile by the engine; the program also adds to `total`."""
        keys: list[str] = []

        def recorded(*args: Any) -> Metrics:
            self._seen, self._calls, self._records_forward = {}, Counter(), True
            metrics = fn(*args)
            keys[:], seen = self._seen, [*self._seen.values()]
            self._seen = {}  # on XLA, a tensor that lives at the end of a program becomes an output
            return {**metrics, "seen": self._engine.sum(torch.stack(seen))} if seen else metrics

        program = self._compile(recorded, name)

        def run(*args: Any) -> Metrics:
            metrics = dict(program(*args))
            if "seen" in metrics:
                rows = self._engine.fetch({"seen": metrics.pop("seen")}).result()["seen"].tolist()
                _add(self.total, dict(zip(keys, rows, strict=True)))
            return metrics

        return run

    def _enter(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> Any:
        self._calls[name] += 1
        return self._noted("in", name, (args, kwargs))

    def _leave(self, name: str, _: nn.Module, __: Any, output: Any) -> Any:
        if name:
            return self._noted("out", name, output)
        # From now on gradient checkpointing runs the same modules again; on XLA their gradients count.
        self._records_forward, self._calls = False, Counter()
        return output

    def _noted(self, place: str, name: str, value: Any) -> Any:
        """Record a value and return it as aliases: the gradient of an alias is that of this use alone, and comes after
        those of its users."""
        leaves, structure = tree_flatten(value)
        prefix = f"{place}|{name}|{self._calls[name]}"
        return tree_unflatten([self._note(f"{prefix}|{at}", leaf) for at, leaf in enumerate(leaves)], structure)

    def _note(self, key: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() < 2 or not leaf.numel():
            return leaf
        if not leaf.is_floating_point() and not key.startswith("in||"):
            return leaf
        if self._records_forward:
            self._add_to_seen(f"forward|{key}", leaf)
        if leaf.requires_grad and torch.is_grad_enabled():
            leaf = leaf.view_as(leaf)
            leaf.register_hook(partial(self._add_to_seen, f"backward|{key}"))
        return leaf

    def _add_to_seen(self, key: str, tensor: Tensor) -> None:
        values = statistics(tensor, [signs(size, self._engine.device) for size in tensor.shape[1:]])
        self._seen[key] = values + self._seen[key] if key in self._seen else values


def _add(total: Statistics, more: Mapping[str, list[float]]) -> None:
    for key, values in more.items():
        total[key] = [a + b for a, b in zip(total[key], values, strict=True)] if key in total else values


def state_statistics(engine: Backend, training: Training) -> Statistics:
    """Return float64 statistics of a checkpoint's non-scalar tensors by key; all dimensions have signs. *collective*"""
    mine: Statistics = {}
    for key, state in engine.state(training.model, training.optimizer).items():
        for piece in (piece for piece in state.pieces() if state.shape and not piece.replica):
            where = zip(state.shape, piece.offset, piece.data.shape, strict=True)
            weights = [signs(size, torch.device("cpu"))[at : at + length].double() for size, at, length in where]
            _add(mine, {key: statistics(piece.data.cpu(), weights).tolist()})
    total: Statistics = {}
    for part in engine.gather(mine):
        _add(total, part)
    return total
