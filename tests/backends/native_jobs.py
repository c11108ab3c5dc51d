"""Jobs of the native engine: collectives, bytes, and the order of things, as torch's own counters see them."""

import logging
import os
import time
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from cases import Case, CaseRows
from jobs import Operators, open_case, running
from live_storages import Measured, measure

from portable_fsdp.backends.contract import ShardPolicy
from portable_fsdp.backends.native.units import local_part
from portable_fsdp.backends.open import open_backend
from portable_fsdp.config.load import make_config
from portable_fsdp.config.schema import Config, Train
from portable_fsdp.layout import Spec, weight_spec
from portable_fsdp.runtime.errors import BackendError
from portable_fsdp.train.build import build_training, shard_policy


def live_storages(config: Config) -> Measured:
    """Of any config: the peak of live storage bytes, and the collectives."""
    with open_backend(config, device="cpu", backend="native", num_devices=int(os.environ["WORLD_SIZE"])) as backend:
        return measure(backend, config)


def collectives(case: Case) -> dict[str, Any]:
    """The collectives of the first two steps: as the backend counts them, as torch does, and each one on the wire."""
    from torch.distributed.tensor.debug import CommDebugMode

    with running(case) as run:
        before = run.backend.collectives
        out: list[dict[str, Any]] = []
        for step in (1, 2):
            # torch's counter loses its way in the modules when they run twice.
            counted = CommDebugMode() if run.accumulation == 1 else None
            with counted or nullcontext(), Operators() as wire:
                run.train(step, step)
            comms = {str(op): count for op, count in counted.get_comm_counts().items()} if counted else None
            out.append({"torch": comms, "wire": wire.collectives})
        return {"before": before, "backend": run.backend.collectives, "steps": out}


def resting(case: Case) -> dict[str, Any]:
    """Parameters, gradients and optimizer state of this process after a backward: FQN -> bytes, rows and device."""
    from torch.distributed.tensor import DTensor

    def measure(tensor: torch.Tensor) -> dict[str, Any]:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return {"bytes": local.nbytes, "shape": tuple(tensor.shape), "device": str(local.device)}

    with running(case) as run:
        run.train(1, 1)
        rows = CaseRows().rows(torch.arange(2).numpy())
        with run.backend.accumulate(True):
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
    from torch.utils._python_dispatch import TorchDispatchMode
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

    with running(case) as run:
        rows = CaseRows().rows(torch.arange(4).numpy())
        weights = [local_part(weight) for weight in run.model.parameters()]
        with FlopCounterMode(display=False) as flops, Made(weights) as made, run.backend.accumulate(True):
            loss, _ = run.model(rows["input_ids"], rows["labels"])
            kept = made.alive()
            loss.backward()
        return {"bytes": kept, "flops": flops.get_total_flops(), "attentions": made.attentions}


