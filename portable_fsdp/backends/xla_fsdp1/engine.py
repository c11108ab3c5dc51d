"""XLA FSDP1: torch_xla's XlaFullyShardedDataParallel. One process drives one device; each holds its part of a unit.

`shard_model` reads top to bottom: full parameters that nobody reads, the units that cut them, then the weights.
"""

# Parameters are put into a module's own tables, and host tensors go to the device through torch_xla's private bridge.
# pyright: reportPrivateUsage=false

import functools
import math
import os
import pickle
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

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
    ParameterSlot,
    Pending,
    Piece,
    Rank,
    Read,
    ShardPolicy,
    T,
    TensorState,
    Traffic,
    full_region,
    name_groups,
    optimizer_state_twins,
    parameter_slots,
    persistent_buffers,
    process_memory,
    state_key,
)
from portable_fsdp.backends.pjrt import (
    Programs,
    expected_programs,
    lower_triangular_solves,
    set_environment,
    tpu_name,
)
from portable_fsdp.backends.support import require_supported
from portable_fsdp.backends.xla_fsdp1.process import check_devices, start_process
from portable_fsdp.backends.xla_fsdp1.shards import Shard, check_rows, shards_of
from portable_fsdp.backends.xla_fsdp1.units import wrap_forwards
from portable_fsdp.config.layout import check_batch, mesh_axes
from portable_fsdp.config.schema import Config


