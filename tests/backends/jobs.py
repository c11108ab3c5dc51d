"""Jobs that worker processes run for several tests. Each job opens the backend of its own process group."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from cases import GLOBAL_BATCH, SEQ_LEN, Case, CaseRows, rows_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from portable_fsdp.backends.contract import Backend, Pending, TensorState
from portable_fsdp.backends.open import open_backend
from portable_fsdp.backends.refusals import Deployment, verdicts
from portable_fsdp.backends.state import parameter_slots
from portable_fsdp.checkpoint.manager import Checkpoints, Resumed
from portable_fsdp.config import schema
from portable_fsdp.config.schema import Config
from portable_fsdp.data.batches import Batches
from portable_fsdp.models.build import build_model
from portable_fsdp.optim.optimizer import learning_rate
from portable_fsdp.train.build import build_training

Pieces = dict[str, tuple[tuple[int, ...], str, list[tuple[tuple[int, ...], torch.Tensor]]]]


def open_group(config: Config) -> Backend:
    """Open the group's backend on all its devices."""
    device, backend = os.environ["GROUP_DEVICE"], os.environ["GROUP_BACKEND"]
    return open_backend(config, device=device, backend=backend, num_devices=device_count())


def open_case(case: Case) -> tuple[Backend, Config]:
    config = case.config(device_count())
    return open_group(config), config


def device_count() -> int:
    return int(os.environ["WORLD_SIZE" if "WORLD_SIZE" in os.environ else "CPU_NUM_DEVICES"])


def pieces(state: dict[str, TensorState]) -> Pieces:
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
    """Import what the model needs: several threads must not import transformers' lazy modules at once."""
    build_model(case.config(1).model, seed=0, seq_len=SEQ_LEN, vocabulary=256)


class Run:
    """A model on an open backend, trained step by step on the rows of the cases."""

    def __init__(self, backend: Backend, config: Config) -> None:
        self.backend, self.config = backend, config
        unwrapped = build_model(config.model, seed=config.run.seed, seq_len=SEQ_LEN, vocabulary=256).model
        self.unwrapped_names = [name for name, _ in unwrapped.named_parameters(remove_duplicate=False)]
        self.ties = sorted(sorted(_names(unwrapped, places)) for places in parameter_slots(unwrapped).values())
        self.buffers = {name: buffer.clone() for name, buffer in unwrapped.named_buffers()}
        training = build_training(config, backend, vocabulary=None if config.model.pretrained else 256)
        self.model, self.optimizer, self.accumulation = training.model, training.optimizer, training.accumulation
        self.step, self.architecture, self.keys = training.step, training.built.config, training.keys
        self.base = training.built.base

    def train(self, first: int, last: int, stop_in: int | None = None) -> list[dict[str, float]]:
        """Steps first to last; metrics are read a step late, as the loop does."""
        steps = self.config.train.steps or 0
        pending, out = None, []
        with Batches(
            rows_of(self.config),
            seed=self.config.run.seed,
            global_batch=(global_batch := self.config.train.global_batch),
            shard=(self.backend.data_shard.index, self.backend.data_shard.count),
            accumulation=self.accumulation,
            parts=self.backend.row_shards // self.backend.data_shard.count,
            start=(first - 1) * global_batch,
            keys=self.keys,
        ) as batches:
            for step in range(first, last + 1):
                lr = learning_rate(self.config.optim, step, steps)
                stop = float(step == stop_in and self.backend.process.index == self.backend.process.count - 1)
                rows = next(batches)
                placed = [self.backend.place(batch) for batch in rows.micro_batches]
                previous, pending = pending, self.backend.fetch(self.step(placed, lr, self.control(rows.count, stop)))
                if previous is not None:
                    out.append(numbers(previous))
        assert pending is not None
        return [*out, numbers(pending)]

    def control(self, count: float, stop: float = 0.0) -> list[float]:
        """Control numbers: each process tells its number."""
        process = self.backend.process
        votes = [0.0] * 2 * process.count
        votes[2 * process.index : 2 * process.index + 2] = [process.index + 1.0, 10.0 * process.index]
        return [count, stop, *votes]

    def state(self) -> Pieces:
        return pieces(self.backend.state(self.model, self.optimizer))


