"""What the worker processes run. Each job opens the backend of its own process group, and returns plain data."""

import math
import os
import re
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from cases import GLOBAL_BATCH, SEQ_LEN, Case, CaseRows
from dying import Instants, patched
from live_storages import Measured, measure
from memory import Peak, anonymous
from torch.utils._python_dispatch import TorchDispatchMode

from portable_fsdp.backends.base import Backend, Pending, ShardPolicy, TensorState, parameter_places
from portable_fsdp.backends.open import open_backend
from portable_fsdp.checkpoint.manager import Checkpoints
from portable_fsdp.config import schema
from portable_fsdp.config.schema import Config, Train
from portable_fsdp.data.batches import Batches
from portable_fsdp.metrics.hlo import collectives as collectives_of_program
from portable_fsdp.models.build import build_model
from portable_fsdp.optim.schedule import learning_rate
from portable_fsdp.train.build import build_training
from portable_fsdp.train.evaluate import Evaluator

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
            [(tuple(p.offset), p.data.detach().cpu().clone()) for p in tensor.pieces()],
        )
        for key, tensor in state.items()
    }


def live_storages(config: Config) -> Measured:
    """Of any config: the peak of live storage bytes, and the collectives."""
    with open_backend(config, device="cpu", backend="native", num_devices=int(os.environ["WORLD_SIZE"])) as backend:
        return measure(backend, config)


def import_model(case: Case) -> None:
    """What building the model imports; transformers' lazy modules may not be imported by several threads at once."""
    build_model(case.config(1).model, seed=0, seq_len=SEQ_LEN, vocabulary=256)


class Run:
    """A model on an open backend, trained step by step on the rows of the cases."""

    def __init__(self, backend: Backend, config: Config) -> None:
        self.backend, self.config = backend, config
        unwrapped = build_model(config.model, seed=config.run.seed, seq_len=SEQ_LEN, vocabulary=256).model
        self.unwrapped_names = [name for name, _ in unwrapped.named_parameters(remove_duplicate=False)]
        self.ties = sorted(sorted(_names(unwrapped, places)) for places in parameter_places(unwrapped).values())
        self.buffers = {name: buffer.clone() for name, buffer in unwrapped.named_buffers()}
        training = build_training(config, backend, vocabulary=256)
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
                    self.backend.place({**batch, **self._news(len(batch["tokens"]), stop)}) for batch in next(batches)
                ]
                previous, pending = pending, self.backend.fetch(self.step(placed, lr))
                if previous is not None:
                    out.append(_numbers(previous))
        assert pending is not None
        return [*out, _numbers(pending)]

    def _news(self, rows: int, stop: float) -> dict[str, torch.Tensor]:
        """What rides with a batch; each process tells its number."""
        process = self.backend.process
        news = torch.zeros(rows, 1 + 2 * process.count)
        news[0, 0] = stop
        news[0, 1 + 2 * process.index :][:2] = torch.tensor([process.index + 1.0, 10.0 * process.index])
        return {"news": news}

    def state(self) -> Pieces:
        return _pieces(self.backend.state(self.model, self.optimizer))


def _numbers(pending: Pending) -> dict[str, Any]:
    return {name: value.tolist() for name, value in pending.result().items()}


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


def _checkpoints(
    folder: str, backend: Backend, config: Config, settings: schema.Checkpoint | None = None
) -> Checkpoints:
    return Checkpoints(folder, backend, config=config.model_dump(mode="json"), model_config={}, settings=settings)


def write(case: Case, folder: str, at: int) -> dict[str, Any]:
    """Train to step `at`, save, and go on to the end."""
    backend, config = _open(case)
    with backend:
        run = Run(backend, config)
        checkpoints = _checkpoints(folder, backend, config)
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
            checkpoints = _checkpoints(folder, backend, config)
            found = checkpoints.find("auto")
            assert found is not None
            resumed = checkpoints.load(found, run.model, run.optimizer)
            state = run.state()
            out[writer] = {
                "state": state,
                "position": resumed.position,
                "metrics": run.train(at + 1, case.steps),
            }
        out["compilations"] = backend.compilations
    return out


