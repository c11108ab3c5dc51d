"""What the worker processes run. Each job opens the backend of its own process group, and returns plain data.

These run on every engine; native_jobs.py and xla_jobs.py have those of one.
"""

import math
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import task_rows
import torch
from cases import GLOBAL_BATCH, SEQ_LEN, Case, CaseRows, PackedCaseRows, rows_of
from fault_injection import Instants, patched
from memory import Peak, anonymous
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from portable_fsdp.backends.contract import Backend, Pending, TensorState, parameter_slots
from portable_fsdp.backends.open import open_backend
from portable_fsdp.backends.refusals import Deployment, verdicts
from portable_fsdp.checkpoint.manager import Checkpoints, Resumed
from portable_fsdp.config import schema
from portable_fsdp.config.load import load_config, make_config
from portable_fsdp.config.schema import Config
from portable_fsdp.data.batches import Batches
from portable_fsdp.data.build import build_data
from portable_fsdp.data.tokenize import ByteTokenizer
from portable_fsdp.layout import weight_spec
from portable_fsdp.models.build import build_model
from portable_fsdp.optim.optimizer import learning_rate
from portable_fsdp.runtime.errors import CheckpointError, ConfigError
from portable_fsdp.train.build import build_evaluator, build_training, open_batches, open_checkpoints, shard
from portable_fsdp.train.evaluate import Evaluator
from portable_fsdp.train.preflight import require_same
from portable_fsdp.train.sampling import Sampler
from portable_fsdp.train.step import train_step

Pieces = dict[str, tuple[tuple[int, ...], str, list[tuple[tuple[int, ...], torch.Tensor]]]]


def open_case(case: Case) -> tuple[Backend, Config]:
    """On all devices of this process group."""
    devices = _devices()
    config = case.config(devices)
    return open_backend(
        config, device=os.environ["GROUP_DEVICE"], backend=os.environ["GROUP_BACKEND"], num_devices=devices
    ), config


def _devices() -> int:
    return int(os.environ["WORLD_SIZE" if "WORLD_SIZE" in os.environ else "CPU_NUM_DEVICES"])


def _pieces(state: dict[str, TensorState]) -> Pieces:
    """A state as data that crosses processes."""
    return {
        key: (
            tensor.shape,
            str(tensor.dtype),
            [(tuple(p.offset), p.data.detach().cpu().clone()) for p in tensor.pieces() if not p.replica],
        )
        for key, tensor in state.items()
    }


def import_model(case: Case) -> None:
    """What building the model imports; transformers' lazy modules may not be imported by several threads at once."""
    build_model(case.config(1).model, seed=0, seq_len=SEQ_LEN, vocabulary=256)


class Run:
    """A model on an open backend, trained step by step on the rows of the cases."""

    def __init__(self, backend: Backend, config: Config) -> None:
        self.backend, self.config = backend, config
        unwrapped = build_model(config.model, seed=config.run.seed, seq_len=SEQ_LEN, vocabulary=256).model
        self.unwrapped_names = [name for name, _ in unwrapped.named_parameters(remove_duplicate=False)]
        self.ties = sorted(sorted(_names(unwrapped, places)) for places in parameter_slots(unwrapped).values())
        self.buffers = {name: buffer.clone() for name, buffer in unwrapped.named_buffers()}
        training = build_training(config, backend, vocabulary=256)
        self.model, self.optimizer, self.accumulation = training.model, training.optimizer, training.accumulation
        self.step, self.architecture = training.step, training.built.config

    def train(self, first: int, last: int, stop_in: int | None = None) -> list[dict[str, float]]:
        """Steps first to last; metrics are read a step late, as the loop does."""
        steps = self.config.train.steps or 0
        pending, out = None, []
        with Batches(
            rows_of(self.config),
            seed=self.config.run.seed,
            global_batch=GLOBAL_BATCH,
            shard=(self.backend.data_shard.index, self.backend.data_shard.count),
            accumulation=self.accumulation,
            start=(first - 1) * GLOBAL_BATCH,
        ) as batches:
            for step in range(first, last + 1):
                lr = learning_rate(self.config.optim, step, steps)
                stop = float(step == stop_in and self.backend.process.index == self.backend.process.count - 1)
                rows = next(batches)
                placed = [self.backend.place(batch) for batch in rows.micro_batches]
                previous, pending = pending, self.backend.fetch(self.step(placed, lr, self.control(rows.count, stop)))
                if previous is not None:
                    out.append(_numbers(previous))
        assert pending is not None
        return [*out, _numbers(pending)]

    def control(self, count: float, stop: float = 0.0) -> list[float]:
        """Control numbers: each process tells its number."""
        process = self.backend.process
        votes = [0.0] * 2 * process.count
        votes[2 * process.index : 2 * process.index + 2] = [process.index + 1.0, 10.0 * process.index]
        return [count, stop, *votes]

    def state(self) -> Pieces:
        return _pieces(self.backend.state(self.model, self.optimizer))