@contextmanager
def running(case: Case) -> Generator[Run]:
    """A run of the case, whose backend is open meanwhile."""
    backend, config = open_case(case)
    with backend:
        yield Run(backend, config)


def numbers(pending: Pending) -> dict[str, Any]:
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
            "devices": backend.devices,
        }


def checkpoints_in(folder: str, run: Run, settings: schema.Checkpoint | None = None) -> Checkpoints:
    config = run.config.model_dump(mode="json")
    return Checkpoints(
        folder, run.backend, config=config, model_config=run.architecture, settings=settings, base=run.base
    )


def load_newest(checkpoints: Checkpoints, run: Run) -> tuple[Path, Resumed]:
    """The newest whole checkpoint, and what was resumed from it."""
    checkpoint = checkpoints.find("auto")
    assert checkpoint is not None
    return checkpoint.path, checkpoints.load(checkpoint, run.model, run.optimizer)


def write(case: Case, folder: str, at: int) -> dict[str, Any]:
    """Train to step `at`, save, and go on to the end."""
    with running(case) as run:
        backend = run.backend
        checkpoints, before = checkpoints_in(folder, run), backend.compilations
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
    out: dict[str, Any] = {}
    with running(case) as run:
        for writer, folder in folders.items():
            _, resumed = load_newest(checkpoints_in(folder, run, schema.Checkpoint(allow=allow)), run)
            state = run.state()
            out[writer] = {"state": state, "position": resumed.position, "metrics": run.train(at + 1, case.steps)}
        return {**out, "compilations": run.backend.compilations}


def reads_nothing_on_the_host(case: Case) -> None:
    """A step after the first reads no tensor there (aten::_local_scalar_dense)."""
    with running(case) as run:
        rows = GLOBAL_BATCH // run.backend.data_shard.count // run.accumulation
        run.train(1, 1)
        placed = run.backend.place(CaseRows().rows(np.arange(rows)))
        with Operators() as step:
            metrics = run.step([placed] * run.accumulation, 1e-3, run.control(float(rows)))
        run.backend.fetch(metrics).result()
        assert step.reads == 0


class Collective(NamedTuple):
    """One on the wire."""

    name: str
    dtype: str
    bytes: int  # of its larger side
    members: int  # how many times those of its smaller side: for a gather, the devices that it runs over


class Operators(TorchDispatchMode):
    """Count the reads of tensors on the host, and list the collectives, of what runs inside it."""

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


def collectives(case: Case) -> dict[str, Any]:
    """The collectives of the first two steps: as the backend counts them, and each one that torch sent in a step."""
    assert "WORLD_SIZE" in os.environ, "threads send nothing through torch's dispatcher"
    with running(case) as run:
        before = run.backend.collectives
        sent: list[list[Collective]] = []
        for step in (1, 2):
            with Operators() as wire:
                run.train(step, step)
            sent.append(wire.collectives)
        return {"before": before, "backend": run.backend.collectives, "sent": sent}


def is_refused(case: Case) -> bool:
    """Whether the engine's own table refuses the case."""
    devices = device_count()
    place = Deployment(os.environ["GROUP_BACKEND"], os.environ["GROUP_DEVICE"], devices, 1)
    return any(verdict.kind == "refused" for verdict in verdicts(case.config(devices), place))


def opened(case: Case, *, build: bool = False) -> None:
    """Open, perhaps lay out, and no more; a refusal is the JobFailed that the test expects."""
    backend, config = open_case(case)
    with backend:
        if build:
            build_training(config, backend, vocabulary=256)
