"""What the worker processes run. Each job opens the backend of its own process group, and returns plain data."""

import os
from pathlib import Path
from typing import Any

import torch
from cases import GLOBAL_BATCH, SEQ_LEN, Case, CaseRows

from portable_fsdp.backends.base import Backend, TensorState, parameter_places
from portable_fsdp.backends.open import open_backend
from portable_fsdp.checkpoint.manager import Checkpoints
from portable_fsdp.config.schema import Config
from portable_fsdp.data.batches import Batches
from portable_fsdp.models.build import build_model
from portable_fsdp.optim.schedule import learning_rate
from portable_fsdp.train.loop import build

Pieces = dict[str, tuple[tuple[int, ...], str, list[tuple[tuple[int, ...], torch.Tensor]]]]


def _open(case: Case) -> tuple[Backend, Config]:
    devices = int(os.environ["CPU_NUM_DEVICES" if "PJRT_DEVICE" in os.environ else "WORLD_SIZE"])
    config = case.config(devices)
    return open_backend(config, device="cpu", backend=os.environ["GROUP_BACKEND"], num_devices=devices), config


def _pieces(state: dict[str, TensorState]) -> Pieces:
    """A state as data that crosses processes."""
    return {
        key: (
            tensor.shape,
            str(tensor.dtype),
            [(tuple(p.offset), p.data.detach().cpu().clone()) for p in tensor.pieces],
        )
        for key, tensor in state.items()
    }


class Run:
    """A model on an open backend, trained step by step on the rows of the cases."""

    def __init__(self, backend: Backend, config: Config) -> None:
        self.backend, self.config = backend, config
        unwrapped = build_model(config.model, seed=config.run.seed, seq_len=SEQ_LEN, vocabulary=256).model
        self.unwrapped_names = [name for name, _ in unwrapped.named_parameters(remove_duplicate=False)]
        self.ties = sorted(sorted(_names(unwrapped, places)) for places in parameter_places(unwrapped).values())
        self.buffers = {name: buffer.clone() for name, buffer in unwrapped.named_buffers()}
        training = build(config, backend, vocabulary=256)
        self.model, self.optimizer, self.accumulation = training.model, training.optimizer, training.accumulation
        self.step = training.step

    def train(self, first: int, last: int, stop_in: int | None = None) -> list[dict[str, float]]:
        """Steps first to last; metrics are read a step late, as the loop does."""
        steps = self.config.train.steps or 0
        pending, out = None, []
        with Batches(
            CaseRows(),
            seed=self.config.run.seed,
            global_batch=GLOBAL_BATCH,
            shard=(self.backend.data_shard.index, self.backend.data_shard.count),
            accumulation=self.accumulation,
            start=(first - 1) * GLOBAL_BATCH,
        ) as batches:
            for step in range(first, last + 1):
                lr = learning_rate(self.config.optim, step, steps)
                stop = float(step == stop_in and self.backend.process.index == self.backend.process.count - 1)
                placed = [
                    self.backend.place({**batch, "stop": torch.full_like(batch["tokens"], stop)})
                    for batch in next(batches)
                ]
                previous, pending = pending, self.backend.fetch(self.step(placed, lr))
                if previous is not None:
                    out.append(previous.result())
        assert pending is not None
        return [*out, pending.result()]

    def state(self) -> Pieces:
        return _pieces(self.backend.state(self.model, self.optimizer))


def _names(model: torch.nn.Module, places: list[Any]) -> list[str]:
    modules = {id(module): name for name, module in model.named_modules()}
    return [f"{modules[id(place.module)]}.{place.leaf}".lstrip(".") for place in places]


def train(case: Case, stop_in: int | None = None) -> dict[str, Any]:
    """One whole run; all that tests assert about it."""
    backend, config = _open(case)
    with backend:
        run = Run(backend, config)
        initial = run.state()
        before = backend.compilations
        metrics = run.train(1, case.steps, stop_in)
        return {
            "metrics": metrics,
            "initial": initial,
            "final": run.state(),
            "names": [name for name, _ in run.model.named_parameters(remove_duplicate=False)],
            "unwrapped_names": run.unwrapped_names,
            "ties": sorted(sorted(_names(run.model, p)) for p in parameter_places(run.model).values()),
            "unwrapped_ties": run.ties,
            "dtypes": {name: str(p.dtype) for name, p in run.model.named_parameters()},
            "buffers": {name: buffer.cpu() for name, buffer in run.model.named_buffers()},
            "unwrapped_buffers": run.buffers,
            "compilations": backend.compilations - before,
            "expected_compilations": backend.expected_compilations,
            "memory": backend.memory(),
            "data_shard": (backend.data_shard.index, backend.data_shard.count),
            "process": (backend.process.index, backend.process.count),
            "devices": backend.data_parallel_size,
        }


def write(case: Case, folder: str, at: int) -> dict[str, Any]:
    """Train to step `at`, save, and go on to the end."""
    backend, config = _open(case)
    with backend:
        run = Run(backend, config)
        checkpoints = Checkpoints(
            Path(folder),
            backend,
            config=config.model_dump(mode="json"),
            model_config={},
        )
        run.train(1, at)
        checkpoints.save(at, run.model, run.optimizer, (0, at * GLOBAL_BATCH))
        return {"state": run.state(), "metrics": run.train(at + 1, case.steps)}


def read(case: Case, folders: dict[str, str], at: int) -> dict[str, Any]:
    """Load what each writer saved into one model, read it back, and train on from there."""
    backend, config = _open(case)
    out: dict[str, Any] = {}
    with backend:
        run = Run(backend, config)
        for writer, folder in folders.items():
            checkpoints = Checkpoints(
                Path(folder),
                backend,
                config=config.model_dump(mode="json"),
                model_config={},
            )
            found = checkpoints.find("auto")
            assert found is not None
            manifest = checkpoints.load(found, run.model, run.optimizer)
            state = run.state()
            out[writer] = {
                "state": state,
                "position": (manifest.data.epoch, manifest.data.position),
                "metrics": run.train(at + 1, case.steps),
            }
        out["compilations"] = backend.compilations
    return out


def agree_and_sum() -> dict[str, Any]:
    """What the small methods of the contract give on each process."""
    backend, _ = _open(Case())
    with backend:
        agreed = backend.agree({"from": backend.process.index, "list": [1, 2]})
        rows = torch.arange(GLOBAL_BATCH // backend.data_shard.count).float() + 100 * backend.data_shard.index
        placed = backend.place({"rows": rows})["rows"]
        total = backend.fetch({"total": backend.sum(placed.sum())}).result()["total"]
        return {"agreed": agreed, "total": total, "shard": (backend.data_shard.index, backend.data_shard.count)}


def host_reads(case: Case) -> dict[str, int]:
    """How often a step after the first reads a tensor on the host (aten::_local_scalar_dense)."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Reads.count += func is torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    backend, config = _open(case)
    with backend:
        run = Run(backend, config)
        run.train(1, 1)
        batch = backend.place(
            {
                **CaseRows().rows(torch.arange(GLOBAL_BATCH // backend.data_shard.count).numpy()),
                "tokens": torch.ones(GLOBAL_BATCH // backend.data_shard.count),
                "stop": torch.zeros(GLOBAL_BATCH // backend.data_shard.count),
            }
        )
        with Reads():
            metrics = run.step([batch], 1e-3)
        backend.fetch(metrics).result()
        return {"reads": Reads.count}


def refused(case: Case) -> None:
    """Open only; a refusal is the JobFailed that the test expects."""
    backend, _ = _open(case)
    backend.close()
