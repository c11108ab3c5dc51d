"""The native train step on absent GPUs and TPUs (or on CPUs): a device's memory and its work.

`plan_memory` runs the trainer's own step (the native backend, `train.build.build_training`) for rank 0 of any number of
ranks, on fake tensors and a fake process group, in one process.
"""

# Observing the step needs private parts of torch: it has no public hooks for this.
# pyright: reportPrivateUsage=false

import importlib.metadata
import os
from collections import defaultdict
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple, get_args
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F

from portable_fsdp.backends.contract import Batch, Fill, MakeOptimizer, ShardPolicy
from portable_fsdp.backends.native.engine import NativeBackend
from portable_fsdp.backends.native.units import local_part, materialise, require_saved_ops
from portable_fsdp.backends.state import dtype_name, state_key
from portable_fsdp.config.describe import with_value
from portable_fsdp.config.schema import Config
from portable_fsdp.data.build import build_data
from portable_fsdp.data.packing import Rows
from portable_fsdp.layout import devices_per_row, split_batch
from portable_fsdp.models import attention, document_masks
from portable_fsdp.models.experts import OneDevice
from portable_fsdp.plan.device_rules import CachingAllocator, gpu_attention, gpu_flex, tpu_attention
from portable_fsdp.plan.memory_trace import (
    Block,
    Collective,
    CollectiveRun,
    Events,
    KernelRun,
    MemoryPart,
    Recorder,
    Timeline,
    fused,
    peak,
    replay,
)
from portable_fsdp.plan.repeated_layers import Extension, Pattern, find_pattern, keep
from portable_fsdp.plan.result import Buffer, DeviceMemory, EnginePlan, ModelFacts, Moved, Work
from portable_fsdp.plan.target import Target
from portable_fsdp.plan.time import Compute, Drain, ScheduleEntry, Send, Wait, expected_time, over_links, rates_of
from portable_fsdp.runtime.child import without_garbage_collection
from portable_fsdp.runtime.errors import PortableFSDPError
from portable_fsdp.runtime.launchers import LAUNCH_VARIABLES
from portable_fsdp.train.build import Training, build_training
from portable_fsdp.train.measures import control_numbers, tokens_and_flops
from portable_fsdp.train.preflight import fit_packing

# NCCL's buffers per communicator: in each of 24 channels two connections for a ring and two for a tree, each with
# 10 MiB to receive or 2 MiB to send (sizes as logged on 8 H100s, github.com/NVIDIA/nccl/issues/1685; more than two
# hosts need no more, issues/864). Not measured by us.
COMMUNICATOR_BYTES = 24 * 2 * (10 + 2) * 2**20

TPU_NOTE = (
    "memory is a lower bound: inputs and outputs of operations, one at a time, as TorchTPU runs them. Unknown: scratch "
    "and code of their programs, tpu_dist's buffers, gaps of the allocator. A product by a gathered weight may need "
    "the weight's bytes again (1,002 MiB for a head of 128,256 x 4,096 in libtpu 0.0.52's program on v6e)."
)

MICRO_BATCHES = 3  # the first, one that accumulates onto the first's gradients, and the last; the rest equal the second
BIGGEST = 10
SHAPES_MODE = "torch.distributed.tensor._sharding_prop.detect_fake_mode"