def gradients_of_branches() -> dict[str, Any]:
    """Of a model whose ranks take different branches, on replicas: of one micro batch, of two, and by hand."""
    from torch import nn

    from portable_fsdp.backends.native import unsharded as whole

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.last = nn.Linear(8, 1)

        def forward(self, inputs: torch.Tensor, branch: int) -> torch.Tensor:
            return self.last(torch.tanh(self.branches[branch](inputs))).sum()

    def fill(fqn: str, region: Any) -> torch.Tensor:
        return torch.full([part.stop - part.start for part in region], 0.01 * len(fqn))

    config = make_config(sharding={"strategy": "NO_SHARD"})
    with patch.object(whole, "BUCKET_BYTES", 300), open_backend(config, device="cpu", backend="native") as backend:
        with torch.device("meta"):
            model: Any = Branches()
        backend.shard_model(model, ShardPolicy(units=(), layouts=_layouts(model)), fill)
        rank, ranks = backend.process.index, backend.process.count
        rows = [[torch.full((1, 8), 0.1 * (1 + process + 2 * number)) for number in (0, 1)] for process in range(ranks)]

        def gradients() -> dict[str, list[float]]:
            return {fqn: p.grad.flatten().tolist() for fqn, p in model.named_parameters() if p.grad is not None}

        with backend.accumulate(False):
            model(rows[rank][0], rank).backward()
        before = gradients()
        with backend.accumulate(True):
            model(rows[rank][1], rank).backward()
        sums, [buckets] = gradients(), [len(of_model._buckets) for of_model in cast(Any, backend)._sums.values()]
        plain: Any = Branches()
        for fqn, weight in plain.named_parameters():
            weight.data.fill_(0.01 * len(fqn))
        parts: list[dict[str, torch.Tensor]] = []
        for process in range(ranks):
            plain.zero_grad()
            for row in rows[process]:
                plain(row, process).backward()
            parts.append({fqn: p.grad for fqn, p in plain.named_parameters() if p.grad is not None})
        names = [fqn for fqn, _ in plain.named_parameters() if any(fqn in part for part in parts)]
        expected = {
            fqn: torch.stack([part[fqn] for part in parts if fqn in part]).sum(0).flatten().tolist() for fqn in names
        }
        model.zero_grad()
        with backend.accumulate(True):
            model(rows[rank][0], rank).backward()
            again = model(rows[rank][0], rank)
            with pytest.raises(BackendError, match="found a second gradient"):
                again.backward()
        model.zero_grad()
        model.last.requires_grad_(False)  # the hooks of an earlier step know it
        for last, row in enumerate(rows[rank]):
            with backend.accumulate(bool(last)):
                model(row, rank).backward()
        frozen = [fqn for fqn in expected if fqn.startswith("last.")]
        later = gradients() | {fqn: expected[fqn] for fqn in frozen if fqn not in gradients()}
        return {"before": before, "sums": sums, "later": later, "expected": expected, "buckets": buckets}


