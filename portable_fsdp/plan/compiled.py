"""The train step on a TPU slice that isn't there: its memory, collectives and work, from the TPU's own compiler.

`plan_compiled` has the trainer's own step traced (`tpu_trace.py`) and compiled by libtpu for the slice
(`tpu_compiler.py`), each in a process of its own. Imports no torch.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from portable_fsdp.config.describe import with_value
from portable_fsdp.config.schema import Config
from portable_fsdp.plan.result import Buffer, DeviceMemory, EnginePlan, Moved, Progress, Work
from portable_fsdp.plan.target import Shape, Target
from portable_fsdp.plan.time import Loop, expected_time, rates_of
from portable_fsdp.plan.tpu_compiler import (
    COMPILER_PACKAGES,
    LIMIT_S,
    compile_for,
    compiler_version,
    failure_message,
    require_installed,
)
from portable_fsdp.plan.tpu_program import Compiled, Traced, largest, part_of
from portable_fsdp.runtime.child import Worker, WorkerFailedError
from portable_fsdp.runtime.errors import BackendError

PARTS = ("weights", "gradients", "optimizer", "batch", "temporaries", "outputs")
DTYPES = {"bf16": "bfloat16", "f32": "float32", "f16": "float16", "s32": "int32", "u32": "uint32", "pred": "bool"}


def plan_compiled(config: Config, target: Target, progress: Progress = lambda stage: None) -> EnginePlan:
    """Memory and work of the config's train step on one device of `target`, one or more TPU slices.

    Calls `progress` at once with `tracing`, later with what is compiled. Raises what opening the backend and building
    the model raise; BackendError where the extra is missing, and where the compiler refuses the slice, an option or the
    program, fails, or takes longer than LIMIT_S.
    """
    assert target.topology is not None
    progress("tracing")
    require_installed("torch_xla", *COMPILER_PACKAGES)
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
    accumulation = config.train.global_batch // (config.train.resolved_micro_batch * target.devices)
    work = work_of(compiled, accumulation)
    notes = notes_of(compiled)
    if config.precision.products != "auto":
        notes.append(f"products of {config.precision.products} are expected to take bfloat16's time")
    method = f"The trainer's own step, compiled by {compiler_version()} for this slice; not run."
    memory = memory_of(compiled, target.limit_bytes)
    step = [Loop(_times(name, accumulation), [program.operations]) for name, program in compiled.items()]
    expected = expected_time(step, rates) if (rates := rates_of(target)) else None
    return EnginePlan(traced.model, memory, work, method, tuple(notes), expected)


def trace_apart(config: Config, devices: int, *, hosts: int = 1, torus: Shape = ()) -> Traced:
    """`tpu_trace.trace` in a process of its own; raises what it raises, and BackendError where it fails or is late."""
    require_installed("torch_xla")
    if config.sharding.strategy.startswith("HYBRID") and config.sharding.replicas is None:
        config = with_value(config, "sharding.replicas", hosts)
    with Worker(LIMIT_S) as worker:
        try:
            return worker("portable_fsdp.plan.tpu_trace:trace", config, devices, torus)
        except WorkerFailedError as failed:
            raise BackendError(failure_message("the train step could not be traced", failed.ended)) from None


# ------------------------------------------------------------------------------------------------- the whole step


def memory_of(programs: Mapping[str, Compiled], limit_bytes: int | None) -> DeviceMemory:
    """The memory of the fuller program, with the arguments of the other one, which stay on the device all the same."""
    arguments: dict[str, int] = {}
    for compiled in programs.values():
        arguments |= compiled.named_bytes
    fuller = max(programs.values(), key=lambda compiled: compiled.temporary_bytes + compiled.output_bytes)
    parts: dict[str, int] = dict.fromkeys(PARTS, 0)
    for name, size in arguments.items():
        parts[part_of(name)] += size
    parts["temporaries"], parts["outputs"] = fuller.temporary_bytes, fuller.output_bytes
    others = arguments.keys() - fuller.named_bytes.keys()
    resting = [Buffer(name=name, bytes=arguments[name], where="") for name in others]
    return DeviceMemory(
        parts={part: size for part, size in parts.items() if size},
        limit_bytes=limit_bytes,
        at=fuller.at,
        biggest=largest([*fuller.biggest, *resting]),
        rematerialised=max(compiled.rematerialised for compiled in programs.values()),
        host_bytes=max(compiled.host_bytes for compiled in programs.values()),
    )


def work_of(programs: Mapping[str, Compiled], accumulation: int) -> Work:
    """The work of a step: with accumulation `micro_batch` runs several times, `update` once."""
    flops: defaultdict[str, float] = defaultdict(float)
    collectives: defaultdict[str, Moved] = defaultdict(Moved)
    sent: Counter[str] = Counter()
    memory_bytes = 0.0
    for name, compiled in programs.items():
        times = _times(name, accumulation)
        for factors, count in (*compiled.matmul_flops.items(), *compiled.kernel_flops.items()):
            names = [DTYPES.get(name, name) for name in factors.split(" x ")]
            dtype = "float32" if "float32" in names else names[0]  # the narrower factor is cast first
            if dtype != "bool":  # of masks (T5's); no vendor gives their speed
                flops[dtype] += times * count
        by_link = (("ici", "", compiled.collectives), ("network", " between slices", compiled.between_slices))
        for link, suffix, moves in by_link:
            for key, moved in moves.items():
                kind, _, dtypes = key.partition(" ")
                words = "+".join(DTYPES.get(dtype, dtype) for dtype in dtypes.split("+"))
                collectives[f"{kind} {words}{suffix}"] += moved * times
                sent[link] += moved.sent_bytes * times
        # What is updated in its place, and temporaries at the peak, are written and read, outputs written. What is
        # only read is left out: of a table it may be a few rows.
        memory_bytes += times * (2.0 * (compiled.updated_bytes + compiled.live_bytes) + compiled.output_bytes)
    return Work(
        matmul_flops=flops,
        memory_bytes=memory_bytes,
        collectives=dict(sorted(collectives.items())),
        sent_bytes={link: size for link, size in sent.items() if size},
    )


def _times(program: str, accumulation: int) -> int:
    """How often a step runs one of its programs."""
    return accumulation if program == "micro_batch" else 1


def notes_of(programs: Mapping[str, Compiled]) -> list[str]:
    """What is wrong with a program: state that isn't updated in place, waits for the host, copies of unknown speed."""
    notes: list[str] = []
    for name, compiled in programs.items():
        for found, problem in (
            (compiled.undonated, "tensors are not updated in place, which takes their memory twice"),
            (compiled.host_transfers, "instructions inside the step wait for the host"),
        ):
            if found:
                notes.append(f"{name}: {len(found)} {problem}: {', '.join(found[:3])}")
        if compiled.host_bytes:
            notes.append(f"{name}: copies to the host are taken to hide behind compute: their speed is unknown")
    return notes