def plan_memory(config: Config, target: Target) -> EnginePlan:
    """Plan the memory of the fullest device of `target` in a step of `config`, and the work of each device.

    Nothing runs and no weight is allocated. It takes seconds, which hardly grow with the devices. On GPUs they
    hardly grow with the layers that are equal (`repeated_layers`); elsewhere the trace has all layers.
    Memory has the parts that live at the peak (rank 0 holds the largest shards), and on cuda two more:
    - `allocator`: memory that torch's caching allocator reserves on top (`CachingAllocator`). It stays within the
      device's limit, because torch returns unused memory there.
    - `communication buffers`: NCCL's, by rule: COMMUNICATOR_BYTES for each communicator that the step uses.
    Neither includes the CUDA context (about half a GiB): `Target.limit_bytes` subtracts it. On TPUs memory is a lower
    bound (TPU_NOTE), of tensors in their tiles.

    Work counts products by the formulas of torch.utils.flop_counter, causal attention by half; float32 products as
    `tf32` if precision.matmul allows it. Raises what building the model raises. Call it in a process without a process
    group, preferably a separate one: FSDP2 and DTensor keep caches.
    """
    config, _ = fit_packing(config)
    with without_garbage_collection():
        recorder, training, host_bytes, _ = _record(config, target)
    events, calls = replay(recorder.log)
    is_compiled, rates = config.compile.enabled is True, rates_of(target)
    left_out = split_batch(config, target.devices // devices_per_row(config)).accumulation - MICRO_BATCHES
    programs = [*calls[:2], *calls[1:2] * left_out, *calls[2:]]  # the micro batches left out equal the second
    runs = [entry for program in calls for entry in program if isinstance(entry, CollectiveRun)]
    sent = {run.collective: _sent_by(run.collective, target) for run in runs}
    memory = _memory(recorder, events, peak(events), sent, target, host_bytes)
    operations = operations_of(programs, sent, is_compiled=is_compiled)
    notes = ("planned as an eager step: a compiled one needs less memory.",) * is_compiled
    if config.precision.products != "auto":
        notes += ("planned with bfloat16 products: float8 products take less time.",)
    return EnginePlan(
        model=facts_of(training, config.data.seq_len),
        memory=memory,
        work=_work(programs, sent),
        method=f"The trainer's own step, on fake tensors with torch {importlib.metadata.version('torch')}; not run.",
        notes=(*notes, TPU_NOTE) if recorder.is_tpu else notes,
        expected=expected_time(operations, rates) if rates and recorder.is_gpu else None,
    )


def _memory(
    recorder: Recorder,
    events: Events,
    blocks: list[Block],
    sent: Collection[Collective],
    target: Target,
    host_bytes: int,
) -> DeviceMemory:
    """Sum up a device's memory while `blocks`, those of the peak, live."""
    parts: dict[str, int] = dict.fromkeys(get_args(MemoryPart), 0)
    for block in blocks:
        parts[block.part] += block.bytes
    if recorder.is_gpu:
        live_bytes = sum(parts.values())
        buffers = len({collective.communicator for collective in sent}) * COMMUNICATOR_BYTES
        allocator = CachingAllocator(None if target.limit_bytes is None else target.limit_bytes - buffers)
        for block, is_made in events:
            if is_made:
                allocator.malloc(block, block.bytes, block.stream)
            else:
                allocator.free(block)
        parts |= {"allocator": allocator.peak_reserved - live_bytes, "communication buffers": buffers}
    biggest = sorted(blocks, key=lambda block: block.bytes, reverse=True)[:BIGGEST]
    return DeviceMemory(
        parts=parts,
        limit_bytes=target.limit_bytes,
        at=blocks[-1].where if blocks else "",
        biggest=tuple(Buffer(name=block.name, bytes=block.bytes, where=block.where) for block in biggest),
        host_bytes=host_bytes if recorder.is_gpu else 0,
        is_least=recorder.is_tpu,
    )


def _planned(config: Config, devices: int) -> Config:
    """Return the config for the plan: eager, products in the compute dtype, and only the micro batches that differ."""
    row_shards = devices // devices_per_row(config)
    split = split_batch(config, row_shards)
    computed = split.rows * row_shards * min(split.accumulation, MICRO_BATCHES)
    config = with_value(config.without_compiler(), "train.micro_batch", split.rows)
    config = with_value(config, "train.global_batch", computed - (split.padding > 0))  # refused where padding is
    return with_value(config, "precision.products", "auto")


# ---------------------------------------------------------------------------------------------------------- the step


class _Recorded(NamedTuple):
    recorder: Recorder  # its log is that of the whole model
    training: Training  # its model may have fewer of the layers that are equal
    host_bytes: int  # of weights, gradients, optimizer state and activations that are offloaded
    pattern: Pattern | None  # None: all layers were traced


def _record(config: Config, target: Target) -> _Recorded:
    """Record the planned steps; on GPUs trace few of the layers if they repeat."""
    if target.hardware.kind != "cuda":
        return record_layers(config, target, whole=True)
    try:
        recorded = record_layers(config, target, whole=False)
        if recorded.pattern:
            recorded.recorder.log = Extension(recorded.recorder.log, recorded.pattern).entries
        return recorded
    except PortableFSDPError:
        raise
    except Exception:  # the layers aren't regular, or it is the error of a forward that needs all layers
        return record_layers(config, target, whole=True)


def record_layers(config: Config, target: Target, *, whole: bool) -> _Recorded:
    """Record the planned steps: the whole model's, or of the layers that `find_pattern` keeps."""
    compiles, config = config.compile.enabled is True, _planned(config, target.devices)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    kind = target.hardware.kind
    device = torch.device("cpu") if kind == "cpu" else stand_in()
    has_tf32 = kind == "cuda" and config.precision.matmul != "highest"
    recorder = Recorder(fake, device, kind, has_tf32=has_tf32)
    with ExitStack() as held:
        held.enter_context(ranks(target.devices, target.devices_per_host))
        planned = held.enter_context(planned_engine(config, fake, recorder, whole, compiles=compiles))
        backend = planned.engine
        held.enter_context(_seen_by(recorder))
        # Newer DTensors propagate shapes on tensors of the active mode, which the recorder would count as memory.
        held.enter_context(patch(SHAPES_MODE, lambda: None, create=True))
        training = build_training(config, backend, vocabulary=1, fill=False, rows=rows_of(config))
        _name(recorder, training)
        if recorder.is_tpu:
            held.enter_context(patch.object(F, "scaled_dot_product_attention", tpu_attention))
        if recorder.is_gpu:
            held.enter_context(patch.object(F, "scaled_dot_product_attention", gpu_attention))
            held.enter_context(patch.object(document_masks, "flex_attention", gpu_flex))
            held.enter_context(patch.object(attention, "has_flash", lambda _: True))
        held.enter_context(fake)
        held.enter_context(recorder.watching(training.model))
        # A first step, of one micro batch, determines FSDP2's prefetch order.
        first = replace(training.step, accumulation=1)
        for step, micro_batches in ((first, 1), (training.step, training.accumulation)):
            recorder.begin("step")
            placed = [backend.place(empty_batch(config, training, training.rows, "cpu")) for _ in range(micro_batches)]
            backend.fetch(step(placed, config.optim.lr, control_numbers(target.devices)))
            del placed
    host_bytes = _host_bytes(training, planned.pattern) + (backend.offload.host_bytes if backend.offload else 0)
    return _Recorded(recorder, training, host_bytes, planned.pattern)


@contextmanager
def planned_engine(
    config: Config, fake: FakeTensorMode, recorder: Recorder, whole: bool, *, compiles: bool = False
) -> Generator["_Planned"]:
    """Open the native engine of rank 0 for fake tensors. `compiles`: the run compiles layers, though the plan is of an
    eager step."""
    # The stand-in device is the CPU, for which the engine refuses flex; the model is built with its own attention.
    with NativeBackend("cpu", with_value(config, "model.attention", "auto"), None) as engine:
        engine.device, engine.runs_blocks = recorder.device, compiles and recorder.is_gpu
        planned = _Planned(engine, fake, recorder, whole, compiles)
        of_device = ("shard_model", "build_optimizer", "place", "compile", "clip_grad_norm")
        with patch.multiple(engine, **{name: getattr(planned, name) for name in of_device}):
            yield planned


class _Planned:
    """What a native engine does on fake tensors and a stand-in device, in place of the methods that need the device."""

    def __init__(
        self, engine: NativeBackend, fake: FakeTensorMode, recorder: Recorder, whole: bool, compiles: bool
    ) -> None:
        self.engine, self._fake, self._recorder, self._whole = engine, fake, recorder, whole
        self._compiles = compiles
        self.pattern: Pattern | None = None

    def shard_model(self, model: nn.Module, policy: ShardPolicy, fill: Fill | None) -> nn.Module:
        device = self.engine.device
        require_saved_ops(policy, compiles=self._compiles)
        if not self._whole and (pattern := find_pattern(model, policy)):
            policy, self.pattern = keep(model, policy, pattern), pattern
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = self._fake.from_tensor(buffer)
        with patch("torch.distributed.fsdp._fully_shard._fully_shard._get_device_from_mesh", lambda _: device):
            model = NativeBackend.shard_model(self.engine, model, policy, None)
        with self._fake, self._recorder, self._recorder.making("weights", "the model"):
            materialise(model, policy, device)
        return model

    def build_optimizer(
        self, make: MakeOptimizer, groups: list[dict[str, Any]], model: nn.Module
    ) -> torch.optim.Optimizer:
        def as_on_device(groups: list[dict[str, Any]], compiled: bool) -> torch.optim.Optimizer:
            on_device = all(parameter.device == stand_in() for group in groups for parameter in group["params"])
            optimizer = make(groups, compiled or self._recorder.is_tpu)  # like make_optimizer on a TPU
            for group in optimizer.param_groups:
                if "fused" in group and on_device:  # like make_optimizer on a GPU
                    group |= {"foreach": False, "fused": True}
            return optimizer

        if pattern := self.pattern:
            groups = [group | {"params": [*pattern.as_kept(group["params"])]} for group in groups]
        with self._fake, self._recorder, self._recorder.making("optimizer", "the optimizer"):
            return NativeBackend.build_optimizer(self.engine, as_on_device, groups, model)

    def place(self, batch: Batch, axes: Sequence[str] = ()) -> Batch:
        with self._recorder.making("activations", "the batch"), self._fake:  # the batch's tensors aren't fake yet
            return {
                name: torch.empty(tensor.shape, dtype=tensor.dtype, device=self.engine.device)
                for name, tensor in self.engine.split_tokens(batch).items()
            }

    def compile(self, fn: Any, name: str) -> Any:
        run = NativeBackend.compile(self.engine, fn, name)

        def counted(*args: Any) -> Any:
            self._recorder.begin("program")
            return run(*args)

        return counted

    def clip_grad_norm(self, model: nn.Module, limit: float | None) -> Tensor:
        with self._recorder.making("temporaries", "clipping of gradients"):
            return NativeBackend.clip_grad_norm(self.engine, model, limit)


def _name(recorder: Recorder, training: Training) -> None:
    """Name the tensors that stay on the device as a checkpoint does."""
    parameters = dict(training.model.named_parameters())
    for fqn, parameter in (*parameters.items(), *training.model.named_buffers()):
        recorder.name(local_part(parameter), fqn)
        for key, value in training.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                recorder.name(local_part(value), state_key(key, fqn))


def _host_bytes(training: Training, pattern: Pattern | None) -> int:
    """Return the bytes of this rank's weights, gradients and optimizer state that are offloaded to the host."""
    total = 0
    for fqn, weight in training.model.named_parameters():
        state: Iterable[Any] = training.optimizer.state.get(weight, {}).values()
        gradients = [weight] * weight.requires_grad
        tensors = [local_part(tensor) for tensor in (weight, *gradients, *state)]
        # Step counts (dim 0) are on the host anyway.
        bytes_ = sum(tensor.nbytes for tensor in tensors if tensor.device != stand_in() and tensor.dim() > 0)
        total += bytes_ * (pattern.times(fqn) if pattern else 1)
    return total


# ------------------------------------------------------------------------------------------------------- stand-ins


def stand_in() -> torch.device:
    """Return the device that stands in for a GPU or a TPU: for torch not the CPU, but with its kernels.

    So copies to it are recorded and mixing the two fails. Fake tensors on "cuda" end the process without a driver.
    """
    return torch.device("cpu", 0)


@contextmanager
def ranks(devices: int, devices_per_host: int) -> Generator[None]:
    """Open a fake process group of `devices` ranks; this process is rank 0."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    importlib.import_module("torch.distributed._tools.fake_collectives")  # collectives of fake tensors
    with patch.dict(os.environ, LOCAL_WORLD_SIZE=str(devices_per_host)):
        for name in LAUNCH_VARIABLES:
            os.environ.pop(name, None)
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=devices)
        try:
            yield
        finally:
            dist.destroy_process_group()


@contextmanager
def _seen_by(recorder: Recorder) -> Generator[None]:
    """Report what no dispatch mode sees: resizes of storages, and how much of the buffers of experts their products
    compute (not the padding). Let `item()` of fake tensors (step counts) return 1."""
    resize, item, linear = torch.UntypedStorage.resize_, torch.Tensor.item, OneDevice.linear

    def resized(storage: Any, size: int) -> Any:
        result = resize(storage, size)
        recorder.resized(storage)
        return result

    def noted(self: OneDevice, experts: Any, sizes: Tensor, active: int, rows: Tensor, name: str) -> Tensor:
        recorder.grouped_share = active / rows.shape[1]
        return linear(self, experts, sizes, active, rows, name)

    with (
        patch.object(torch.UntypedStorage, "resize_", resized),
        patch.object(OneDevice, "linear", noted),
        patch.object(torch.Tensor, "item", lambda value: 1.0 if isinstance(value, FakeTensor) else item(value)),
    ):
        yield


# -------------------------------------------------------------------------------------------------------- the result


def _sent_by(collective: Collective, target: Target) -> dict[str, float]:
    """Return link -> least bytes that a device sends over it; an all-reduce circles the ring twice."""
    ranks, size = collective.ranks, collective.bytes * (2 if collective.kind == "all_reduce" else 1)
    exchanges = collective.kind == "all_to_all"
    return over_links(target.levels, size, members=len(ranks), stride=ranks[-1] - ranks[-2], exchanges=exchanges)


def _work(programs: list[Timeline], sent: Mapping[Collective, Mapping[str, float]]) -> Work:
    flops: defaultdict[str, float] = defaultdict(float)
    collectives: defaultdict[str, Moved] = defaultdict(Moved)
    links: defaultdict[str, float] = defaultdict(float)
    for entry in chain.from_iterable(programs):
        if isinstance(entry, KernelRun):
            if entry.flops:
                flops[entry.dtype] += entry.flops
            continue
        collective, members = entry.collective, len(entry.collective.ranks)
        times = 2 if collective.kind == "all_reduce" else 1
        ring = times * (collective.bytes * (members - 1) // members)
        collectives[f"{collective.kind} {collective.dtype}"] += Moved(1, collective.bytes, ring)
        for link, size in sent[collective].items():
            links[link] += size
    return Work(matmul_flops=flops, collectives=collectives, sent_bytes=links)


def operations_of(
    programs: Iterable[Timeline], sent: Mapping[Collective, Mapping[str, float]], *, is_compiled: bool
) -> Iterator[ScheduleEntry]:
    """List the operations that a GPU runs for the programs of a step, in order.

    FSDP2 starts the next gather when compute takes over the last one's weights. Compute waits where it reads weights
    that aren't gathered yet. Gradient reductions overlap with compute and alternate with gathers; a program ends when
    they have ended. Collectives of the compute stream (activations of the axis `tensor`, clipping) run beside FSDP2's.
    `is_compiled`: layers and the loss are compiled, which fuses the kernels between their products.
    """
    gathered: set[Block] = set()  # not read yet
    for program in programs:
        for entry in fused(program) if is_compiled else program:
            if isinstance(entry, CollectiveRun):
                if entry.is_waited_for:
                    yield Send(id(entry), "links of the compute stream", sent[entry.collective])
                    yield Wait(id(entry))
                else:
                    gathered |= {entry.result} if entry.result else set()
                    is_ahead = entry.result is not None
                    yield Send(entry.result, "links", sent[entry.collective], is_ahead)
                continue
            for block, _ in entry.reads:
                if block in gathered:
                    gathered.remove(block)
                    yield Wait(block)
            moved = sum(size for _, size in (*entry.reads, *entry.writes))
            yield Compute(entry.part, entry.flops, moved, entry.dtype)
        yield Drain()


# ------------------------------------------------------------------------------------- the model, and its batch


def rows_of(config: Config) -> Rows | None:
    """Return the rows of `data.factory`, whose first rows define a batch; None: text. Raises the run's errors."""
    if config.data.factory is None:
        return None
    return build_data(config.data.model_copy(update={"eval_split": None})).rows


def facts_of(training: Training, seq_len: int) -> ModelFacts:
    """Return the whole model's facts, as a run counts them (measures.run_start). `seq_len`: tokens in a row of text."""
    size, trial = training.built.size, training.trial
    tokens, flops = tokens_and_flops(size, seq_len, trial and trial.cost)
    row = trial.row.items() if trial else ()
    rows = ", ".join(f"{name} {dtype_name(dtype)} {list(shape)}" for name, (shape, dtype) in row)
    return ModelFacts(parameters=size.parameters, tokens_per_row=tokens, rows=rows, flops_per_token=flops)


def empty_batch(config: Config, training: Training, rows: int, device: str) -> Batch:
    """Return the tensors of a micro batch, without values: shaped as `data.factory`'s first rows, or text as int64
    `[rows, seq_len]`."""
    names = ["input_ids", "labels"]
    if config.data.resolved_packing != "stream":
        names += ["positions", "segments"]
    text = dict.fromkeys(names, ((config.data.seq_len,), torch.int64))
    row = text if training.trial is None else training.trial.row
    batch = {name: torch.empty((rows, *shape), dtype=dtype, device=device) for name, (shape, dtype) in row.items()}
    if training.keys is None:
        return batch
    name, make = training.keys
    return batch | {name: torch.empty_like(make(0, np.arange(rows)), device=device)}
