"""XLA: torch_xla SPMD. One process drives all devices of its host; the program is global, XLA partitions it.

`shard_model` reads top to bottom: the model's forwards (`_wrap_forwards`), then its weights, shard by shard. The engine
sets environment variables that torch_xla reads at import, before it imports torch_xla.
"""

# Parameters are replaced in a module's own tables, and shards are reached through torch_xla's private bridge only.
# pyright: reportPrivateUsage=false

import logging
import math
import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from portable_fsdp.attach import refuse_copies, set_expert_groups
from portable_fsdp.backends import contract
from portable_fsdp.backends.state import checkpoint_tensors, is_count, output_head, parameter_slots, put_parameter
from portable_fsdp.backends.torch_xla.runtime import (
    PjrtBackend,
    recomputed,
    require_devices,
    require_one_process,
    set_environment,
)
from portable_fsdp.backends.torch_xla.spmd.attention import LayerAttention
from portable_fsdp.backends.torch_xla.spmd.experts import MeshExperts
from portable_fsdp.backends.torch_xla.spmd.forward import (
    Copies,
    finish_backward,
    keep_products,
    keep_rows_split,
)
from portable_fsdp.backends.torch_xla.spmd.scan import LayerLoop
from portable_fsdp.backends.torch_xla.spmd.sums import (
    replace_forwards,
    scatter_over,
    summed_in_float32,
    torus_of_run,
)
from portable_fsdp.backends.torch_xla.spmd.tensors import (
    DeviceTensors,
    Layouts,
    Tensors,
    axes_apart,
    rows_between,
    traced,
)
from portable_fsdp.backends.weight_uses import (
    check_statistics,
    eight_bit_layers,
    in_own_dtype,
    uses_by_block,
    weight_uses,
)
from portable_fsdp.config.describe import is_inside
from portable_fsdp.config.schema import Config
from portable_fsdp.layout import (
    FSDP_AXES,
    LOSS_AXES,
    ROW_AXES,
    Region,
    Spec,
    batch_spec,
    count_copies,
    full_region,
    state_spec,
)
from portable_fsdp.runtime.errors import BackendError

log = logging.getLogger("portable_fsdp")