@contextmanager
def running(case: Case) -> Generator[Run]:
    """A run of the case, whose backend is open meanwhile."""
    backend, config = open_case(case)
    with backend:
        yield Run(backend, config)


def _numbers(pending: Pending) -> dict[str, Any]:
    return {name: value.tolist() for name, value in pending.result().items()}


def _names(model: torch.nn.Module, places: list[Any]) -> list[str]:
    modules = {id(module): name for name, module in model.named_modules()}
    return [f"{modules[id(place.module)]}.{place.leaf}".lstrip(".") for place in places]


def train(case: Case, stop_in: int | None = None) -> dict[str, Any]:
    """One whole run; all that tests assert about it."""
    with running(case) as run:
        backend = run.backend
        initial = run.state()
        before = backend.compilations
        metrics = run.train(1, case.steps, stop_in)
        return {
            "metrics": metrics,
            "initial": initial,
            "final": run.state(),
            "names": [name for name, _ in run.model.named_parameters(remove_duplicate=False)],
            "unwrapped_names": run.unwrapped_names,
            "ties": sorted(sorted(_names(run.model, p)) for p in parameter_slots(run.model).values()),
            "unwrapped_ties": run.ties,
            "dtypes": {name: str(p.dtype) for name, p in run.model.named_parameters()},
            "buffers": {name: buffer.cpu() for name, buffer in run.model.named_buffers()},
            "unwrapped_buffers": run.buffers,
            "compilations": backend.compilations - before,
            "expected_compilations": backend.expected_compilations,
            "memory": backend.memory(),
            "data_shard": (backend.data_shard.index, backend.data_shard.count),
            "process": (backend.process.index, backend.process.count),
            "devices": backend.devices,
        }


def traced(case: Case, first: int, last: int, folder: str) -> dict[str, Any]:
    """A run until step `last`, of which process 0 records the steps from `first` on."""
    with running(case) as run:
        before = run.backend.compilations
        metrics = run.train(1, first - 1)
        stop = run.backend.start_trace(Path(folder)) if run.backend.process.index == 0 else lambda: list
        metrics += run.train(first, last)
        return {
            "metrics": metrics,
            "operations": stop()(),
            "compilations": run.backend.compilations - before,
            "expected_compilations": run.backend.expected_compilations,
            "collectives": run.backend.collectives,
        }


def losses_of_documents(case: Case) -> dict[str, Any]:
    """The loss of each document of a global batch with the initial weights, by steps that change nothing, as each
    row's documents come; then a whole run."""
    with running(case) as run:
        backend = run.backend
        count, rows = backend.data_shard.count, GLOBAL_BATCH // backend.data_shard.count
        before = backend.compilations
        losses: list[float] = []
        batch = PackedCaseRows().rows(np.arange(GLOBAL_BATCH))
        own = slice(backend.data_shard.index * rows, (backend.data_shard.index + 1) * rows)
        for row in range(GLOBAL_BATCH):
            for number in range(1, int(batch["segments"][row].max()) + 1):
                labels = torch.full_like(batch["labels"], -100)
                is_its = batch["segments"][row] == number
                labels[row, is_its] = batch["labels"][row, is_its]
                shard = {name: tensor[own] for name, tensor in {**batch, "labels": labels}.items()}
                control = run.control(float((shard["labels"] != -100).sum()))
                losses.append(_numbers(backend.fetch(run.step([backend.place(shard)], 0.0, control)))["loss"])
        return {
            "documents": losses,
            "metrics": run.train(1, case.steps),
            "compilations": backend.compilations - before,
            "expected_compilations": backend.expected_compilations,
            "shards": count,
        }


