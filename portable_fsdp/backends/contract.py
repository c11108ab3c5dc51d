"""The backend contract: what an engine must do so that one train loop runs on it.

A backend is opened (`backends.open.open_backend`), used as a context manager, and closed. It refuses
what it can't honour while it opens, never later. `tests/backends/test_contract.py` runs each line of the
contract (C1 to C7) against every backend.
"""

import resource
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from portable_fsdp.layout import LOSS_AXES, ROW_AXES, Region, Spec, full_region
from portable_fsdp.optim.counting import MakeOptimizer
from portable_fsdp.runtime.errors import BackendError, Closing, ConfigError
from portable_fsdp.runtime.host import host_memory_bytes
from portable_fsdp.runtime.watchdog import LONG_S, Watchdog

if TYPE_CHECKING:
    from portable_fsdp.backends.peers import Peers
    from portable_fsdp.backends.refusals import Deployment
    from portable_fsdp.config.schema import Config
    from portable_fsdp.optim.counting import LossScaler
    from portable_fsdp.quantised import ByteTable
    from portable_fsdp.tensor_plan import TensorPlan

T = TypeVar("T")

Forward = Callable[..., Any]  # of a module

Fill = Callable[[str, Region], Tensor]  # (FQN, slices) -> that piece of the initial weight, on the host, in master


class Read(Protocol):
    """Read one slice of a saved tensor to the host. Keys are those of `Backend.state`."""

    def __call__(self, key: str, slices: Region, /, into: Tensor | None = None) -> Tensor:
        """Return the slice. `into`: a host tensor of its shape and dtype to fill; without it, new memory."""
        ...


Batch = dict[str, Tensor]
"""Named tensors whose dimension 0 is the rows of this process's data shard.

Text, int64 `[rows, seq]`: `input_ids`; `labels` (the token after each of `input_ids`, or -100); for rows of documents
also `positions` (in the document) and `segments` (number of the document from 1; 0: padding). Other data: the user's
dataset defines the tensors."""

Metrics = dict[str, Tensor]  # float32, on the device, 0-D or 1-D, equal on all processes


@dataclass(frozen=True)
class Partition:
    """Index and number of equal parts: of this process among all, or of the rows that it feeds."""

    index: int
    count: int


class Piece(NamedTuple):
    """A piece of a global tensor on this process, which writes it unless it is replica 1 or higher."""

    offset: tuple[int, ...]
    data: Tensor  # on the host or the device; data.shape is the piece's shape
    replica: int | None = None
    """Replica index: replica 0 is written, others are compared with it. None: not replicated."""


@dataclass(frozen=True)
class TensorState:
    """A global tensor. `pieces()` returns those on this process, further replicas included; perhaps none.

    On XLA each call copies from the devices; elsewhere pieces are live memory, which the next step changes.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Callable[[], list[Piece]] = list


Allocate = Callable[[torch.optim.Optimizer, Iterable[Tensor]], None]  # its state for some of its parameters


class OptimizerState(Protocol):
    """What a checkpoint holds of an optimizer, or of several."""

    @property
    def state(self) -> Mapping[Tensor, Any]: ...


@dataclass(frozen=True)
class MemoryStats:
    """Peak use and size of a device's memory, in bytes (on CPU: of this process, which all its devices share)."""

    peak_bytes: int
    limit_bytes: int | None


class KeyedDraws(Protocol):
    """Dropout by keys of the rows (`models.dropout.Draws`), as engines see it; explained there."""

    argument: str
    chunk: int | None

    def move(self, chunk: int | None, part: tuple[int, int] | None) -> tuple[int | None, tuple[int, int] | None]: ...

    def rows_of(self, layers: Sequence[str]) -> Tensor: ...


