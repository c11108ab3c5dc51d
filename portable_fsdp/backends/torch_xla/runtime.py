"""Code shared by both torch_xla engines: opening and closing, recomputation, and operators that torch_xla lacks.

Only functions import torch_xla: at import it reads the environment variables that `set_environment` sets.
"""

# pyright: reportPrivateUsage=false

import gc
import logging
import os
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as drop
from torch.nn.functional import linear
from torch.utils._pytree import tree_leaves

from portable_fsdp.attach import replace_step
from portable_fsdp.backends.contract import (
    Backend,
    Forward,
    MemoryStats,
    Metrics,
    Operation,
    Partition,
    Piece,
    process_memory,
)
from portable_fsdp.backends.nested import flatten, tensors_in, tensors_of_modules
from portable_fsdp.backends.own_objects import refuse_unknown
from portable_fsdp.backends.refusals import Deployment, require_supported
from portable_fsdp.backends.state import tensors_of, zero_optimizer
from portable_fsdp.backends.torch_xla.options import libtpu_arguments
from portable_fsdp.backends.torch_xla.program import Compiler
from portable_fsdp.config.schema import Config
from portable_fsdp.layout import count_row_shards, mesh_axes, split_batch
from portable_fsdp.optim.counting import CountingOptimizer, MakeOptimizer
from portable_fsdp.optim.own import AdamW
from portable_fsdp.runtime.errors import BackendError
from portable_fsdp.runtime.launchers import detect_launch

_COLLECTIVE = re.compile(r"%?(all-gather|all-reduce|reduce-scatter|all-to-all|collective-[a-z]+)\b")
_LOWERING = Lock()  # devices may be threads


