"""Native: FSDP2 (`fully_shard`), one process per device. gloo on CPU, NCCL on CUDA.

The order in which techniques apply reads top to bottom in `shard_model`: gradient checkpointing inside a unit,
units, the root around them, gradients as sums, then memory and weights.
"""

import os
import resource
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from portable_fsdp.backends.base import (
    Backend,
    Batch,
    Fill,
    MakeOptimizer,
    MemoryStats,
    Metrics,
    Part,
    Pending,
    Piece,
    Read,
    ShardPolicy,
    Slices,
    T,
    TensorState,
    Traffic,
    name_groups,
    optimizer_state_twins,
    persistent_buffers,
    rows_of_shard,
    whole,
)
from portable_fsdp.config.load import check_batch
from portable_fsdp.config.schema import Config
from portable_fsdp.runtime.errors import BackendError
from portable_fsdp.runtime.process import detect_launch

COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # torch's own default, for the first step as for a slow save


class _HostCopy(Pending):
    """Values copied into pinned memory while the device goes on; `ready` marks the end of the copy."""

    def __init__(self, names: list[str], values: Tensor, ready: torch.cuda.Event | None) -> None:
        self._names, self._values, self._ready = names, values, ready

    def result(self) -> dict[str, float]:
        if self._ready is not None:
            self._ready.synchronize()
        return dict(zip(self._names, cast(list[float], self._values.tolist()), strict=True))