@dataclass(frozen=True)
class ShardPolicy:
    """The sharding of a model over the backend's mesh, and its execution, in plain values.

    FQNs name modules in definition order, a unit before its inner units; the root holds the rest. `layouts` has the
    spec of each parameter; optimizer state follows by `layout.state_spec`. `layers` are the model's repeated blocks.
    Backward recomputes the modules in `recompute`, except for the outputs of `save_ops`. `modules` have a dtype other
    than `compute`: their inputs are cast to it, their outputs (but for the head's logits) back.
    """

    units: tuple[str, ...]
    layers: tuple[str, ...] = ()
    compute: torch.dtype = torch.float32
    cast_inputs: bool = True  # of the model and of `units`
    reduce: torch.dtype = torch.float32
    modules: Mapping[str, torch.dtype] = field(default_factory=lambda: {})
    products: str = "auto"  # of linear layers: a value of precision.products
    recompute: tuple[str, ...] = ()
    save_ops: tuple[str, ...] = ()  # of "matmul", "attention"
    reshard_after_forward: bool | int = True  # False: keep gathered weights until backward; int: over this many devices
    forward_prefetch: int = 0
    backward_prefetch: str = "BACKWARD_PRE"
    backward_prefetch_units: int = 1
    cpu_offload: bool = False
    offload_activations: bool = False  # the inputs of `recompute`
    compile_backend: str | None = None
    scan_layers: bool = False
    attention: Callable[..., Tensor] | None = None  # called by models; an engine may run its own kernel instead
    layouts: Mapping[str, Spec] = field(default_factory=lambda: {})
    tables: Mapping[str, "ByteTable"] = field(default_factory=lambda: {})  # parameters that hold quantised weights
    tensor: "TensorPlan | None" = None  # None: no axis `tensor`
    require_plan: Callable[[Callable[..., Tensor]], None] | None = None
    """`models.trials.require_plan` of this model: an engine that splits it by `tensor` gives its `RunParts`"""
    experts: tuple[str, ...] = ()  # modules whose weights `expert_spec` lays out; an engine may run its own products
    process_experts: Callable[[int, float | None, Callable[[Tensor], Tensor]], Any] | None = None
    """`models.experts.OneDevice`: experts of processes that exchange rows"""
    draws: KeyedDraws | None = None  # dropout draws from keys of the rows; None: from torch's generators
    expert_capacity: float | None = None  # of each exchange, in multiples of an even load; None: of the worst case


class Traffic(NamedTuple):
    """Calls of one kind of collective in a step, and the bytes of the full tensors that it gathers or reduces."""

    calls: int
    bytes: int


class Pending(NamedTuple):
    """Metrics that are being copied to the host."""

    result: Callable[[], dict[str, Tensor]]  # waits for the copy: the only place where a run waits for the device


class Operation(NamedTuple):
    """One operation of a device in an engine's trace."""

    name: str  # for a collective its kind (all_gather), if the engine knows it
    kind: Literal["compute", "communication", "copy"]
    start: float  # seconds on the trace's clock
    seconds: float
    stream: str  # operations on one stream run one after another, or are nested
    device: str = "cpu"
    module: str = ""  # the FSDP unit, or the XLA program
    bytes: int = 0  # size of the full tensor that a collective gathers or reduces; 0: unknown


