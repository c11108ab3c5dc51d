"""The contract of `backends/base.py` with nothing distributed in it."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from portable_fsdp.backends import base
from portable_fsdp.backends.refusals import Deployment, require_supported
from portable_fsdp.config.schema import Config
from portable_fsdp.layout import full_region, mesh_axes
from portable_fsdp.metrics.profile import Operation


class ToyBackend(base.Backend):
    name = "toy"

    def __init__(self, device: str, config: Config, num_devices: int | None) -> None:
        require_supported(config, Deployment("toy", device, 1, 1))
        self.device, self.device_name = torch.device(device), device
        self.process = self.data_shard = base.Rank(0, 1)
        self.devices = self.row_shards = 1
        self.axes = mesh_axes(config, 1, 1)
        self.expected_compilations = 0
        self._compute = torch.float32

    def close(self) -> None:
        pass

    def shard_model(self, model: nn.Module, policy: base.ShardPolicy, fill: base.Fill | None) -> nn.Module:
        assert fill is not None
        for fqn, places in base.parameter_slots(model).items():
            given = model.get_parameter(fqn)
            made = nn.Parameter(fill(fqn, full_region(given.shape)).clone(), given.requires_grad)
            for place in places:
                place.module._parameters[place.leaf] = made
        self._model, self._compute = model, policy.compute
        return model

    def build_optimizer(self, make: base.MakeOptimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        parameters = dict(self._model.named_parameters())
        return base.zero_optimizer(
            make, groups, parameters, lambda _, twin, __: torch.zeros_like(twin, device="cpu"), compiled=False
        )

    def place(self, batch: base.Batch) -> base.Batch:
        return batch

    def compile(self, fn: Callable[..., base.Metrics], name: str) -> Callable[..., base.Metrics]:
        return torch.autocast("cpu", self._compute, enabled=self._compute != torch.float32)(fn)

    def clip_grad_norm(self, model: nn.Module, limit: float | None) -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), math.inf if limit is None else limit)

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, base.TensorState]:
        return {key: _state(tensor) for key, tensor in base.checkpoint_tensors(model, optimizer).items()}

    def load_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, read: base.Read) -> None:
        for key, tensor in base.checkpoint_tensors(model, optimizer).items():
            read(key, full_region(tensor.shape), tensor.detach())

    def memory(self) -> base.MemoryStats:
        return base.process_memory()

    def start_trace(self, folder: Path) -> Callable[[], Callable[[], list[Operation]]]:
        return lambda: list


def _state(tensor: Tensor) -> base.TensorState:
    piece = base.Piece((0,) * tensor.dim(), tensor.detach())
    return base.TensorState(tuple(tensor.shape), tensor.dtype, lambda: [piece])
