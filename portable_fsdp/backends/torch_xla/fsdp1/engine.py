"""XLA FSDP1: torch_xla's XlaFullyShardedDataParallel. One process drives one device; each holds its part of a unit.

`shard_model` reads top to bottom: full parameters that nobody reads, the units that shard them, then the weights.
"""

# Parameters are put into a module's own tables, and host tensors go to the device through torch_xla's private bridge.
# pyright: reportPrivateUsage=false

import functools
import math
import os
import pickle
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from portable_fsdp.attach import refuse_copies
from portable_fsdp.backends import contract
from portable_fsdp.backends.nested import tensors_in
from portable_fsdp.backends.state import (
    ParameterSlot,
    parameter_slots,
    persistent_buffers,
    put_parameter,
    state_key,
    tensors_of,
)
from portable_fsdp.backends.torch_xla.fsdp1.shards import Shard, check_rows, shards_of
from portable_fsdp.backends.torch_xla.program import Programs
from portable_fsdp.backends.torch_xla.runtime import (
    PjrtBackend,
    recomputed,
    require_devices,
    require_one_process,
    set_environment,
)
from portable_fsdp.backends.weight_uses import check_statistics
from portable_fsdp.config.schema import Config
from portable_fsdp.layout import LOSS_AXES, ROW_AXES, full_region, groups_over
from portable_fsdp.optim.counting import CountingOptimizer
from portable_fsdp.runtime.errors import BackendError
from portable_fsdp.runtime.launchers import detect_launch