class XlaBackend(PjrtBackend):
    """torch_xla SPMD over all devices of all hosts: PJRT TPU, or N virtual PJRT CPU devices."""

    name = "xla"

    def __init__(self, device: str, config: Config, num_devices: int | None, tensors: Tensors | None = None) -> None:
        """Open the engine. `tensors`: replaces the tensors on devices, for a plan."""
        require_one_process(self.name, device)
        set_environment(device)
        if device == "cpu":  # before torch_xla is imported: the flag, else the environment's number, else 1
            os.environ["CPU_NUM_DEVICES"] = str(num_devices or os.environ.get("CPU_NUM_DEVICES", "1"))
        import torch_xla.distributed.spmd as spmd
        import torch_xla.runtime as runtime

        runtime.use_spmd()
        count = int(cast(Any, runtime).global_runtime_device_count())
        same_process = "The number can't change in a process after its first use: start a new process."
        require_devices(self.name, device, num_devices, count, on_cpu=same_process)
        hosts = int(cast(Any, runtime).process_count())
        self._open(device, config, contract.Partition(int(cast(Any, runtime).process_index()), hosts), count, hosts)
        self.device = torch.device("xla:0")
        self._sum_in_float32 = config.precision.reduce == "float32"
        self._shards = math.prod(self.axes.get(axis, 1) for axis in FSDP_AXES)
        self.mesh: Any = spmd.Mesh(np.arange(count), tuple(self.axes.values()), tuple(self.axes))
        self._programs = self._tensors = tensors or DeviceTensors(
            self.mesh, self.axes, self.process.count, torus=torus_of_run(), for_tpu=device == "tpu"
        )
        if device == "tpu" and not self._tensors.torus:
            log.info("the chips' coordinates are unknown: the compiler sums gradients in its own way, not as planned")
        self._make = self._tensors.make
        self._layouts: dict[nn.Module, Mapping[str, Spec]] = {}
        self._copies: list[Copies] = []  # of each model
        self._row_parts: dict[Tensor, int] = {}  # weight -> equal parts of its dimension 0, if no other is cut
        self._owns_group = self.process.count > 1 and not dist.is_initialized()
        if self._owns_group:
            from portable_fsdp.backends.peers import join

            self._peers = join("gloo", self.process, config.run.peer_timeout_s, _meeting(device, self.process))
        if self.process.count > 1 and self.row_shards < count:
            own = cast(DeviceTensors, self._tensors).row_shards()
            self.data_shard = _data_shard(own, self.gather(own), self.row_shards)

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        try:
            if self._peers:
                self._peers.leave(error)
        finally:
            super().__exit__(kind, error, where)

    def close(self) -> None:
        super().close()
        traced.clear()
        if self._owns_group:
            dist.destroy_process_group()

    # ------------------------------------------------------------------------------------------- model, optimizer

    def shard_model(self, model: nn.Module, policy: contract.ShardPolicy, fill: contract.Fill | None) -> nn.Module:
        check_statistics(model, policy)
        if policy.tensor is not None:
            shapes = {fqn: weight.shape for fqn, weight in model.named_parameters()}
            layouts = {fqn: axes_apart(spec, shapes[fqn], self.axes) for fqn, spec in policy.layouts.items()}
            policy = replace(policy, layouts=layouts)
        if policy.tables:
            from portable_fsdp.backends.torch_xla.spmd import quantised

            barrier = self._bridge._xla_optimization_barrier_
            quantised.use_tables(model, policy, Layouts(self.mesh, self.axes), barrier)
            fill = None if fill is None else partial(quantised.expanded_piece, fill, policy)
        self._wrap_forwards(model, policy)
        refuse_copies(model.modules())
        for fqn, shared in parameter_slots(model).items():
            weight = cast(Tensor, shared[0].module._parameters[shared[0].leaf])
            fetch, spec = None if fill is None else partial(fill, fqn), policy.layouts[fqn]
            laid_out = self._make(weight.shape, weight.dtype, spec, fetch)
            put_parameter(shared, laid_out, weight.requires_grad)
        for module in model.modules():
            for leaf, buffer in module._buffers.items():
                if buffer is not None and not is_count(buffer):
                    whole = ((),) * buffer.dim()
                    module._buffers[leaf] = self._make(buffer.shape, buffer.dtype, whole, buffer.__getitem__)
        saved = {fqn: spec for fqn, spec in policy.layouts.items() if fqn not in policy.tables}
        self._layouts[model] = saved
        for fqn, weight in model.named_parameters():
            spec = policy.layouts[fqn]
            parts = math.prod(self.axes.get(axis, 1) for axis in spec[0]) if spec and not any(spec[1:]) else 1
            self._row_parts[weight] = parts if parts > 1 and len(weight) % parts == 0 else 1
        return model

    def _wrap_forwards(self, model: nn.Module, policy: contract.ShardPolicy) -> None:
        """Wrap forwards, innermost first: attention, sums of gradients, modules in another dtype, compute copies,
        recompute; then add hooks on block outputs.

        Raises BackendError for layers that can't be scanned, and for weights whose gradients can't be summed in float32
        although precision.reduce requires it.
        """
        layouts, barrier = Layouts(self.mesh, self.axes), self._bridge._xla_optimization_barrier_
        keeps_copies = not policy.reshard_after_forward and self._shards > 1
        head = output_head(model)
        tensor, context = (self.axes.get(axis, 1) for axis in ("tensor", "context"))
        attention = LayerAttention(layouts, policy.attention)
        keep = partial(keep_products, attention.keep) if "matmul" in policy.save_ops else attention.keep
        for name in policy.layers if self._tensors.for_tpu else ():
            layer = model.get_submodule(name)
            layer.forward = partial(attention.run_layer, layer.forward)
        has_kernel = self._tensors.for_tpu and tensor == 1
        if policy.experts and (has_kernel or "expert" in self.axes):
            groups = MeshExperts(layouts, policy.expert_capacity, has_kernel=has_kernel)
            set_expert_groups(model, policy.experts, groups)
        blocks_of_experts = dict.fromkeys(name.rpartition(".")[0] for name in policy.experts if context > 1)
        for name in blocks_of_experts:
            if name not in policy.layers:  # else the block has attention, which isn't computed token by token
                block = model.get_submodule(name)
                block.forward = partial(layouts.run_by_device, block.forward)
        uses = weight_uses(model, policy)
        if self._sum_in_float32:
            uses = summed_in_float32(uses)
        scanned = policy.layers if policy.scan_layers else ()
        in_loop = {fqn: use for fqn, use in uses.items() if is_inside(fqn, scanned)}
        outside = {fqn: use for fqn, use in uses.items() if fqn not in in_loop}
        self._copies.append(copies := Copies(layouts.gathered, barrier, keeps_copies))
        in_int8 = {*map(model.get_submodule, eight_bit_layers(model, policy))}
        replace_forwards(uses, copies, layouts.shard, scatter_over(self._tensors.torus, self.axes), in_int8)
        for name, dtype in policy.modules.items():
            module = model.get_submodule(name)
            module.forward = in_own_dtype(module.forward, dtype, None if module is head else policy.compute)
        if scanned:
            offload = policy.offload_activations and self._tensors.for_tpu
            LayerLoop(model, policy, in_loop, layouts, gather=keeps_copies, offload=offload)
        blocks = {name for name in (*policy.units, *policy.recompute) if not is_inside(name, scanned)}
        for name, owned in uses_by_block(outside, blocks).items():
            block = model.get_submodule(name)
            # The decorator keeps the signature: a head's forward may take `loss_input`.
            block.forward = copies.in_place(owned)(block.forward)
            if policy.cast_inputs and name in ("", *policy.units):  # as FSDP2 does: it may get pixels
                block.forward = in_own_dtype(block.forward, policy.compute, None)
            if name in policy.recompute:
                trains = any(weight.requires_grad for weight in block.parameters())
                block.forward = recomputed(block.forward, trains, copies.again, keep, block)
            if name in policy.units and block is not head:
                keep_rows_split(block, lambda out: layouts.split_rows(out, *rows_between(policy)))
        if head is not None:  # unit or not: else the logits would be sharded by words over the axes of the rows
            tokens, words = ("context",), ("tensor",) if policy.tensor else ()
            if policy.tensor and policy.tensor.splits_rows:  # else the logits of all words are gathered
                head.register_forward_pre_hook(lambda _, args: (layouts.split_rows_in_loop(args[0], tokens), *args[1:]))
            keep_rows_split(head, lambda logits: layouts.split_rows(logits, tokens, words))
        for name in () if scanned else policy.layers:
            finish_backward(model.get_submodule(name), barrier)
        run = partial(copies.run_model, list(outside.values()), model.forward)
        model.forward = wraps(model.forward)(run)  # with its signature, which Trainer reads

    def build_optimizer(
        self, make: contract.MakeOptimizer, groups: list[dict[str, Any]], model: nn.Module
    ) -> torch.optim.Optimizer:
        def zeros(fqn: str, twin: Tensor) -> Tensor:
            return self._zeros(twin, state_spec(layouts[fqn], parameters[fqn].shape, twin.shape))

        parameters, layouts = dict(model.named_parameters()), self._layouts[model]
        optimizer = self._make_optimizer(model, make, groups, parameters, zeros)
        self._keep_gradients((parameters[fqn], spec) for fqn, spec in layouts.items() if fqn in parameters)
        return optimizer

    def _keep_gradients(self, parameters: Iterable[tuple[Tensor, Spec]]) -> None:
        """The micro-batch program adds into existing gradients, and so is the same every time."""
        for parameter, spec in parameters if self._accumulation > 1 else ():
            if parameter.requires_grad:
                parameter.grad = self._zeros(parameter, spec)
        self._tensors.wait()

    def shard_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        from portable_fsdp.backends.own_objects import owners_of, warn_of_kept_gradients, zero_state

        def zeros(parameter: Tensor, twin: Tensor, _: dict[str, Any]) -> Tensor:
            model, fqn = owners[parameter]
            if twin.is_cpu:
                return torch.zeros(twin.shape, dtype=twin.dtype)
            return self._zeros(twin, state_spec(self._layouts[model][fqn], parameter.shape, twin.shape))

        allocate = zero_state(optimizer, self.optimizers, owners := owners_of(self._layouts), zeros)
        self._step_by_ours(optimizer)
        warn_of_kept_gradients(optimizer, self.optimizers, self._layouts)
        self._optimizers[optimizer], self.optimizers[optimizer] = None, allocate
        self._programs.watch(self._steps_by_ours.get(optimizer, optimizer), {})
        weights = (weight for group in optimizer.param_groups for weight in group["params"])
        self._keep_gradients((weight, self._layouts[owners[weight][0]][owners[weight][1]]) for weight in weights)

    def _zeros(self, twin: Tensor, spec: Spec) -> Tensor:
        def zeros_of(region: Region) -> Tensor:
            return torch.zeros([part.stop - part.start for part in region], dtype=twin.dtype)

        return self._make(twin.shape, twin.dtype, spec, zeros_of)

    # --------------------------------------------------------------------------------------------------- the step

    def compile(self, fn: Callable[..., contract.Metrics], name: str) -> Callable[..., contract.Metrics]:
        """Each device gets whole outputs: torch_xla compiles a program each time that a sharded tensor is read."""
        gather = Layouts(self.mesh, self.axes).replicated
        return super().compile(lambda *args: tree_map_only(Tensor, gather, fn(*args)), name)

    def end_step(self) -> None:
        self._programs.run_pending()

    def whole(self, tensor: Tensor) -> Tensor:
        return Layouts(self.mesh, self.axes).replicated(tensor)

    def place(self, batch: contract.Batch, axes: Sequence[str] = ROW_AXES) -> contract.Batch:
        batch = contract.as_batch(batch)
        text = batch["input_ids"].shape if "input_ids" in batch else None

        def spec(tensor: Tensor) -> Spec:
            rows = batch_spec(tensor.dim(), axes)
            return (*rows[:1], ("context",), *rows[2:]) if tensor.shape == text and len(rows) > 1 else rows

        return {name: self._tensors.place(tensor, spec(tensor)) for name, tensor in batch.items()}

    @contextmanager
    def accumulate(self, last: bool, model: nn.Module | None = None) -> Generator[None]:
        with super().accumulate(last, model):
            yield  # one global program: gradients are already summed over devices
        for copies in self._copies:  # without gradients a model's forward itself releases what it gathered
            copies.release()

    def clip_grad_norm(self, model: nn.Module | Iterable[Tensor], limit: float | None) -> Tensor:
        if self._accumulation > 1 and isinstance(model, nn.Module):
            self._order_inputs(model)
        weights = model.parameters() if isinstance(model, nn.Module) else model
        parameters = [parameter for parameter in weights if parameter.grad is not None]
        gradients = [cast(Tensor, parameter.grad) for parameter in parameters]
        if not gradients:
            return torch.zeros((), device=self.device)
        # In float32: bfloat16 gradients (precision.master) would give a norm of three digits. Squares, and one root:
        # each vector_norm would become absolute values, powers and a root, which cost compile time.
        sums: dict[int, list[Tensor]] = {}  # by the number of parts: else XLA may sum each weight over the devices
        for parameter, gradient in zip(parameters, gradients, strict=True):
            square, parts = gradient.float().square(), self._row_parts.get(parameter, 1)
            by_part = square.unflatten(0, (parts, -1)).flatten(1).sum(dim=1) if parts > 1 else square.sum()
            sums.setdefault(parts, []).append(by_part)
        norm = torch.stack([torch.stack(each).sum() for each in sums.values()]).sum().sqrt()
        if limit is not None:
            factor = (limit / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    if self._accumulation > 1:  # inputs of the next program
                        gradient.copy_(gradient * factor)  # a product in place takes ten times as long to trace
                    else:  # a copy would be an operation more for each weight
                        parameter.grad = gradient * factor
        return norm

    def sum(self, tensor: Tensor, axes: Sequence[str] = LOSS_AXES) -> Tensor:
        return tensor  # already over the global batch

    # -------------------------------------------------------------------------------------------------- the state

    def state(self, model: nn.Module, optimizer: contract.OptimizerState) -> dict[str, contract.TensorState]:
        self._tensors.wait()
        return {
            key: contract.TensorState(tuple(tensor.shape), tensor.dtype, partial(self._pieces, tensor, spec))
            for key, (tensor, spec, _) in checkpoint_tensors(model, optimizer, self._layouts[model]).items()
        }

    def tensor_state(self, tensor: Tensor) -> contract.TensorState:
        self._tensors.wait()
        return contract.TensorState(tuple(tensor.shape), tensor.dtype, partial(self._pieces, tensor, None))

    def load_tensor(self, tensor: Tensor, read: Callable[[Region], Tensor]) -> None:
        if tensor.device.type == "cpu" or not self._bridge._get_xla_sharding_spec(tensor):
            super().load_tensor(tensor, read)
            return
        pieces: list[Tensor] = []
        for shard, _, parts in self._parts_on_devices(tensor):
            data = read(parts)
            missing = [full - size for full, size in zip(shard.shape, data.shape, strict=True)]
            pieces.append(nn.functional.pad(data, [n for rows in reversed(missing) for n in (0, rows)]))
        sharding = self._bridge._get_xla_op_sharding(tensor)
        tensor.data = self._bridge._global_tensor_from_cpu_shards(pieces, sharding, list(tensor.shape))

    def _pieces(self, tensor: Tensor, spec: Spec | None) -> list[contract.Piece]:
        """Copy the parts that this process's devices hold to the host. `spec` None: of a tensor of the user's own."""
        if tensor.device.type == "cpu" or not self._bridge._get_xla_sharding_spec(tensor):
            return self._whole_piece(tensor)
        pieces: list[contract.Piece] = []
        copies = self.devices if spec is None else count_copies(spec, self.axes)
        for shard, replica, parts in self._parts_on_devices(tensor):
            data = shard[tuple(slice(0, part.stop - part.start) for part in parts)]  # without padding
            if data.numel() or not tensor.numel():
                number = replica if copies > 1 else None
                pieces.append(contract.Piece(tuple(part.start for part in parts), data, number))
        return pieces

    def _parts_on_devices(self, tensor: Tensor) -> Generator[tuple[Tensor, int, Region]]:
        """Yield (padded part on the host, number of the replica, region) for each device of this process."""
        (shards,) = self._bridge._get_local_shards([tensor])
        (where,) = self._bridge._get_local_shard_replica_and_indices([tensor])
        for (shard, _), (replica, slices) in zip(shards, where, strict=True):
            parts = full_region(tensor.shape) if slices is Ellipsis else slices
            yield shard, int(replica), tuple(slice(int(part.start), int(part.stop)) for part in parts)

    def load_state(self, model: nn.Module, optimizer: contract.OptimizerState, read: contract.Read) -> None:
        for key, (old, spec, _) in checkpoint_tensors(model, optimizer, self._layouts[model]).items():
            if old.device.type == "cpu":
                old.copy_(read(key, full_region(old.shape)))
                continue
            new = self._make(old.shape, old.dtype, spec, partial(read, key))
            # Not _replace_xla_tensor: after a step has run, the next forward would still see the old values.
            old.data = new
        self._input_orders.clear()
        self._tensors.wait()

    def memory(self) -> contract.MemoryStats | None:
        try:
            return self._memory_of(self._bridge._xla_get_runtime_devices()[0])
        except RuntimeError:  # "MemoryInfo not supported for SPMD virtual device" in torch_xla 2.9
            return None


def _data_shard(own: tuple[int, ...], of_processes: list[tuple[int, ...]], row_shards: int) -> contract.Partition:
    """Return the rows that this process feeds, from the row shards of its devices and those of all processes: several
    may feed the same. Raises BackendError if two processes share some only."""
    different = sorted({*of_processes})
    if sum(map(len, different)) != row_shards:
        raise BackendError(
            f"backend xla: the devices of a host have rows {list(own)}, and other hosts have some of them.\n"
            "  Set sharding.context and sharding.tensor to divide, or be a multiple of, the chips of a host."
        )
    return contract.Partition(different.index(own), len(different))


def _meeting(device: str, process: contract.Partition) -> dict[str, str]:
    """The variables by which the hosts of a slice meet: torchrun's, else the first worker's address and torch_xla's
    port (torch_xla/_internal/rendezvous.py)."""
    from torch_xla._internal import tpu

    address = os.environ.get("MASTER_ADDR") or (tpu.discover_master_worker_ip() if device == "tpu" else "localhost")
    meeting = {"MASTER_ADDR": address, "MASTER_PORT": os.environ.get("MASTER_PORT") or "12355"}
    return {**os.environ, **meeting, "RANK": str(process.index), "WORLD_SIZE": str(process.count)}
