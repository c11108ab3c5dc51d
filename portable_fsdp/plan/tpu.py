"""The train step on a TPU slice that isn't there: its memory, collectives and work, from the TPU's own compiler.

`trace` records the trainer's own step (the same backend, the same `train.loop.build`) with tensors that hold no
memory, for any number of devices. `compile_for` gives the record to libtpu for a named slice, and stops it once
buffers are assigned: what follows is code generation, which takes most of the time, and of which nothing is asked here
but whether it succeeds.
"""

# Programs are lowered through torch_xla's private bridge only.
# pyright: reportPrivateUsage=false

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from portable_fsdp.backends.base import Batch, MakeOptimizer, Metrics
from portable_fsdp.backends.xla.engine import ROWS, Spec, XlaBackend
from portable_fsdp.config.schema import Config
from portable_fsdp.metrics import hlo
from portable_fsdp.metrics.hlo import Moved
from portable_fsdp.runtime.errors import BackendError
from portable_fsdp.train.loop import build

# Windowed einsum hides gathers in loops of point-to-point copies, which makes them uncountable and costs memory.
OPTIONS = {
    "xla_tpu_enable_windowed_einsum_for_all_gather": "false",
    "xla_tpu_enable_windowed_einsum_for_reduce_scatter": "false",
}


@dataclass(frozen=True)
class Argument:
    """An input of a program, in the order of its parameters."""

    name: str  # as Backend.state's keys; `batch.<key>`; or `constant`
    shape: tuple[int, ...]
    sharding: str  # in XLA's words
    output: int | None  # number of the output that takes its place in memory


@dataclass(frozen=True)
class Program:
    """A step as it was traced: one global program, not yet partitioned."""

    name: str
    devices: int
    hlo: bytes  # a serialized HloModuleProto
    arguments: tuple[Argument, ...]
    outputs: tuple[str, ...]  # shardings


@dataclass(frozen=True)
class Compiled:
    """What one device of the slice needs for one run of a program."""

    slice: str
    argument_bytes: int  # weights, optimizer state, batch; their updates take the same place
    temporary_bytes: int
    output_bytes: int  # that take no argument's place
    collectives: dict[str, Moved]  # kind and dtype: `all_gather bf16`
    matmul_flops: dict[str, int]  # dtypes of the factors: `bf16 x bf16`
    rematerialised: int  # instructions that the compiler repeats by itself, because memory was short
    compile_s: float  # of processor time, up to the assignment of buffers, or with code generation

    @property
    def bytes(self) -> int:
        """What must fit into a device's memory, the program's own code aside."""
        return self.argument_bytes + self.temporary_bytes + self.output_bytes


# ---------------------------------------------------------------------------------------------------------- tracing


def trace(config: Config, devices: int) -> dict[str, Program]:
    """Name -> program of the config's train step on `devices` devices: `train_step`, or `micro_batch` and `update`.

    Nothing runs, and neither weights nor optimizer state take memory. To be called in a process of its own, in which
    torch_xla wasn't used before: it takes the count of devices for a fact, and keeps it. Raises what opening the
    backend and building the model raise.
    """
    with _pretended(devices):
        backend = _Tracer(config)
        training = build(config, backend, vocabulary=1, fill=False)
        rows = config.train.micro_batch * devices
        batch = {
            "input_ids": torch.empty((rows, config.data.seq_len), dtype=torch.int64, device="meta"),
            "labels": torch.empty((rows, config.data.seq_len), dtype=torch.int64, device="meta"),
            "tokens": torch.empty(rows, device="meta"),
            "stop": torch.empty(rows, device="meta"),
            "processes": torch.empty((rows, 3 * backend.process.count), device="meta"),
        }
        training.step([backend.place(batch) for _ in range(training.accumulation)], config.optim.lr)
        return backend.programs


@contextmanager
def _pretended(devices: int) -> Generator[None]:
    """A mesh of more devices than the CPU client has, of TPUs: in a program that only is traced they are words."""
    os.environ["PJRT_DEVICE"] = "CPU"
    os.environ.setdefault("CPU_NUM_DEVICES", "4")  # a single one would leave annotations out
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import torch_xla.runtime

    runtime = cast(Any, torch_xla.runtime)
    real = runtime.global_runtime_device_count
    runtime.global_runtime_device_count = lambda: devices
    try:
        yield
    finally:
        runtime.global_runtime_device_count = real