def set_environment(device: str) -> None:
    """Set the variables that torch_xla reads when it is imported, and libtpu when it is loaded."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # else each compilation prints that GSPMD will be deprecated
    logging.getLogger("absl").setLevel(logging.ERROR)  # else jax's packages warn that TensorFlow is absent
    os.environ["PJRT_DEVICE"] = "TPU" if device == "tpu" else "CPU"
    if device == "tpu":
        os.environ["LIBTPU_INIT_ARGS"] = libtpu_arguments(os.environ)
        # torch_xla's import detects the chips; libtpu, loaded with the first device, reads the arguments.
        os.environ["LIBTPU_INIT_ARGS"] = libtpu_arguments(os.environ, _generation())
    if device == "cpu":  # else jax looks for a TPU if libtpu is installed, and warns
        os.environ.setdefault("JAX_PLATFORMS", "cpu")


@cache  # else each call may query the cloud's metadata server
def _generation() -> str:
    """Return the generation of this machine's TPU by libtpu's name (v5e, v5p, v6e); empty without a chip."""
    from torch_xla._internal import tpu

    return str(cast(Any, tpu).get_tpu_type()).replace("litepod", "e") if tpu.num_available_chips() else ""


class PjrtBackend(Backend):
    """An engine of torch_xla. Its constructor counts devices, then calls `_open`."""

    _programs: Compiler

    def _open(self, device: str, config: Config, rank: Partition, count: int, hosts: int) -> None:
        """Check `config` on `count` devices of `hosts` hosts, and set the state that both engines share."""
        import torch_xla

        self._xla: Any = torch_xla
        self._bridge: Any = cast(Any, torch_xla)._XLAC
        gc.collect()  # tensors of an engine that failed
        try:
            self._xla.sync()
        except RuntimeError as error:
            raise BackendError(
                f"backend {self.name}: XLA couldn't compile an earlier program in this process, and that error keeps "
                "tensors without values.\n  Start a new process."
            ) from error
        generation = _generation() if device == "tpu" else ""
        self.deployment = Deployment(self.name, device, count, hosts, generation)
        # PJRT's name of the chip (TPU v5p, TPU v5 lite), by which its peak is found.
        self.device_name = f"TPU {generation.replace('v5e', 'v5 lite')}" if device == "tpu" else device
        self.process = self.data_shard = rank
        self.devices = count
        self.adopt(config)
        self._optimizers: dict[torch.optim.Optimizer, nn.Module | None] = {}  # None: of the user's own
        self.optimizers = WeakKeyDictionary()
        self._steps_by_ours: dict[torch.optim.Optimizer, CountingOptimizer] = {}
        self._in_program = False
        # Found at an optimizer's first program, and kept: another order would be another program. A load makes new
        # tensors, so the order is found again.
        self._input_orders: dict[torch.optim.Optimizer, list[tuple[Tensor, str]]] = {}
        with _LOWERING:
            _replace_operators()
        self._matmul_before = self._bridge._xla_get_mat_mul_precision()
        self._bridge._xla_set_mat_mul_precision(config.precision.matmul)

    def adopt(self, config: Config) -> None:
        require_supported(config, self.deployment)
        self.axes = mesh_axes(config, self.devices, self.deployment.hosts or 1)
        self.row_shards = count_row_shards(self.axes)
        self._accumulation = split_batch(config, self.row_shards).accumulation
        self._shapes = config.data.shapes
        # The step, or a micro batch and the update; and evaluation and samples, if the run has them. Programs that take
        # rows are compiled for each of their shapes; the update takes none.
        evaluates, samples = (every is not None for every in (config.train.eval_every, config.train.sample_every))
        self.expected_compilations = self._shapes * (1 + evaluates) + (self._accumulation > 1) + samples

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        if error is None:
            self._programs.wait()  # leaves nothing for the next engine's first program
        else:  # drop what a failed step left, perhaps in the error's frames: it can't be compiled
            self._bridge._clear_pending_irs(str(self.device))
        super().__exit__(kind, error, where)

    def close(self) -> None:
        self._bridge._xla_wait_device_ops(devices=[])
        self._bridge._xla_set_mat_mul_precision(self._matmul_before)

    def compile(self, fn: Callable[..., Metrics], name: str) -> Callable[..., Metrics]:
        if name == "count_choices":  # only the model tells whether it has a router loss
            self.expected_compilations += self._shapes

        def program(*args: Any) -> Metrics:
            self._in_program = True
            try:
                return fn(*args)
            finally:
                self._in_program = False

        compiled = self._programs.compile(program, name, self._shapes)

        def run(*args: Any) -> Metrics:
            tensors = (value for value in tree_leaves(args) if isinstance(value, Tensor))
            if any(tensor.dim() and tensor.device.type != "xla" for tensor in tensors):
                raise BackendError(f"program {name!r}: a batch isn't on the device.\n  Pass engine.place(batch).")
            with self._placed_rates(self._steps_by_ours):
                return compiled(*args)

        return run

    def zero_gradients(self, optimizer: torch.optim.Optimizer, *, keep: bool) -> None:
        if optimizer not in self.optimizers:
            refuse_unknown(optimizer)
        super().zero_gradients(optimizer, keep=keep)

    @contextmanager
    def _placed_rates(self, steps: Mapping[torch.optim.Optimizer, CountingOptimizer]) -> Generator[None]:
        """Context in which optimizers of the user's own that step by ours have device tensors as learning rates.

        As Python's numbers, equal ones would share an input: two rates that become equal would be another program.
        """
        before: list[tuple[dict[str, Any], Any, Tensor, int]] = []
        for optimizer, ours in steps.items():
            self._follow(optimizer, ours)
            rates = {f"lr {number}": float(group["lr"]) for number, group in enumerate(optimizer.param_groups)}
            numbers = {**rates, **ours.counts()}
            ours.placed = self.place({name: torch.tensor(number) for name, number in numbers.items()})
            for name, group in zip(rates, optimizer.param_groups, strict=True):
                before.append((group, group["lr"], ours.placed[name], ours.placed[name]._version))
                group["lr"] = ours.placed[name]
        try:
            yield
        finally:
            is_changed = any(group["lr"] is not rate or rate._version != version for group, _, rate, version in before)
            for group, old, _, _ in before:
                group["lr"] = old
        if is_changed:
            raise BackendError(
                "step: a compiled step changed the learning rate of an optimizer.\n"
                "  Call the scheduler's step between steps."
            )

    @property
    def compilations(self) -> int:
        return self._programs.compilations

    @contextmanager
    def accumulate(self, last: bool, model: nn.Module | None = None) -> Generator[None]:
        if self._accumulation == 1:  # with several micro batches the update is a separate program
            self._order_inputs(model)
        yield

    def _order_inputs(self, model: nn.Module | None) -> None:
        """Make the weights, gradients and optimizer states of `model` (None: of all) the first inputs of a program, in
        the order of its outputs. Call it before the program uses weights or states. Outside a program it does nothing.

        torch_xla tells XLA only which inputs a program may overwrite. XLA pairs the n-th of these with the n-th output
        of its size (optimize_input_output_buffer_alias.cc), and copies an input that is paired with another tensor.
        Outputs are in the order of their tensors' age. Inputs are in the order of their first use, by which nearly all
        would be copied.
        """
        for optimizer, owner in self._optimizers.items() if self._in_program else ():
            if model is not None and owner is not model:
                continue
            tensors = dict(self._changed_by(optimizer))
            if optimizer not in self._input_orders:
                ages = {key: self._bridge._xla_get_tensor_id(tensor) for key, tensor in tensors.items()}
                self._input_orders[optimizer] = sorted(ages, key=ages.__getitem__)
            in_order = [tensors[key] for key in self._input_orders[optimizer] if key in tensors]
            # torch_xla visits an operation's last operand first.
            self._bridge._xla_optimization_barrier_(in_order[::-1])

    @staticmethod
    def _changed_by(optimizer: torch.optim.Optimizer) -> Iterator[tuple[tuple[Tensor, str], Tensor]]:
        """Yield (weight, name) -> tensor on the device: the weight itself, its gradient, each of its states."""
        for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
            states = {f"state {name}": value for name, value in tensors_of(optimizer.state.get(weight, {})).items()}
            for name, tensor in {"weight": weight, "gradient": weight.grad, **states}.items():
                if tensor is not None and tensor.device.type == "xla":
                    yield (weight, name), tensor

    @property
    def _barrier(self) -> Callable[[list[Tensor]], None] | None:
        """Keep moments apart from weights in an optimizer's step. Else XLA on CPUs would compute moments a second time,
        inside the update of the weights. That would read the old moments, so each would be copied first. On a TPU one
        fusion writes all three."""
        return self._bridge._xla_optimization_barrier_ if os.environ["PJRT_DEVICE"] == "CPU" else None

    def _make_optimizer(
        self,
        model: nn.Module,
        make: MakeOptimizer,
        groups: list[dict[str, Any]],
        parameters: Mapping[str, nn.Parameter],
        zeros_on_device: Callable[[str, Tensor], Tensor],
    ) -> torch.optim.Optimizer:
        """Build the optimizer of `model`; `zeros_on_device(fqn, twin)` allocates a state of a parameter."""

        def zeros(fqn: str, twin: Tensor, _: dict[str, Any]) -> Tensor:
            # Step counts stay on the host: the program takes the values computed from them.
            return torch.zeros(twin.shape, dtype=twin.dtype) if twin.is_cpu else zeros_on_device(fqn, twin)

        optimizer = zero_optimizer(make, groups, parameters, zeros, compiled=True)
        if isinstance(optimizer, CountingOptimizer):
            optimizer.barrier = self._barrier
        self._optimizers[optimizer], self.optimizers[optimizer] = model, None
        self._programs.watch(optimizer, parameters)
        return optimizer

    def _step_by_ours(self, optimizer: torch.optim.Optimizer) -> None:
        """Let torch's AdamW or Adam step by ours, which takes its numbers as inputs, over the same groups and state."""
        options = ("amsgrad", "maximize", "capturable", "differentiable")
        if type(optimizer) not in (torch.optim.AdamW, torch.optim.Adam) or any(map(optimizer.defaults.get, options)):
            return
        ours = AdamW([{"params": [p for group in optimizer.param_groups for p in group["params"]]}])
        ours.barrier = self._barrier
        self._steps_by_ours[optimizer] = ours

        def step(optimizer: Any, closure: None = None) -> None:
            if closure is not None:
                raise BackendError("step: on XLA an optimizer takes no closure.\n  Compute the loss before its step.")
            for hook in optimizer._optimizer_step_pre_hooks.values():
                hook(optimizer, (), {})
            self._follow(optimizer, ours)
            with nullcontext() if self._in_program else self._placed_rates({optimizer: ours}):
                ours.step()
            for hook in optimizer._optimizer_step_post_hooks.values():
                hook(optimizer, (), {})

        replace_step(optimizer, step)

    @staticmethod
    def _follow(optimizer: torch.optim.Optimizer, ours: CountingOptimizer) -> None:
        """Let `ours` have the present groups and state: `load_state_dict` makes new ones."""
        ours.state, ours.param_groups = optimizer.state, optimizer.param_groups
        for group in optimizer.param_groups:
            group["decoupled"] = type(optimizer) is torch.optim.AdamW

    def start_trace(self, folder: Path) -> Callable[[], Callable[[], list[Operation]]]:
        """Write a trace for xprof."""
        import torch_xla.debug.profiler as profiler

        cast(Any, profiler).start_trace(str(folder))

        def stop() -> Callable[[], list[Operation]]:
            cast(Any, profiler).stop_trace()
            return lambda: [operation for path in folder.rglob("*.xplane.pb") for operation in _operations(path)]

        return stop

    def _whole_piece(self, tensor: Tensor) -> list[Piece]:
        """Return the piece of a tensor that isn't sharded: a copy on process 0, which writes it, else none."""
        if self.process.index != 0:
            return []
        return [Piece((0,) * tensor.dim(), tensor.detach().to("cpu", copy=True))]

    def _memory_of(self, device: str) -> MemoryStats:
        if os.environ["PJRT_DEVICE"] == "CPU":
            return process_memory()
        used = self._bridge._xla_memory_info(device)
        return MemoryStats(int(used["peak_bytes_used"]), int(used["bytes_limit"]))


