"""XLA FSDP1: torch_xla's XlaFullyShardedDataParallel. One process drives one device; each holds its part of a unit.

`shard_model` reads top to bottom: recompute inside a unit, a wrapper around it, the root around all, then weights.
The wrappers stand behind the modules' forwards and not among them, so that no name changes. What a device holds of a
parameter is a range of its elements in row-major order, however the engine cuts it: by rows, or flat.
"""

# Parameters are put into a module's own tables, and host tensors go to the device through torch_xla's private bridge.
# pyright: reportPrivateUsage=false

import functools
import logging
import math
import os
import pickle
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import psutil
import torch
from torch import Tensor, nn

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
    Place,
    Read,
    ShardPolicy,
    Slices,
    T,
    TensorState,
    Traffic,
    name_groups,
    optimizer_state_twins,
    parameter_places,
    persistent_buffers,
    whole,
)
from portable_fsdp.config.load import check_batch
from portable_fsdp.config.schema import Config
from portable_fsdp.config.support import require_supported
from portable_fsdp.runtime.errors import BackendError
from portable_fsdp.runtime.process import detect_launch

log = logging.getLogger("portable_fsdp")


class _OnDevice(Pending):
    """Values that are read when they are asked for, a step late; reading one compiles nothing."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def result(self) -> dict[str, Tensor]:
        return {name: value.cpu() for name, value in self._metrics.items()}


@dataclass(frozen=True)
class _Span:
    """A parameter among those that were joined into one tensor: where its elements start there."""

    fqn: str
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class _Shard:
    """This device's part of a tensor: elements `index * numel` to `(index + 1) * numel`, zeros beyond the last span."""

    parameter: nn.Parameter
    spans: tuple[_Span, ...]
    index: int

    def boxes(self) -> Iterator[tuple[str, Slices, slice]]:
        """FQN, box of the parameter, and where its elements lie in the flat shard."""
        size = self.parameter.numel()
        begin = self.index * size
        for span in self.spans:
            at = max(begin, span.start)
            stop = min(begin + size, span.start + math.prod(span.shape))
            for box in _boxes(span.shape, at - span.start, stop - span.start):
                count = math.prod(part.stop - part.start for part in box)
                yield span.fqn, box, slice(at - begin, at - begin + count)
                at += count

    def collect(self, read: Read, dtype: torch.dtype) -> Tensor:
        """The shard as a host tensor, from the pieces that `read` gives."""
        flat = torch.zeros(self.parameter.numel(), dtype=dtype)
        for fqn, box, where in self.boxes():
            flat[where] = read(fqn, box).flatten()
        return flat.view(self.parameter.shape)