class XlaFsdp1Backend(Backend):
    """XlaFullyShardedDataParallel on PJRT: a process for each TPU chip of all hosts, or one CPU device."""

    name = "xla_fsdp1"

    def __init__(self, device: str, config: Config, num_devices: int | None) -> None:
        set_environment(device)
        import torch_xla
        import torch_xla.core.xla_model as model
        import torch_xla.runtime as runtime

        self._xla: Any = torch_xla
        self._ops: Any = model  # collectives
        self._bridge: Any = cast(Any, torch_xla)._XLAC
        start_process(device, cast(Any, runtime))
        count = int(runtime.world_size())
        check_devices(device, num_devices, count)
        hosts = max(1, count // int(runtime.local_device_count()))
        require_supported(config, engine="xla_fsdp1", device=device, devices=count, hosts=hosts)
        self.device = cast(torch.device, self._xla.device())
        self.device_name = tpu_name() if device == "tpu" else device
        self.process = Rank(int(runtime.global_ordinal()), count)
        self.data_shard = self.process
        self.data_parallel_size = count
        self._accumulation = check_batch(config, count)
        self.expected_compilations = expected_programs(config, self._accumulation)
        self.axes = mesh_axes(config, count, hosts)
        self._replicas, shards = self.axes["replicate"], self.axes["shard"]
        self._replica, self._index = divmod(self.process.index, shards)
        self._shard_groups = [[r * shards + s for s in range(shards)] for r in range(self._replicas)]
        self._replica_groups = [list(group) for group in zip(*self._shard_groups, strict=True)]
        self._settings = config.xla_fsdp1
        pin = self._settings.pin_layout_in_collective_ops
        self._pin_layout = device == "tpu" if pin is None else pin
        rows = self._settings.shard_param_on_dim_0
        self._by_rows = not self._settings.flatten_parameters if rows is None else rows
        lower_triangular_solves()
        self._programs = Programs("xla_fsdp1")
        self._matmul = self._bridge._xla_get_mat_mul_precision()
        self._bridge._xla_set_mat_mul_precision(config.precision.matmul)

    def close(self) -> None:
        self._xla.sync(wait=True)
        self._bridge._xla_set_mat_mul_precision(self._matmul)

    # ------------------------------------------------------------------------------------------- model, optimizer

    def shard_model(self, model: nn.Module, policy: ShardPolicy, fill: Fill | None) -> nn.Module:
        assert fill is not None
        places = parameter_slots(model)
        if self._by_rows:
            check_rows(places)
        self._put_zeros(places)
        units = wrap_forwards(model, policy, self._unit_maker(policy))
        self._units, self._root = units, units[-1]
        self._reduce = policy.reduce
        self._shards = shards_of(units, places, self._index)
        for shard in self._shards.values():
            shard.parameter.data = self._upload(shard.collect(fill, torch.float32))
            if not self._settings.flatten_parameters:  # else there is no shard of one parameter to be found there
                for place in places[shard.spans[0].fqn]:
                    # The gathered tensor is a plain attribute of the module, which Python finds before this table.
                    place.module._parameters[place.leaf] = shard.parameter
        self._xla.sync(wait=True)
        return model

    def _put_zeros(self, places: dict[str, list[ParameterSlot]]) -> None:
        """Full parameters that nobody reads: the units cut them, `fill` replaces what they cut, nothing is computed.

        So no host and no device ever holds more than the shards of a model; XLA traces these zeros and drops them.
        """
        for shared in places.values():
            given = cast(nn.Parameter, shared[0].module._parameters[shared[0].leaf])
            # A clone: views of what torch.zeros gives, which is filled in place, would never see another value.
            zeros = torch.zeros(given.shape, device=self.device).clone()
            full = nn.Parameter(zeros, requires_grad=given.requires_grad)
            for place in shared:
                place.module._parameters[place.leaf] = full

    def _unit_maker(self, policy: ShardPolicy) -> Callable[[nn.Module], Any]:
        from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

        return functools.partial(
            XlaFullyShardedDataParallel,
            reshard_after_forward=bool(policy.reshard_after_forward),
            flatten_parameters=self._settings.flatten_parameters,
            shard_param_on_dim_0=self._by_rows,
            compute_dtype=policy.compute,
            buffer_dtype=getattr(torch, self._settings.buffer_dtype),
            sharding_groups=self._shard_groups,
            sharding_rank=self._index,
            sharding_world_size=len(self._shard_groups[0]),
            pin_layout_in_collective_ops=self._pin_layout,
            execute_sharding_on_init=False,
        )

    def _upload(self, host: Tensor) -> Tensor:
        (placed,) = self._bridge._xla_tensors_from_aten([host], [str(self.device)], None)
        return placed

    def build_optimizer(self, make: MakeOptimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        parameters = {name: shard.parameter for name, shard in self._shards.items()}
        groups = self._groups_of_shards(groups)
        optimizer = make(name_groups(groups, parameters), True)
        for name, state in optimizer_state_twins(make, groups, parameters).items():
            for key, twin in state.items():
                zeros = torch.zeros(twin.shape, dtype=twin.dtype)
                on_host = twin.device.type == "cpu"  # step counts: the program takes what follows from them
                optimizer.state[parameters[name]][key] = zeros if on_host else self._upload(zeros)
        if self._accumulation > 1:
            self._prepare_micro_batches([name for group in groups for name in group["params"]])
        self._xla.sync(wait=True)
        return optimizer

    def _prepare_micro_batches(self, trained: list[str]) -> None:
        """Make the micro-batch program the same one every time: it adds into gradients that exist.

        It also gives the shards back, through the engine's barriers, in the order in which they were last written:
        the optimizer's, from the first update on. So that order holds from the start, and after a load too.
        """
        frozen = [name for name in self._shards if name not in trained]
        self._shards = {name: self._shards[name] for name in (*frozen, *trained)}
        for name in trained:
            parameter = self._shards[name].parameter
            parameter.data = self._upload(parameter.detach().cpu())
            parameter.grad = self._upload(torch.zeros(parameter.shape))

    def _groups_of_shards(self, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Groups that name shards: of joined parameters only one; groups that treat them alike become one."""
        shard_of = {span.fqn: name for name, shard in self._shards.items() for span in shard.spans}
        merged: list[dict[str, Any]] = []
        for group in groups:
            options = {key: value for key, value in group.items() if key != "params"}
            alike = next((one for one in merged if {**one, "params": ()} == {**options, "params": ()}), None)
            if alike is None:
                merged.append(alike := {**options, "params": []})
            names = [shard_of[fqn] for fqn in group["params"]]
            alike["params"] = list(dict.fromkeys([*alike["params"], *names]))
        return merged

    # --------------------------------------------------------------------------------------------------- the step

    def place(self, batch: Batch) -> Batch:
        placed = self._bridge._xla_tensors_from_aten(list(batch.values()), [str(self.device)] * len(batch), None)
        return dict(zip(batch, placed, strict=True))

    def compile(self, fn: Callable[..., Metrics], name: str) -> Callable[..., Metrics]:
        return self._programs.compile(fn, name)

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        # Shards are reduced in every micro batch, since whole gradients would undo FULL_SHARD; replicas once a step.
        return nullcontext()

    @contextmanager
    def evaluate(self) -> Generator[None]:
        try:
            with torch.no_grad():
                yield
        finally:
            for unit in self._units:  # the root keeps its full parameters for backward; by the policy, all of them do
                unit._free_full_params()

    def clip_grad_norm(self, model: nn.Module, limit: float | None) -> Tensor:
        if self._replicas > 1:
            self._sum_over_replicas()
        return self._root.clip_grad_norm_(math.inf if limit is None else limit, groups=self._shard_groups)

    def _sum_over_replicas(self) -> None:
        """Replace gradients by their sums, in the reduce dtype."""
        for parameter in self._root.params_with_grad:
            gradient = cast(Tensor, parameter.grad)
            total = self._ops.all_reduce(
                self._ops.REDUCE_SUM,
                gradient.to(self._reduce),
                groups=self._replica_groups,
                pin_layout=self._pin_layout,
            )
            parameter.grad = total.to(gradient.dtype)

    def sum(self, tensor: Tensor) -> Tensor:
        return self._ops.all_reduce(self._ops.REDUCE_SUM, tensor, pin_layout=self._pin_layout)

    def fetch(self, metrics: Metrics) -> Pending:
        return OnDevice(metrics)

    def agree(self, value: T) -> T:
        return self._told(value, 0)

    def gather(self, value: T) -> list[T]:
        return [self._told(value, source) for source in range(self.process.count)]

    def _told(self, value: T, source: int) -> T:
        """The value of process `source`, on all processes."""
        if self.process.count == 1:
            return value
        mine = list(pickle.dumps(value)) if self.process.index == source else []
        (size,) = self._total([len(mine)])
        room = 1 << size.bit_length()  # a program for each power of two, and not for each size
        total = self._total(mine + [0] * (room - len(mine)))
        return cast(T, pickle.loads(bytes(total[:size])))

    def _total(self, numbers: list[int]) -> list[int]:
        """The sums over all processes, on the host."""
        total = self.sum(self._upload(torch.tensor(numbers, dtype=torch.int32)))
        self._xla.sync()
        return cast(list[int], total.cpu().tolist())

    # -------------------------------------------------------------------------------------------------- the state

    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, TensorState]:
        self._xla.sync(wait=True)
        states: dict[str, TensorState] = {}
        on_host = functools.lru_cache(maxsize=1)(_flat_on_host)  # the parameters of one shard come one after another
        for key_of, tensor, shard in self._cut(optimizer):
            flat = functools.partial(on_host, tensor)
            for span in shard.spans:
                pieces = functools.partial(self._pieces, shard, span.fqn, flat)
                states[key_of(span.fqn)] = TensorState(span.shape, tensor.dtype, pieces)
        for key, tensor in self._uncut(model, optimizer).items():
            states[key] = TensorState(tuple(tensor.shape), tensor.dtype, functools.partial(self._whole, tensor))
        return states

    def _whole(self, tensor: Tensor) -> list[Piece]:
        """What isn't sharded, of which process 0 writes a copy."""
        if self.process.index != 0:
            return []
        return [Piece((0,) * tensor.dim(), tensor.detach().to("cpu", copy=True))]

    def _pieces(self, shard: Shard, fqn: str, flat: Callable[[], Tensor]) -> list[Piece]:
        """Those of one parameter, from the flat shard that holds it."""
        number = self._replica if self._replicas > 1 else None
        return [
            Piece(
                tuple(part.start for part in box),
                flat()[where].view([part.stop - part.start for part in box]),
                number,
            )
            for name, box, where in shard.boxes()
            if name == fqn
        ]

    def load_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, read: Read) -> None:
        for key_of, tensor, shard in self._cut(optimizer):
            host = shard.collect(lambda fqn, box, key_of=key_of: read(key_of(fqn), box), tensor.dtype)
            tensor.data = self._upload(host.contiguous())
        for key, tensor in self._uncut(model, optimizer).items():
            host = read(key, full_region(tensor.shape))
            if tensor.device.type == "cpu":
                tensor.copy_(host)
            else:
                tensor.data = self._upload(host.contiguous())
        self._xla.sync(wait=True)

    def _cut(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[Callable[[str], str], Tensor, Shard]]:
        """Parameters and their state: the key of each FQN that a shard holds elements of, its tensor, the shard."""
        for shard in self._shards.values():
            yield str, shard.parameter, shard
            for name, value in self._states(shard, optimizer):
                if value.shape == shard.parameter.shape:
                    yield functools.partial(state_key, name), value, shard

    def _uncut(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """What each process has whole, by its key: buffers, and state that isn't laid out like its parameter."""
        counts = {
            state_key(name, span.fqn): value
            for shard in self._shards.values()
            for name, value in self._states(shard, optimizer)
            if value.shape != shard.parameter.shape
            for span in shard.spans
        }
        return {**persistent_buffers(model), **counts}

    def _states(self, shard: Shard, optimizer: torch.optim.Optimizer) -> list[tuple[str, Tensor]]:
        state = cast(dict[str, Any], optimizer.state.get(shard.parameter, {}))
        return [(name, value) for name, value in state.items() if isinstance(value, Tensor)]

    @property
    def compilations(self) -> int:
        return self._programs.compilations

    @property
    def collectives(self) -> dict[str, Traffic] | None:
        return None

    def memory(self) -> MemoryStats:
        if os.environ["PJRT_DEVICE"] == "CPU":
            return process_memory()
        used = self._ops.get_memory_info(self.device)
        return MemoryStats(int(used["peak_bytes_used"]), int(used["bytes_used"]), int(used["bytes_limit"]))


def _flat_on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().flatten()
