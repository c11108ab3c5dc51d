"""The backend contract: what an engine must do so that one train loop runs on it.

A backend is opened (`backends.open.open_backend`), used as a context manager, and closed. It refuses
what it can't honour while it opens, never later. `tests/backends/test_contract.py` runs each line of the
contract (C1 to C7) against every backend.
"""

import resource
import traceback
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar, cast

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd  # pyright: ignore[reportPrivateUsage]

from portable_fsdp.layout import LOSS_AXES, ROW_AXES, Region, Spec, state_spec
from portable_fsdp.optim.counting import CountingOptimizer
from portable_fsdp.runtime.errors import BackendError, Closing
from portable_fsdp.runtime.host import host_memory_bytes

if TYPE_CHECKING:
    from portable_fsdp.optim.counting import LossScaler

T = TypeVar("T")

Forward = Callable[..., Any]
"""A module's."""

Fill = Callable[[str, Region], Tensor]
"""`fill(fqn, slices)` -> that piece of the initial weight, on the host, in the master dtype."""


class Read(Protocol):
    """Read one slice of a saved tensor to the host. Keys are those of `Backend.state`."""

    def __call__(self, key: str, slices: Region, /, into: Tensor | None = None) -> Tensor:
        """`into`: a host tensor of its shape and dtype that is filled; new memory without it."""
        ...


Batch = dict[str, Tensor]
"""Named tensors whose dimension 0 is rows of this process's data shard.

Of text, int64 [rows, seq]: `input_ids`; `labels` (the token after each of `input_ids`, or -100); for rows of documents
also `positions` (in the document) and `segments` (number of the document from 1; 0: padding). Else what the user's
dataset gives."""

Metrics = dict[str, Tensor]
"""Named float32 device tensors of no or one dimension, equal on all processes."""

MakeOptimizer = Callable[[list[dict[str, Any]], bool], torch.optim.Optimizer]
"""`make(groups, compiled)`: groups hold parameters under `params`; compiled: for steps that are compiled, whose lr is a
tensor."""


@dataclass(frozen=True)
class Partition:
    """One of `count` equal parts: which process this is, or which rows it feeds."""

    index: int
    count: int


class Piece(NamedTuple):
    """A piece of a global tensor that this process holds, and writes unless it is a further replica of it."""

    offset: tuple[int, ...]
    data: Tensor  # on the host or the device; data.shape is the piece's shape
    replica: int | None = None
    """Replica index: replica 0 is written, others are compared with it. None: not replicated."""