class NativeBackend(Backend):
    """FSDP2 on the process group that torchrun (or a plain start) describes."""

    name = "native"

    def __init__(self, device: str, config: Config, num_devices: int | None) -> None:
        launch = detect_launch(os.environ)
        self._check(device, config, num_devices, launch.world_size, launch.local_rank)
        self.device = torch.device(device, launch.local_rank) if device != "cpu" else torch.device("cpu")
        self.device_name = device
        if device == "cuda":
            torch.cuda.set_device(self.device)
            self.device_name = torch.cuda.get_device_name(self.device)
        self._owns_group = not dist.is_initialized()
        if self._owns_group:
            _init_process_group(device, self.device, launch.kind == "plain")
        self.process = Part(dist.get_rank(), dist.get_world_size())
        self.data_shard = self.process
        self.data_parallel_size = self.process.count
        self.expected_compilations = 0
        shards = self.process.count if config.sharding.strategy == "FULL_SHARD" else 1
        self._mesh = init_device_mesh(
            device, (self.process.count // shards, shards), mesh_dim_names=("replicate", "shard")
        )

    @staticmethod
    def _check(device: str, config: Config, num_devices: int | None, world_size: int, local_rank: int) -> None:
        if num_devices is not None and num_devices != world_size:
            raise BackendError(
                f"backend native: --num_devices={num_devices}, but the launcher started {world_size} process(es), and "
                "each process has one device.\n  Leave --num_devices out under torchrun."
            )
        if device == "cuda" and local_rank >= torch.cuda.device_count():
            raise BackendError(
                f"backend native on cuda: local rank {local_rank} needs a GPU of its own, found "
                f"{torch.cuda.device_count()}.\n  Start at most that many processes: torchrun --nproc_per_node=gpu."
            )
        check_batch(config, world_size)
        if config.precision.reduce == "bfloat16" and config.precision.compute == "float32":
            raise BackendError(
                "backend native: precision.reduce=bfloat16 with precision.compute=float32 would lose the gradients' "
                "precision on the way.\n  Set precision.reduce=auto, or precision.compute=bfloat16."
            )

    def close(self) -> None:
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()

    def shard_model(self, model: nn.Module, policy: ShardPolicy, fill: Fill | None) -> nn.Module:
        mesh = self._mesh["shard"] if self._mesh.size(0) == 1 else self._mesh
        precision = MixedPrecisionPolicy(
            param_dtype=None if policy.compute == torch.float32 else policy.compute, reduce_dtype=policy.reduce
        )
        for name in policy.units:
            unit = model.get_submodule(name)
            if name in policy.recompute:
                _recompute(unit)
            fully_shard(unit, mesh=mesh, mp_policy=precision)
        fully_shard(model, mesh=mesh, mp_policy=precision)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                # C1: gradients are summed, never averaged. The factor alone fails on gloo ("PREMUL_SUM").
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        self._root = cast(FSDPModule, model)
        _materialise(model, self.device)
        if fill is None:
            return model
        with torch.no_grad():
            for fqn, parameter in model.named_parameters():
                slices = self._slices(parameter)
                if _is_empty(slices):
                    continue
                _local(parameter).copy_(fill(fqn, slices))
        return model

    def build_optimizer(self, make: MakeOptimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        parameters = dict(cast(nn.Module, self._root).named_parameters())
        optimizer = make(name_groups(groups, parameters), False)
        on_device = {id(p) for g in optimizer.param_groups if g.get("fused") for p in g["params"]}
        for fqn, state in optimizer_state_twins(make, groups, parameters).items():
            parameter = parameters[fqn]
            counts_on = parameter.device if id(parameter) in on_device else torch.device("cpu")
            for name, twin in state.items():
                optimizer.state[parameter][name] = (
                    torch.zeros_like(parameter, dtype=twin.dtype)
                    if twin.shape == parameter.shape
                    else torch.zeros(twin.shape, dtype=twin.dtype, device=counts_on)
                )
        return optimizer

    def place(self, batch: Batch) -> Batch:
        if self.device.type == "cpu":
            return batch
        pinned = {name: tensor.pin_memory() for name, tensor in batch.items()}
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in pinned.items()}

    def compile(self, fn: Callable[..., Metrics], name: str) -> Callable[..., Metrics]:
        return fn

    @contextmanager
    def accumulate(self, last: bool) -> Generator[None]:
        # Shards are reduced in every micro batch: keeping unsharded gradients until the last one would undo FULL_SHARD.
        # Replicas are reduced once, in the last one.
        self._root.set_requires_all_reduce(last)
        yield

    def clip_grad_norm(self, model: nn.Module, limit: float | None) -> Tensor:
        parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm([cast(Tensor, parameter.grad) for parameter in parameters])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if limit is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return norm

    def sum(self, tensor: Tensor) -> Tensor:
        if self.process.count == 1:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    def fetch(self, metrics: Metrics) -> Pending:
        values = torch.stack([value.float() for value in metrics.values()])
        if self.device.type != "cuda":
            return _HostCopy(list(metrics), values.cpu(), None)
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return _HostCopy(list(metrics), host, ready)

    def agree(self, value: T) -> T:
        if self.process.count == 1:
            return value
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return cast(T, box[0])

    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, TensorState]:
        return {key: self._tensor_state(tensor) for key, tensor in _tensors(model, optimizer).items()}

    def load_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, read: Read) -> None:
        with torch.no_grad():
            for key, tensor in _tensors(model, optimizer).items():
                slices = self._slices(tensor)
                if not _is_empty(slices):
                    _local(tensor).copy_(read(key, slices))

    @property
    def compilations(self) -> int:
        return 0

    @property
    def collectives(self) -> dict[str, Traffic] | None:
        return None

    def memory(self) -> MemoryStats:
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            return MemoryStats(
                torch.cuda.max_memory_allocated(self.device), torch.cuda.memory_allocated(self.device), total
            )
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return MemoryStats(peak, psutil.Process().memory_info().rss, psutil.virtual_memory().total)

    def _slices(self, tensor: Tensor) -> Slices:
        """What this process holds of a tensor: some rows of it, or all."""
        slices = whole(tensor.shape)
        if not isinstance(tensor, DTensor):
            return slices
        shard = self._mesh["shard"]
        return (rows_of_shard(tensor.shape[0], shard.get_local_rank(), shard.size()), *slices[1:])

    def _tensor_state(self, tensor: Tensor) -> TensorState:
        """The first replica writes its shards; process 0 writes what isn't sharded."""
        slices = self._slices(tensor)
        first = (
            self._mesh["replicate"].get_local_rank() == 0 if isinstance(tensor, DTensor) else self.process.index == 0
        )
        mine = first and not _is_empty(slices)
        pieces = [Piece(tuple(part.start for part in slices), _local(tensor))] if mine else []
        return TensorState(tuple(tensor.shape), tensor.dtype, pieces)


def _init_process_group(device: str, where: torch.device, alone: bool) -> None:
    backend = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}.get(device)
    if alone:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=COLLECTIVE_TIMEOUT)
    else:
        bound = where if device != "cpu" else None
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT, device_id=bound)


def _recompute(unit: nn.Module) -> None:
    """Gradient checkpointing of a unit, inside its FSDP hooks; by its forward, so that no wrapper changes a name."""
    forward = unit.forward

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    unit.forward = recomputed


def _materialise(model: nn.Module, device: torch.device) -> None:
    """Memory for the parameters (on meta until now); buffers are moved with their values."""

    def give(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device)

    cast(Any, model)._apply(give)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _is_empty(slices: Slices) -> bool:
    return any(part.start >= part.stop for part in slices)


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of a checkpoint under its key, the same on all processes."""
    parameters = dict(model.named_parameters())
    tensors: dict[str, Tensor] = {**parameters, **persistent_buffers(model)}
    for fqn, parameter in parameters.items():
        for name, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{name}/{fqn}"] = value
    return tensors