def _checkpoints(folder: str, run: Run, settings: schema.Checkpoint | None = None) -> Checkpoints:
    config = run.config.model_dump(mode="json")
    return Checkpoints(folder, run.backend, config=config, model_config=run.architecture, settings=settings)


def _load(checkpoints: Checkpoints, run: Run) -> tuple[Path, Resumed]:
    """The newest whole checkpoint, and what was resumed from it."""
    checkpoint = checkpoints.find("auto")
    assert checkpoint is not None
    return checkpoint.path, checkpoints.load(checkpoint, run.model, run.optimizer)


def write(case: Case, folder: str, at: int) -> dict[str, Any]:
    """Train to step `at`, save, and go on to the end."""
    with running(case) as run:
        backend = run.backend
        checkpoints, before = _checkpoints(folder, run), backend.compilations
        first = run.train(1, at)
        checkpoints.save(at, run.model, run.optimizer, (0, at * GLOBAL_BATCH))
        return {
            "before": first,
            "state": run.state(),
            "metrics": run.train(at + 1, case.steps),
            "compilations": backend.compilations - before,
            "expected_compilations": backend.expected_compilations,
        }


def read(case: Case, folders: dict[str, str], at: int, allow: tuple[str, ...] = ()) -> dict[str, Any]:
    """Load what each writer saved into one model, read it back, and train on from there."""
    backend, config = open_case(case)
    out: dict[str, Any] = {}
    with backend:
        run = Run(backend, config)
        for writer, folder in folders.items():
            _, resumed = _load(_checkpoints(folder, run, schema.Checkpoint(allow=allow)), run)
            state = run.state()
            out[writer] = {"state": state, "position": resumed.position, "metrics": run.train(at + 1, case.steps)}
        out["compilations"] = backend.compilations
    return out


def save_by_instants(case: Case, folder: str, kept: str) -> dict[str, Any]:
    """Save step 1, then step 2 in the background, which gives up step 1: the files at every instant are in `kept`."""
    with running(case) as run:
        settings = schema.Checkpoint(keep=1, async_save=True)
        checkpoints = _checkpoints(folder, run, settings)
        states: dict[int, Pieces] = {}
        instants = Instants(Path(folder), Path(kept))
        for step in (1, 2):
            run.train(step, step)
            states[step] = run.state()
            with patched(instants) if step == 2 else nullcontext():
                checkpoints.save(step, run.model, run.optimizer, (0, step * GLOBAL_BATCH))
                checkpoints.wait()
        instants.keep()
        return {"states": states, "operations": len(instants.tried)}


def resume_each(case: Case, folders: list[str], expected: dict[int, dict[str, torch.Tensor]]) -> list[dict[str, Any]]:
    """From each folder: what is found and loaded, as this process holds it; then the next step is saved there."""
    backend, config = open_case(case)
    answers: list[dict[str, Any]] = []
    with backend:
        run = Run(backend, config)
        for folder in folders:
            checkpoints = _checkpoints(folder, run, schema.Checkpoint(keep=1))
            _, resumed = _load(checkpoints, run)
            differ = _differences(run.state(), expected[resumed.step])
            answers.append({"step": resumed.step, "position": resumed.position, "differ": differ})
            checkpoints.save(3, run.model, run.optimizer, (0, 3 * GLOBAL_BATCH))
    return answers


def _differences(state: Pieces, expected: dict[str, torch.Tensor]) -> list[str]:
    """Keys whose pieces aren't what stands there in the whole tensors."""
    return sorted(state.keys() ^ expected.keys()) + [
        key
        for key, (_, _, pieces) in state.items()
        for offset, data in pieces
        if not torch.equal(data, expected[key][tuple(slice(o, o + n) for o, n in zip(offset, data.shape, strict=True))])
    ]


