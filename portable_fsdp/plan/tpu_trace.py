"""The trainer's own step, traced for absent devices.

`trace` uses the same backend and the same `train.build.build_training` as a run, with tensors that hold no memory.
"""

# Programs are lowered through torch_xla's private bridge only.
# pyright: reportPrivateUsage=false

import math
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn

from portable_fsdp.backends.contract import Batch, Metrics
from portable_fsdp.backends.state import state_key, tensors_of
from portable_fsdp.backends.torch_xla.spmd.engine import XlaBackend
from portable_fsdp.backends.torch_xla.spmd.tensors import Initializer
from portable_fsdp.config.schema import Config
from portable_fsdp.layout import Spec
from portable_fsdp.plan.fake_step import empty_batch, facts_of, rows_of
from portable_fsdp.plan.tpu_program import Argument, Program, Traced
from portable_fsdp.train.build import Training, build_training
from portable_fsdp.train.measures import control_numbers
from portable_fsdp.train.preflight import fit_packing


def trace(config: Config, devices: int, torus: tuple[int, ...] = ()) -> Traced:
    """Trace the config's train step for `devices` devices, chips of `torus` (as `Tensors.torus`).

    Nothing runs, and neither weights nor optimizer state take memory. Call it in a process that hasn't used torch_xla
    yet, because torch_xla caches the device count. Raises what opening the backend and building the model raise.
    """
    config, _ = fit_packing(config)
    with _pretended(devices):
        tracer = Tracer(torus)
        backend = XlaBackend("cpu", config, None, tracer)
        training = build_training(config, backend, vocabulary=1, fill=False, rows=rows_of(config))
        tracer.begin(training, backend.axes)
        model = facts_of(training, config.data.seq_len)
        rows = training.rows * backend.row_shards
        batches = [backend.place(empty_batch(config, training, rows, "meta")) for _ in range(training.accumulation)]
        training.step(batches, config.optim.lr, control_numbers(backend.process.count))
        return Traced(tracer.programs, model)


@contextmanager
def _pretended(devices: int) -> Generator[None]:
    """Pretend that the CPU client has `devices` devices; a program that is only traced needs none of them."""
    os.environ["PJRT_DEVICE"] = "CPU"
    os.environ.setdefault("CPU_NUM_DEVICES", "4")  # with a single device, annotations would be left out
    os.environ.update(XLA_IR_DEBUG="1", XLA_HLO_DEBUG="1")  # operations keep names and source lines: 1 s for 8B
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import torch_xla.runtime

    with patch.object(torch_xla.runtime, "global_runtime_device_count", lambda: devices):
        yield


