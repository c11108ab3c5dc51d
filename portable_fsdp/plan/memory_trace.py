"""Lifetimes of memory while a step runs on fake tensors: every storage from its first tensor to its last.

`Recorder` is a dispatch mode: it sees each operator, and so each new storage, the matrix products and the collectives.
"""

# Autograd's running node and a storage's address have no public name.
# pyright: reportPrivateUsage=false

import math
import re
import weakref
from bisect import bisect_right
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, Literal, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from portable_fsdp.backends.native.engine import COLLECTIVES, collective_of
from portable_fsdp.backends.native.groups import SUMS
from portable_fsdp.backends.native.unsharded import CASTS
from portable_fsdp.backends.state import dtype_name
from portable_fsdp.plan.device_rules import CUBLAS_WORKSPACE_BYTES, matrix_products, tiled_bytes, workspace_bytes

MemoryPart = Literal[
    "weights", "gradients", "optimizer", "gathered weights", "activations", "loss and logits", "temporaries"
]
KernelPart = Literal["products", "attention", "elementwise", "copies"]
LOSS = "the loss"  # in place of a module's FQN


@dataclass(eq=False)
class Block:
    """A storage, or its memory between two `resize_`."""

    bytes: int
    stream: int
    part: MemoryPart
    name: str  # name of the operator, or the tensor's FQN
    where: str  # "backward of model.layers.7.mlp"
    freed: float = math.inf  # number of the timeline entry, in its program, before which it was freed; inf: never
    program: int = 0  # number, from 1, of the program that allocated it


Events = list[tuple[Block, bool]]
"""Blocks in the order in which they are allocated (True) or freed (False)."""


@dataclass(frozen=True)
class Collective:
    kind: str
    dtype: str
    bytes: int  # of the full tensor
    ranks: tuple[int, ...]
    communicator: str  # name: two communicators may have the same ranks


@dataclass
class KernelRun:
    """An operator's kernels on the device's compute stream."""

    part: KernelPart
    dtype: str  # of the factors of its matrix products
    flops: float
    reads: list[tuple[Block, int]]  # block, and bytes read of it
    writes: list[tuple[Block, int]]


@dataclass
class CollectiveRun:
    """A collective at the point where the step starts it."""

    collective: Collective
    block: Block | None  # of the full tensor
    is_waited_for: bool = False  # the compute stream waits for its end

    @property
    def result(self) -> Block | None:
        """The block that a gather fills."""
        return self.block if self.collective.kind == "all_gather" else None


Timeline = list[KernelRun | CollectiveRun]
"""Work of one call of one of the step's programs, in order."""


@dataclass
class Entry:
    """An entry in the log of all steps: a change of memory, an operator, or the begin of a program or of a step."""

    change: Literal["made", "freed", "runs", "program", "step"]
    what: Block | KernelRun | CollectiveRun | None = None
    moment: str = ""
    module: str = ""


class Moments:
    """The current place in a step: FSDP2's or the optimizer's section, and the module whose forward or backward runs.

    Each autograd node has the sequence number of the operation that made it. Forward records the numbers at which
    modules begin and end; in backward, the running node's number identifies the innermost module.
    """

    def __init__(self) -> None:
        self.sections: list[str] = []  # of torch.profiler.record_function, as FSDP2 and optimizers name them
        self.in_loss = False  # True in forward from the head on
        self._names: dict[int, str] = {}
        self._head: nn.Module | None = None
        self._running: list[str] = []
        self._marks: list[tuple[int, str]] = []  # (number of an operation, module that runs from it on)
        self._backward_module = ""

    @contextmanager
    def watching(self, model: nn.Module) -> Generator[None]:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._head = getattr(model, "get_output_embeddings", lambda: None)()
        with (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),  # recomputation ends with an exception
        ):
            yield

    def _enter(self, module: nn.Module, _: Any) -> None:
        if (name := self._names.get(id(module))) is not None:
            self._running.append(name)
            self._mark(name)
            self.in_loss = self.in_loss or module is self._head

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if id(module) in self._names:
            self._running.pop()
            self.in_loss = self.in_loss and bool(self._running)
            self._mark(self._module())

    def _mark(self, name: str) -> None:
        self._marks.append((cast(Any, torch.autograd)._get_sequence_nr(), name))

    def _module(self) -> str:
        """Return the innermost running module; the model's own operations after its head are the loss."""
        name = self._running[-1] if self._running else ""
        return LOSS if self.in_loss and name == "" else name

    def now(self) -> tuple[str, str]:
        """Return the moment (`forward`, `recomputation`, `backward`, or a section's name) and the module's FQN."""
        section = self.section
        if section.startswith("Optimizer."):
            return "optimizer", ""
        node = _running_node()
        if node is None or self.in_loss:
            if self._running:
                return "forward", self._module()
            # FSDP reduces a layer's gradients after the backward if no input of the layer has a gradient, as behind a
            # frozen embedding.
            late = re.fullmatch(r"FSDP::post_backward_\w+ \((.+)\)", section)
            return ("backward", late[1]) if late else (section, "")
        number = node._sequence_nr()
        if number <= (self._marks[-1][0] if self._marks else 0):  # not the accumulation of a gradient
            at = bisect_right(self._marks, number, key=lambda mark: mark[0]) - 1
            self._backward_module = self._marks[at][1] if at >= 0 else ""
        if torch.is_grad_enabled():  # a layer's forward again, inside its backward
            return "recomputation", self._running[-1] if self._running else self._backward_module
        return "backward", self._backward_module

    @property
    def section(self) -> str:
        return self.sections[-1] if self.sections else ""


