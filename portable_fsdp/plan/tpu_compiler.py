"""The train step on an absent TPU slice: its memory, collectives and work, from the TPU's own compiler.

`plan_compiled` traces the trainer's own step (`tpu_trace.py`) and compiles it by libtpu, each in a process of its own;
it imports no torch, and needs no TPU. `compile_for` runs `python -m portable_fsdp.plan.tpu_compiler PARENT FOLDER`,
which compiles FOLDER/program.hlo.pb for the slice that FOLDER/program.json names, through jax's client for absent
devices. It stops the compiler after buffer assignment: code generation follows, takes most of the time and adds nothing
but possible failures. The compiler's output is cached under a hash of all its inputs.
"""

# jax has no public API from an HLO module to libtpu, and its bridge isn't typed: written for the jax 0.7.1 and
# libtpu 0.0.21 that torch_xla 2.9.0 pins.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportArgumentType=false

import contextlib
import gzip
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from portable_fsdp.backends.torch_xla.options import libtpu_arguments
from portable_fsdp.config.describe import with_value
from portable_fsdp.config.schema import Config
from portable_fsdp.layout import devices_per_row, split_batch
from portable_fsdp.plan.result import EnginePlan, Progress
from portable_fsdp.plan.target import Shape, Target
from portable_fsdp.plan.time import Loop, expected_time, rates_of
from portable_fsdp.plan.tpu_program import (
    Compiled,
    Program,
    Traced,
    memory_of,
    notes_of,
    read_compiled,
    times_run,
    traffic_of,
    work_of,
)
from portable_fsdp.runtime.child import Child, Ended, Worker, WorkerFailedError
from portable_fsdp.runtime.errors import BackendError
from portable_fsdp.runtime.files import cache_folder
from portable_fsdp.runtime.host import pip_install
from portable_fsdp.runtime.signals import end_with_parent

LIMIT_S = 900  # for the trace, and for each program
LARGEST_BYTES = 2**30  # limit on the whole cache: an entry of 8B, unrolled, takes about 5 MB

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # jax itself must not look for chips
    "TPU_SKIP_MDS_QUERY": "1",  # nor ask a cloud's metadata server who we are
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # else concurrent compilations fail at a lock file
}