class Backend(Closing):
    """An open engine. All processes call the methods marked *collective* in the same order."""

    name: str  # of the engine, for logs and manifests; no code outside backends/ branches on it
    deployment: "Deployment"  # the engine and its devices, by which options are refused
    device: torch.device
    device_name: str  # as its driver reports it ("NVIDIA H100 80GB HBM3", "TPU v5p", "cpu")
    process: Partition
    data_shard: Partition  # which rows this process feeds
    devices: int  # over all processes
    row_shards: int  # groups of devices that get different rows of a batch
    axes: Mapping[str, int]  # mesh axis -> number of devices along it (`layout.mesh_axes`)
    expected_compilations: int  # of the train step, evaluation and samples in a whole run; 0: nothing is compiled
    runs_blocks: bool = False  # it computes attention over blocks (flex) in compiled layers
    _peers: "Peers | None" = None  # watches the other processes, if the engine forms their group
    loss_scaler: "LossScaler | None" = None  # in float16: `clip_grad_norm` divides gradients by its scale
    optimizers: MutableMapping[torch.optim.Optimizer, "Allocate | None"]
    """Optimizer -> None if the engine made it; else, from `shard_optimizer`, what allocates its state for a load"""

    @abstractmethod
    def close(self) -> None:
        """Release what opening acquired (process groups)."""

    @abstractmethod
    def adopt(self, config: "Config") -> None:
        """Take the values that a plan found for keys that were `auto`, before `shard_model`.

        `config` differs from the one by which it opened in these keys alone. Raises BackendError for options that it
        can't honour.
        """

    @abstractmethod
    def shard_model(self, model: nn.Module, policy: ShardPolicy, fill: Fill | None) -> nn.Module:
        """Shard `model` (parameters on meta, buffers real on the host) over the mesh and fill it.

        FQNs, ties, buffers, dtypes and `requires_grad` stay those of `model`. With `fill=None` parameters are
        placeholders without memory, for the planner. Raises BackendError or ConfigError for a model that the engine
        can't run by `policy`. *collective*
        """

    @abstractmethod
    def build_optimizer(
        self, make: MakeOptimizer, groups: list[dict[str, Any]], model: nn.Module
    ) -> torch.optim.Optimizer:
        """Build the optimizer of a sharded model; `groups` name its parameters by FQN under `params`.

        Allocates all state at once as zeros, sharded like its parameters. Raises BackendError for an optimizer whose
        step reads a tensor's value on the host. *collective*
        """

    def shard_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepare your own optimizer over parameters of models that this backend sharded: of one, of several, of parts.

        Allocates its state as zeros, sharded like its parameters; a first step makes what doesn't begin as zeros. On
        XLA torch's AdamW and Adam step by ours, over their groups and state, with rates as inputs. Raises BackendError
        for a parameter of no sharded model, earlier state, and a step that reads a tensor on the host. *collective*
        """
        raise BackendError(f"backend {self.name}: takes no optimizer of your own.\n  Use --backend=native or xla.")

    @abstractmethod
    def place(self, batch: Batch, axes: Sequence[str] = ROW_AXES) -> Batch:
        """Start the copy from host to device: dimension 0 sharded over the mesh `axes`, 0-dim tensors replicated."""

    def place_control(self, values: Sequence[float]) -> Tensor:
        """Start the copy of this process's numbers, float32, that a step sums over all processes (`sum_control`)."""
        rows = torch.zeros(self.devices // self.process.count, len(values))  # an engine may have a row for each device
        rows[0] = torch.tensor(values)
        return self.place({"control": rows}, tuple(self.axes))["control"]

    def sum_control(self, control: Tensor) -> Tensor:
        """Sum placed control numbers over all processes: float32 `[n]`, on the device. *collective*"""
        return self.sum(control.sum(dim=0), tuple(self.axes))

    @property
    def counts_rows(self) -> bool:
        """Whether this process counts the rows that it feeds: the first of the processes that feed the same rows."""
        return self.process.index % (self.process.count // self.data_shard.count) == 0

    @abstractmethod
    def compile(self, fn: Callable[..., Metrics], name: str) -> Callable[..., Metrics]:
        """Compile `fn` (batches in, device tensors out) into one program; an eager engine returns `fn` itself."""

    def end_step(self) -> None:
        """Run what a loop outside `compile` has recorded as one program. Eager engines have run it."""

    def whole(self, tensor: Tensor) -> Tensor:
        """Return a tensor that is whole on each device: reading it then compiles nothing."""
        return tensor

    def accumulate(self, last: bool, model: nn.Module | None = None) -> AbstractContextManager[None]:
        """Context of a micro batch's backward, best of its forward too. After the last one gradients are sums over
        LOSS_AXES, once `clip_grad_norm` has run; an engine may reduce a part of them earlier.

        `model`: accumulate the gradients of this model, if the backend sharded several. None: of all.
        """
        return nullcontext()

    def unshard(self, module: nn.Module) -> None:
        """Start to gather a unit's weights, for loops that know the next unit: a forward gathers what is missing. A
        no-op on engines that compile, whose compiler schedules gathers. *collective*"""

    def evaluate(self) -> AbstractContextManager[None]:
        """Context of a forward without backward: no gradients. On exit the weights are sharded as before."""
        return torch.no_grad()

    def second_derivatives(self, model: nn.Module) -> AbstractContextManager[None]:
        """Context of a forward and backward with `autograd.grad(..., create_graph=True)`, inside `accumulate`. On
        native the whole model stays gathered meanwhile, and its gradients are reduced at the end. *collective*"""
        return nullcontext()

    def zero_gradients(self, optimizer: torch.optim.Optimizer, *, keep: bool) -> None:
        """Drop the gradients; with `keep`, or if the engine keeps them, zero them in place: their memory stays."""
        if keep:
            optimizer.zero_grad(set_to_none=False)
            return
        for group in optimizer.param_groups:
            for weight in group["params"]:
                weight.grad = None  # without `zero_grad`, which takes ten times as long

    def scale_gradients(self, model: nn.Module, factor: Tensor) -> None:
        """Multiply all gradients by `factor`, a 0-dim device tensor, the same on all processes."""
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    @abstractmethod
    def clip_grad_norm(self, model: nn.Module | Iterable[Tensor], limit: float | None) -> Tensor:
        """Finish sums of gradients over LOSS_AXES, undo loss scaling, clip to the global norm `limit` (None: don't).

        `model`: a sharded model, or parameters of any sharded models.

        Returns the unscaled norm before clipping, 0-dim, on the device. *collective*
        """

    @abstractmethod
    def sum(self, tensor: Tensor, axes: Sequence[str] = LOSS_AXES) -> Tensor:
        """Sum what the devices along the mesh `axes` computed of the placed batch, element by element, on the device.

        Keeps shape and dtype. On xla, tensors are global already: the result is `tensor`. Numbers that each process
        has for itself need `place_control` and `sum_control`. *collective*
        """

    def fetch(self, metrics: Metrics) -> Pending:
        """Start the copy to the host. Read the result later, so that the device never waits for the host."""
        return Pending(lambda: {name: value.cpu() for name, value in metrics.items()})

    def agree(self, value: T) -> T:
        """Broadcast process 0's `value` (anything that pickles) to all processes. *collective*

        This and `gather` use torch's process group, which a run of one process may lack.
        """
        values: list[Any] = [value]
        if self.process.count > 1:
            dist.broadcast_object_list(values, src=0)
        return cast(T, values[0])

    def gather(self, value: T) -> list[T]:
        """Gather every process's `value` (anything that pickles) on all processes, in process order. *collective*"""
        values: list[Any] = [value] * self.process.count
        if self.process.count > 1:
            dist.all_gather_object(values, value)
        return cast(list[T], values)

    @abstractmethod
    def state(self, model: nn.Module, optimizer: OptimizerState) -> dict[str, TensorState]:
        """Return the tensors to save. All processes together write each element of a global tensor exactly once.
        Further replicas of a piece have an index: a save compares them. Buffers have none, since they may differ.
        Keys: FQN for parameters and persistent buffers, `<state name>/<FQN>` for optimizer state. Tied weights
        appear once, under their first FQN. The same keys, shapes and dtypes on all processes.
        """

    @abstractmethod
    def load_state(self, model: nn.Module, optimizer: OptimizerState, read: Read) -> None:
        """Overwrite every tensor of `state`, reading this process's slices through `read`. No collective."""

    def tensor_state(self, tensor: Tensor) -> TensorState:
        """Describe a tensor outside models and optimizers, for a save: a part of it on each device, or a copy."""
        pieces = [Piece((0,) * tensor.dim(), tensor.detach())] if self.process.index == 0 else []
        return TensorState(tuple(tensor.shape), tensor.dtype, lambda: pieces)

    def load_tensor(self, tensor: Tensor, read: Callable[[Region], Tensor]) -> None:
        """Overwrite such a tensor, which stays on its devices; `read` returns slices, on the host."""
        tensor.copy_(read(full_region(tensor.shape)))

    @property
    def compilations(self) -> int:
        """Number of programs of the train step, evaluation and samples compiled so far; 0 on eager engines."""
        return 0

    @property
    def collectives(self) -> dict[str, Traffic] | None:
        """Kind (all_gather, reduce_scatter, all_reduce, ...) -> traffic of one step, counted during the first one.

        None before that, and if the engine can't count.
        """
        return None

    def compute_seconds(self) -> float | None:
        """Seconds of a part of the last step in which this process waited for no other; to compare processes.

        Call once per step. Does not synchronize: CUDA reports the step before last. NaN: no measurement yet; None: not
        supported.
        """
        return None

    def watch(self, watchdog: Watchdog) -> None:
        """Tell the other processes what this one does, and `watchdog` for whom it waits. Without `_peers`, as in a
        group of the caller, they don't watch each other, and each may wait long for a callback of process 0."""
        if self._peers is not None:
            self._peers.watch(watchdog)
        elif self.process.count > 1:
            watchdog.note("", LONG_S, waits=self.process.index != 0)

    def lost_connection(self, error: BaseException) -> str | None:
        """Return which process is lost, and why, for an error of the network; None for another error."""
        return self._peers.explain(error) if self._peers is not None else None

    @abstractmethod
    def memory(self) -> MemoryStats | None:
        """Peak and current use of the fullest device of this process; None if the engine can't report it."""

    @abstractmethod
    def start_trace(self, folder: Path) -> Callable[[], Callable[[], list[Operation]]]:
        """Record this process and its devices until the returned function is called.

        That function writes the engine's own trace into `folder` and returns another, which reads the trace (this
        takes seconds) and returns its operations. None of them waits for a device, compiles, or needs other processes.
        """


def as_batch(batch: object) -> Batch:
    """Return a batch. Raises ConfigError for anything but a dict of tensors."""
    values = cast(dict[object, object], batch if isinstance(batch, Mapping) and batch else {0: batch})
    for name, value in values.items():
        if not (isinstance(name, str) and isinstance(value, Tensor)):
            raise ConfigError(
                f"batch: expected a dict of tensors, found {f'{name}: ' * bool(name)}{type(value).__name__}.\n"
                '  Write engine.place({"x": torch.as_tensor(x)}): the task reads batch["x"].'
            )
    return cast(Batch, batch)


_host_bytes = cache(host_memory_bytes)  # a step needs it twice, and reading the files of cgroups takes 0.1 ms


def process_memory() -> MemoryStats:
    """Memory of this process, which all its CPU devices share."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return MemoryStats(peak, _host_bytes())