def save_by_instants(case: Case, folder: str, kept: str) -> dict[str, Any]:
    """Save step 1, then step 2 in the background, which gives up step 1: the files at every instant are in `kept`."""
    backend, config = _open(case)
    with backend:
        run = Run(backend, config)
        settings = schema.Checkpoint(keep=1, async_save=True)
        checkpoints = _checkpoints(folder, backend, config, settings)
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
    backend, config = _open(case)
    found: list[dict[str, Any]] = []
    with backend:
        run = Run(backend, config)
        for folder in folders:
            checkpoints = _checkpoints(folder, backend, config, schema.Checkpoint(keep=1))
            whole = checkpoints.find("auto")
            assert whole is not None, folder
            resumed = checkpoints.load(whole, run.model, run.optimizer)
            differ = _differences(run.state(), expected[resumed.step])
            found.append({"step": resumed.step, "position": resumed.position, "differ": differ})
            checkpoints.save(3, run.model, run.optimizer, (0, 3 * GLOBAL_BATCH))
    return found


def _differences(state: Pieces, expected: dict[str, torch.Tensor]) -> list[str]:
    """Keys whose pieces aren't what stands there in the whole tensors."""
    return sorted(state.keys() ^ expected.keys()) + [
        key
        for key, (_, _, pieces) in state.items()
        for offset, data in pieces
        if not torch.equal(data, expected[key][tuple(slice(o, o + n) for o, n in zip(offset, data.shape, strict=True))])
    ]


def save_untrained(case: Case, folder: str) -> None:
    """The state that training starts from."""
    backend, config = _open(case)
    with backend:
        run = Run(backend, config)
        _checkpoints(folder, backend, config).save(1, run.model, run.optimizer, (0, 0))


def memory_of_a_load(case: Case, folder: str) -> dict[str, int]:
    """Bytes: what the model takes, and what the load adds at most; this process's shards, the largest tensor."""
    backend, config = _open(case)
    with backend:
        before = anonymous()
        run = Run(backend, config)
        checkpoints = _checkpoints(folder, backend, config)
        found = checkpoints.find("auto")
        assert found is not None
        with Peak() as loading:
            checkpoints.load(found, run.model, run.optimizer)
        state = backend.state(run.model, run.optimizer)
        return {
            "before": loading.before - before,
            "grown": loading.grown,
            "shards": sum(piece.data.nbytes for one in state.values() for piece in one.pieces()),
            "largest": max(math.prod(one.shape) * one.dtype.itemsize for one in state.values()),
        }