class _Tracer(XlaBackend):
    """The XLA backend, whose programs are kept instead of run."""

    def __init__(self, config: Config) -> None:
        super().__init__("cpu", config, None)
        self.flash_attention = True  # as on TPU
        self.programs: dict[str, Program] = {}
        self._spec_of: dict[str, Spec] = {}  # of each argument seen so far

    def build_optimizer(self, make: MakeOptimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        self._optimizer = super().build_optimizer(make, groups)
        return self._optimizer

    def compile(self, fn: Callable[..., Metrics], name: str) -> Callable[..., Metrics]:
        def step(*args: Any) -> Metrics:
            before = self._state()
            with torch.no_grad():  # a clone keeps the node of what is updated in place
                clones = {key: tensor.detach().clone() for key, tensor in {**before, **_named(args)}.items()}
            versions = {key: (id(tensor), tensor._version) for key, tensor in before.items()}
            metrics = fn(*args)
            after = self._state()
            changed = {key: t for key, t in after.items() if (id(t), t._version) != versions.get(key)}
            self.programs[name] = self._lower(name, metrics, changed, clones)
            for key, tensor in (metrics | changed).items():  # the next program takes them as arguments
                tensor.data = self._placeholder(tensor.shape, tensor.dtype, self._spec_of.get(key, ()))
            return metrics

        return step

    def _state(self) -> dict[str, Tensor]:
        """All that a step may change in place, by the names that a checkpoint gives it; gradients as `grad/<FQN>`."""
        found: dict[str, Tensor] = dict(self._model.named_buffers())
        for fqn, parameter in self._model.named_parameters():
            found[fqn] = parameter
            for name, value in self._optimizer.state[parameter].items():
                if value.device.type == "xla":  # step counts rest on the host
                    found[f"{name}/{fqn}"] = value
            if parameter.grad is not None:
                found[f"grad/{fqn}"] = parameter.grad
        return found

    def _lower(self, name: str, metrics: Metrics, changed: dict[str, Tensor], clones: dict[str, Tensor]) -> Program:
        context = self._bridge.lowering.LoweringContext(name)
        context.set_name_string(name)
        context.build([*metrics.values(), *changed.values()])
        names = {context.tensor_parameter_id(clone): key for key, clone in clones.items()}
        specs = {context.tensor_parameter_id(known.handle): known.spec for known in self.placeholders or ()}
        outputs = {key: number for number, key in enumerate(changed, start=len(metrics))}
        arguments: list[Argument] = []
        for number, tensor in sorted(context.device_parameter_id_tensor_mapping().items()):
            key = names.get(number, "constant")
            self._spec_of[key] = specs.get(number, ())
            sharding = self._sharding(self._spec_of[key])
            arguments.append(Argument(key, tuple(tensor.shape), sharding, outputs.get(key)))
        results = [self._sharding(self._spec_of.get(key, ())) for key in metrics | changed]
        return Program(name, self.data_parallel_size, context.hlo(), tuple(arguments), tuple(results))

    def _sharding(self, spec: Spec) -> str:
        """XLA's words for a partition of dimension 0, over all devices or over the shards of each replica."""
        devices = self.data_parallel_size
        if not spec or spec[0] is None:
            return "{replicated}"
        if spec[0] == ROWS or self._shards == devices:
            return f"{{devices=[{','.join([str(devices), *'1' * (len(spec) - 1)])}]<=[{devices}]}}"
        tiles = ",".join([str(self._shards), *"1" * (len(spec) - 1), str(devices // self._shards)])
        return f"{{devices=[{tiles}]<=[{devices // self._shards},{self._shards}]T(1,0) last_tile_dim_replicate}}"


def _named(args: Sequence[Any]) -> dict[str, Tensor]:
    """The tensors among a step's arguments: batches by their keys."""
    found: dict[str, Tensor] = {}
    for number, argument in enumerate(args):
        if isinstance(argument, dict):
            found.update({f"batch.{key}": tensor for key, tensor in cast(Batch, argument).items()})
        elif isinstance(argument, Tensor):
            found[f"argument {number}"] = argument
    return found


# -------------------------------------------------------------------------------------------------------- compiling


def compile_for(
    program: Program,
    slice: str,
    *,
    generate_code: bool = False,
    options: Mapping[str, str] | None = None,
    limit_s: float = 900,
) -> Compiled:
    """What the TPU compiler makes of `program` on `slice` (`v6e:2x4`, `v5p:2x2x4`), without a TPU.

    Args:
        program: for as many devices as the slice has.
        slice: generation and torus, as libtpu names topologies.
        generate_code: go on to the end, where a kernel may still be refused: minutes for a model of billions.
        options: of the compiler, added to OPTIONS; a run takes the same through LIBTPU_INIT_ARGS.
        limit_s: seconds after which the compiler is stopped.

    Raises BackendError where the compiler refuses the program or the slice, or takes longer.
    """
    with tempfile.TemporaryDirectory(prefix="portable_fsdp_plan") as name:
        folder = Path(name)
        options = {**OPTIONS, **(options or {})}
        seconds = _run_compiler(folder, program, slice, options, limit_s, generate_code=generate_code)
        return _read(folder / "dump", program, slice, seconds)


def _run_compiler(
    folder: Path, program: Program, slice: str, options: Mapping[str, str], limit_s: float, *, generate_code: bool
) -> float:
    """Run the compiler until it has assigned buffers, or to its end; returns its seconds of processor time."""
    record = {
        "slice": slice,
        "devices": program.devices,
        "options": dict(options),
        "arguments": [asdict(argument) for argument in program.arguments],
        "outputs": program.outputs,
    }
    (folder / "program.json").write_text(json.dumps(record))
    (folder / "program.hlo.pb").write_bytes(program.hlo)
    began, spent = time.monotonic(), _childrens_seconds()
    with (folder / "log").open("w") as log:
        command = [sys.executable, "-m", "portable_fsdp.plan.tpu_compiler", str(folder)]
        compiler = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
        try:
            while compiler.poll() is None and (generate_code or not _is_written(folder / "dump", program.name)):
                if time.monotonic() - began > limit_s:
                    break
                time.sleep(0.1)
        finally:
            compiler.kill()
            ended = compiler.wait()
    if not _is_written(folder / "dump", program.name) or (generate_code and ended != 0):
        raise BackendError(_refusal(slice, (folder / "log").read_text(), limit_s))
    return _childrens_seconds() - spent


def _childrens_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _is_written(dump: Path, name: str) -> bool:
    """Whether the last of the files that are read is whole: the next one has been begun and has come to rest."""
    last = list(dump.glob(f"*.{name}.*after_optimizations_after_buffer_assignment.txt"))
    if not last or not last[0].stat().st_size:
        return False
    size = last[0].stat().st_size
    time.sleep(0.3)
    return last[0].stat().st_size == size


def _refusal(slice: str, log: str, limit_s: float) -> str:
    found = re.findall(r"^\S*(?:Error|RESOURCE_EXHAUSTED|INVALID_ARGUMENT)\b.*", log, re.MULTILINE)
    reason = found[-1] if found else f"nothing in {limit_s:.0f} s"
    return (
        f"plan for {slice}: expected the TPU compiler to compile the step, found: {reason}\n"
        "  It needs the extra `tpu` (pip install '.[tpu]') and a slice that libtpu knows: v4, v5e, v5p or v6e, "
        "a colon, its torus (v6e:2x4, v5p:2x2x4)."
    )


def _read(dump: Path, program: Program, slice: str, seconds: float) -> Compiled:
    def text(ending: str) -> str:
        return next(dump.glob(f"*.{program.name}.*{ending}")).read_text()

    compiled = text("after_optimizations.txt")
    memory = allocations(text("after_optimizations-buffer-assignment.txt"))
    return Compiled(
        slice,
        argument_bytes=memory["arguments"],
        temporary_bytes=memory["temporaries"],
        output_bytes=memory["outputs"],
        collectives=hlo.collectives_by_dtype(compiled, program.devices),
        matmul_flops=hlo.matmul_flops(compiled),
        rematerialised=hlo.rematerialised(compiled),
        compile_s=seconds,
    )


def allocations(buffer_assignment: str) -> dict[str, int]:
    """Bytes of a device's main memory by what they hold: `arguments`, `temporaries`, `outputs` (not aliased).

    What has a color lies in another memory (VMEM, SMEM).
    """
    found: dict[str, int] = {"arguments": 0, "temporaries": 0, "outputs": 0}
    for size, rest in re.findall(r"^allocation \d+: size (\d+)(.*)", buffer_assignment, re.MULTILINE):
        if "color" in rest:
            continue
        if "parameter" in rest:
            found["arguments"] += int(size)
        elif "preallocated-temp" in rest:
            found["temporaries"] += int(size)
        elif "maybe-live-out" in rest:
            found["outputs"] += int(size)
    return found
