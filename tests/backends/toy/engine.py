"""The contract of `backends/contract.py` with nothing clever in it, over a mesh with an axis that no other engine has.

A process is a device. Two of them along `tensor` get the same rows; each weight is cut along its last dimension over
`tensor`, where that divides, beside its rows over `shard`. Weights are gathered before a micro batch, and gradients
summed and cut after it.
"""

import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from portable_fsdp.backends import contract
from portable_fsdp.backends.contract import Operation
from portable_fsdp.backends.refusals import Deployment, require_supported
from portable_fsdp.backends.state import checkpoint_tensors, parameter_slots, zero_optimizer
from portable_fsdp.config.schema import Config
from portable_fsdp.layout import (
    LOSS_AXES,
    ROW_AXES,
    Region,
    Spec,
    coordinates,
    count_copies,
    count_row_shards,
    cutting_axes,
    groups_over,
    mesh_axes,
    region,
    replica,
)


class ToyBackend(contract.Backend):
    name = "toy"

    def __init__(self, device: str, config: Config, num_devices: int | None) -> None:
        count = int(os.environ.get("WORLD_SIZE", "1")) if dist.is_initialized() else 1
        self.deployment = Deployment("toy", device, count, 1)
        self.adopt(config)
        self.device, self.device_name = torch.device(device), device
        self.process, self.devices = contract.Partition(dist.get_rank() if count > 1 else 0, count), count
        tensor = 2 if count % 2 == 0 else 1
        self.axes = {**mesh_axes(config, count // tensor, 1), "tensor": tensor}
        self.row_shards = count_row_shards(self.axes)
        self.data_shard = contract.Partition(self.process.index // tensor, self.row_shards)
        self.expected_compilations, self.optimizers = 0, WeakKeyDictionary()
        self._place = coordinates(self.axes, self.process.index)
        self._compute = torch.float32
        self._group = cache(self._new_group)

    def adopt(self, config: Config) -> None:
        require_supported(config, self.deployment)

    def close(self) -> None:
        """The groups end with their process."""

    def shard_model(self, model: nn.Module, policy: contract.ShardPolicy, fill: contract.Fill | None) -> nn.Module:
        assert fill is not None
        self._model, self._compute, self._shapes = model, policy.compute, dict[str, torch.Size]()
        self._layouts = {fqn: self._spec(spec, model.get_parameter(fqn)) for fqn, spec in policy.layouts.items()}
        self._slots = parameter_slots(model)
        parts: dict[str, nn.Parameter] = {}
        for fqn in self._slots:
            given = model.get_parameter(fqn)
            self._shapes[fqn] = given.shape
            part = fill(fqn, region(given.shape, self._layouts[fqn], self.axes, self._place)).clone()
            parts[fqn] = nn.Parameter(part, given.requires_grad)
        self._hold(parts)
        return model

    def _spec(self, spec: Spec, weight: Tensor) -> Spec:
        if not spec or weight.shape[-1] % (self.axes["tensor"] * (self.axes["shard"] if len(spec) == 1 else 1)):
            return spec
        return (*spec[:-1], (*spec[-1], "tensor"))

    def build_optimizer(
        self, make: contract.MakeOptimizer, groups: list[dict[str, Any]], model: nn.Module
    ) -> torch.optim.Optimizer:
        parameters = dict(model.named_parameters())
        optimizer = zero_optimizer(
            make, groups, parameters, lambda _, twin, __: torch.zeros_like(twin, device="cpu"), compiled=False
        )
        self.optimizers[optimizer] = None
        return optimizer

    def place(self, batch: contract.Batch, axes: Sequence[str] = ROW_AXES) -> contract.Batch:
        return batch

    def compile(self, fn: Callable[..., contract.Metrics], name: str) -> Callable[..., contract.Metrics]:
        return torch.autocast("cpu", self._compute, enabled=self._compute != torch.float32)(fn)

    @contextmanager
    def accumulate(self, last: bool, model: nn.Module | None = None) -> Generator[None]:
        with self._gathered() as wholes:
            yield
        gradients = {fqn: whole.grad for fqn, whole in wholes.items() if whole.grad is not None}
        for fqn, gradient in self._summed(gradients, LOSS_AXES).items():
            held, part = self._model.get_parameter(fqn), gradient[self._region(fqn)]
            held.grad = part.clone() if held.grad is None else held.grad + part

    @contextmanager
    def evaluate(self) -> Generator[None]:
        with torch.no_grad(), self._gathered():
            yield

    @contextmanager
    def _gathered(self) -> Generator[dict[str, nn.Parameter]]:
        """The model with whole weights."""
        parts, own = dict(self._model.named_parameters()), dict[str, Tensor]()
        for fqn, held in parts.items():
            own[fqn] = torch.zeros(self._shapes[fqn], dtype=held.dtype)
            if replica(self._layouts[fqn], self.axes, self._place)[0] == 0:
                own[fqn][self._region(fqn)] = held.detach()
        summed = self._summed(own, tuple(self.axes))
        wholes = {fqn: nn.Parameter(whole, parts[fqn].requires_grad) for fqn, whole in summed.items()}
        self._hold(wholes)
        try:
            yield wholes
        finally:
            self._hold(parts)

    def _summed(self, tensors: Mapping[str, Tensor], axes: Sequence[str]) -> dict[str, Tensor]:
        """Sum all tensors over `axes` by one collective."""
        flat = self.sum(torch.cat([tensor.flatten() for tensor in tensors.values()]), axes)
        parts = flat.split([tensor.numel() for tensor in tensors.values()])
        return {fqn: part.view_as(tensors[fqn]).clone() for fqn, part in zip(tensors, parts, strict=True)}

    def _region(self, fqn: str) -> Region:
        return region(self._shapes[fqn], self._layouts[fqn], self.axes, self._place)

    def _hold(self, weights: Mapping[str, nn.Parameter]) -> None:
        for fqn, slots in self._slots.items():
            for slot in slots:
                slot.module._parameters[slot.leaf] = weights[fqn]

    def clip_grad_norm(self, model: nn.Module | Iterable[Tensor], limit: float | None) -> Tensor:
        assert isinstance(model, nn.Module)
        gradients = {fqn: weight.grad for fqn, weight in model.named_parameters() if weight.grad is not None}
        squares = [self.sum(g.float().square().sum(), cutting_axes(self._layouts[fqn])) for fqn, g in gradients.items()]
        norm = torch.stack(squares).sum().sqrt()
        if limit is not None:
            nn.utils.clip_grads_with_norm_(model.parameters(), limit, norm)
        return norm

    def sum(self, tensor: Tensor, axes: Sequence[str] = LOSS_AXES) -> Tensor:
        group = self._group(tuple(axis for axis in axes if self.axes.get(axis, 1) > 1))
        total = tensor.clone()
        if group is not None:
            dist.all_reduce(total, group=group)
        return total

    def _new_group(self, axes: tuple[str, ...]) -> dist.ProcessGroup | None:
        groups = [(ranks, dist.new_group(ranks)) for ranks in groups_over(self.axes, axes)] if axes else []
        return next((cast(dist.ProcessGroup, group) for ranks, group in groups if self.process.index in ranks), None)

    def state(self, model: nn.Module, optimizer: contract.OptimizerState) -> dict[str, contract.TensorState]:
        held = checkpoint_tensors(model, optimizer, self._layouts)
        return {key: self._state(self._shape(key, tensor), tensor, spec) for key, (tensor, spec, _) in held.items()}

    def load_state(self, model: nn.Module, optimizer: contract.OptimizerState, read: contract.Read) -> None:
        for key, (tensor, spec, _) in checkpoint_tensors(model, optimizer, self._layouts).items():
            read(key, region(self._shape(key, tensor), spec, self.axes, self._place), tensor.detach())

    def _shape(self, key: str, tensor: Tensor) -> torch.Size:
        fqn = key.rpartition("/")[2]
        is_cut = fqn in self._shapes and tensor.shape == self._model.get_parameter(fqn).shape
        return self._shapes[fqn] if is_cut else tensor.shape

    def _state(self, shape: torch.Size, tensor: Tensor, spec: Spec) -> contract.TensorState:
        part, copies = region(shape, spec, self.axes, self._place), count_copies(spec, self.axes)
        number = replica(spec, self.axes, self._place)[0] if copies > 1 else None
        piece = contract.Piece(tuple(cut.start for cut in part), tensor.detach(), number)
        return contract.TensorState(tuple(shape), tensor.dtype, lambda: [piece] if tensor.numel() else [])

    def memory(self) -> contract.MemoryStats:
        return contract.process_memory()

    def start_trace(self, folder: Path) -> Callable[[], Callable[[], list[Operation]]]:
        return lambda: list