class Tracer:
    """Gives the XLA backend tensors without memory, and records its programs instead of running them."""

    for_tpu = True  # trace as for a TPU
    compilations = 0

    def __init__(self, torus: tuple[int, ...]) -> None:
        import torch_xla

        self.torus = torus
        self.programs: dict[str, Program] = {}
        self._bridge: Any = cast(Any, torch_xla)._XLAC
        # A clone that still identifies a placeholder after a traced step changed it, and the partition.
        self._handles: list[tuple[Tensor, Spec]] = []
        self._spec_of: dict[str, Spec] = {}  # partition of each argument so far

    def begin(self, training: Training, axes: Mapping[str, int]) -> None:
        """Set the training and the mesh axes, and tag forward operations; call it before the first step."""
        self._training, self._axes, self._devices = training, axes, math.prod(axes.values())
        self._name_operations(training.model)

    def make(self, shape: Sequence[int], dtype: torch.dtype, spec: Spec, fetch: Initializer | None) -> Tensor:
        from torch_xla.core.xla_builder import create_placeholder_tensor

        tensor = cast(Tensor, create_placeholder_tensor(tuple(shape), dtype))
        self._handles.append((tensor.clone(), spec))
        return tensor

    def place(self, tensor: Tensor, spec: Spec) -> Tensor:
        return self.make(tensor.shape, tensor.dtype, spec, None)

    def run_pending(self) -> None:
        """Do nothing: nothing runs."""

    def wait(self) -> None:
        """Do nothing: nothing runs."""

    def compile(self, fn: Callable[..., Metrics], name: str, shapes: int = 1) -> Callable[..., Metrics]:
        def step(*args: Any) -> Metrics:
            before = self._state()
            with torch.no_grad():  # a clone keeps the node of a tensor that is updated in place
                clones = {key: tensor.detach().clone() for key, tensor in {**before, **_named(args)}.items()}
            versions = {key: (id(tensor), tensor._version) for key, tensor in before.items()}
            metrics = fn(*args)
            after = self._state()
            changed = {key: t for key, t in after.items() if (id(t), t._version) != versions.get(key)}
            self.programs[name] = self._lower(name, metrics, changed, clones)
            for key, tensor in (metrics | changed).items():  # arguments of the next program
                tensor.data = self.make(tensor.shape, tensor.dtype, self._spec_of.get(key, ()), None)
            return metrics

        return step

    def watch(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        """Do nothing: no program is compiled twice."""

    def _name_operations(self, model: nn.Module) -> None:
        """Tag the forward operations of each module with its FQN; backward operations run elsewhere and get none."""
        names = {module: f"module.{fqn}" for fqn, module in model.named_modules()}
        open_scopes: list[object] = []  # operations traced while one lives have its name in their op_name

        def enter(module: nn.Module, _: object) -> None:
            open_scopes.append(self._bridge.profiler.scope_pusher(names[module]))

        def leave(*_: object) -> None:
            del open_scopes[-1]

        for module in names:
            module.register_forward_pre_hook(enter, prepend=True)
            module.register_forward_hook(leave, always_call=True)

    def _state(self) -> dict[str, Tensor]:
        """Return the tensors that a step may change in place, by checkpoint name; gradients as `grad/<FQN>`."""
        parameters = dict(self._training.model.named_parameters())
        kept = {fqn: tensors_of(self._training.optimizer.state.get(p, {})) for fqn, p in parameters.items()}
        states = {state_key(name, fqn): value for fqn, state in kept.items() for name, value in state.items()}
        gradients = {state_key("grad", fqn): p.grad for fqn, p in parameters.items() if p.grad is not None}
        on_device = {key: value for key, value in states.items() if value.device.type == "xla"}  # not step counts
        return {**dict(self._training.model.named_buffers()), **parameters, **on_device, **gradients}

    def _lower(self, name: str, metrics: Metrics, changed: dict[str, Tensor], clones: dict[str, Tensor]) -> Program:
        context = self._bridge.lowering.LoweringContext(name)
        context.set_name_string(name)
        context.build([*metrics.values(), *changed.values()])
        names = {context.tensor_parameter_id(clone): key for key, clone in clones.items()}
        specs = {context.tensor_parameter_id(handle): spec for handle, spec in self._handles}
        outputs = {key: number for number, key in enumerate(changed, start=len(metrics))}
        arguments: list[Argument] = []
        for number, tensor in sorted(context.device_parameter_id_tensor_mapping().items()):
            key = names.get(number, "constant")
            self._spec_of[key] = specs.get(number, ())
            sharding = self._sharding(self._spec_of[key])
            arguments.append(Argument(key, tuple(tensor.shape), sharding, outputs.get(key)))
        results = [self._sharding(self._spec_of.get(key, ())) for key in metrics | changed]
        return Program(name, self._devices, context.hlo(), tuple(arguments), tuple(results))

    def _sharding(self, spec: Spec) -> str:
        """Format a sharding for XLA: tiles per dimension, replicas of a tile last, and the order of devices."""
        sizes = {axis: size for axis, size in self._axes.items() if size > 1}
        cuts = [axis for part in spec for axis in part if axis in sizes]
        if not cuts:
            return "{replicated}"
        rest = [axis for axis in sizes if axis not in cuts]
        tiles = [math.prod(sizes.get(axis, 1) for axis in part) for part in spec]
        tiles += [math.prod(sizes[axis] for axis in rest)] if rest else []
        order = [[*sizes].index(axis) for axis in (*cuts, *rest)]
        in_order = order == sorted(order)
        mesh = [self._devices] if in_order else [*sizes.values()]
        cut, over, turned = (",".join(map(str, numbers)) for numbers in (tiles, mesh, order))
        words = f"devices=[{cut}]<=[{over}]" + ("" if in_order else f"T({turned})")
        return f"{{{words} last_tile_dim_replicate}}" if rest else f"{{{words}}}"


def _named(args: Sequence[Any]) -> dict[str, Tensor]:
    """Return the tensors among a step's arguments, batches by their keys."""
    named: dict[str, Tensor] = {}
    for number, argument in enumerate(args):
        if isinstance(argument, dict):
            named |= {f"batch.{key}": tensor for key, tensor in cast(Batch, argument).items()}
        elif isinstance(argument, Tensor):
            named[f"argument {number}"] = argument
    return named