def require_one_process(engine: str, device: str) -> None:
    """Raise BackendError for several processes on CPU, whose PJRT devices can't communicate: each would act as the
    whole run."""
    launch = detect_launch(os.environ)
    if device == "cpu" and launch.world_size > 1:
        raise BackendError(
            f"backend {engine} on cpu: expected one process, but the launcher started {launch.world_size}.\n"
            "  Start it without a launcher; for several devices: "
            "python -m portable_fsdp.launch --device=cpu --backend=xla --num_devices=N."
        )


def require_devices(engine: str, device: str, num_devices: int | None, count: int, on_cpu: str) -> None:
    """Raise BackendError unless `num_devices` (None: any) is the run's `count`. `on_cpu`: the fix on CPU."""
    if num_devices is not None and num_devices != count:
        fix = "Leave --num_devices out: all chips of the slice take part." if device == "tpu" else on_cpu
        raise BackendError(
            f"backend {engine} on {device}: expected --num_devices={num_devices} devices, found {count}.\n  {fix}"
        )


Keep = Callable[..., AbstractContextManager[None]]
"""`keep(kept, again=...)`: context of a recomputed forward. Its first run adds tensors to the list `kept`, and the
second, `again`, reuses them."""


def recomputed(
    forward: Forward,
    trains: bool,
    again: Callable[[list[Tensor]], AbstractContextManager[None]] | None = None,
    keep: Keep = lambda kept, again: nullcontext(),
    block: nn.Module | None = None,
) -> Forward:
    """Put `forward` under torch_xla's gradient checkpointing; with torch's, XLA would merge both runs.

    `trains`: the module has weights that need gradients. The second run happens inside `again(float inputs)`. Tensors
    that the first run leaves outside its output get no gradient: raises BackendError for changed arguments and
    attributes of `block`.
    """
    from torch_xla.core.xla_model import optimization_barrier_
    from torch_xla.utils.checkpoint import checkpoint

    def run(*args: Any, **kwargs: Any) -> Any:
        values, unflatten = flatten((args, kwargs))
        if not torch.is_grad_enabled() or not (trains or any(value.requires_grad for value in values)):
            return forward(*args, **kwargs)

        kept: list[Tensor] = []
        output_of: list[Callable[[Sequence[Tensor]], Any]] = []  # of the first run

        def of_tensors(*values: Tensor) -> tuple[Tensor, ...]:
            args_, kwargs_ = unflatten(values)
            if not torch.is_grad_enabled():  # the first run
                with keep(kept, again=False):
                    output, make = flatten(forward(*args_, **kwargs_))
                if {*map(id, tensors_in((args_, kwargs_)))} != {*map(id, values)}:
                    raise _beside_the_output(block)
                output_of.append(make)
                return tuple(tensor.detach() for tensor in output)
            floats = [value for value in values if is_float(value)]
            if kept:  # else XLA would keep what the first run computed from it
                cast(Any, optimization_barrier_)([*floats, *kept])
            with again(floats) if again else nullcontext(), keep(kept, again=True):
                output = tensors_in(forward(*args_, **kwargs_))
            known = {*map(id, values), *map(id, output)}
            if any(t.grad_fn and id(t) not in known for t in tensors_of_modules(block.modules() if block else ())):
                raise _beside_the_output(block)
            return tuple(output)

        output = checkpoint(of_tensors, *_with_gradient(values), use_reentrant=True)
        return output_of[0](cast("tuple[Tensor, ...]", output))

    return run