def agree_and_sum() -> dict[str, Any]:
    """What the small methods of the contract give on each process."""
    backend, _ = _open(Case())
    with backend:
        agreed = backend.agree({"from": backend.process.index, "list": [1, 2]})
        gathered = backend.gather("x" * backend.process.index)
        rows = torch.arange(GLOBAL_BATCH // backend.data_shard.count).float() + 100 * backend.data_shard.index
        placed = backend.place({"rows": rows})["rows"]
        add = backend.compile(lambda rows: {"total": backend.sum(rows.sum())}, "total")
        total = backend.fetch(add(placed)).result()["total"].item()
        shard = (backend.data_shard.index, backend.data_shard.count)
        return {"agreed": agreed, "gathered": gathered, "total": total, "shard": shard}


def host_reads(case: Case) -> dict[str, int]:
    """How often a step after the first reads a tensor on the host (aten::_local_scalar_dense)."""
    backend, config = _open(case)
    with backend:
        run = Run(backend, config)
        run.train(1, 1)
        batch = backend.place(
            {
                **CaseRows().rows(torch.arange(GLOBAL_BATCH // backend.data_shard.count).numpy()),
                "tokens": torch.ones(GLOBAL_BATCH // backend.data_shard.count),
                **run._news(GLOBAL_BATCH // backend.data_shard.count, 0.0),
            }
        )
        with Reads() as reads:
            metrics = run.step([batch], 1e-3)
        backend.fetch(metrics).result()
        return {"reads": reads.count}


class Reads(TorchDispatchMode):
    """Counts how often a tensor is read on the host."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class Sent(TorchDispatchMode):
    """Names the collectives that run inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def evaluated(case: Case, rows: int, early: bool) -> dict[str, Any]:
    """Two runs of a case: with evaluations over `rows` rows after steps 2 and 5 (`early`: before too), and without."""
    backend, config = _open(case)
    with backend:
        run = Run(backend, config)
        before = backend.compilations
        evaluator = Evaluator(backend, run.model, CaseRows(rows), config.train)
        untrained = evaluator() if early else None
        metrics = run.train(1, 2)
        counted = backend.collectives
        evaluation = evaluator()
        at = run.state()
        sent = _three_more(run, metrics)
        evaluator()
        told = {
            "untrained": untrained,
            "evaluation": evaluation,
            "at": at,
            "metrics": metrics,
            "sent": sent,
            "collectives": [counted, backend.collectives],
            "compilations": backend.compilations - before,
            "expected_compilations": backend.expected_compilations,
            "final": run.state(),
        }
        with Reads() as reads:
            evaluator()
        plain = Run(backend, config)
        metrics = plain.train(1, 2)
        at = plain.state()
        sent = _three_more(plain, metrics)
        without = {"at": at, "metrics": metrics, "sent": sent, "final": plain.state()}
        return {**told, "reads": reads.count, "plain": without}


def _three_more(run: Run, metrics: list[dict[str, float]]) -> list[str]:
    """The collectives on the wire. Where XLA makes them nobody looks: under a mode of torch's it is another program."""
    with nullcontext() if run.backend.expected_compilations else Sent() as sent:
        metrics += run.train(3, 5)
    return sent.names if sent else []


def refused(case: Case) -> None:
    """Open only; a refusal is the JobFailed that the test expects."""
    backend, _ = _open(case)
    backend.close()


# ------------------------------------------------------------------------------------------------ the native engine


def collectives(case: Case) -> dict[str, Any]:
    """The collectives of the first two steps: as the backend counts them, as torch does, and each one on the wire.

    One on the wire: its name, dtype, bytes of its larger side, and how many times those of its smaller one, which for a
    gather is the number of devices that it runs over.
    """
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.utils._pytree import tree_leaves

    class Wire(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[tuple[str, str, int, int]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "c10d":
                tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
                sizes = [tensor.nbytes for tensor in tensors]
                self.seen.append((func.name(), str(tensors[0].dtype), max(sizes), max(sizes) // min(sizes)))
            return func(*args, **(kwargs or {}))

    backend, config = _open(case)
    with backend:
        run = Run(backend, config)
        before = backend.collectives
        out: list[dict[str, Any]] = []
        for step in (1, 2):
            # torch's counter loses its way in the modules when they run twice.
            counted = CommDebugMode() if run.accumulation == 1 else None
            with counted or nullcontext(), Wire() as wire:
                run.train(step, step)
            comms = {str(op): count for op, count in counted.get_comm_counts().items()} if counted else None
            out.append({"torch": comms, "wire": wire.seen})
        return {"before": before, "backend": backend.collectives, "steps": out}


def resting(case: Case) -> dict[str, Any]:
    """Parameters, gradients and optimizer state of this process after a backward: FQN -> bytes, rows and device."""
    from torch.distributed.tensor import DTensor

    def measure(tensor: torch.Tensor) -> dict[str, Any]:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return {"bytes": local.nbytes, "shape": tuple(tensor.shape), "device": str(local.device)}

    backend, config = _open(case)
    with backend:
        run = Run(backend, config)
        run.train(1, 1)
        rows = CaseRows().rows(torch.arange(2).numpy())
        with backend.accumulate(True):
            run.model(rows["input_ids"], rows["labels"])[0].backward()
        named = dict(run.model.named_parameters())
        states = {
            f"{name}/{fqn}": value for fqn, p in named.items() for name, value in run.optimizer.state.get(p, {}).items()
        }
        return {
            "parameters": {fqn: measure(p) for fqn, p in named.items()},
            "gradients": {fqn: measure(p.grad) for fqn, p in named.items() if p.grad is not None},
            "state": {key: measure(value) for key, value in states.items() if not key.startswith("step/")},
            "counts": {key: measure(value) for key, value in states.items() if key.startswith("step/")},
        }


def kept_for_backward(case: Case) -> dict[str, int]:
    """Bytes that forward made and that live on until backward; products (FLOPs) and attentions of both together."""
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._pytree import tree_leaves
    from torch.utils.flop_counter import FlopCounterMode

    class Made(TorchDispatchMode):
        def __init__(self, weights: list[torch.Tensor]) -> None:
            super().__init__()
            self.old = {weight.untyped_storage()._cdata for weight in weights}
            self.storages: dict[int, StorageWeakRef] = {}
            self.attentions = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.attentions += "scaled_dot_product" in func.name() and "backward" not in func.name()
            out = func(*args, **(kwargs or {}))
            for leaf in tree_leaves(out):
                if isinstance(leaf, torch.Tensor) and leaf.untyped_storage()._cdata not in self.old:
                    reference = StorageWeakRef(leaf.untyped_storage())
                    self.storages[reference.cdata] = reference
            return out

        def alive(self) -> int:
            new: Any = torch.UntypedStorage._new_with_weak_ptr
            storages = [new(reference.cdata) for reference in self.storages.values() if not reference.expired()]
            return sum(storage.nbytes() for storage in storages)

    backend, config = _open(case)
    with backend:
        run = Run(backend, config)
        rows = CaseRows().rows(torch.arange(4).numpy())
        weights = [cast(Any, weight).to_local() for weight in run.model.parameters()]
        with FlopCounterMode(display=False) as flops, Made(weights) as made, backend.accumulate(True):
            loss, _ = run.model(rows["input_ids"], rows["labels"])
            kept = made.alive()
            loss.backward()
        return {"bytes": kept, "flops": flops.get_total_flops(), "attentions": made.attentions}


def order_of_gathers(policy: dict[str, Any], frozen: tuple[int, ...] = ()) -> list[str]:
    """What a step after the first does, in order, of a model that runs its four layers from the last to the first.

    "gather NAME" when it starts, "compute NAME" in forward, "backward" for a product in backward, "reduce NAME".
    """
    from torch import nn
    from torch.profiler import ProfilerActivity, profile, record_function

    from portable_fsdp.backends.base import ShardPolicy

    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))
            self.scale = nn.Parameter(torch.empty(64))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = inputs * self.scale
            for number in (3, 2, 1, 0):
                with record_function(f"compute layers.{number}"):
                    hidden = torch.tanh(self.layers[number](hidden))
            return hidden.sum()

    with torch.device("meta"):
        model = Backwards()
    for number in frozen:
        model.layers[number].requires_grad_(False)
    units = tuple(f"layers.{number}" for number in range(4))
    backend, _ = _open(Case())
    with backend:
        backend.shard_model(
            model,
            ShardPolicy(units, layers=units, **policy),
            lambda _, part: torch.full([s.stop - s.start for s in part], 0.1),
        )

        def step() -> None:
            with backend.accumulate(True):
                model(torch.ones(2, 64)).backward()

        step()
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            step()
    events = sorted(trace.events() or [], key=lambda event: event.time_range.start)
    said = [_said(event.name) for event in events]
    return [text for text in said if text]


def _said(name: str) -> str:
    for event, word in (("FSDP::all_gather", "gather "), ("FSDP::post_backward_reduce", "reduce ")):
        if name == event or name.startswith(f"{event} ("):
            return word + (name.partition("(")[2].rstrip(")") or "root")
    if name.startswith("compute "):
        return name
    return "backward" if name == "MmBackward0" else ""


def programs(case: Case) -> dict[str, Any]:
    """What torch.compile made in three steps: programs, and breaks of their graphs with their reasons."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    backend, config = _open(case)
    with backend:
        run = Run(backend, config)
        losses = [metrics["loss"] for metrics in run.train(1, 3)]
    return {
        "programs": counters["stats"]["unique_graphs"],
        "breaks": dict(counters["graph_break"]),
        "losses": losses,
    }


def matmul_precision(case: Case) -> list[str]:
    """torch's setting before a backend opens, while it is open, and after."""
    found: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 names a newer setting
        found.append(torch.get_float32_matmul_precision())
        backend, _ = _open(case)
        with backend:
            found.append(torch.get_float32_matmul_precision())
        found.append(torch.get_float32_matmul_precision())
    return found


def at_scale(sizes: dict[str, int], devices: int) -> dict[str, Any]:
    """A Llama on the first of `devices` pretended processes, without weights: its bytes on this one, by kind.

    Runs in a process of its own, whose peak of memory it tells.
    """
    import resource

    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def local_bytes(tensors: Any) -> int:
        return sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes for tensor in tensors)

    dist.init_process_group("fake", rank=0, world_size=devices, store=FakeStore())
    architecture = {"model_type": "llama", "vocab_size": 128256, "max_position_embeddings": 8192, **sizes}
    case = Case(settings={"model.architecture": architecture, "precision.compute": "bfloat16"})
    config = case.config(1).model_copy(update={"train": Train(steps=1, global_batch=devices)})
    with open_backend(config, device="cpu", backend="native", num_devices=devices) as backend:
        training = build_training(config, backend, vocabulary=256, fill=False)
        weights = dict(training.model.named_parameters())
        moments = [
            value
            for state in training.optimizer.state.values()
            for name, value in state.items()
            if name.startswith("exp")
        ]
        answer = {
            "parameters": local_bytes(weights.values()),
            "state": local_bytes(moments),
            "shapes": [tuple(weight.shape) for weight in weights.values()],
            "host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
    dist.destroy_process_group()
    return answer


# ------------------------------------------------------------------------------------------------------ the XLA engine


def xla_run(case: Case, folder: str) -> dict[str, Any]:
    """A whole run: its metrics, what each device holds after it, and the programs that XLA wrote into `folder`."""
    backend, config = _open(case)
    with backend:
        run = Run(backend, config)
        metrics = run.train(1, case.steps)
        held = {fqn: _on_devices(parameter) for fqn, parameter in run.model.named_parameters()}
        for fqn, parameter in run.model.named_parameters():
            for name, value in run.optimizer.state.get(parameter, {}).items():
                held[f"{name}/{fqn}"] = _on_devices(value)
        return {
            "metrics": metrics,
            "held": held,
            "final": run.state(),
            "programs": _programs(Path(folder), backend.data_parallel_size),
            "compilations": backend.compilations,
            "expected_compilations": backend.expected_compilations,
        }


def _on_devices(tensor: torch.Tensor) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The shape of a global tensor, and that of the piece on each device, padding included."""
    import torch_xla

    bridge: Any = cast(Any, torch_xla)._XLAC
    devices = int(os.environ["CPU_NUM_DEVICES"])
    if tensor.device.type == "cpu" or "devices=" not in bridge._get_xla_sharding_spec(tensor):
        return tuple(tensor.shape), [tuple(tensor.shape)] * devices
    (shards,) = bridge._get_local_shards([tensor])
    return tuple(tensor.shape), [tuple(shard.shape) for shard, _ in shards]


def _programs(folder: Path, devices: int) -> dict[str, Any]:
    """Name -> what stands in the program after partitioning. Empties the folder: another process names files alike."""
    found: dict[str, Any] = {}
    for path in folder.iterdir():
        text = path.read_text(errors="ignore")
        path.unlink()
        if path.name.endswith("cpu_after_optimizations.txt"):
            gathers = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)
            found[path.name.split(".")[1]] = {
                "collectives": collectives_of_program(text, devices),
                "gathered": [tuple(int(size) for size in shape.split(",")) for shape in gathers],
                "dots": text.count(" dot("),
                "loops": text.count(" while("),
            }
    return found


class _Products(torch.nn.Module):
    """An embedding, a linear layer and GPT-2's, each with an output gradient of its own; no dimension divides by 4."""

    def __init__(self) -> None:
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        self.table, self.linear, self.conv1d = torch.nn.Embedding(11, 6), torch.nn.Linear(6, 7), Conv1D(5, 6)

    def get_output_embeddings(self) -> None:
        return None

    def forward(self, ids: torch.Tensor, x: torch.Tensor, outer: dict[str, torch.Tensor]) -> torch.Tensor:
        return (
            (self.table(ids) * outer["table"]).sum()
            + (self.linear(x) * outer["linear"]).sum()
            + (self.conv1d(x) * outer["conv1d"]).sum()
        )


def xla_gradients(reduce: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Name -> the gradient of a bfloat16 weight, and the same from its factors in float64."""
    backend, _ = _open(Case(compute="bfloat16", reduce=reduce))
    draw = torch.Generator().manual_seed(3)
    rows = (GLOBAL_BATCH, 40)
    ids = torch.randint(11, rows, generator=draw)
    x, *outer = (torch.randn(*rows, size, generator=draw).bfloat16() for size in (6, 6, 7, 5))
    factors = dict(zip(("table", "linear", "conv1d"), outer, strict=True))
    with backend:
        policy = ShardPolicy((), compute=torch.bfloat16)
        given = _Products()
        values = {fqn: weight.detach().clone() for fqn, weight in given.named_parameters()}
        model = backend.shard_model(given, policy, lambda fqn, slices: values[fqn][slices])
        weights = dict(model.named_parameters())

        def gradients(ids: torch.Tensor, x: torch.Tensor, factors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            model(ids, x, factors).backward()
            return {fqn: cast(torch.Tensor, weight.grad) for fqn, weight in weights.items()}

        placed = backend.place({"ids": ids, "x": x, **factors})
        found = backend.fetch(
            backend.compile(gradients, "gradients")(
                placed["ids"], placed["x"], {name: placed[name] for name in factors}
            )
        ).result()
    one_hot = torch.nn.functional.one_hot(ids, 11)
    flat = {name: factor.double().flatten(0, 1) for name, factor in {**factors, "x": x, "ids": one_hot}.items()}
    return {
        "table": (found["table.weight"], flat["ids"].T @ flat["table"]),
        "linear": (found["linear.weight"], flat["linear"].T @ flat["x"]),
        "bias": (found["linear.bias"], flat["linear"].sum(0)),
        "conv1d": (found["conv1d.weight"], flat["x"].T @ flat["conv1d"]),
        "conv1d_bias": (found["conv1d.bias"], flat["conv1d"].sum(0)),
    }


def xla_matmul_precision(case: Case) -> tuple[list[str], str]:
    """XLA's setting before a backend opens, while it is open, and after; and a product traced in between, as HLO."""
    import torch_xla

    bridge: Any = cast(Any, torch_xla)._XLAC
    found = [bridge._xla_get_mat_mul_precision()]
    backend, _ = _open(case)
    with backend:
        found.append(bridge._xla_get_mat_mul_precision())
        square = torch.ones(4, 4).to(backend.device)
        product = bridge._get_xla_tensors_hlo([square @ square])
    return [*found, bridge._xla_get_mat_mul_precision()], product


# ------------------------------------------------------------------------------------------------ the engine xla_fsdp1


def fsdp1_program(case: Case) -> dict[str, Any]:
    """What forward and backward of a step would run, read from the traced program; nothing of it runs."""
    import re

    import torch_xla

    backend, config = _open(case)
    with backend:
        run = Run(backend, config)
        rows = backend.place(CaseRows().rows(torch.arange(2).numpy()))
        parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
        before = {parameter: parameter.detach().cpu() for parameter in parameters}
        run.model(rows["input_ids"], rows["labels"])[0].backward()
        text: str = cast(Any, torch_xla)._XLAC._get_xla_tensors_hlo([p.grad for p in parameters])
        for parameter in parameters:  # barriers made them results of what shall not run
            parameter.grad = None
            parameter.data = backend.place({"as before": before[parameter]})["as before"]
        out: dict[str, Any] = {
            name: len(re.findall(rf" {name}\(", text)) for name in ("all-gather", "reduce-scatter", "all-reduce", "dot")
        }
        out["reduced"] = set(re.findall(r"= \(?(\w+)\[[^=]* reduce-scatter\(", text))
        out["gathered"] = set(re.findall(r"= \(?(\w+)\[[^=]* all-gather\(", text))
        out["pinned"] = text.count("constrain_layout=true")
        out["shards"] = {name: tuple(p.shape) for name, p in run.model.named_parameters()}
        out["buffers"] = {name: str(buffer.dtype) for name, buffer in run.model.named_buffers()}
        return out


def built(case: Case) -> None:
    """Open and lay out, and no more; a refusal is the JobFailed that the test expects."""
    backend, config = _open(case)
    with backend:
        build_training(config, backend, vocabulary=256)