class XlaFsdp1Backend(Backend):
    """XlaFullyShardedDataParallel on PJRT: a process for each TPU chip of all hosts, or one CPU device."""

    name = "xla_fsdp1"

    def __init__(self, device: str, config: Config, num_devices: int | None) -> None:
        _set_environment(device)
        import torch_xla
        import torch_xla.core.xla_model as model
        import torch_xla.debug.metrics as counters
        import torch_xla.runtime as runtime

        self._xla: Any = torch_xla
        self._counters: Any = counters
        self._ops: Any = model  # collectives
        self._bridge: Any = cast(Any, torch_xla)._XLAC
        _start_process(device, cast(Any, runtime))
        count = int(runtime.world_size())
        _check_devices(device, num_devices, count)
        hosts = max(1, count // int(runtime.local_device_count()))
        require_supported(config, engine="xla_fsdp1", device=device, devices=count, hosts=hosts)
        self.device = cast(torch.device, self._xla.device())
        self.device_name = _tpu_name() if device == "tpu" else device
        self.process = Part(int(runtime.global_ordinal()), count)
        self.data_shard = self.process
        self.data_parallel_size = count
        self._accumulation = check_batch(config, count)
        self.expected_compilations = 1 if self._accumulation == 1 else 2
        self._replicas = _replicas(config, count, hosts)
        shards = count // self._replicas
        self._replica, self._index = divmod(self.process.index, shards)
        self._shard_groups = [[r * shards + s for s in range(shards)] for r in range(self._replicas)]
        self._replica_groups = [list(group) for group in zip(*self._shard_groups, strict=True)]
        self._settings = config.xla_fsdp1
        pin = self._settings.pin_layout_in_collective_ops
        self._pin_layout = device == "tpu" if pin is None else pin
        self._compilations = 0
        self._matmul = self._bridge._xla_get_mat_mul_precision()
        self._bridge._xla_set_mat_mul_precision(config.precision.matmul)

    def close(self) -> None:
        self._xla.sync(wait=True)
        self._bridge._xla_set_mat_mul_precision(self._matmul)

    # ------------------------------------------------------------------------------------------- model, optimizer

    def shard_model(self, model: nn.Module, policy: ShardPolicy, fill: Fill | None) -> nn.Module:
        assert fill is not None
        places = parameter_places(model)
        self._put_zeros(places)
        wrap = self._wrapping(policy)
        inner = [wrap(model.get_submodule(name), name in policy.recompute) for name in reversed(policy.units)]
        self._root: Any = wrap(model, False, inner)
        self._policy = policy
        self._shards = _in_order_of(places, [shard for one in (*inner, self._root) for shard in self._cut(one, places)])
        for shard in self._shards.values():
            shard.parameter.data = self._upload(shard.collect(fill, torch.float32))
            if not self._settings.flatten_parameters:  # else there is no shard of one parameter to be found there
                for place in places[shard.spans[0].fqn]:
                    # The gathered tensor is a plain attribute of the module, which Python finds before this table.
                    place.module._parameters[place.leaf] = shard.parameter
        self._xla.sync(wait=True)
        return model

    def _put_zeros(self, places: dict[str, list[Place]]) -> None:
        """Full parameters that nobody reads: the wrapper cuts them, `fill` replaces what it cut, nothing is computed.

        So no host and no device ever holds more than the shards of a model; XLA traces these zeros and drops them.
        """
        for shared in places.values():
            given = cast(nn.Parameter, shared[0].module._parameters[shared[0].leaf])
            # A clone: views of what torch.zeros gives, which is filled in place, would never see another value.
            zeros = torch.zeros(given.shape, device=self.device).clone()
            full = nn.Parameter(zeros, requires_grad=given.requires_grad)
            for place in shared:
                place.module._parameters[place.leaf] = full

    def _wrapping(self, policy: ShardPolicy) -> Callable[..., Any]:
        """The function that wraps a module: its forward gathers its weights, runs it, and frees them."""
        from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel, checkpoint_module

        wrapper = functools.partial(
            XlaFullyShardedDataParallel,
            reshard_after_forward=bool(policy.reshard_after_forward),
            flatten_parameters=self._settings.flatten_parameters,
            shard_param_on_dim_0=self._settings.shard_param_on_dim_0,
            compute_dtype=policy.compute,
            buffer_dtype=getattr(torch, self._settings.buffer_dtype),
            sharding_groups=self._shard_groups,
            sharding_rank=self._index,
            sharding_world_size=len(self._shard_groups[0]),
            pin_layout_in_collective_ops=self._pin_layout,
            execute_sharding_on_init=False,
        )

        def wrap(module: nn.Module, recompute: bool, inner: Sequence[nn.Module] = ()) -> Any:
            body = _Body(module, inner)
            wrapped: Any = wrapper(checkpoint_module(body) if recompute else body)
            # C1: gradients are summed. set_gradient_divide_factors(1, 1) would move the mean into the reduction.
            wrapped.gradient_predivide_factor = wrapped.gradient_postdivide_factor = 1.0
            wrapped.reduce_scatter_op = _ReduceScatter(wrapped.reduce_scatter_op, policy.reduce)
            body.run = module.forward
            module.forward = functools.partial(wrapped)
            return wrapped

        return wrap

    def _cut(self, wrapper: Any, places: dict[str, list[Place]]) -> Iterator[_Shard]:
        """The shards of a wrapper, named by the FQNs of what was cut."""
        fqns = {(id(place.module), place.leaf): fqn for fqn, shared in places.items() for place in shared}
        cuts = zip(wrapper.full_params, wrapper.full_param_infos, wrapper.sharded_params, strict=True)
        for full, (_, module, leaf), parameter in cuts:
            if (id(module), leaf) in fqns:
                spans = [_Span(fqns[id(module), leaf], tuple(parameter._orig_size), 0)]
            else:  # joined
                starts = [sum(full._param_numels[:number]) for number in range(len(full._param_numels))]
                spans = [
                    _Span(fqns[id(module), leaf], tuple(shape), start)
                    for (_, module, leaf), shape, start in zip(
                        full._param_infos, full._param_shapes, starts, strict=True
                    )
                ]
            yield _Shard(parameter, tuple(spans), self._index)

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
                optimizer.state[parameters[name]][key] = self._upload(zeros)
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
        seen = 0

        def step(*args: Any) -> Metrics:
            nonlocal seen
            before = self._compile_count()
            with self._xla.compile(name=name, full_graph=True):
                out = fn(*args)
            new = self._compile_count() - before
            self._compilations += new
            seen += new
            if new and seen > 1:
                log.warning(
                    "backend xla_fsdp1: program %r was compiled %d times, expected once. A shape or a Python number "
                    "that changes with the step does that; XLA_SAVE_TENSORS_FILE=FILE shows the programs.",
                    name,
                    seen,
                )
            return out

        return step

    def _compile_count(self) -> int:
        data = self._counters.metric_data("CompileTime")
        return int(data[0]) if data else 0

    def accumulate(self, last: bool) -> AbstractContextManager[None]:
        # Shards are reduced in every micro batch, since whole gradients would undo FULL_SHARD; replicas once a step.
        return nullcontext()

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
                gradient.to(self._policy.reduce),
                groups=self._replica_groups,
                pin_layout=self._pin_layout,
            )
            parameter.grad = total.to(gradient.dtype)

    def sum(self, tensor: Tensor) -> Tensor:
        return self._ops.all_reduce(self._ops.REDUCE_SUM, tensor, pin_layout=self._pin_layout)

    def fetch(self, metrics: Metrics) -> Pending:
        return _OnDevice(metrics)

    def agree(self, value: T) -> T:
        if self.process.count == 1:
            return value
        mine = list(pickle.dumps(value)) if self.process.index == 0 else []
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
        for key, tensor, shard in self._tensors(model, optimizer):
            if shard is None:
                states[key] = TensorState(tuple(tensor.shape), tensor.dtype)
                if self.process.index == 0:
                    states[key].pieces.append(Piece((0,) * tensor.dim(), tensor.detach().cpu()))
                continue
            states |= {key + span.fqn: TensorState(span.shape, tensor.dtype) for span in shard.spans}
            if self._replica == 0:
                flat = tensor.detach().cpu().flatten()
                for fqn, box, where in shard.boxes():
                    data = flat[where].view([part.stop - part.start for part in box])
                    states[key + fqn].pieces.append(Piece(tuple(part.start for part in box), data))
        return states

    def load_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, read: Read) -> None:
        for key, tensor, shard in self._tensors(model, optimizer):
            if shard is None:
                host = read(key, whole(tensor.shape))
            else:
                host = shard.collect(lambda fqn, box, key=key: read(key + fqn, box), tensor.dtype)
            tensor.data = self._upload(host.contiguous())
        self._xla.sync(wait=True)

    def _tensors(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> Iterator[tuple[str, Tensor, _Shard | None]]:
        """All that a checkpoint holds: the key of a whole tensor, or what stands before the FQNs of a cut one."""
        for shard in self._shards.values():
            yield "", shard.parameter, shard
        for name, buffer in persistent_buffers(model).items():
            yield name, buffer, None
        for shard in self._shards.values():
            for name, value in cast(dict[str, Any], optimizer.state.get(shard.parameter, {})).items():
                if isinstance(value, Tensor) and value.shape == shard.parameter.shape:
                    yield f"{name}/", value, shard
                elif isinstance(value, Tensor):
                    yield from ((f"{name}/{span.fqn}", value, None) for span in shard.spans)

    @property
    def compilations(self) -> int:
        return self._compilations

    @property
    def collectives(self) -> dict[str, Traffic] | None:
        return None

    def memory(self) -> MemoryStats:
        if os.environ["PJRT_DEVICE"] == "CPU":
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            return MemoryStats(peak, psutil.Process().memory_info().rss, psutil.virtual_memory().total)
        used = self._ops.get_memory_info(self.device)
        return MemoryStats(int(used["peak_bytes_used"]), int(used["bytes_used"]), int(used["bytes_limit"]))


class _ReduceScatter:
    """The engine's, in the dtype asked for.

    torch_xla 2.9 gives it float32 whatever `fp32_reduce_scatter` says: a full parameter stays float32 to autograd,
    which casts the gradient to that, and only its values are of the compute dtype.
    """

    def __init__(self, scatter: Any, dtype: torch.dtype) -> None:
        self.flush = scatter.flush
        self._scatter, self._dtype = scatter, dtype

    def __call__(self, gradient: Tensor, done: Callable[[Tensor], None]) -> None:
        self._scatter(gradient.to(self._dtype), done)


class _Body(nn.Module):
    """What a wrapper wraps: a module under the forward that it had, so that the module itself stays where it is.

    The root's holds the wrappers of all units too, since the root looks for them among its own modules.
    """

    run: Callable[..., Any]

    def __init__(self, module: nn.Module, inner: Sequence[nn.Module]) -> None:
        super().__init__()
        self.module = module
        self.inner = nn.ModuleList(inner)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


def _boxes(shape: Sequence[int], start: int, stop: int) -> list[Slices]:
    """Elements `start` to `stop`, in row-major order, as boxes in that order: part of a row, whole rows, part of one.

    `_boxes((3, 4), 2, 9)` is `[0:1, 2:4], [1:2, 0:4], [2:3, 0:1]`.
    """
    if start >= stop:
        return []
    if not shape:
        return [()]
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # of the whole rows
    if first > last:
        return [(slice(last, first), *box) for box in _boxes(shape[1:], start - last * row, stop - last * row)]
    head = [(slice(first - 1, first), *box) for box in _boxes(shape[1:], start - (first - 1) * row, row)]
    middle = [(slice(first, last), *whole(shape[1:]))] if first < last else []
    tail = [(slice(last, last + 1), *box) for box in _boxes(shape[1:], 0, stop - last * row)]
    return head + middle + tail


def _in_order_of(places: dict[str, list[Place]], shards: list[_Shard]) -> dict[str, _Shard]:
    """Shards by the FQN of their first span, in the order of the model's parameters."""
    order = {fqn: number for number, fqn in enumerate(places)}
    named = {shard.spans[0].fqn: shard for shard in shards}
    return {fqn: named[fqn] for fqn in sorted(named, key=lambda fqn: order[fqn])}


def _replicas(config: Config, count: int, hosts: int) -> int:
    strategy = config.sharding.strategy
    if strategy == "NO_SHARD":
        return count
    return (config.sharding.replicas or hosts) if strategy.startswith("HYBRID") else 1


def _start_process(device: str, runtime: Any) -> None:
    """Tell PJRT which chip is this process's; on CPU there is one device and nothing to tell."""
    launch = detect_launch(os.environ)
    if runtime.is_spmd():
        raise BackendError(
            "backend xla_fsdp1: expected a process without SPMD, found that backend xla was opened in it before.\n"
            "  torch_xla can't leave SPMD: open the two in processes of their own."
        )
    if device == "cpu":
        if launch.world_size > 1:
            raise BackendError(
                f"backend xla_fsdp1 on cpu: expected one process, found {launch.world_size} of a launcher: PJRT's CPU "
                "devices can't talk across processes.\n  Start it plainly, with one device; several CPU devices: "
                "--backend=xla --num_devices=N."
            )
        return
    from torch_xla._internal import pjrt, tpu

    processes, chips = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(cast(Any, tpu).num_local_processes())
    if processes != chips:
        raise BackendError(
            f"backend xla_fsdp1 on tpu: expected one process for each of the {chips} chips of this host, found "
            f"{processes}.\n  Start it plainly on every host, or with torchrun --nproc_per_node={chips}."
        )
    cast(Any, pjrt).initialize_multiprocess(launch.local_rank, processes)
    if runtime.addressable_device_count() > 1:
        raise BackendError(
            "backend xla_fsdp1 on tpu: expected one device a chip, found "
            f"{runtime.addressable_device_count()} (TPU v2 and v3).\n  Use --backend=xla there."
        )


def _check_devices(device: str, num_devices: int | None, count: int) -> None:
    if num_devices is not None and num_devices != count:
        raise BackendError(
            f"backend xla_fsdp1 on {device}: expected --num_devices={num_devices} devices, found {count}.\n  On a TPU "
            "slice leave --num_devices out: all chips take part. On CPU it has one; several: --backend=xla."
        )


def _set_environment(device: str) -> None:
    """What torch_xla reads when it is imported."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # else each compilation prints that GSPMD is to be deprecated
    logging.getLogger("absl").setLevel(logging.ERROR)  # else jax's packages warn that TensorFlow is absent
    os.environ["PJRT_DEVICE"] = "TPU" if device == "tpu" else "CPU"


def _tpu_name() -> str:
    """The chip's name as PJRT writes it (TPU v5p, TPU v5 lite); an unknown one keeps MFU unknown."""
    from torch_xla._internal import tpu

    kind = str(cast(Any, tpu).get_tpu_env()["ACCELERATOR_TYPE"]).split("-")[0]  # v5litepod, v5p, v6e
    return f"TPU {kind.replace('litepod', ' lite')}"