def overflow_in_one_shard(case: Case) -> list[dict[str, Any]]:
    """Three steps of one weight of four rows. In the second a row of process 0 makes the gradient of the last row of
    the weight overflow, which the last process holds. What this process holds after each step, and the metrics."""
    from torch import nn

    from portable_fsdp.train.build import shard
    from portable_fsdp.train.step import train_step

    def weighted(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = model(batch["inputs"]) * batch["weights"]
        return outputs.float().sum(), torch.tensor(float(len(outputs)))

    backend, config = open_case(case)
    out: list[dict[str, Any]] = []
    with backend:
        model, optimizer = shard(lambda: nn.Linear(3, 4, bias=False), config, backend)
        step = train_step(backend, model, optimizer, accumulation=1, max_grad_norm=1.0, task=weighted)
        [weight] = model.parameters()
        for number in (1, 2, 3):
            weights = torch.ones(1, 4)
            weights[0, 3] = 8.0 if number == 2 and backend.process.index == 0 else 1.0
            metrics = backend.fetch(step([backend.place({"inputs": torch.ones(1, 3), "weights": weights})], 1e-2))
            state = {name: local_part(value).clone() for name, value in optimizer.state[weight].items()}
            numbers = {name: value.item() for name, value in metrics.result().items()}
            out.append({"state": {"weight": local_part(weight).clone(), **state}, "metrics": numbers})
    return out


def order_of_gathers(policy: dict[str, Any], frozen: tuple[int, ...] = ()) -> list[str]:
    """What a step after the first does, in order, of a model that runs its four layers from the last to the first.

    "gather NAME" when it starts, "compute NAME" in forward, "backward" for a product in backward, "reduce NAME".
    """
    from torch import nn
    from torch.profiler import ProfilerActivity, profile, record_function

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
    backend, _ = open_case(Case())
    with backend:
        backend.shard_model(
            model,
            ShardPolicy(units, layers=units, layouts=_layouts(model), **policy),
            lambda _, part: torch.full([s.stop - s.start for s in part], 0.1),
        )

        def step() -> None:
            with backend.accumulate(True):
                model(torch.ones(2, 64)).backward()

        step()
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            step()
    events = sorted(trace.events() or [], key=lambda event: event.time_range.start)
    return [word for event in events if (word := _word(event.name))]


def _word(name: str) -> str:
    for event, word in (("FSDP::all_gather", "gather "), ("FSDP::post_backward_reduce", "reduce ")):
        if name == event or name.startswith(f"{event} ("):
            return word + (name.partition("(")[2].rstrip(")") or "root")
    if name.startswith("compute "):
        return name
    return "backward" if name == "MmBackward0" else ""


def programs(case: Case, inductor: str = "") -> dict[str, Any]:
    """What torch.compile made in three steps: programs, and breaks of their graphs with their reasons; and the bytes
    that forward keeps for backward in the last one.

    `inductor`: a folder for its cache, for it in place of the case's compiler; a config on CPU is refused it.
    """
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()

    def policy(*arguments: Any) -> ShardPolicy:
        return replace(shard_policy(*arguments), compile_backend="inductor")

    environment = patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": inductor}) if inductor else nullcontext()
    made = patch("portable_fsdp.train.build.shard_policy", policy) if inductor else nullcontext()
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with environment, made, running(case) as run:
        losses = [metrics["loss"] for metrics in run.train(1, 2)]
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            losses += [metrics["loss"] for metrics in run.train(3, 3)]
    return {
        "kept": sum(kept.values()),
        "kernels": sum(path.suffix == ".so" for path in Path(inductor).rglob("*")) if inductor else 0,
        "programs": counters["stats"]["unique_graphs"],
        "cached": counters["inductor"]["fxgraph_cache_hit"],
        "breaks": dict(counters["graph_break"]),
        "losses": losses,
    }


def matmul_precision(case: Case) -> list[str]:
    """torch's setting before a backend opens, while it is open, and after."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 names a newer setting
        before = torch.get_float32_matmul_precision()
        backend, _ = open_case(case)
        with backend:
            during = torch.get_float32_matmul_precision()
        return [before, during, torch.get_float32_matmul_precision()]


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


def train_with_a_slow_process(config: Config, slow: int | None, place: str, seconds: float) -> None:
    """A whole run. Process `slow` sleeps in each step: in its layers' forward, or as it waits for rows."""
    from torch.nn.modules.module import register_module_forward_pre_hook

    from portable_fsdp.data.batches import Batches
    from portable_fsdp.train.loop import train

    def sleep(module: Any, _: Any) -> None:
        if place == "forward" and type(module).__name__ == "LlamaMLP" and dist.get_rank() == slow:
            time.sleep(seconds)

    def late(batches: Batches) -> Any:
        time.sleep(seconds)
        return following(batches)

    following, hook = Batches.__next__, register_module_forward_pre_hook(sleep)
    is_late = place == "rows" and dist.get_rank() == slow
    try:
        with patch.object(Batches, "__next__", late) if is_late else nullcontext():
            assert train(config, device="cpu", backend="native") == 0
    finally:
        hook.remove()


def programs_of_steps(case: Case, log: str) -> dict[str, Any]:
    """On TorchTPU: how many programs each step compiled, and what stands in stderr after these steps, after an
    evaluation of fewer rows and two more steps, and after an operation of another shape and one more step.

    `log`: a file that is stderr meanwhile, TorchTPU's own lines included.
    """
    logger, handler = logging.getLogger("portable_fsdp"), logging.FileHandler(log)
    logger.addHandler(handler)
    stderr = os.dup(2)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 2)
    texts = list[str]()

    def note() -> None:
        texts.append(Path(log).read_text()[sum(map(len, texts)) :])

    try:
        with running(case) as run:
            programs, new = cast(Any, run.backend)._programs, list[int]()
            for step in range(1, case.steps + 1):
                before = programs.count
                run.train(step, step)
                new.append(programs.count - before)
            note()
            rows = CaseRows().rows(torch.arange(3).numpy())
            with run.backend.evaluate():
                loss, _ = run.model(*(run.backend.place(rows)[name] for name in ("input_ids", "labels")))
                loss.item()
            run.train(case.steps, case.steps)
            run.train(case.steps, case.steps)
            note()
            torch.ones(7, 11, 13, device="tpu").cos().sum().item()
            run.train(case.steps, case.steps)
            note()
            count = programs.count
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(file)
        logger.removeHandler(handler)
        handler.close()
    return {"programs": count, "new": new, "texts": texts}


def _layouts(model: torch.nn.Module) -> dict[str, Spec]:
    return {fqn: weight_spec(weight.dim()) for fqn, weight in model.named_parameters()}