class XlaFsdp1Backend(PjrtBackend):
    """XlaFullyShardedDataParallel on PJRT: one process per TPU chip of all hosts, or one CPU device."""

    name = "xla_fsdp1"

    def __init__(self, device: str, config: Config, num_devices: int | None) -> None:
        set_environment(device)
        import torch_xla.core.xla_model as collectives
        import torch_xla.runtime as runtime

        self._ops: Any = collectives
        _start_process(device, cast(Any, runtime))
        count = int(runtime.world_size())
        several = f"On CPU xla_fsdp1 has one device; for several: --backend=xla --num_devices={num_devices}."
        require_devices(self.name, device, num_devices, count, on_cpu=several)
        hosts = max(1, count // int(runtime.local_device_count()))
        self._open(device, config, contract.Partition(int(runtime.global_ordinal()), count), count, hosts)
        self.device = cast(torch.device, self._xla.device())
        self._replicas, shards = self.axes["replicate"], self.axes["shard"]
        self._replica, self._index = divmod(self.process.index, shards)
        self._shard_groups = groups_over(self.axes, ["shard"])
        self._replica_groups = groups_over(self.axes, ["replicate"])
        self._settings = config.xla_fsdp1
        pin = self._settings.pin_layout_in_collective_ops
        self._pin_layout = device == "tpu" if pin is None else pin
        rows = self._settings.shard_param_on_dim_0
        self._by_rows = not self._settings.flatten_parameters if rows is None else rows
        self._programs = Programs(self.name)
        self._roots: dict[nn.Module, Any] = {}  # model -> its root unit
        self._shards_of: dict[nn.Module, dict[str, Shard]] = {}

    # ------------------------------------------------------------------------------------------- model, optimizer

    def shard_model(self, model: nn.Module, policy: contract.ShardPolicy, fill: contract.Fill | None) -> nn.Module:
        check_statistics(model, policy)
        assert fill is not None
        places = parameter_slots(model)
        if self._by_rows:
            check_rows(places)
        self._put_zeros(places)
        units, self._reduce = self._wrap_forwards(model, policy), policy.reduce
        self._roots[model] = units[-1]
        shards = self._shards_of[model] = shards_of(units, places, self._index)
        for shard in shards.values():
            shard.parameter.data = self._upload(shard.collect(fill, torch.float32))
            if not self._settings.flatten_parameters:  # else no shard belongs to a single parameter
                for place in places[shard.spans[0].fqn]:
                    # The gathered tensor is a plain attribute of the module, which Python finds before this table.
                    place.module._parameters[place.leaf] = shard.parameter
        self._xla.sync(wait=True)
        refuse_copies(model.modules())
        return model

    def _put_zeros(self, places: dict[str, list[ParameterSlot]]) -> None:
        """Put zeros in place of the parameters: units shard them, `fill` replaces the shards, nothing is computed.

        So no host and no device ever holds more than the shards of a model; XLA traces these zeros and drops them.
        """
        for shared in places.values():
            given = cast(nn.Parameter, shared[0].module._parameters[shared[0].leaf])
            # A clone: torch.zeros fills in place, and views of its result would never see another value.
            zeros = torch.zeros(given.shape, device=self.device).clone()
            put_parameter(shared, zeros, given.requires_grad)

    def _wrap_forwards(self, model: nn.Module, policy: contract.ShardPolicy) -> list[Any]:
        """Put units behind the forwards of modules, so that no name changes: inner ones first, the root last.

        A unit takes all parameters that no unit before it took. A layer that is a unit is gathered before its first
        run, and again before its recomputation in backward.
        """
        recompute = {name: model.get_submodule(name) for name in policy.recompute}
        trains = {name for name, layer in recompute.items() if any(p.requires_grad for p in layer.parameters())}
        buffer_dtype = _buffer_dtype(model)
        units: list[Any] = []
        bodies: dict[str, _Body] = {}
        for name in (*reversed(policy.units), ""):
            module = model.get_submodule(name)
            body = bodies[name] = _Body(module, [] if name else units)
            units.append(self._unit(body, policy, buffer_dtype))
            body.run = module.forward  # only now: the unit has replaced the forward of linear modules
            module.forward = functools.partial(units[-1])
        for name, layer in recompute.items():
            if name in bodies:
                bodies[name].run = recomputed(bodies[name].run, name in trains)
            else:
                layer.forward = recomputed(layer.forward, name in trains)
        return units

    def _unit(self, body: nn.Module, policy: contract.ShardPolicy, buffer_dtype: torch.dtype) -> Any:
        from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

        unit = cast(Any, XlaFullyShardedDataParallel)(
            body,
            reshard_after_forward=bool(policy.reshard_after_forward),
            flatten_parameters=self._settings.flatten_parameters,
            shard_param_on_dim_0=self._by_rows,
            compute_dtype=policy.compute,
            buffer_dtype=buffer_dtype,
            sharding_groups=self._shard_groups,
            sharding_rank=self._index,
            sharding_world_size=len(self._shard_groups[0]),
            pin_layout_in_collective_ops=self._pin_layout,
            execute_sharding_on_init=False,
        )
        # C1: gradients are summed. set_gradient_divide_factors(1, 1) would move the mean into the reduction.
        unit.gradient_predivide_factor = unit.gradient_postdivide_factor = 1.0
        unit.reduce_scatter_op = _ReduceScatter(unit.reduce_scatter_op, policy.reduce)
        register = unit._register_pre_backward_hooks

        def register_inside(outputs: Any) -> Any:
            """Find the tensors inside objects too: torch_xla doesn't, and backward would lack its hooks."""
            register(tensors_in(outputs))
            return outputs

        unit._register_pre_backward_hooks = register_inside
        return unit

    def _upload(self, host: Tensor) -> Tensor:
        (placed,) = self._bridge._xla_tensors_from_aten([host], [str(self.device)], None)
        return placed

    def build_optimizer(
        self, make: contract.MakeOptimizer, groups: list[dict[str, Any]], model: nn.Module
    ) -> torch.optim.Optimizer:
        shards = self._shards_of[model]
        parameters = {name: shard.parameter for name, shard in shards.items()}
        groups = _groups_of_shards(groups, shards)
        optimizer = self._make_optimizer(
            model,
            make,
            groups,
            parameters,
            lambda _, twin: self._upload(torch.zeros(twin.shape, dtype=twin.dtype)),
        )
        if self._accumulation > 1:
            self._prepare_micro_batches(shards, [name for group in groups for name in group["params"]])
        self._xla.sync(wait=True)
        return optimizer

    def _prepare_micro_batches(self, shards: dict[str, Shard], trained: list[str]) -> None:
        """Keep the micro-batch program the same every time: it adds into existing gradients.

        It also returns the shards, through the engine's barriers, in the order in which they were last written: the
        optimizer's, from the first update on. So set that order from the start, and after a load too.
        """
        frozen = [name for name in shards if name not in trained]
        for name in (*frozen, *trained):
            shards[name] = shards.pop(name)
        for name in trained:
            parameter = shards[name].parameter
            parameter.data = self._upload(parameter.detach().cpu())
            parameter.grad = self._upload(torch.zeros(parameter.shape))

    # --------------------------------------------------------------------------------------------------- the step

    def place(self, batch: contract.Batch, axes: Sequence[str] = ROW_AXES) -> contract.Batch:
        batch = contract.as_batch(batch)
        placed = self._bridge._xla_tensors_from_aten(list(batch.values()), [str(self.device)] * len(batch), None)
        return dict(zip(batch, placed, strict=True))

    # `accumulate` is as on xla: shards are reduced in every micro batch, since whole gradients would undo FULL_SHARD;
    # replicas once per step, in `clip_grad_norm`.

    @contextmanager
    def evaluate(self) -> Generator[None]:
        try:
            with torch.no_grad():
                yield
        finally:
            for root in self._roots.values():
                for unit in (*root.module.inner, root):  # the root keeps its full parameters for backward, others may
                    unit._free_full_params()

    def scale_gradients(self, model: nn.Module, factor: Tensor) -> None:
        for parameter in self._roots[model].params_with_grad:
            cast(Tensor, parameter.grad).mul_(factor)

    def clip_grad_norm(self, model: nn.Module | Iterable[Tensor], limit: float | None) -> Tensor:
        if not isinstance(model, nn.Module):
            raise BackendError("backend xla_fsdp1: clip_grad_norm needs a whole model.\n  Use --backend=xla.")
        if self._accumulation > 1:
            self._order_inputs(model)
        if self._replicas > 1:
            self._sum_over_replicas(model)
        return self._roots[model].clip_grad_norm_(math.inf if limit is None else limit, groups=self._shard_groups)

    def _sum_over_replicas(self, model: nn.Module) -> None:
        """Replace gradients by their sums over replicas, in the reduce dtype."""
        for parameter in self._roots[model].params_with_grad:
            gradient = cast(Tensor, parameter.grad)
            total = self._ops.all_reduce(
                self._ops.REDUCE_SUM,
                gradient.to(self._reduce),
                groups=self._replica_groups,
                pin_layout=self._pin_layout,
            )
            parameter.grad = total.to(gradient.dtype)

    def sum(self, tensor: Tensor, axes: Sequence[str] = LOSS_AXES) -> Tensor:
        groups = groups_over(self.axes, axes)
        return self._ops.all_reduce(self._ops.REDUCE_SUM, tensor, groups=groups, pin_layout=self._pin_layout)

    def agree(self, value: contract.T) -> contract.T:
        return self._broadcast(value, 0)

    def gather(self, value: contract.T) -> list[contract.T]:
        return [self._broadcast(value, source) for source in range(self.process.count)]

    def _broadcast(self, value: contract.T, source: int) -> contract.T:
        """Broadcast the value of process `source` to all processes."""
        if self.process.count == 1:
            return value
        mine = list(pickle.dumps(value)) if self.process.index == source else []
        (size,) = self._total([len(mine)])
        room = 1 << size.bit_length()  # one program per power of two, not per size
        total = self._total(mine + [0] * (room - len(mine)))
        return cast(contract.T, pickle.loads(bytes(total[:size])))

    def _total(self, numbers: list[int]) -> list[int]:
        """Sum numbers over all processes; return them on the host."""
        total = self.sum(self._upload(torch.tensor(numbers, dtype=torch.int32)), tuple(self.axes))
        self._xla.sync()
        return cast(list[int], total.cpu().tolist())

    # -------------------------------------------------------------------------------------------------- the state

    def state(self, model: nn.Module, optimizer: contract.OptimizerState) -> dict[str, contract.TensorState]:
        self._xla.sync(wait=True)
        states: dict[str, contract.TensorState] = {}
        on_host = functools.lru_cache(maxsize=1)(lambda t: t.detach().cpu().flatten())  # of the spans of one shard
        for key_of, tensor, shard in self._cut(model, optimizer):
            flat = functools.partial(on_host, tensor)
            for span in shard.spans:
                pieces = functools.partial(self._pieces, shard, span.fqn, flat)
                states[key_of(span.fqn)] = contract.TensorState(span.shape, tensor.dtype, pieces)
        for key, tensor in self._uncut(model, optimizer).items():
            whole = functools.partial(self._whole_piece, tensor)
            states[key] = contract.TensorState(tuple(tensor.shape), tensor.dtype, whole)
        return states

    def _pieces(self, shard: Shard, fqn: str, flat: Callable[[], Tensor]) -> list[contract.Piece]:
        """Return the pieces of one parameter, from the flat shard that holds it."""
        number = self._replica if self._replicas > 1 else None
        return [
            contract.Piece(
                tuple(part.start for part in box),
                flat()[where].view([part.stop - part.start for part in box]),
                number,
            )
            for name, box, where in shard.boxes()
            if name == fqn
        ]

    def load_state(self, model: nn.Module, optimizer: contract.OptimizerState, read: contract.Read) -> None:
        for key_of, tensor, shard in self._cut(model, optimizer):
            host = shard.collect(lambda fqn, box, key_of=key_of: read(key_of(fqn), box), tensor.dtype)
            tensor.data = self._upload(host.contiguous())
        for key, tensor in self._uncut(model, optimizer).items():
            host = read(key, full_region(tensor.shape))
            if tensor.device.type == "cpu":
                tensor.copy_(host)
            else:
                tensor.data = self._upload(host.contiguous())
        self._input_orders.clear()
        self._xla.sync(wait=True)

    def _cut(
        self, model: nn.Module, optimizer: contract.OptimizerState
    ) -> Iterator[tuple[Callable[[str], str], Tensor, Shard]]:
        """Yield parameters and their state: a function from an FQN in the shard to its key, the tensor, the shard."""
        for shard in self._shards_of[model].values():
            yield str, shard.parameter, shard
            for name, value in tensors_of(optimizer.state.get(shard.parameter, {})).items():
                if value.shape == shard.parameter.shape:
                    yield functools.partial(state_key, name), value, shard

    def _uncut(self, model: nn.Module, optimizer: contract.OptimizerState) -> dict[str, Tensor]:
        """Key -> replicated tensor: buffers, and state that isn't sharded like its parameter."""
        if isinstance(optimizer, CountingOptimizer):
            optimizer.settle_counts()
        counts = {
            state_key(name, span.fqn): value
            for shard in self._shards_of[model].values()
            for name, value in tensors_of(optimizer.state.get(shard.parameter, {})).items()
            if value.shape != shard.parameter.shape
            for span in shard.spans
        }
        return {**persistent_buffers(model), **counts}

    def memory(self) -> contract.MemoryStats:
        return self._memory_of(str(self.device))


class _Body(nn.Module):
    """The module that a unit wraps: it runs a module's original forward, so that the module itself stays in place.

    The root's body holds all units too, since the root looks for them among its own modules.
    """

    run: contract.Forward

    def __init__(self, module: nn.Module, inner: Sequence[nn.Module]) -> None:
        super().__init__()
        self.module = module
        self.inner = nn.ModuleList(inner)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


class _ReduceScatter:
    """The unit's reduce-scatter, in the reduce dtype.

    torch_xla 2.9 passes it float32 whatever `fp32_reduce_scatter` says: a full parameter stays float32 to autograd,
    which casts the gradient to that, and only its values have the compute dtype.
    """

    def __init__(self, scatter: Any, dtype: torch.dtype) -> None:
        self.flush = scatter.flush
        self._scatter, self._dtype = scatter, dtype

    def __call__(self, gradient: Tensor, done: Callable[[Tensor], None]) -> None:
        self._scatter(gradient.to(self._dtype), done)


def _buffer_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of the model's floating-point buffers: XlaFullyShardedDataParallel casts all to one."""
    dtypes = {buffer.dtype for buffer in model.buffers() if buffer.is_floating_point()} or {torch.float32}
    if len(dtypes) > 1:
        raise BackendError(
            f"backend xla_fsdp1: the model's buffers have several dtypes ({', '.join(sorted(map(str, dtypes)))}), and "
            "XlaFullyShardedDataParallel casts them to one.\n  Set precision.buffers=float32, or use --backend=xla."
        )
    return dtypes.pop()


def _start_process(device: str, runtime: Any) -> None:
    """Assign this process's chip in PJRT; on CPU there is only one device.

    Raises BackendError after SPMD, for several processes on CPU, and unless there is one process per chip.
    """
    require_one_process("xla_fsdp1", device)
    if runtime.is_spmd():
        raise BackendError(
            "backend xla_fsdp1: backend xla was opened in this process before, and torch_xla can't leave SPMD.\n"
            "  Open the two in separate processes."
        )
    if device == "cpu":
        return
    from torch_xla._internal import pjrt, tpu

    processes, chips = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(cast(Any, tpu).num_local_processes())
    if processes != chips:
        raise BackendError(
            f"backend xla_fsdp1 on tpu: expected one process for each of the {chips} chips of this host, found "
            f"{processes}.\n  Start it without a launcher on every host, or with torchrun --nproc_per_node={chips}."
        )
    cast(Any, pjrt).initialize_multiprocess(detect_launch(os.environ).local_rank, processes)
    if runtime.addressable_device_count() > 1:
        raise BackendError(
            "backend xla_fsdp1 on tpu: expected one device per chip, found "
            f"{runtime.addressable_device_count()} (TPU v2 and v3).\n  Use --backend=xla there."
        )


def _groups_of_shards(groups: list[dict[str, Any]], shards: Mapping[str, Shard]) -> list[dict[str, Any]]:
    """Return groups that name shards, each once if it joins parameters; merge groups with equal settings."""
    shard_of = {span.fqn: name for name, shard in shards.items() for span in shard.spans}
    merged: list[dict[str, Any]] = []
    for group in groups:
        alike = next((other for other in merged if {**other, "params": ()} == {**group, "params": ()}), None)
        if alike is None:
            merged.append(alike := {**group, "params": []})
        names = [shard_of[fqn] for fqn in group["params"]]
        alike["params"] = list(dict.fromkeys([*alike["params"], *names]))
    return merged