@dataclass(frozen=True)
class TensorState:
    """A global tensor. `pieces()` reads those that this process holds, perhaps none, further replicas included.

    On XLA each call copies from the devices; elsewhere the pieces are live memory, which the next step changes.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: Callable[[], list[Piece]] = list


@dataclass(frozen=True)
class MemoryStats:
    """Bytes of one device (on CPU: of this process, over its devices)."""

    peak_bytes: int
    now_bytes: int
    limit_bytes: int | None


@dataclass(frozen=True)
class ShardPolicy:
    """How a model is laid out over the backend's mesh, and run, in plain values.

    FQNs name modules in the order of definition, a unit before the units inside it; the root holds the rest. `layouts`
    has the spec of each parameter; optimizer state follows by `layout.state_spec`. `layers` are the model's repeated
    blocks. Modules in `recompute` run again in backward, except for the outputs of `save_ops`. `modules` compute in
    another dtype than `compute`: their inputs are cast to it, their outputs (but for the head's logits) back.
    """

    units: tuple[str, ...]
    layers: tuple[str, ...] = ()
    compute: torch.dtype = torch.float32
    cast_inputs: bool = True  # of the model and of `units`
    reduce: torch.dtype = torch.float32
    modules: Mapping[str, torch.dtype] = field(default_factory=lambda: {})
    products: str = "auto"  # of linear layers: a word of precision.products
    recompute: tuple[str, ...] = ()
    save_ops: tuple[str, ...] = ()  # of "matmul", "attention"
    reshard_after_forward: bool | int = True  # False: gathered weights stay until backward; a number: of devices
    forward_prefetch: int = 0
    backward_prefetch: str = "BACKWARD_PRE"
    backward_prefetch_units: int = 1
    cpu_offload: bool = False
    offload_activations: bool = False  # the inputs of `recompute`
    compile_backend: str | None = None
    scan_layers: bool = False
    attention: Callable[..., Tensor] | None = None  # that models call; an engine may run its kernel instead
    layouts: Mapping[str, Spec] = field(default_factory=lambda: {})


class Traffic(NamedTuple):
    """How often a kind of collective runs in a step, and the bytes of the full tensors that it gathers or reduces."""

    calls: int
    bytes: int


class Pending(NamedTuple):
    """Metrics on their way to the host."""

    result: Callable[[], dict[str, Tensor]]
    """Waits for them. The only place where a run waits for the device."""


class Operation(NamedTuple):
    """Work of a device in the trace that an engine recorded."""

    name: str  # of a collective its kind (all_gather), where the engine knows it
    kind: Literal["compute", "communication", "copy"]
    start: float  # seconds, by the trace's clock
    seconds: float
    stream: str  # on one stream operations follow one another, or lie inside one another
    device: str = "cpu"
    module: str = ""  # the FSDP unit, or the XLA program
    bytes: int = 0  # of the full tensor that a collective gathers or reduces; 0: unknown


class Backend(Closing):
    """An open engine. Methods marked *collective* are called by all processes in the same order."""

    name: str  # of the engine, for logs and manifests; no code outside backends/ branches on it
    device: torch.device
    device_name: str  # as its driver gives it ("NVIDIA H100 80GB HBM3", "TPU v5p", "cpu")
    process: Partition
    data_shard: Partition  # which rows this process feeds
    devices: int  # of all processes
    row_shards: int  # groups of devices that get different rows of a batch
    axes: Mapping[str, int]  # of the mesh, as `layout.mesh_axes` gives them: name -> devices along it
    expected_compilations: int  # of the train step, evaluation and samples in a whole run; 0 where nothing compiles
    loss_scaler: "LossScaler | None" = None  # in float16: `clip_grad_norm` divides gradients by its scale

    @abstractmethod
    def close(self) -> None:
        """Give back what opening took (process groups)."""

    @abstractmethod
    def shard_model(self, model: nn.Module, policy: ShardPolicy, fill: Fill | None) -> nn.Module:
        """Lay out `model` (parameters on meta, buffers real on the host) over the mesh and fill it.

        FQNs, ties, buffers, dtypes and `requires_grad` stay those of `model`. With `fill=None` parameters are
        placeholders without memory, for the planner. *collective*
        """

    @abstractmethod
    def build_optimizer(self, make: MakeOptimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Make the optimizer of the sharded model; `groups` name parameters by FQN under `params`.

        All its state exists at once, zero, laid out like its parameters. *collective*
        """

    @abstractmethod
    def place(self, batch: Batch, axes: Sequence[str] = ROW_AXES) -> Batch:
        """Start the copy from host to device. Dimension 0 lies over the mesh `axes`, a 0-dim tensor on each device."""

    def place_control(self, values: Sequence[float]) -> Tensor:
        """Start the copy of numbers of this process, float32, that a step sums over all processes (`sum_control`)."""
        rows = torch.zeros(self.devices // self.process.count, len(values))  # an engine may have a row for each device
        rows[0] = torch.tensor(values)
        return self.place({"control": rows}, tuple(self.axes))["control"]

    def sum_control(self, control: Tensor) -> Tensor:
        """Placed control numbers, summed over all processes: float32 [n], on device. *collective*"""
        return self.sum(control.sum(dim=0), tuple(self.axes))

    @property
    def counts_rows(self) -> bool:
        """Whether this process counts the rows that it feeds: the first of those that feed the same ones."""
        return self.process.index % (self.process.count // self.data_shard.count) == 0

    @abstractmethod
    def compile(self, fn: Callable[..., Metrics], name: str) -> Callable[..., Metrics]:
        """One program of `fn` (batches in, device tensors out), or `fn` itself where the engine is eager."""

    def accumulate(self, last: bool, model: nn.Module | None = None) -> AbstractContextManager[None]:
        """Around a micro batch's forward and backward. After the last one gradients are sums over LOSS_AXES, once
        `clip_grad_norm` has run; an engine may reduce a part of them earlier.

        `model`: the one whose gradients are wanted, if the backend laid out several. None: all of them.
        """
        return nullcontext()

    def unshard(self, module: nn.Module) -> None:
        """Start to gather a unit's weights ahead of its forward. *collective*

        For a loop that knows what comes next; a forward gathers what isn't there. Nothing happens where the engine
        compiles: the compiler schedules gathers.
        """

    def evaluate(self) -> AbstractContextManager[None]:
        """Around a forward that no backward follows: no gradients. The model rests afterwards as it did before."""
        return torch.no_grad()

    def zero_gradients(self, optimizer: torch.optim.Optimizer, *, keep: bool) -> None:
        """Drop the gradients; with `keep`, or where the engine keeps them, set them to zero: their memory stays."""
        optimizer.zero_grad(set_to_none=not keep)

    def scale_gradients(self, model: nn.Module, factor: Tensor) -> None:
        """Multiply all gradients by a 0-dim tensor of the device, the same on all processes."""
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    @abstractmethod
    def clip_grad_norm(self, model: nn.Module, limit: float | None) -> Tensor:
        """Undo loss scaling and clip to the global norm `limit` (None: don't).

        Returns the norm between the two, 0-dim, on device. *collective*
        """

    @abstractmethod
    def sum(self, tensor: Tensor, axes: Sequence[str] = LOSS_AXES) -> Tensor:
        """Sum element by element over the mesh `axes`, on device, in the shape and dtype of `tensor`. *collective*"""

    def fetch(self, metrics: Metrics) -> Pending:
        """Start the copy to the host; the result is read later, so that the device never waits for the host."""
        return Pending(lambda: {name: value.cpu() for name, value in metrics.items()})

    def agree(self, value: T) -> T:
        """Process 0's `value` (anything that pickles), on all processes. *collective*

        This and `gather` use torch's process group, which a run of one process may lack.
        """
        values: list[Any] = [value]
        if self.process.count > 1:
            dist.broadcast_object_list(values, src=0)
        return cast(T, values[0])

    def gather(self, value: T) -> list[T]:
        """Every process's `value` (anything that pickles), in their order, on all processes. *collective*"""
        values: list[Any] = [value] * self.process.count
        if self.process.count > 1:
            dist.all_gather_object(values, value)
        return cast(list[T], values)

    @abstractmethod
    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, TensorState]:
        """What this process must write: each element of a global tensor exactly once over all processes.

        Further replicas of a piece are named as such: a save compares them. Not of buffers, which may differ.
        Keys: FQN for parameters and persistent buffers, `<state name>/<FQN>` for optimizer state. Tied weights
        appear once, under their first FQN. The same keys, shapes and dtypes on all processes.
        """

    @abstractmethod
    def load_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, read: Read) -> None:
        """Overwrite all that `state` names, pulling this process's slices through `read`. No collective."""

    @property
    def compilations(self) -> int:
        """Programs of the train step, evaluation and samples compiled so far; none where the engine is eager."""
        return 0

    @property
    def collectives(self) -> dict[str, Traffic] | None:
        """all_gather, reduce_scatter, all_reduce, ... -> traffic of one step, counted during the first one.

        None before it, and where the engine cannot count.
        """
        return None

    def compute_seconds(self) -> float | None:
        """A part of the last step in which this process computed and waited for no other, to compare processes by.

        Call once per step. Does not synchronize: CUDA reports the step before last. NaN: no measurement yet; None: not
        supported.
        """
        return None

    @abstractmethod
    def memory(self) -> MemoryStats | None:
        """Peak and present use of the fullest device of this process; None where the engine doesn't tell."""

    @abstractmethod
    def start_trace(self, folder: Path) -> Callable[[], Callable[[], list[Operation]]]:
        """Record what this process and its devices do, until the function that it returns is called.

        That one writes the engine's own trace into `folder` and returns a function that reads it, which takes seconds,
        and returns what ran. None of them waits for a device, compiles, or needs the other processes.
        """


# ------------------------------------------------------------------------------- what every engine asks of a model


def output_head(model: nn.Module) -> nn.Module | None:
    """The module that makes the logits of a model of transformers; None: no other model has one known by a name."""
    get = getattr(model, "get_output_embeddings", None)
    return None if get is None else get()


def dropouts(model: nn.Module) -> list[str]:
    """FQNs of the modules that draw random numbers in training: torch's, and those with a number called dropout."""
    names: list[str] = []
    for name, module in model.named_modules():
        rates = [value for attribute, value in vars(module).items() if "drop" in attribute]
        rates += [module.p] if isinstance(module, _DropoutNd) else []
        if any(isinstance(rate, float) and rate > 0 for rate in rates):
            names.append(name or type(module).__name__)
    return names


class ParameterSlot(NamedTuple):
    """The place of a parameter: `module._parameters[leaf]`."""

    module: nn.Module
    leaf: str


def parameter_slots(model: nn.Module) -> dict[str, list[ParameterSlot]]:
    """First FQN of each parameter -> all its slots; tied weights have several."""
    first: dict[int, str] = {}
    slots: dict[str, list[ParameterSlot]] = {}
    for fqn, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, leaf = fqn.rpartition(".")
        name = first.setdefault(id(parameter), fqn)
        slots.setdefault(name, []).append(ParameterSlot(model.get_submodule(owner), leaf))
    return slots


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """FQN -> buffer, of those in the state dict."""
    kept = set(model.state_dict(keep_vars=True))
    return {fqn: buffer for fqn, buffer in model.named_buffers() if fqn in kept}


def state_key(name: str, fqn: str) -> str:
    """The key of a parameter's optimizer state in a checkpoint: `exp_avg/model.norm.weight`."""
    return f"{name}/{fqn}"


class CheckpointTensor(NamedTuple):
    """A tensor of a checkpoint, and what the mesh cuts of it."""

    tensor: Tensor
    spec: Spec


def checkpoint_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, layouts: Mapping[str, Spec]
) -> dict[str, CheckpointTensor]:
    """Every tensor of a checkpoint under its key: parameters (tied ones once), persistent buffers, optimizer state.

    `layouts`: `ShardPolicy.layouts`; buffers are whole everywhere.
    """
    if isinstance(optimizer, CountingOptimizer):
        optimizer.settle_counts()
    out: dict[str, CheckpointTensor] = {}
    states: dict[str, CheckpointTensor] = {}
    for fqn, parameter in model.named_parameters():
        out[fqn] = CheckpointTensor(parameter, layouts[fqn])
        for name, state in tensors_of(optimizer.state.get(parameter, {})).items():
            states[state_key(name, fqn)] = CheckpointTensor(
                state, state_spec(layouts[fqn], parameter.shape, state.shape)
            )
    buffers = {fqn: CheckpointTensor(buffer, ((),) * buffer.dim()) for fqn, buffer in persistent_buffers(model).items()}
    return {**out, **buffers, **states}