def _beside_the_output(block: nn.Module | None) -> BackendError:
    name = type(block).__name__ if block else "a layer"
    return BackendError(
        f"memory.gradient_checkpointing on XLA: {name} changes one of its inputs, or keeps a tensor in an attribute, "
        "which would get no gradient.\n  Return the tensor, or recompute other modules (memory.classes), or use "
        "--backend=native."
    )


def _with_gradient(values: list[Tensor]) -> list[Tensor]:
    """Make an input need a gradient: reentrant checkpointing silently drops weight gradients if none does (after a
    frozen embedding)."""
    if any(value.requires_grad for value in values):
        return values
    first = next(index for index, value in enumerate(values) if is_float(value))
    return [*values[:first], values[first].detach().requires_grad_(), *values[first + 1 :]]


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _operations(path: Path) -> Iterator[Operation]:
    """Yield the operations of compiled programs. PJRT's CPU devices share threads, so they count as one device."""
    from jax.profiler import ProfileData

    for plane in cast(Any, ProfileData).from_file(str(path)).planes:
        is_device = plane.name.startswith("/device:")
        # A device's other lines hold its steps and programs, over the same period.
        for line in (line for line in plane.lines if not is_device or line.name.endswith("XLA Ops")):
            for event in line.events:
                stats, collective = dict(event.stats), _COLLECTIVE.match(event.name)
                if is_device or "hlo_op" in stats:
                    yield Operation(
                        collective[1].replace("-", "_") if collective else event.name,
                        "communication" if collective else "compute",
                        event.start_ns / 1e9,
                        event.duration_ns / 1e9,
                        line.name,
                        plane.name if is_device else "cpu",
                        str(stats.get("hlo_module", "")),
                    )