COPIES = {"aten::copy_", "aten::clone", "aten::cat", "aten::_to_copy", "aten::split_with_sizes_copy.out"}
UNWRITTEN = ("empty", "new_empty", "resize_", "set_", "_local_scalar_dense", "record_stream")  # operators
FILLS = {"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"}  # write their argument without reading it
LOOKUPS = {"embedding", "index_select", "gather", "index"}


class Recorder(TorchDispatchMode):
    """Records allocations and frees on `device` by tensors of `fake`, and the work that runs.

    `kind`: cuda adds the workspaces of a GPU's kernels; tpu counts bytes in a TPU's tiled layout.
    `has_tf32`: products of float32 factors round them to TF32.
    """

    def __init__(self, fake: FakeTensorMode, device: torch.device, kind: str, *, has_tf32: bool = False) -> None:
        super().__init__()
        self.moments = Moments()
        self.log: list[Entry] = []
        self._streams: dict[int, tuple[int, Any]] = {}  # id -> order of first use; the reference keeps the id unique
        self._fake, self.device, self.is_gpu, self.is_tpu = fake, device, kind == "cuda", kind == "tpu"
        self._has_tf32 = has_tf32
        self.grouped_share = 1.0  # of the rows of grouped products that belong to a group
        self._known: tuple[MemoryPart, str] | None = None
        self._live: dict[int, tuple[Any, Block]] = {}  # keyed by the storage's address
        self._weights: Mapping[str, set[torch.Size]] = {}  # module -> shapes of its parameters
        self._has_workspace: set[bool] = set()
        self._runs_program = False

    def begin(self, change: Literal["program", "step"]) -> None:
        self._runs_program = self._runs_program or change == "program"
        self.log.append(Entry(change))

    def _note(self, change: Literal["made", "freed", "runs"], what: Block | KernelRun | CollectiveRun) -> None:
        self.log.append(Entry(change, what, *self.moments.now()))

    @contextmanager
    def making(self, part: MemoryPart, where: str) -> Generator[None]:
        """Assign everything allocated inside to this part."""
        with patch.object(self, "_known", (part, where)):
            yield

    @contextmanager
    def watching(self, model: nn.Module) -> Generator[None]:
        """Record a model's modules, from its first forward to its last backward."""
        self._weights = {
            name: {parameter.shape for parameter in module.parameters(recurse=False)}
            for name, module in model.named_modules()
        }
        with self, self.moments.watching(model):
            yield

    def name(self, tensor: Tensor, name: str) -> None:
        """Set the FQN of an existing tensor."""
        if (block := self._block_of(tensor)) is not None:
            block.name = name

    def resized(self, storage: Any) -> None:
        """Record a `resize_`, which no dispatch mode sees: FSDP2 frees and allocates gathered weights by it."""
        entry = self._live.get(storage._cdata)
        bytes_ = self._flat_bytes(storage)
        if entry is None or entry[1].bytes == bytes_:
            return
        reference, block = entry
        if block.bytes:
            block.part = "gathered weights"
        self._note("freed", block)
        again = Block(bytes_, self._stream(), "gathered weights", block.name, _words(*self.moments.now()))
        self._live[storage._cdata] = (reference, again)
        self._note("made", again)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # the call comes back with the local tensors
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):  # half of all calls
            return args[0].fake_device
        kwargs = kwargs or {}
        name, sections = func.name(), self.moments.sections
        if name.startswith("profiler::_record_function_"):
            if name.startswith("profiler::_record_function_enter"):
                sections.append(str(args[0]))
            else:
                del sections[-1:]
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf, name)
        if self._runs_program:
            if name in COLLECTIVES:
                self._note_collective(func, args)
            else:
                self._note_kernel(func, args, kwargs, out)
        return out

    def _see(self, tensor: Tensor, op: str) -> None:
        # DTensor propagates shapes on fake tensors of its own mode: those are no memory.
        if not isinstance(tensor, FakeTensor) or tensor.fake_mode is not self._fake or tensor.device != self.device:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        moment, module = self.moments.now()
        part, where = self._known or (self._part(tensor, moment, module), _words(moment, module))
        is_whole = self.is_tpu and tensor.nbytes == storage.nbytes()
        bytes_ = tiled_bytes(tensor.shape, tensor.element_size()) if is_whole else self._flat_bytes(storage)
        block = Block(bytes_, self._stream(), part, op, where)
        self._live[key] = (weakref.ref(storage, lambda _: self._note("freed", self._live.pop(key)[1])), block)
        self._note("made", block)

    def _flat_bytes(self, storage: Any) -> int:
        return tiled_bytes((storage.nbytes(),), 1) if self.is_tpu else storage.nbytes()

    def _part(self, tensor: Tensor, moment: str, module: str) -> MemoryPart:
        section = self.moments.section
        if section.startswith((CASTS, "FSDP::all_gather", "FSDP::pre_forward", "FSDP::pre_backward")):
            return "gathered weights"
        if section.startswith((SUMS, "FSDP::post_backward")):
            return "gradients"
        if moment == "optimizer" or not moment:
            return "temporaries"
        if self.moments.in_loss or module == LOSS:  # the head's gradient is computed with the loss
            return "gradients" if tensor.shape in self._weights.get(module, ()) else "loss and logits"
        if moment in ("forward", "recomputation"):
            return "activations"
        # A gradient has the size of its weight, before FSDP2 sees it; the gradient of a cast copy is cast back.
        is_cast = (node := _running_node()) is not None and node.name() == "ToCopyBackward0"
        modules = self._weights if is_cast else (module,)
        shapes = (shape for name in modules for shape in self._weights.get(name, ()))
        return "gradients" if any(shape.numel() == tensor.numel() for shape in shapes) else "temporaries"

    def _stream(self) -> int:
        stream = torch.cpu.current_stream()  # the API through which FSDP2 gets this device's streams
        return self._streams.setdefault(id(stream), (len(self._streams), stream))[0]

    def _note_kernel(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        # Only the expected time of a GPU's step needs them.
        reads, writes = self._traffic(func, args, kwargs, out) if self.is_gpu else ([], [])
        if (products := matrix_products(func, args, kwargs, out)) is not None:
            if self.is_gpu:
                self._take_workspace(func, args)
            dtype, flops = products
            if "grouped_mm" in func.name():
                flops *= self.grouped_share
            name = "tf32" if self._has_tf32 and dtype == torch.float32 else dtype_name(dtype)
            part = "attention" if "attention" in func.name() else "products"
            self._note("runs", KernelRun(part, name, flops, reads, writes))
        elif writes:
            part = "copies" if func.name() in COPIES else "elementwise"
            self._note("runs", KernelRun(part, "float32", 0.0, reads, writes))

    def _traffic(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> tuple[list[tuple[Block, int]], list[tuple[Block, int]]]:
        """Return the blocks that a kernel reads and writes on the device; none for a view and for unfilled memory."""
        if func.is_view or func._opname.startswith(UNWRITTEN):
            return [], []
        reads: list[tuple[Block, int]] = []
        writes: list[tuple[Block, int]] = []
        all_args = (*args, *(kwargs.get(argument.name) for argument in func._schema.arguments[len(args) :]))
        for argument, value in zip(func._schema.arguments, all_args, strict=False):
            used = self._blocks_in(value)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            writes += used if is_written else []
            reads += [] if is_written and (argument.is_out or func._opname in FILLS) else used
        known = {id(block) for block, _ in (*reads, *writes)}
        writes += [(block, size) for block, size in self._blocks_in(out) if id(block) not in known]
        if func._opname in LOOKUPS and reads:  # only the requested rows of a table are read
            reads[0] = (reads[0][0], out.nbytes)
        return reads, writes

    def _blocks_in(self, value: Any) -> list[tuple[Block, int]]:
        """Return the blocks of the tensors in a value, and the tensors' bytes."""
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        return [(block, tensor.nbytes) for tensor in tensors if (block := self._block_of(tensor)) is not None]

    def _block_of(self, tensor: Tensor) -> Block | None:
        return self._live.get(tensor.untyped_storage()._cdata, (None, None))[1]

    def _take_workspace(self, func: Any, args: tuple[Any, ...]) -> None:
        where = _words(*self.moments.now())
        # cuBLAS has a workspace for forward's thread and one for backward's, kept from the first product on.
        is_backward = _running_node() is not None
        if is_backward not in self._has_workspace:
            self._has_workspace.add(is_backward)
            self._note("made", Block(CUBLAS_WORKSPACE_BYTES, self._stream(), "temporaries", "cuBLAS workspace", where))
        if size := workspace_bytes(func, args):
            block = Block(size, self._stream(), "temporaries", f"{func.name()} workspace", where)
            self._note("made", block)
            self._note("freed", block)

    def _note_collective(self, func: Any, args: tuple[Any, ...]) -> None:
        if (running := collective_of(func, args)) is not None:
            kind, full, group = running
            ranks = tuple(dist.get_process_group_ranks(group))
            collective = Collective(kind, dtype_name(full.dtype), full.nbytes, ranks, group.group_name)
            is_sync = any(argument is False for argument in args)  # async_op; left out where it is True
            self._note("runs", CollectiveRun(collective, self._block_of(full), self._stream() == 0 and is_sync))


def _running_node() -> Any:
    """Return autograd's running node in backward, else None."""
    return cast(Any, torch._C)._current_autograd_node()


def _words(moment: str, module: str) -> str:
    """Format `backward of model.layers.7.mlp`."""
    return f"{moment} of {module}" if module else moment


def replay(log: Iterable[Entry]) -> tuple[Events, list[Timeline]]:
    """Return the changes of memory in all steps, and the programs of the last one; note in each block when it lived."""
    events: Events = []
    programs: list[Timeline] = []
    for entry in log:
        match entry.what:
            case Block() as block:
                if entry.change == "made":
                    block.program = len(programs)
                elif block.program == len(programs):
                    block.freed = len(programs[-1]) if programs else 0.0
                if block.bytes:
                    events.append((block, entry.change == "made"))
            case None:
                programs = [] if entry.change == "step" else [*programs, []]
            case run:
                programs[-1].append(run)
    return events, programs


def peak(events: Events) -> list[Block]:
    """Return the blocks that live at the peak, in the order of allocation; the last one caused the peak."""
    totals = list(accumulate(block.bytes if is_made else -block.bytes for block, is_made in events))
    until_peak = events[: totals.index(max(totals)) + 1] if totals else []
    freed = {block for block, is_made in until_peak if not is_made}
    return [block for block, is_made in until_peak if is_made and block not in freed]


def fused(program: Timeline) -> Timeline:
    """Return the program as compiled: kernels without products between products and collectives become one kernel."""
    entries: Timeline = []
    end = 0
    for is_fused, group in groupby(program, lambda entry: isinstance(entry, KernelRun) and not entry.flops):
        run = list(group)
        end += len(run)
        entries += [_as_one(cast(list[KernelRun], run), end)] if is_fused else run
    return entries


def _as_one(kernels: list[KernelRun], end: int) -> KernelRun:
    """Merge kernels: read each input once, and write only blocks that live beyond entry `end` of the timeline."""
    made: set[int] = set()
    reads: dict[int, tuple[Block, int]] = {}
    writes: dict[int, tuple[Block, int]] = {}
    for kernel in kernels:
        reads |= {id(block): (block, size) for block, size in kernel.reads if id(block) not in made | reads.keys()}
        writes |= {id(block): (block, size) for block, size in kernel.writes if block.freed > end}
        made |= {id(block) for block, _ in kernel.writes}
    return KernelRun("elementwise", "float32", 0.0, list(reads.values()), list(writes.values()))