def optimizer_tensors(parameters: Mapping[str, Tensor], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The tensors of the optimizer's state, under their keys."""
    states = {fqn: tensors_of(optimizer.state.get(parameter, {})) for fqn, parameter in parameters.items()}
    return {state_key(name, fqn): value for fqn, state in states.items() for name, value in state.items()}


def tensors_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of an optimizer's state of one parameter."""
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def name_groups(groups: list[dict[str, Any]], parameters: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Optimizer groups with parameters in place of their FQNs."""
    return [{**group, "params": [parameters[fqn] for fqn in group["params"]]} for group in groups]


def dtype_name(dtype: torch.dtype) -> str:
    """`bfloat16`, as configs and checkpoints have it."""
    return str(dtype).removeprefix("torch.")


def optimizer_state_twins(
    make: MakeOptimizer,
    groups: list[dict[str, Any]],
    parameters: Mapping[str, nn.Parameter],
    *,
    compiled: bool = False,
) -> dict[str, dict[str, Tensor]]:
    """FQN -> state name -> a tensor with the shape and dtype of that state, its values arbitrary.

    It lies on the host if the optimizer keeps that state there (step counts), else on meta. The same optimizer takes a
    step on meta twins, which works for any torch optimizer whose state starts at zero. Raises BackendError, with the
    line, for one whose step reads a tensor's value: meta tensors have none.
    """
    twins = {fqn: nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta")) for fqn, p in parameters.items()}
    for twin in twins.values():
        twin.grad = torch.zeros_like(twin)
    optimizer = make(name_groups(groups, twins), compiled)
    for group in optimizer.param_groups if compiled else ():
        group["lr"] = torch.empty((), device="meta")
    try:
        optimizer.step()
    except Exception as error:
        inside = str(Path(torch.__file__).parent)
        frames = traceback.extract_tb(error.__traceback__)
        frame = [f for f in frames if f"{inside}/optim" in f.filename or not f.filename.startswith(inside)][-1]
        raise BackendError(
            f"optim: expected an optimizer whose step reads no value of a tensor, found {type(optimizer).__name__}, "
            f"which can't step without values: {error}\n  in {frame.filename}:{frame.lineno}: {frame.line}\n"
            "  In each step the host would wait for the device, and XLA couldn't compile it.\n"
            "  Compute with tensors there, or take another optimizer: optim.name=adamw."
        ) from error
    return {fqn: tensors_of(optimizer.state[twin]) for fqn, twin in twins.items()}


def zero_optimizer(
    make: MakeOptimizer,
    groups: list[dict[str, Any]],
    parameters: Mapping[str, nn.Parameter],
    zeros: Callable[[str, Tensor, dict[str, Any]], Tensor],
    *,
    compiled: bool,
) -> torch.optim.Optimizer:
    """The optimizer with all its state. `zeros(fqn, twin, group)` lays out each tensor of a parameter's."""
    optimizer = make(name_groups(groups, parameters), compiled)
    for group in optimizer.param_groups if compiled else ():
        group["lr"] = group["lr"].clone()  # else groups share one, which a scheduler changes in place
    group_of = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    for fqn, state in optimizer_state_twins(make, groups, parameters, compiled=compiled).items():
        parameter = parameters[fqn]
        for name, twin in state.items():
            optimizer.state[parameter][name] = zeros(fqn, twin, group_of[id(parameter)])
    return optimizer


@cache
def _host_bytes() -> int:
    """Read once a process: a step asks twice, and the files of cgroups take 0.1 ms."""
    return host_memory_bytes()


def process_memory() -> MemoryStats:
    """Memory of this process, which all its CPU devices share."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return MemoryStats(peak, psutil.Process().memory_info().rss, _host_bytes())