def plan_compiled(config: Config, target: Target, progress: Progress = lambda stage: None) -> EnginePlan:
    """Plan memory and work of the config's train step on one device of `target`, one or more TPU slices.

    Calls `progress` at once with `tracing`, later with the programs that are compiled. Raises what opening the backend
    and building the model raise. Raises BackendError if the extra is missing, or the compiler refuses the slice, an
    option or the program, fails, or takes longer than LIMIT_S.
    """
    assert target.topology is not None
    progress("tracing")
    require_installed()
    traced = trace_apart(config, target.devices, hosts=target.hosts, torus=target.torus)
    progress(f"compiling {' and '.join(traced.programs)}")
    stop = threading.Event()
    with ThreadPoolExecutor(len(traced.programs)) as pool:
        try:
            pending = {
                name: pool.submit(compile_for, program, target.topology, slices=target.slices, stopped=stop.is_set)
                for name, program in traced.programs.items()
            }
            compiled = {name: future.result() for name, future in pending.items()}
        finally:
            stop.set()  # Ctrl-C reaches this thread alone
    accumulation = split_batch(config, target.devices // devices_per_row(config)).accumulation
    work = work_of(compiled, accumulation)
    notes = notes_of(compiled)
    if config.precision.products != "auto":
        notes.append(f"{config.precision.products} products are expected to take the time of bfloat16 products")
    method = f"The trainer's own step, compiled by {compiler_version()} for this slice; not run."
    memory = memory_of(compiled, target.limit_bytes)
    step = [Loop(times_run(name, accumulation), [program.operations]) for name, program in compiled.items()]
    expected, bandwidth = None, target.hardware.memory_bandwidth
    if (rates := rates_of(target)) and bandwidth:
        expected = expected_time(step, rates)
        # Copies into on-chip memory, which the schedule counts as free, bind small steps.
        if (missing := traffic_of(compiled, accumulation) / bandwidth.value - expected.seconds) > 0:
            parts = {**expected.parts, "copies": expected.parts.get("copies", 0.0) + missing}
            expected = expected.model_copy(update={"seconds": expected.seconds + missing, "parts": parts})
    model = traced.model
    return EnginePlan(model=model, memory=memory, work=work, method=method, notes=tuple(notes), expected=expected)


def trace_apart(config: Config, devices: int, *, hosts: int = 1, torus: Shape = ()) -> Traced:
    """Run `tpu_trace.trace` in a process of its own. Raises its errors, and BackendError if it crashes or times out."""
    if config.sharding.strategy.startswith("HYBRID") and config.sharding.replicas is None:
        config = with_value(config, "sharding.replicas", hosts)
    with Worker(LIMIT_S) as worker:
        try:
            return worker("portable_fsdp.plan.tpu_trace:trace", config, devices, torus)
        except WorkerFailedError as failed:
            raise BackendError(failure_message("the train step could not be traced", failed.ended)) from None


def compile_for(
    program: Program,
    topology: str,
    *,
    slices: int = 1,
    generate_code: bool = False,
    stopped: Callable[[], bool] = lambda: False,
) -> Compiled:
    """Compile `program` for `slices` of `topology`, in libtpu's notation (`v6e:2x4`); needs no TPU.

    Reads an earlier result for the same program from the cache, except with `generate_code`: that compiles to the end,
    where a kernel may still be refused, in minutes for a model of billions. `stopped` returns True once nobody waits
    for the result. Raises BackendError if the compiler refuses the program, an option or the slice, fails, or takes
    longer than LIMIT_S.
    """
    arguments = libtpu_arguments(os.environ, topology.partition(":")[0])
    request = {**asdict(program), "topology": topology, "slices": slices}
    del request["hlo"]
    versions = [compiler_version(), *(importlib.metadata.version(name) for name in ("jax", "jaxlib"))]
    digest = hashlib.sha256(program.hlo).hexdigest()
    inputs = json.dumps([digest, request, arguments, os.environ.get("XLA_FLAGS", ""), versions], sort_keys=True)
    cache, key = cache_folder(os.environ) / "plans", hashlib.sha256(inputs.encode()).hexdigest()
    texts = None if generate_code else load_entry(cache, key)
    if texts is None:
        texts = _run_compiler(program, request, arguments, stopped, generate_code=generate_code)
        save_entry(cache, key, texts)
    seconds = float(texts["seconds"])
    return read_compiled(program, texts["program"], texts["buffers"], slices=slices, compile_s=seconds)


def _run_compiler(
    program: Program, request: dict[str, Any], arguments: str, stopped: Callable[[], bool], *, generate_code: bool
) -> dict[str, str]:
    """Run the compiler up to buffer assignment, or to its end; return its output files' texts."""
    with tempfile.TemporaryDirectory(prefix="portable_fsdp_plan") as name:
        folder, dump = Path(name), Path(name) / "dump"
        (folder / "program.json").write_text(json.dumps(request))
        (folder / "program.hlo.pb").write_bytes(program.hlo)
        # Otherwise libtpu writes logs into /tmp/tpu_logs, which nobody removes.
        environment = {"LIBTPU_INIT_ARGS": arguments, "TPU_LOG_DIR": os.environ.get("TPU_LOG_DIR", name)}
        with Child("portable_fsdp.plan.tpu_compiler", name, environment=environment) as child:
            ended = child.wait(LIMIT_S, lambda: stopped() or (not generate_code and _is_written(dump, program.name)))
        if ended.how not in ("finished", "enough") or not _is_written(dump, program.name):
            raise BackendError(f"plan for {request['topology']}: {_refusal(ended)}")
        after = f"*.{program.name}.*after_optimizations"
        return {
            "program": next(dump.glob(f"{after}.txt")).read_text(),
            "buffers": next(dump.glob(f"{after}-buffer-assignment.txt")).read_text(),
            "seconds": str(ended.cpu_s),
        }


def _is_written(dump: Path, name: str) -> bool:
    """True if the last file to read is complete: the file after it exists and has stopped growing."""
    last = list(dump.glob(f"*.{name}.*after_optimizations_after_buffer_assignment.txt"))
    if not last or not (size := last[0].stat().st_size):
        return False
    time.sleep(0.3)
    return last[0].stat().st_size == size


# -------------------------------------------------------------------------------------------------------- refusals


def compiler_version() -> str:
    return f"libtpu {importlib.metadata.version('libtpu')}"


def require_installed() -> None:
    missing = [name for name in ("torch_xla", "jax", "libtpu") if importlib.util.find_spec(name) is None]
    if missing:
        raise BackendError(
            f"plan for a TPU slice: needs the packages torch_xla, jax and libtpu; not installed: {', '.join(missing)}."
            f"\n  In a new environment, on Linux on x86-64: {pip_install('plan')}. No "
            "TPU is needed. Without them, --backend=native plans the memory of FSDP2 on TorchTPU."
        )


_OPTION = (
    r"(?:No such compile option: '?|Unknown command line flag '|Failed to parse.*?'"
    r"|Illegal value '.*' specified for flag ')(\w+)"
)
_SLICE = r"(Invalid TPU external name: \w+|does not match|Topology layout .*|it has \d+ devices.*)"


def _refusal(ended: Ended) -> str:
    """Return the compiler's error and its fix."""
    if option := re.search(_OPTION, ended.log):
        return (
            f"{compiler_version()} rejects the option {option[1]}.\n"
            "  LIBTPU_INIT_ARGS sets it; a run would fail too. Remove it."
        )
    if ended.how == "failed" and (unknown := re.search(_SLICE, ended.log)):
        return (
            f"{compiler_version()} doesn't know this slice: {unknown[1]}\n"
            "  It knows v4, v5e, v5p and v6e: a colon, then the torus in chips, as in v6e:2x4 and v5p:2x2x4; "
            "tpu7x needs a newer libtpu (0.0.51). --backend=native plans without libtpu."
        )
    if full := re.search(r"RESOURCE_EXHAUSTED[^\n]*", ended.log):
        return (
            f"the step does not fit: {full.group()[:600]}\n"
            "  Lower train.micro_batch or data.seq_len, set memory.gradient_checkpointing=full, or use more chips."
        )
    return failure_message("the TPU compiler wrote no program", ended)


def failure_message(problem: str, ended: Ended) -> str:
    """Return a message with the child's last lines; save its log in the cache folder."""
    how = "the time limit stopped it" if ended.how == "late" else f"it exited with code {ended.code}"
    reports = cache_folder(os.environ) / "reports"
    try:
        reports.mkdir(parents=True, exist_ok=True)
        prefix = time.strftime("%Y%m%d-%H%M%S-")
        with tempfile.NamedTemporaryFile("w", prefix=prefix, suffix=".log", dir=reports, delete=False) as file:
            file.write(ended.log)
        kept = file.name
    except OSError as error:
        kept = f"could not be saved ({error})"
    return f"{problem}: {how}. Its last lines:\n{ended.last_lines}\n  Its whole log: {kept}"


# ----------------------------------------------------------------------------------------------------------- the cache


def load_entry(folder: Path, key: str) -> dict[str, str] | None:
    """Return name -> text of an entry; None if it is missing or damaged."""
    path = folder / f"{key}.gz"
    try:
        os.utime(path)  # for `save_entry`, which deletes the least recently used
        return json.loads(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, ValueError, zlib.error):
        return None


def save_entry(folder: Path, key: str, texts: Mapping[str, str], largest_bytes: int = LARGEST_BYTES) -> None:
    """Save an entry, and delete the least recently used beyond `largest_bytes`; no effect if folder isn't writable."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        entry = folder / f"{key}.{os.getpid()}"
        entry.write_bytes(gzip.compress(json.dumps(texts).encode(), compresslevel=1))
        entry.replace(folder / f"{key}.gz")
        used = 0
        for path in sorted(folder.iterdir(), key=lambda path: -path.stat().st_mtime_ns):
            used += path.stat().st_size
            if used > largest_bytes:
                path.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------ in the child process


def _main(folder: Path) -> None:
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir

    request: dict[str, Any] = json.loads((folder / "program.json").read_text())
    devices = devices_of(request["topology"], request["slices"])
    if len(devices) != request["devices"]:
        raise ValueError(f"it has {len(devices)} devices, the program is for {request['devices']}")
    with mlir.make_ir_context(), ir.Location.unknown():
        module = _annotated((folder / "program.hlo.pb").read_bytes(), request)
        _compile(mlir.module_to_bytecode(module), devices, folder / "dump")


def devices_of(topology: str, slices: int = 1) -> list[Any]:
    """Return the devices sorted by id, as in torch_xla's runtime (pjrt_computation_client.cpp): x runs fastest."""
    from jax.experimental import topologies

    options: dict[str, Any] = {}
    if topology.startswith("v4:"):
        options["chip_config_name"] = "megacore"  # a chip's two cores as one device: TPU_MEGACORE of a run
    if set(topology.partition(":")[2].split("x")) == {"1"}:
        options["chips_per_host_bounds"] = (1, 1, 1)  # one chip of a host that has more
    if slices > 1:
        options["num_slices"] = slices
    devices = list(topologies.get_topology_desc(platform="tpu", topology_name=topology, **options).devices)
    return sorted(devices, key=lambda device: device.id)


def _annotated(hlo: bytes, request: dict[str, Any]) -> Any:
    """Add to the program what an HLO module lacks: shardings of arguments and results, and donated arguments."""
    from jax._src.lib import xla_client
    from jax._src.lib.mlir import ir

    text = xla_client._xla.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(hlo))
    module = ir.Module.parse(text)
    number = ir.IntegerType.get_signless(32)
    main = next(op for op in module.body.operations if ir.StringAttr(op.attributes["sym_name"]).value == "main")
    arguments: list[Any] = []
    for argument in request["arguments"]:
        attributes = {"mhlo.sharding": ir.StringAttr.get(argument["sharding"])}
        if argument["output"] is not None:
            attributes["tf.aliasing_output"] = ir.IntegerAttr.get(number, argument["output"])
        arguments.append(ir.DictAttr.get(attributes))
    results = [ir.DictAttr.get({"mhlo.sharding": ir.StringAttr.get(sharding)}) for sharding in request["outputs"]]
    main.attributes["arg_attrs"] = ir.ArrayAttr.get(arguments)
    main.attributes["res_attrs"] = ir.ArrayAttr.get(results)
    module.operation.attributes["mhlo.num_partitions"] = ir.IntegerAttr.get(number, request["devices"])
    module.operation.attributes["mhlo.num_replicas"] = ir.IntegerAttr.get(number, 1)
    module.operation.verify()
    return module


def _compile(program: bytes, devices: list[Any], dump: Path) -> None:
    import numpy as np
    from jax._src import compiler
    from jax._src.lib import xla_client

    compile_options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=len(devices),
        device_assignment=np.array([[device.id for device in devices]]),
        env_options_overrides={"xla_dump_to": str(dump)},
    )
    compile_options.executable_build_options.use_shardy_partitioner = False
    devices[0].client.compile(program, xla_client.DeviceList(tuple(devices)), compile_options)


if __name__ == "__main__":
    end_with_parent(int(sys.argv[1]))
    os.environ.update(ENVIRONMENT)  # before jax is imported
    _main(Path(sys.argv[2]))