def save_unequal_replicas(case: Case, folder: str, key: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Save step 1; change one number of `key` in the last replica, train on, and save step 2, and 3 in its place.

    Then load what is found and save that step 3.
    """
    with running(case) as run:
        checkpoints = _checkpoints(folder, run, schema.Checkpoint(**settings))
        run.train(1, 1)
        checkpoints.save(1, run.model, run.optimizer, (0, GLOBAL_BATCH))
        checkpoints.wait()
        change_a_replica(run.backend, run.model, key)
        run.train(2, 2)
        message, left = "", list[str]()
        try:
            checkpoints.save(2, run.model, run.optimizer, (0, 2 * GLOBAL_BATCH))
            checkpoints.wait()
        except CheckpointError as error:
            message, left = str(error), sorted(path.name for path in Path(folder).iterdir())
        path, _ = _load(checkpoints, run)
        run.train(2, 3)
        checkpoints.save(3, run.model, run.optimizer, (0, 3 * GLOBAL_BATCH))
        checkpoints.wait()
        return {"message": message, "left": left, "resumed_from": path.name}


def change_a_replica(backend: Backend, model: torch.nn.Module, key: str) -> None:
    """Add 0.5 to one number of a weight in the last replica of the last shard alone."""
    parameter = dict(model.named_parameters()).get(key)
    if backend.name == "xla":
        calls = iter(range(backend.devices))

        def piece(slices: tuple[slice, ...]) -> torch.Tensor:
            data = host[slices].clone()
            data[0, 0] += 0.5 * (next(calls) == backend.devices - 1)
            return data

        assert parameter is not None
        host = parameter.detach().cpu()
        parameter.data = cast(Any, backend)._make(host.shape, host.dtype, weight_spec(host.dim()), piece)
    elif backend.process.index == backend.process.count - 1:
        parameter = parameter if parameter is not None else list(model.parameters())[-1]  # FQNs of the wrappers
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter.data
        change = torch.zeros(local.shape)
        change.view(-1)[0] = 0.5
        with torch.no_grad():
            parameter_data = local + change.to(local.device)
            if isinstance(parameter, DTensor):
                local.copy_(parameter_data)
            else:
                parameter.data = parameter_data


def save_untrained(case: Case, folder: str) -> None:
    """The state that training starts from."""
    with running(case) as run:
        _checkpoints(folder, run).save(1, run.model, run.optimizer, (0, 0))


def memory_of_a_load(case: Case, folder: str) -> dict[str, int]:
    """Bytes: what the model takes, and what the load adds at most; this process's shards, the largest tensor."""
    backend, config = open_case(case)
    with backend:
        before = anonymous()
        run = Run(backend, config)
        checkpoints = _checkpoints(folder, run)
        with Peak() as loading:
            _load(checkpoints, run)
        state = backend.state(run.model, run.optimizer)
        return {
            "before": loading.before - before,
            "grown": loading.grown,
            "shards": sum(piece.data.nbytes for tensor in state.values() for piece in tensor.pieces()),
            "largest": max(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in state.values()),
        }


def agree_and_sum() -> dict[str, Any]:
    """What the small methods of the contract give on each process."""
    backend, _ = open_case(Case())
    with backend:
        agreed = backend.agree({"from": backend.process.index, "list": [1, 2]})
        gathered = backend.gather("x" * backend.process.index)
        require_same(backend, {"data": "a"})
        message = ""
        try:
            require_same(backend, {"data": "a", "model.pretrained": f"c{backend.process.index}"})
        except ConfigError as error:
            message = str(error).partition(".\n")[0]
        rows = torch.arange(GLOBAL_BATCH // backend.data_shard.count).float() + 100 * backend.data_shard.index
        placed = backend.place({"rows": rows})["rows"]
        add = backend.compile(lambda rows: {"total": backend.sum(rows.sum())}, "total")
        total = backend.fetch(add(placed)).result()["total"].item()
        shard = (backend.data_shard.index, backend.data_shard.count)
        return {"agreed": agreed, "gathered": gathered, "refused": message, "total": total, "shard": shard}


def host_reads(case: Case) -> dict[str, int]:
    """How often a step after the first reads a tensor on the host (aten::_local_scalar_dense)."""
    backend, config = open_case(case)
    with backend:
        run = Run(backend, config)
        rows = GLOBAL_BATCH // backend.data_shard.count // run.accumulation
        run.train(1, 1)
        placed = backend.place(CaseRows().rows(np.arange(rows)))
        with Operators() as step:
            metrics = run.step([placed] * run.accumulation, 1e-3, run.control(float(rows)))
        backend.fetch(metrics).result()
        return {"reads": step.reads}


class Collective(NamedTuple):
    """One on the wire."""

    name: str
    dtype: str
    bytes: int  # of its larger side
    members: int  # how many times those of its smaller side: for a gather, the devices that it runs over


class Operators(TorchDispatchMode):
    """Of what runs inside it: how often a tensor is read on the host, and the collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.collectives: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        if func.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            sizes = [tensor.nbytes for tensor in tensors]
            dtype = str(tensors[0].dtype).removeprefix("torch.")
            self.collectives.append(Collective(func.name(), dtype, max(sizes), max(sizes) // max(1, min(sizes))))
        return func(*args, **(kwargs or {}))


class Ids(ByteTokenizer):
    """Shows each id of a text, also those that are no bytes."""

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


def evaluated(case: Case, rows: int, early: bool) -> dict[str, Any]:
    """Two runs of a case: with evaluations over `rows` rows and samples after steps 2 and 5 (`early`: before too), and
    without."""
    with running(case) as run:
        backend = run.backend
        before = backend.compilations
        evaluator = Evaluator(backend, run.model, CaseRows(rows), run.config.train)
        sampler = Sampler(backend, run.model, Ids(), run.config.train, SEQ_LEN)
        untrained = evaluator() if early else None
        metrics = run.train(1, 2)
        counted = backend.collectives
        evaluation, texts = evaluator(), sampler()
        at = run.state()
        sent = _three_more(run, metrics)
        evaluator()
        sampler()
        answer = {
            "untrained": untrained,
            "evaluation": evaluation,
            "texts": texts,
            "at": at,
            "metrics": metrics,
            "sent": sent,
            "collectives": [counted, backend.collectives],
            "compilations": backend.compilations - before,
            "expected_compilations": backend.expected_compilations,
            "final": run.state(),
        }
        with Operators() as last:
            evaluator()
        plain = Run(backend, run.config)
        metrics = plain.train(1, 2)
        at = plain.state()
        sent = _three_more(plain, metrics)
        without = {"at": at, "metrics": metrics, "sent": sent, "final": plain.state()}
        return {**answer, "reads": last.reads, "plain": without}


def _three_more(run: Run, metrics: list[dict[str, float]]) -> list[Collective]:
    """The collectives on the wire. Where XLA makes them nobody looks: under a mode of torch's it is another program."""
    with nullcontext() if run.backend.expected_compilations else Operators() as operators:
        metrics += run.train(3, 5)
    return operators.collectives if operators else []


def is_refused(case: Case) -> bool:
    """By the engine's own table."""
    devices = _devices()
    place = Deployment(os.environ["GROUP_BACKEND"], os.environ["GROUP_DEVICE"], devices, 1)
    return any(verdict.kind == "refused" for verdict in verdicts(case.config(devices), place))


def opened(case: Case, *, build: bool = False) -> None:
    """Open, perhaps lay out, and no more; a refusal is the JobFailed that the test expects."""
    backend, config = open_case(case)
    with backend:
        if build:
            build_training(config, backend, vocabulary=256)


def train_task(path: str, overrides: Sequence[str], last: int, folder: str) -> dict[str, Any]:
    """The run of a config file until step `last`, from its newest checkpoint in `folder` if there is one."""
    config = load_config(path, [*overrides, f"run.dir={folder}"])
    device, backend = os.environ["GROUP_DEVICE"], os.environ["GROUP_BACKEND"]
    with open_backend(config, device=device, backend=backend, num_devices=_devices()) as engine:
        corpus = build_data(config.data, config.model)
        training = build_training(config, engine, corpus.tokenizer, rows=corpus.rows)
        before, losses = engine.compilations, list[float]()
        with open_checkpoints(config, engine, training, corpus) as checkpoints:
            point = checkpoints.find("auto")
            resumed = checkpoints.load(point, training.model, training.optimizer) if point else None
            loaded = _pieces(engine.state(training.model, training.optimizer))
            with open_batches(config, engine, training, corpus, resumed) as batches:
                for step in range(resumed.step + 1 if resumed else 1, last + 1):
                    rows, lr = next(batches), learning_rate(config.optim, step, config.train.steps or 0)
                    placed = [engine.place(batch) for batch in rows.micro_batches]
                    losses.append(engine.fetch(training.step(placed, lr, [rows.count])).result()["loss"].item())
                position = batches.position
            evaluator = build_evaluator(config, engine, training, corpus)
            evaluation = None if evaluator is None else evaluator()
            compilations = engine.compilations - before
            checkpoints.save(last, training.model, training.optimizer, position)
            checkpoints.wait()
        return {
            "losses": losses,
            "evaluation": evaluation,
            "compilations": (compilations, engine.expected_compilations),
            "loaded": loaded,
            "saved": _pieces(engine.state(training.model, training.optimizer)),
        }


def train_module(name: str, steps: int, settings: dict[str, dict[str, Any]], micro_batches: int = 1) -> dict[str, Any]:
    """A model of unit_models.py, trained through the library: what each step measured, where the gradients are after
    each, and the state at both ends."""
    from unit_models import MODELS, loss_of_rows, rows_of_step

    from portable_fsdp.config.load import make_config
    from portable_fsdp.train.build import shard
    from portable_fsdp.train.step import train_step

    config, devices = make_config(**settings), _devices()
    backend = open_backend(
        config, device=os.environ["GROUP_DEVICE"], backend=os.environ["GROUP_BACKEND"], num_devices=devices
    )
    with backend:
        model, optimizer = shard(MODELS[name], config, backend)
        initial = _pieces(backend.state(model, optimizer))
        step = train_step(backend, model, optimizer, accumulation=micro_batches, max_grad_norm=1.0, task=loss_of_rows)
        part, metrics, addresses = backend.data_shard, list[dict[str, float]](), list[list[int]]()
        for number in range(steps):
            rows = {name: value.chunk(part.count)[part.index] for name, value in rows_of_step(number).items()}
            batches = [
                backend.place({name: value.chunk(micro_batches)[micro].clone() for name, value in rows.items()})
                for micro in range(micro_batches)
            ]
            metrics.append(_numbers(backend.fetch(step(batches, config.optim.lr))))
            gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
            addresses.append([g.to_local().data_ptr() for g in gradients if isinstance(g, DTensor)])
        final = _pieces(backend.state(model, optimizer))
        return {"metrics": metrics, "initial": initial, "final": final, "gradients": addresses}


def two_optimizers(settings: dict[str, Any], accumulation: int, steps: int) -> dict[str, Any]:
    """A generator and a critic by turns, each with its own optimizer and learning rates of torch's scheduler."""
    rows, shards = 12 // accumulation, _devices()
    train = {"steps": 100, "global_batch": 12, "micro_batch": rows // shards}
    config = make_config(**{"optim": {"lr": 1e-2, "weight_decay": 0.1}, "train": train, **settings})
    device, backend = os.environ["GROUP_DEVICE"], os.environ["GROUP_BACKEND"]
    with open_backend(config, device=device, backend=backend, num_devices=shards) as engine:
        models = [shard(make, config, engine) for make in (task_rows.generator, task_rows.critic)]
        (imitates, _), (judges, _) = models
        tasks = [partial(task_rows.generators_losses, judge=judges), task_rows.critics_losses]
        make = partial(train_step, engine, accumulation=accumulation, max_grad_norm=0.5)
        turns = [make(*pair, task=task) for pair, task in zip(models, tasks, strict=True)]
        rates = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for _, optimizer in models]
        first = [_pieces(engine.state(*pair)) for pair in models]
        out, compiled = list[dict[str, float]](), 0
        for step in range(1, steps + 1):
            batches = [engine.place(batch) for batch in _micro_batches(engine, step, accumulation)]
            with engine.evaluate():
                fakes = [{**batch, "fake": imitates(batch["noise"]) * 1} for batch in batches]
            for turn, given, rate in ((turns[1], fakes, rates[1]), (turns[0], batches, rates[0])):
                out.append(_numbers(engine.fetch(turn(given, rate.get_last_lr()[0]))))
                rate.step()
            compiled = engine.compilations if step == 2 else compiled
        states = [_pieces(engine.state(*pair)) for pair in models]
        return {"first": first, "metrics": out, "states": states, "late": engine.compilations - compiled}


def _micro_batches(engine: Backend, step: int, accumulation: int) -> list[dict[str, torch.Tensor]]:
    """This process's rows."""
    shard, batch = engine.data_shard, task_rows.pairs_of(step)
    own = {name: rows.chunk(shard.count)[shard.index].chunk(accumulation) for name, rows in batch.items()}
    return [{name: parts[number] for name, parts in own.items()} for number in range(accumulation)]
