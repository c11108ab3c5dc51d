"""Native: FSDP2 (`fully_shard`), one process per device. gloo on CPU, NCCL on CUDA, TorchTPU's tpu_dist on TPUs.

`shard_model` reads top to bottom: the units (`units.py`) and prefetching (`prefetch.py`), or neither of them if nothing
is sharded (`unsharded.py`), then memory and weights. With `memory.cpu_offload` parameters, gradients and optimizer
state are on the host: FSDP2 copies shards to the device to gather them, and reduced gradients back, and the optimizer
runs on the host.
"""

import logging
import math
import os
import warnings
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor import zeros as distributed_zeros
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from portable_fsdp.attach import refuse_copies, set_row_parts
from portable_fsdp.backends import contract
from portable_fsdp.backends.native.settings import compile_cache, process_settings
from portable_fsdp.backends.native.units import (
    COLLECTIVES,
    ComputeTime,
    local_part,
    materialise,
    move_buffers,
    reshard_all,
    shard_units,
    use_float8,
)
from portable_fsdp.backends.native.unsharded import dequantise_experts, use_in_place, view_tables
from portable_fsdp.backends.refusals import Deployment, require_supported
from portable_fsdp.backends.state import checkpoint_tensors, persistent_buffers, zero_optimizer
from portable_fsdp.backends.weight_uses import check_statistics
from portable_fsdp.config.schema import Config
from portable_fsdp.layout import (
    FSDP_AXES,
    LOSS_AXES,
    ROW_AXES,
    Region,
    RowParts,
    Spec,
    coordinates,
    count_row_shards,
    cutting_axes,
    full_region,
    mesh_axes,
    region,
    replica,
    state_spec,
)
from portable_fsdp.runtime.errors import BackendError, TrainingError, close_after
from portable_fsdp.runtime.host import prefer_expandable_segments
from portable_fsdp.runtime.launchers import Launch, detect_launch

if TYPE_CHECKING:
    from portable_fsdp.backends.native.groups import GradientSums, Group
    from portable_fsdp.backends.native.offload import ActivationOffload
    from portable_fsdp.backends.native.prefetch import Prefetch
    from portable_fsdp.backends.native.torchtpu import TpuPrograms
    from portable_fsdp.tensor_plan import TensorPlan

log = logging.getLogger("portable_fsdp")

_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "tpu": "cpu:gloo,tpu:tpu_dist"}  # of torch.distributed


@dataclass
class _Sharded:
    """What the engine keeps of a model that it sharded."""

    layouts: Mapping[str, Spec]  # of the parameters that checkpoints hold
    shapes: dict[str, torch.Size]  # of whole weights
    reduce: torch.dtype  # of sums of gradients
    plan: "TensorPlan | None"  # of the axis `tensor`
    prefetch: "Prefetch | None" = None
    units: list[FSDPModule] = field(default_factory=lambda: [])  # the root first
    cuts: dict[Tensor, tuple[str, ...]] = field(default_factory=lambda: {})  # weight -> axes, found at the first clip
    whole: list[nn.Parameter] = field(default_factory=lambda: [])  # weights that aren't cut, nor gathered