# --------------------------------------------------------------------------------------- operators that torch_xla lacks


@cache  # keeps the library alive: its implementations end with it
def _replace_operators() -> torch.library.Library:
    """Let XLA run recurrent layers as loops and solve triangular systems in this process.

    torch unrolls recurrent layers into operations for each position, which take minutes to compile. torch_xla 2.9 loops
    only over a GRU, and keeps its first trace: after an evaluation, or behind a frozen embedding, it silently loses
    input gradients. Packed sequences stay torch's. torch_xla 2.9.0 lowers torch.triangular_solve, but would run its
    successor torch.linalg.solve_triangular, used by linear attention (Qwen3-Next), on the host.
    Call after torch_xla's import, from one thread at a time, repeatedly.
    """
    from torch_xla.experimental import gru

    library = torch.library.Library("aten", "IMPL")
    library.impl("linalg_solve_triangular", _solve_triangular, "XLA")
    nn.GRU = getattr(nn.GRU, "_orig", nn.GRU)
    gru.GRU.forward = nn.GRU.forward
    for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        library.impl(f"{kind}.input", partial(_run_recurrent, kind), "AutogradXLA")
    return library


def _solve_triangular(a: Tensor, b: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False) -> Tensor:
    """Solve `a` X = `b`, or X `a` = `b` if not `left`; `a` `[..., n, n]` is lower triangular if not `upper`."""
    if not left:
        return _solve_triangular(a.mT, b.mT, upper=not upper, unitriangular=unitriangular).mT
    return torch.triangular_solve(b, a, upper=upper, unitriangular=unitriangular).solution


