"""The contract of `backends/base.py` with nothing distributed in it."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from portable_fsdp.backends.base import (
    Backend,
    Batch,
    Fill,
    MakeOptimizer,
    MemoryStats,
    Metrics,
    OnDevice,
    Pending,
    Piece,
    Rank,
    Read,
    ShardPolicy,
    T,
    TensorState,
    Traffic,
    checkpoint_tensors,
    full_region,
    name_groups,
    optimizer_state_twins,
    parameter_slots,
    process_memory,
)
from portable_fsdp.backends.support import require_supported
from portable_fsdp.config.layout import mesh_axes
from portable_fsdp.config.schema import Config


class ToyBackend(Backend):
    name = "toy"

    def __init__(self, device: str, config: Config, num_devices: int | None) -> None:
        require_supported(config, engine="toy", device=device, devices=1, hosts=1)
        self.device, self.device_name = torch.device(device), device
        self.process = self.data_shard = Rank(0, 1)
        self.data_parallel_size = 1
        self.axes = mesh_axes(config, 1, 1)
        self.expected_compilations = 0
        self._compute = torch.float32

    def close(self) -> None:
        pass

    def shard_model(self, model: nn.Module, policy: ShardPolicy, fill: Fill | None) -> nn.Module:
        assert fill is not None
        for fqn, places in parameter_slots(model).items():
            given = model.get_parameter(fqn)
            made = nn.Parameter(fill(fqn, full_region(given.shape)).clone(), given.requires_grad)
            for place in places:
                place.module._parameters[place.leaf] = made
        self._model, self._compute = model, policy.compute
        return model

    def build_optimizer(self, make: MakeOptimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        parameters = dict(self._model.named_parameters())
        optimizer = make(name_groups(groups, parameters), False)
        for fqn, state in optimizer_state_twins(make, groups, parameters).items():
            for name, twin in state.items():
                optimizer.state[parameters[fqn]][name] = torch.zeros(twin.shape, dtype=twin.dtype)
        return optimizer

    def place(self, batch: Batch) -> Batch:
        return batch

    def compile(self, fn: Callable[..., Metrics], name: str) -> Callable[..., Metrics]:
        return torch.autocast("cpu", self._compute, enabled=self._compute != torch.float32)(fn)

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def evaluate(self) -> AbstractContextManager[None]:
        return torch.no_grad()

    def clip_grad_norm(self, model: nn.Module, limit: float | None) -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), math.inf if limit is None else limit)

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def fetch(self, metrics: Metrics) -> Pending:
        return OnDevice(metrics)

    def agree(self, value: T) -> T:
        return value

    def gather(self, value: T) -> list[T]:
        return [value]

    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, TensorState]:
        return {key: _state(tensor) for key, tensor in checkpoint_tensors(model, optimizer).items()}

    def load_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, read: Read) -> None:
        for key, tensor in checkpoint_tensors(model, optimizer).items():
            read(key, full_region(tensor.shape), tensor.detach())

    @property
    def compilations(self) -> int:
        return 0

    @property
    def collectives(self) -> dict[str, Traffic] | None:
        return None

    def memory(self) -> MemoryStats:
        return process_memory()


def _state(tensor: Tensor) -> TensorState:
    piece = Piece((0,) * tensor.dim(), tensor.detach())
    return TensorState(tuple(tensor.shape), tensor.dtype, lambda: [piece])