class NativeBackend(contract.Backend):
    """FSDP2 on the process group that torchrun (or a plain start) describes."""

    name = "native"

    def __init__(self, device: str, config: Config, num_devices: int | None) -> None:
        launch = detect_launch(os.environ)
        self._owns_group = not dist.is_initialized()
        if self._owns_group:
            os.environ.update(launch.variables)
        count = launch.world_size if self._owns_group else dist.get_world_size()
        hosts = max(1, count // int(os.environ.get("LOCAL_WORLD_SIZE", count)))
        _check_launch(device, num_devices, count, launch.local_rank)
        self.deployment = Deployment(self.name, device, count, hosts)
        require_supported(config, self.deployment)
        self._programs: TpuPrograms | None = None
        self._open_device(device, launch, config)
        if self._owns_group:
            self._join(launch, device, config.run.peer_timeout_s)
        self.process = contract.Partition(dist.get_rank(), dist.get_world_size())
        self.devices, self.expected_compilations = self.process.count, 0
        self._open_mesh(device, mesh_axes(config, count, hosts), count // hosts)
        self._counter = _CollectiveCounter()
        self._counts_collectives = config.model.attention != "flex"  # nor with compiled layers
        self._first_step_is_over = False
        self._compute_time: ComputeTime | None = None
        self._models: dict[nn.Module, _Sharded] = {}
        self.optimizers = weakref.WeakKeyDictionary()
        self._reshards_later = False  # in `accumulate` and `evaluate`, which reshard all models when they end
        self._sums: dict[tuple[int, ...], GradientSums] = {}  # by the ids of the models
        # Weights whose gradients are sums, over which axes.
        self._summed: dict[nn.Parameter, tuple[nn.Module, weakref.ref[Tensor], set[str]]] = {}
        self.offload: ActivationOffload | None = None
        self._update_scales: list[Callable[[], None]] = []  # of weights that are gathered in float8
        self._keeps_gradients = config.memory.cpu_offload  # else their pinned memory would be allocated in each step
        self._syncs_each_micro_batch = config.sharding.sync_each_micro_batch
        self._settings = ExitStack()
        self._apply(config)
        if "float16" in config.precision.dtypes:
            from portable_fsdp.optim.counting import LossScaler

            self.loss_scaler = LossScaler(config.precision.loss_scale, config.precision.loss_scale_window, self.device)

    def adopt(self, config: Config) -> None:
        require_supported(config, self.deployment)
        self._apply(config)

    def _apply(self, config: Config) -> None:
        """Set what depends on keys that may be `auto`."""
        self._settings.close()
        self._settings = process_settings(config, self.device)
        self.runs_blocks = self.deployment.device == "cuda" and config.compile.compiler in ("auto", "inductor")

    def _open_device(self, device: str, launch: Launch, config: Config) -> None:
        self.device, self.device_name = torch.device("cpu"), device
        if device == "tpu":
            from portable_fsdp.backends.native import torchtpu

            processes = launch.world_size if self._owns_group else None
            self.device, self.device_name, self._programs = torchtpu.open_chip(processes, compile_cache(config))
        if device == "cuda":
            prefer_expandable_segments()
            self.device = torch.device(device, launch.local_rank)
            torch.cuda.set_device(self.device)
            self.device_name = torch.cuda.get_device_name(self.device)

    def _join(self, launch: Launch, device: str, timeout_s: float) -> None:
        """Form the group of the launcher's processes; one that no launcher started is alone."""
        rank = contract.Partition(launch.rank, launch.world_size)
        if launch.is_alone:
            store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
            dist.init_process_group(_BACKENDS[device], store=store, rank=rank.index, world_size=rank.count)
            return
        from portable_fsdp.backends.peers import join

        where = self.device if device == "cuda" else None
        self._peers = join(_BACKENDS[device], rank, timeout_s, os.environ, where)

    def _open_mesh(self, device: str, axes: dict[str, int], per_host: int) -> None:
        self.axes, index = axes, self.process.index
        if (tensor := axes.get("tensor", 1)) > per_host and index == 0:
            log.warning(
                "sharding.tensor: its %d devices lie on several hosts. Each layer waits for the network between them, "
                "which is 9 times slower than the links inside a host with H100s (50 and 450 GB/s): set "
                "sharding.tensor=%d",
                tensor,
                math.gcd(tensor, per_host),
            )
        self.row_shards = count_row_shards(axes)
        self._place = coordinates(axes, index)
        # Rows lie over the outer axes: processes along `context` and `tensor` feed the same.
        self.data_shard = contract.Partition(index * self.row_shards // self.devices, self.row_shards)
        self._mesh = init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))
        self._fsdp_axes = tuple(axis for axis in FSDP_AXES if axes.get(axis, 1) > 1)
        self._fsdp_size = math.prod(axes[axis] for axis in self._fsdp_axes)
        self._row_parts: RowParts | None = None
        self.split_tokens: Callable[[contract.Batch], contract.Batch] = dict
        if "context" in axes:
            from portable_fsdp.backends.native.groups import gather_tokens, split_tokens

            group = self._along("context")
            self._row_parts = RowParts(group.index, group.count, partial(gather_tokens, group))
            self.split_tokens = partial(split_tokens, parts=self._row_parts)

    def __exit__(self, *raised: Any) -> None:
        """Close. Raises TrainingError, which names the lost process, in place of a network error."""
        _, error, _ = raised
        peers, self._peers = self._peers, None
        try:
            if peers:
                peers.leave(error)
        except TrainingError as lost:
            error = lost
            raise
        finally:
            close_after(error, self._release)

    def _release(self) -> None:
        if self._programs:
            self._programs.close()
        self._settings.close()
        if dist.is_initialized():
            for group in self._mesh.get_all_groups():  # each gloo group has polling threads
                if group is not dist.group.WORLD:
                    dist.destroy_process_group(group)
            if self._owns_group:
                dist.destroy_process_group()

    def close(self) -> None:
        self.__exit__(None, None, None)

    def shard_model(self, model: nn.Module, policy: contract.ShardPolicy, fill: contract.Fill | None) -> nn.Module:
        check_statistics(model, policy)
        move_buffers(model, self.device)
        # torch.compile makes no program, or one for each layer, while a dispatch mode is active.
        self._counts_collectives &= policy.compile_backend is None
        if policy.tables:
            view_tables(model, policy)
        saved = {fqn: spec for fqn, spec in policy.layouts.items() if fqn not in policy.tables}
        shapes = {fqn: weight.shape for fqn, weight in model.named_parameters()}
        self._models[model] = record = _Sharded(saved, shapes, policy.reduce, policy.tensor)
        if self._row_parts is not None:
            set_row_parts(model, self._row_parts)
        if policy.tensor is not None:
            from portable_fsdp.backends.native.tensor import run_parts, split_model

            if policy.require_plan is not None:
                policy.require_plan(run_parts)
            split_model(model, policy.tensor, self._along("tensor"), policy.draws)
        if "expert" in self.axes:
            from portable_fsdp.backends.native.groups import distribute_experts

            distribute_experts(model, policy, self._along("expert"), self._fsdp_size // self.axes["expert"])
        if policy.products != "auto":
            self._update_scales.append(use_float8(model, policy, self.device, self._fsdp_size))
        if self._fsdp_size == 1 and not policy.cpu_offload:
            use_in_place(model, policy)
        else:
            from portable_fsdp.backends.native.prefetch import Prefetch

            meshes = self._fsdp_mesh(self._fsdp_axes), None
            if "expert" in self.axes:
                meshes = meshes[0], self._fsdp_mesh([axis for axis in self._fsdp_axes if axis != "expert"])
            record.prefetch = Prefetch(shard_units(model, policy, *meshes, self.device), policy)
            record.units = [module for module in model.modules() if isinstance(module, FSDPModule)]
            model.register_forward_hook(self._reshard_if_alone)
            refuse_copies(cast(list[nn.Module], record.units))
            if policy.tables:
                dequantise_experts(model, policy)
        if policy.offload_activations:
            from portable_fsdp.backends.native.offload import ActivationOffload

            self.offload = ActivationOffload(self.device)
            self.offload.wrap([model.get_submodule(name) for name in policy.recompute])
        if fill is not None:
            self._fill(model, policy, fill)
        record.whole = [weight for weight in model.parameters() if not isinstance(weight, DTensor)]
        return model

    def _fill(self, model: nn.Module, policy: contract.ShardPolicy, fill: contract.Fill) -> None:
        """Allocate the weights of this process, and set their values."""
        # On a TPU the host's clock would time dispatch alone, and TorchTPU's events wait for copies to the host alone.
        self._compute_time = None if self.device.type == "tpu" else ComputeTime(model, policy.units, self.device)
        materialise(model, policy, self.device)
        with torch.no_grad():
            for fqn, parameter in model.named_parameters():
                for part, own in self._regions(model, fqn, parameter, policy.layouts[fqn]):
                    local, piece = local_part(parameter)[own], fill(fqn, part)
                    local.copy_(piece.view(local.dtype) if fqn in policy.tables else piece)

    def build_optimizer(
        self, make: contract.MakeOptimizer, groups: list[dict[str, Any]], model: nn.Module
    ) -> torch.optim.Optimizer:
        parameters, layouts = dict(model.named_parameters()), self._models[model].layouts
        # Foreach functions can't mix DTensors and plain tensors: scalars get their own groups.
        kinds = [
            {**group, "params": names}
            for group in groups
            for kind in (True, False)
            if (names := [fqn for fqn in group["params"] if isinstance(parameters[fqn], DTensor) is kind])
        ]

        def zeros(fqn: str, twin: Tensor, group: dict[str, Any]) -> Tensor:
            return _zeros(parameters[fqn], twin, group, layouts[fqn])

        optimizer = zero_optimizer(make, kinds, parameters, zeros, compiled=False)
        optimizer.register_step_post_hook(self._note_step)
        self.optimizers[optimizer] = None
        return optimizer

    def shard_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        from portable_fsdp.backends import own_objects as own

        if self.loss_scaler is not None:
            raise BackendError("shard_optimizer: precision.compute=float16 scales losses.\n  Set bfloat16.")

        def zeros(parameter: Tensor, twin: Tensor, group: dict[str, Any]) -> Tensor:
            model, fqn = owners[parameter]
            return _zeros(parameter, twin, group, self._models[model].layouts[fqn])

        chose = any(optimizer.defaults.get(name) is not None for name in ("fused", "foreach"))
        if type(optimizer) in (torch.optim.AdamW, torch.optim.Adam) and not chose and self.device.type != "tpu":
            for group in optimizer.param_groups:  # else each operation on each DTensor is dispatched in Python
                group["fused"] = True
        allocate = own.zero_state(optimizer, self.optimizers, owners := own.owners_of(self._models), zeros)
        if any(isinstance(weight, DTensor) for group in optimizer.param_groups for weight in group["params"]):
            own.step_kinds_apart(optimizer)
        optimizer.register_step_pre_hook(partial(own.require_sums, self._summed, self._group(LOSS_AXES)))
        optimizer.register_step_post_hook(self._note_step)
        own.warn_of_kept_gradients(optimizer, self.optimizers, self._models)
        self.optimizers[optimizer] = allocate

    def _note_step(self, *_: Any) -> None:
        self._first_step_is_over = True
        for update in self._update_scales:
            update()
        if self._peers:
            self._peers.note_step()
        if self._programs:
            self._programs.note_step()

    def place(self, batch: contract.Batch, axes: Sequence[str] = ROW_AXES) -> contract.Batch:
        pins = self.device.type == "cuda"
        own = self.split_tokens(contract.as_batch(batch)).items()
        rows = {name: tensor.pin_memory() if pins else tensor for name, tensor in own}
        return {name: tensor.to(self.device, non_blocking=pins) for name, tensor in rows.items()}

    def compile(self, fn: Callable[..., contract.Metrics], name: str) -> Callable[..., contract.Metrics]:
        is_counted = self._counts_collectives and name not in ("evaluate", "sample")
        return self._counting_once()(fn) if is_counted else fn

    @contextmanager
    def _counting_once(self) -> Generator[None]:
        """Context of each program: count its collectives until the first step is over."""
        with nullcontext() if self._first_step_is_over else self._counter:
            yield

    @contextmanager
    def accumulate(self, last: bool, model: nn.Module | None = None) -> Generator[None]:
        # Shards are reduced in every micro batch: keeping unsharded gradients until the last one would undo FULL_SHARD.
        # Replicas are reduced once, in the last one.
        if model not in self._models and model is not None and len(self._models) > 1:
            raise ValueError("accumulate: this engine didn't shard that model; pass one that it sharded, or None")
        models = [model] if model in self._models else list(self._models)
        for root in models:
            if isinstance(root, FSDPModule):
                if self._syncs_each_micro_batch:
                    root.set_requires_all_reduce(last)
                else:
                    root.set_requires_gradient_sync(last)
        self._gather_first(models)
        self._reopen_sums(models)
        sums = self._gradient_sums(models) if last and self._group(LOSS_AXES) else None
        with (
            self._resharding_later(),
            sums.summing(overlap=model in self._models) if sums else nullcontext(),
            _explained_errors(models),
        ):
            yield
        for model in models if last else ():
            if (plan := self._models[model].plan) is not None:
                from portable_fsdp.backends.native.tensor import sum_gradients

                by_tensor = sum_gradients(model, plan, self._along("tensor"))
                self._note_sums(by_tensor, [model], "tensor")
        if sums is not None:
            self._note_sums(sums.parameters, models, *LOSS_AXES)

    def _note_sums(self, weights: Iterable[nn.Parameter], models: list[nn.Module], *axes: str) -> None:
        if len(models) > 1:
            owner = {weight: model for model in models for weight in model.parameters()}
        else:
            owner = dict.fromkeys(weights, models[0])
        for weight in weights:
            if weight.grad is not None:
                _, _, before = self._summed.get(weight, (None, None, ()))
                self._summed[weight] = owner[weight], weakref.ref(weight.grad), {*before, *axes}

    def _reopen_sums(self, models: Iterable[nn.Module]) -> None:
        """Make gradients that are sums parts of one again, since this context or a later one sums anew: the first
        process along their axes keeps them, the others get zeros."""
        for weight, (model, gradient, axes) in [*self._summed.items()]:
            if model in models and weight.requires_grad:
                del self._summed[weight]
                if (old := gradient()) is not None and old is weight.grad and any(map(self._place.get, axes)):
                    local_part(old).zero_()

    def _gradient_sums(self, models: list[nn.Module]) -> "GradientSums | None":
        """The all-reduce of gradients that FSDP2 doesn't reduce, rebuilt when the set of trainable weights changes;
        None: no trainable weight is replicated."""
        trained = [p for model in models for p in self._models[model].whole if p.requires_grad]
        if not trained:
            return None
        key = tuple(map(id, models))
        sums = self._sums.get(key)
        if sums is None or [*map(id, trained)] != [*map(id, sums.parameters)]:
            from portable_fsdp.backends.native.groups import GradientSums

            if sums:
                sums.close()
            reduce = self._models[models[0]].reduce
            sums = self._sums[key] = GradientSums(trained, cast(dist.ProcessGroup, self._group(LOSS_AXES)), reduce)
        return sums

    def _gather_first(self, models: Iterable[nn.Module]) -> None:
        for model in models:
            if prefetch := self._models[model].prefetch:
                prefetch.before_forward()

    def unshard(self, module: nn.Module) -> None:
        if isinstance(module, FSDPModule):
            module.unshard(async_op=True)

    @contextmanager
    def evaluate(self) -> Generator[None]:
        self._gather_first(self._models)
        if self._programs:
            self._programs.expect_others()
        with self._resharding_later(), torch.no_grad(), _explained_errors(self._models):
            yield

    def second_derivatives(self, model: nn.Module) -> AbstractContextManager[None]:
        from portable_fsdp.backends.gathered import kept_gathered

        if model not in self._models:
            raise ValueError("second_derivatives: this engine didn't shard that model; pass one that it sharded")
        return kept_gathered(self._models[model].units)

    @contextmanager
    def _resharding_later(self) -> Generator[None]:
        """Context whose end reshards what a forward without backward left gathered: `parameters()` would be whole
        tensors, whose gradients and pieces the engine would take for those of replicated weights."""
        before, self._reshards_later = self._reshards_later, True
        try:
            yield
        finally:
            self._reshards_later = before
            for record in self._models.values():
                reshard_all(record.units)

    def _reshard_if_alone(self, model: nn.Module, *_: Any) -> None:
        """Reshard after the root's forward where neither a context nor a backward does."""
        if not (self._reshards_later or torch.is_grad_enabled()):
            reshard_all(self._models[model].units)

    def zero_gradients(self, optimizer: torch.optim.Optimizer, *, keep: bool) -> None:
        if optimizer not in self.optimizers:
            from portable_fsdp.backends.own_objects import refuse_unknown

            refuse_unknown(optimizer)
        if not keep and not self._keeps_gradients:
            super().zero_gradients(optimizer, keep=False)
            return
        weights = (weight for group in optimizer.param_groups for weight in group["params"])
        if gradients := [local_part(weight.grad) for weight in weights if weight.grad is not None]:
            cast(Any, torch)._foreach_zero_(gradients)

    def scale_gradients(self, model: nn.Module, factor: Tensor) -> None:
        _scale([local_part(p.grad) for p in model.parameters() if p.grad is not None], factor)

    def clip_grad_norm(self, model: nn.Module | Iterable[Tensor], limit: float | None) -> Tensor:
        # On local shards, in float32, and reduced on the device: with cpu_offload gradients are on the host.
        cut_by: dict[tuple[str, ...], list[Tensor]] = {}
        parts = [model] if isinstance(model, nn.Module) else self._models
        cuts = {weight: axes for part in parts for weight, axes in self._cuts_of(part).items()}
        for weight in cuts if isinstance(model, nn.Module) else model:
            if weight.grad is not None:
                if weight not in cuts:
                    raise BackendError("clip_grad_norm: a parameter is of no model that this engine sharded.")
                cut_by.setdefault(cuts[weight], []).append(local_part(weight.grad))
        gradients = [gradient for part in cut_by.values() for gradient in part]
        if not gradients:
            return torch.zeros((), device=self.device)
        squares = [self._sum_of_shards(self._squared_norm(part), axes) for axes, part in cut_by.items()]
        norm = torch.stack(squares).sum().sqrt()
        factor = None if self.loss_scaler is None else 1 / self.loss_scaler.scale
        norm = norm if factor is None else norm * factor
        if limit is not None:
            clip = (limit / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
            factor = clip if factor is None else clip * factor
        if factor is not None:
            _scale(gradients, factor)
        return norm

    def _cuts_of(self, model: nn.Module) -> dict[Tensor, tuple[str, ...]]:
        """The axes that cut each weight; without quantised ones, which don't train."""
        record = self._models[model]
        if not record.cuts:  # sorted: one sum, whichever dimension is split
            named = {weight: fqn for fqn, weight in model.named_parameters() if fqn in record.layouts}
            record.cuts = {weight: tuple(sorted(cutting_axes(record.layouts[fqn]))) for weight, fqn in named.items()}
        return record.cuts

    def _squared_norm(self, gradients: list[Tensor]) -> Tensor:
        norms = cast(list[Tensor], cast(Any, torch)._foreach_norm(gradients, 2, torch.float32))
        return torch.stack(norms).to(self.device).square().sum()

    def _sum_of_shards(self, value: Tensor, axes: tuple[str, ...]) -> Tensor:
        """Sum a scalar over the axes that cut a weight. Replicas must get identical bits, and the order in which NCCL
        adds depends on each host's topology: where there are replicas, gather and add in a fixed order."""
        group = self._group(axes)
        if group is None or group is dist.group.WORLD:
            return self.sum(value, axes)
        values = value.new_empty(group.size())
        dist.all_gather_into_tensor(values, value.reshape(1), group=group)
        return values.sum()

    def sum(self, tensor: Tensor, axes: Sequence[str] = LOSS_AXES) -> Tensor:
        group = self._group(axes)
        if group is None:
            return tensor
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    def _group(self, axes: Sequence[str]) -> dist.ProcessGroup | None:
        """The group of processes that differ from this one only along `axes`; None: there is no other process."""
        names = tuple(axis for axis, size in self.axes.items() if size > 1 and axis in axes)
        if not names:
            return None
        if math.prod(self.axes[axis] for axis in names) == self.process.count:
            return dist.group.WORLD
        mesh = self._mesh[names]
        return (mesh if len(names) == 1 else cast(Any, mesh)._flatten()).get_group()

    def _along(self, axis: str) -> "Group":
        """The processes along one axis of several devices."""
        from portable_fsdp.backends.native.groups import Group

        return Group(cast(dist.ProcessGroup, self._group((axis,))))

    def _fsdp_mesh(self, axes: Sequence[str]) -> DeviceMesh:
        """The mesh of `fully_shard`: `axes` as one dimension, after the replicas if there are any."""
        names = tuple(axes) or ("shard",)
        flat = self._mesh[names] if len(names) == 1 else cast(Any, self._mesh[names])._flatten()
        if self.axes["replicate"] == 1:
            return flat
        with warnings.catch_warnings():  # torch 2.13 announces another way, which 2.9 lacks
            warnings.filterwarnings("ignore", message="Slicing a flattened dim", category=UserWarning)
            return self._mesh["replicate", "_".join(names)]

    def fetch(self, metrics: contract.Metrics) -> contract.Pending:
        if self.device.type == "cpu":
            return super().fetch({name: value.clone() for name, value in metrics.items()})
        sizes = {name: value.shape for name, value in metrics.items()}
        values = torch.cat([value.float().flatten() for value in metrics.values()])  # one copy; on TPUs one program
        copied = torch.cuda.Event() if values.is_cuda else None
        if copied is not None:  # the copy overlaps compute
            values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
            copied.record()

        def result() -> dict[str, Tensor]:
            if copied is not None:
                copied.synchronize()
            parts = values.cpu().split([size.numel() for size in sizes.values()])
            return {name: part.view(size) for (name, size), part in zip(sizes.items(), parts, strict=True)}

        return contract.Pending(result)

    def state(self, model: nn.Module, optimizer: contract.OptimizerState) -> dict[str, contract.TensorState]:
        buffers = persistent_buffers(model)  # not compared: statistics of each process's rows may differ
        tensors = checkpoint_tensors(model, optimizer, self._models[model].layouts)
        return {
            key: self._tensor_state(model, fqn, tensor, spec, is_compared=key not in buffers)
            for key, (tensor, spec, fqn) in tensors.items()
        }

    def load_state(self, model: nn.Module, optimizer: contract.OptimizerState, read: contract.Read) -> None:
        tensors = checkpoint_tensors(model, optimizer, self._models[model].layouts)
        with torch.no_grad():
            for key, (tensor, spec, fqn) in tensors.items():
                for part, own in self._regions(model, fqn, tensor, spec):
                    local = local_part(tensor)[own]
                    if local.device.type == "cpu" and local.is_contiguous():
                        read(key, part, local)
                    else:
                        local.copy_(read(key, part))
            for update in self._update_scales:
                update()

    def tensor_state(self, tensor: Tensor) -> contract.TensorState:
        from portable_fsdp.backends.own_objects import part_of

        pieces = [part_of(tensor, self.process)]
        return contract.TensorState(tuple(tensor.shape), tensor.dtype, lambda: pieces)

    def load_tensor(self, tensor: Tensor, read: Callable[[Region], Tensor]) -> None:
        from portable_fsdp.backends.own_objects import part_of

        offset, local, _ = part_of(tensor, self.process)
        local.copy_(read(tuple(slice(at, at + size) for at, size in zip(offset, local.shape, strict=True))))

    @property
    def collectives(self) -> dict[str, contract.Traffic] | None:
        if not self._first_step_is_over or not self._counts_collectives:
            return None
        return dict(self._counter.traffic)

    def compute_seconds(self) -> float | None:
        return self._compute_time.take() if self._compute_time else None

    def memory(self) -> contract.MemoryStats | None:
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            return contract.MemoryStats(torch.cuda.max_memory_allocated(self.device), total)
        if self.device.type == "tpu":
            from portable_fsdp.backends.native import torchtpu

            return torchtpu.memory(self.device)
        return contract.process_memory()

    def start_trace(self, folder: Path) -> Callable[[], Callable[[], list[contract.Operation]]]:
        from portable_fsdp.backends.native.profile import start_trace

        if self.device.type == "tpu":  # requested during a run; observe.profile is refused
            raise BackendError("torch.profiler records no operation that TorchTPU runs on a chip")
        return start_trace(folder)

    def _regions(self, model: nn.Module, fqn: str, tensor: Tensor, spec: Spec) -> Iterable[tuple[Region, Region]]:
        """The regions of a whole tensor that this process holds, each with its region in the local tensor."""
        shape = self._whole_shape(model, fqn, tensor, spec)
        if "tensor" in cutting_axes(spec):
            from portable_fsdp.tensor_plan import packed_regions

            plan = cast("TensorPlan", self._models[model].plan)
            return packed_regions(shape, spec, self.axes, self._place, plan.parts[fqn].sizes)
        part = region(shape, spec, self.axes, self._place)
        is_empty = any(cut.start >= cut.stop for cut in part)
        return [] if is_empty else [(part, full_region([cut.stop - cut.start for cut in part]))]

    def _tensor_state(
        self, model: nn.Module, fqn: str, tensor: Tensor, spec: Spec, *, is_compared: bool
    ) -> contract.TensorState:
        """Describe this process's part of a tensor. Of equal copies the first is written."""
        copy, copies = replica(spec, self.axes, self._place)
        held = self._regions(model, fqn, tensor, spec) if is_compared or copy == 0 else []
        number = copy if is_compared and copies > 1 else None
        local = local_part(tensor)
        pieces = [contract.Piece(tuple(cut.start for cut in part), local[own], number) for part, own in held]
        return contract.TensorState(self._whole_shape(model, fqn, tensor, spec), tensor.dtype, lambda: pieces)

    def _whole_shape(self, model: nn.Module, fqn: str, tensor: Tensor, spec: Spec) -> tuple[int, ...]:
        """The shape on all devices of the weight `fqn` or of its optimizer state; DTensor knows FSDP's axes alone."""
        weight = self._models[model].shapes.get(fqn, ())  # a state may have more dimensions
        sizes = zip(tensor.shape, (*weight, *tensor.shape), spec, strict=False)
        return tuple(whole if cuts[:1] in (("tensor",), ("expert",)) else size for size, whole, cuts in sizes)


def _check_launch(device: str, num_devices: int | None, world_size: int, local_rank: int) -> None:
    if num_devices is not None and num_devices != world_size == 1 and "WORLD_SIZE" not in os.environ:
        raise BackendError(
            f"backend native: --num_devices={num_devices} in a script that no launcher started: each device needs a "
            f"process.\n  Start it with torchrun --standalone --nproc_per_node={num_devices}."
        )
    if num_devices is not None and num_devices != world_size:
        raise BackendError(
            f"backend native: --num_devices={num_devices}, but the launcher started {world_size} process(es), and "
            "each process has one device.\n  Leave --num_devices out under a launcher."
        )
    if device == "cuda" and local_rank >= torch.cuda.device_count():
        raise BackendError(
            f"backend native on cuda: local rank {local_rank} needs a GPU of its own, found "
            f"{torch.cuda.device_count()}.\n  Start at most that many processes: torchrun --nproc_per_node=gpu. "
            "Under srun each task must see all GPUs of its host: --gpus-per-node, without --gpus-per-task."
        )


@contextmanager
def _explained_errors(models: Iterable[nn.Module]) -> Generator[None]:
    """Context of forward and backward: an error about a unit that FSDP2 can't track names the module."""
    try:
        yield
    except RuntimeError as error:
        from portable_fsdp.backends.native.boundary import explain

        explain(error, models)
        raise


def _scale(tensors: list[Tensor], factor: Tensor) -> None:
    """Scale in place. On CPU torch's foreach product with a tensor would read the tensor's value."""
    if tensors[0].is_cuda:
        cast(Any, torch)._foreach_mul_(tensors, factor)
        return
    factor = factor.to(tensors[0].device)
    for tensor in tensors:
        tensor.mul_(factor)


def _zeros(parameter: Tensor, twin: Tensor, group: dict[str, Any], spec: Spec) -> Tensor:
    """Allocate optimizer state with the shape and dtype of `twin`; `spec`: of the parameter."""
    if twin.shape == parameter.shape:
        return torch.zeros_like(parameter, dtype=twin.dtype, requires_grad=False)
    if twin.dim() and isinstance(parameter, DTensor):
        mesh, spec = parameter.device_mesh, state_spec(spec, parameter.shape, twin.shape)
        placements = _placements(spec, mesh.mesh_dim_names)
        state = distributed_zeros(twin.shape, dtype=twin.dtype, device_mesh=mesh, placements=placements)
        return state.to(parameter.device)
    on_device = group.get("fused") or twin.device.type != "cpu"
    return torch.zeros(twin.shape, dtype=twin.dtype, device=parameter.device if on_device else "cpu")


def _placements(spec: Spec, names: Sequence[str] | None) -> list[Placement]:
    """Convert a spec to DTensor's placements on the mesh of `_fsdp_mesh`."""
    by_fsdp = [Shard(dim) for dim, axes in enumerate(spec) if {"shard", "context"} & {*axes}]
    return [Replicate() if axis == "replicate" or not by_fsdp else by_fsdp[0] for axis in names or ()]


class _CollectiveCounter(TorchDispatchMode):
    """Counts the collectives that run inside it, in backward too: autograd's threads inherit the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.traffic: dict[str, contract.Traffic] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if (collective := collective_of(func, args)) is not None:
            kind, full, _ = collective
            before = self.traffic.get(kind, contract.Traffic(0, 0))
            self.traffic[kind] = contract.Traffic(before.calls + 1, before.bytes + full.nbytes)
        return func(*args, **(kwargs or {}))


def collective_of(func: Any, args: tuple[Any, ...]) -> tuple[str, Tensor, Any] | None:
    """Return the kind of the collective that an operator runs, the full tensor, and the process group.

    None for other operators, and in a group of one. The first object among the arguments is the group.
    """
    kind = COLLECTIVES.get(func.name())
    if kind is None:
        return None
    group = next(argument for argument in args if isinstance(argument, torch.ScriptObject))
    group = cast(Any, dist.ProcessGroup).unbox(group)
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    return (kind, max(tensors, key=lambda tensor: tensor.nbytes), group) if group.size() > 1 else None