@cache  # scan keeps one trace of a function for all inputs of its shapes, with gradients or without
def _position(kind: str, wants_gradient: bool) -> Callable[..., Any]:
    """Return the step of one position: ((states, recurrent weights, projection), inputs' gates) -> (same, output)."""

    def position(carry: Any, x: Tensor) -> Any:
        (h, *cells), weights, projection = carry
        gates = linear(h, *weights)
        if kind == "lstm":
            i, f, g, o = (x + gates).chunk(4, 1)
            cells = [f.sigmoid() * cells[0] + i.sigmoid() * g.tanh()]
            h = o.sigmoid() * cells[0].tanh()
            h = linear(h, *projection) if projection else h
        elif kind == "gru":
            (r, z, n), (r_h, z_h, n_h) = x.chunk(3, 1), gates.chunk(3, 1)
            n = (n + (r + r_h).sigmoid() * n_h).tanh()
            h = n + (z + z_h).sigmoid() * (h - n)
        else:
            h = (x + gates).tanh() if kind == "rnn_tanh" else (x + gates).relu()
        return ([h, *cells], weights, projection), h

    return position


def _run_recurrent(kind: str, x: Tensor, hx: Tensor | Sequence[Tensor], weights: Sequence[Tensor], *rest: Any) -> Any:
    """Return (outputs, last states); arguments as of torch.lstm, torch.gru, torch.rnn_tanh and torch.rnn_relu."""
    from torch_xla.experimental.scan import scan

    has_biases, layers, dropout, train, bidirectional, batch_first = rest
    x = x.transpose(0, 1) if batch_first else x
    states, ends = [hx] if isinstance(hx, Tensor) else hx, list[list[Tensor]]()
    for layer in range(layers):
        outputs: list[Tensor] = []
        for backwards in (False, True)[: 1 + bidirectional]:
            begin, end = (len(weights) * at // len(states[0]) for at in (len(ends), len(ends) + 1))
            w_input, w_states, *others = weights[begin:end]
            biases, projection = (others[:2], others[2:]) if has_biases else ([], others)
            xs = linear(x.flip(0) if backwards else x, w_input, *biases[:1])
            init = ([state[len(ends)] for state in states], [w_states, *biases[1:]], projection)
            (last, _, _), ys = cast(Any, scan)(_position(kind, xs.requires_grad), init, xs, is_fn_pure=True)
            ends.append(last)
            outputs.append(ys.flip(0) if backwards else ys)
        x = drop(torch.cat(outputs, -1), dropout, train and layer < layers - 1)
    return x.transpose(0, 1) if batch_first else x, *map(torch.stack, zip(*ends, strict=True))
