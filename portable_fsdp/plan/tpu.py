"""The train step on a TPU slice that isn't there: its memory, collectives and work, from the TPU's own compiler.

`plan_tpu` is the way in. It has the trainer's own step traced (`tpu_trace.py`) and compiled by libtpu for the slice
(`tpu_compiler.py`), each in a process of its own, and reads what the compiler wrote (`tpu_read.py`). The compiler is
stopped once buffers are assigned: what follows is code generation, which takes most of the time, and of which nothing
is asked here but whether it succeeds. This module imports neither torch nor torch_xla.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from portable_fsdp.backends.pjrt_options import compiler_options, libtpu_arguments
from portable_fsdp.config.schema import Config
from portable_fsdp.plan import tpu_cache
from portable_fsdp.plan.result import Memory, Model, Work
from portable_fsdp.plan.tpu_program import Program, Traced, read_traced
from portable_fsdp.plan.tpu_read import Compiled, memory_of, notes_of, read_compiled, work_of
from portable_fsdp.runtime import errors
from portable_fsdp.runtime.child import Child, Ended
from portable_fsdp.runtime.errors import BackendError, PortableFSDPError
from portable_fsdp.runtime.files import cache_folder

Progress = Callable[[str], None]
"""Is told what begins: `tracing`, `compiling micro_batch and update`, `reading what the compiler wrote`."""

NEEDS = ("torch_xla", "jax", "libtpu")


class TpuPlan(NamedTuple):
    """What a step is on a slice."""

    model: Model
    memory: Memory
    work: Work
    notes: tuple[str, ...]  # what a user must be told besides
    compiler: str  # libtpu 0.0.21
    compile_s: float  # processor time of the compiler, as it was when the result was new


def plan_tpu(
    config: Config,
    topology: str,
    devices: int,
    *,
    slices: int = 1,
    hosts: int = 1,
    limit_bytes: int | None = None,
    progress: Progress = lambda stage: None,
    limit_s: float = 900,
    options: Mapping[str, str] | None = None,
) -> TpuPlan:
    """Memory and work of the config's train step on one device of a TPU slice.

    Args:
        topology: of one slice, as libtpu names it: generation and torus (`v6e:2x4`, `v5p:2x2x4`).
        devices: of all slices together; a chip of v4 to v6e is one, one of tpu7x two.
        slices: joined over the network.
        hosts: of all slices together; as in a run, HYBRID_SHARD has a replica on each where the config names none.
        limit_bytes: what the compiler lets a program have of a device's memory; None: no verdict.
        progress: is told what begins; the first word comes at once.
        limit_s: seconds, for the trace and for each program.
        options: of the compiler, over those of LIBTPU_INIT_ARGS.

    Raises what opening the backend and building the model raise; BackendError where the extra is missing, the compiler
    refuses the slice, an option or the program, fails, or takes longer. Runs in any thread, and several at once.
    """
    progress("tracing")
    _require_installed(NEEDS)
    programs, model = trace_apart(config, devices, hosts=hosts, limit_s=limit_s)
    progress(f"compiling {' and '.join(programs)}")
    stop = threading.Event()
    with ThreadPoolExecutor(len(programs)) as pool:
        try:
            answers = [
                pool.submit(_written, program, topology, slices, options or {}, limit_s, stopped=stop.is_set)
                for program in programs.values()
            ]
            texts = dict(zip(programs, [answer.result() for answer in answers], strict=True))
        finally:
            stop.set()  # Ctrl-C reaches this thread alone
    progress("reading what the compiler wrote")
    found = {name: _read(program, topology, slices, texts[name]) for name, program in programs.items()}
    return TpuPlan(
        model,
        memory_of(found, _limit(limit_bytes, options or {})),
        work_of(found, config.train.global_batch // (config.train.micro_batch * devices)),
        notes_of(found),
        _compiler(),
        sum(compiled.compile_s for compiled in found.values()),
    )


def _limit(limit_bytes: int | None, options: Mapping[str, str]) -> int | None:
    """Lower where an option tells the compiler of less."""
    asked = {**compiler_options(os.environ.get("LIBTPU_INIT_ARGS", "")), **options}.get("xla_tpu_max_hbm_size_mib")
    if asked is None or not asked.isdigit():
        return limit_bytes
    return min(int(asked) * 2**20, limit_bytes or int(asked) * 2**20)


# ---------------------------------------------------------------------------------------------------------- tracing


def trace_apart(config: Config, devices: int, *, hosts: int = 1, limit_s: float = 900) -> Traced:
    """`tpu_trace.trace` in a process of its own; raises what it raises, and BackendError where it fails or is late."""
    _require_installed(("torch_xla",))
    if config.sharding.strategy.startswith("HYBRID") and config.sharding.replicas is None:
        sharding = config.sharding.model_copy(update={"replicas": hosts})
        config = config.model_copy(update={"sharding": sharding})
    with tempfile.TemporaryDirectory(prefix="portable_fsdp_trace") as name:
        folder = Path(name)
        request = {"config": config.model_dump(mode="json"), "devices": devices}
        (folder / "request.json").write_text(json.dumps(request))
        with Child("portable_fsdp.plan.tpu_trace", name) as child:
            ended = child.wait(limit_s)
        if (folder / "refusal.json").is_file():
            refusal = json.loads((folder / "refusal.json").read_text())
            kind: type[PortableFSDPError] = getattr(errors, refusal["kind"])
            raise kind(refusal["message"])
        if ended.how != "finished":
            raise BackendError(_failure("the train step could not be traced", folder, ended, limit_s))
        return read_traced(folder)


# -------------------------------------------------------------------------------------------------------- compiling


def compile_for(
    program: Program,
    topology: str,
    *,
    slices: int = 1,
    generate_code: bool = False,
    options: Mapping[str, str] | None = None,
    limit_s: float = 900,
) -> Compiled:
    """What the TPU compiler makes of `program` on slices of `topology`, without a TPU.

    Args:
        program: for as many devices as the slices have.
        topology: of a slice, as libtpu names it (`v6e:2x4`, `v5p:2x2x4`).
        slices: how many, joined over the network.
        generate_code: go on to the end, where a kernel may still be refused: minutes for a model of billions.
        options: of the compiler, over those of LIBTPU_INIT_ARGS.
        limit_s: seconds after which the compiler is stopped.

    What it gave for the same program before is taken from the cache, but for `generate_code`. Raises BackendError
    where the compiler refuses the program, an option or the slice, fails, or takes longer.
    """
    return _read(
        program,
        topology,
        slices,
        _written(program, topology, slices, options or {}, limit_s, generate_code=generate_code),
    )


def _read(program: Program, topology: str, slices: int, texts: Mapping[str, str]) -> Compiled:
    seconds = float(texts["seconds"])
    return read_compiled(program, topology, texts["program"], texts["buffers"], slices=slices, compile_s=seconds)


def _written(
    program: Program,
    topology: str,
    slices: int,
    options: Mapping[str, str],
    limit_s: float,
    *,
    generate_code: bool = False,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, str]:
    """What the compiler writes of a program, from the cache where it is the same in all that goes into it."""
    _require_installed(("jax", "libtpu"))
    arguments = libtpu_arguments(os.environ, topology.partition(":")[0])
    described: dict[str, object] = {
        "topology": topology,
        "slices": slices,
        "devices": program.devices,
        "options": dict(options),
        "arguments": [asdict(argument) for argument in program.arguments],
        "outputs": program.outputs,
    }
    versions = [_compiler(), *(importlib.metadata.version(name) for name in ("jax", "jaxlib"))]
    flags = os.environ.get("XLA_FLAGS", "")
    what = json.dumps([program.name, described, arguments, flags, versions], sort_keys=True)
    folder = cache_folder(os.environ) / "plans"
    key = tpu_cache.key_of(program.hlo, what.encode())
    texts = None if generate_code else tpu_cache.load(folder, key)
    if texts is None or texts.keys() != {"program", "buffers", "seconds"}:
        texts = _run_compiler(program, described, arguments, limit_s, generate_code=generate_code, stopped=stopped)
        tpu_cache.save(folder, key, texts)
    return texts


def _run_compiler(
    program: Program,
    described: dict[str, object],
    arguments: str,
    limit_s: float,
    *,
    generate_code: bool,
    stopped: Callable[[], bool],
) -> dict[str, str]:
    """Run the compiler until it has assigned buffers, or to its end; returns what it wrote."""
    with tempfile.TemporaryDirectory(prefix="portable_fsdp_plan") as name:
        folder = Path(name)
        (folder / "program.json").write_text(json.dumps(described))
        (folder / "program.hlo.pb").write_bytes(program.hlo)
        # libtpu writes logs into /tmp/tpu_logs otherwise, and nobody removes them.
        environment = {"LIBTPU_INIT_ARGS": arguments, "TPU_LOG_DIR": os.environ.get("TPU_LOG_DIR", name)}
        with Child("portable_fsdp.plan.tpu_compiler", name, environment=environment) as child:
            ended = child.wait(
                limit_s, lambda: stopped() or (not generate_code and _is_written(folder / "dump", program.name))
            )
        if ended.how not in ("finished", "enough") or not _is_written(folder / "dump", program.name):
            raise BackendError(_refusal(str(described["topology"]), folder, ended, limit_s))
        dump = folder / "dump"
        return {
            "program": next(dump.glob(f"*.{program.name}.*after_optimizations.txt")).read_text(),
            "buffers": next(dump.glob(f"*.{program.name}.*after_optimizations-buffer-assignment.txt")).read_text(),
            "seconds": str(ended.cpu_s),
        }


def _is_written(dump: Path, name: str) -> bool:
    """Whether the last of the files that are read is whole: the next one has been begun and has come to rest."""
    last = list(dump.glob(f"*.{name}.*after_optimizations_after_buffer_assignment.txt"))
    if not last or not last[0].stat().st_size:
        return False
    size = last[0].stat().st_size
    time.sleep(0.3)
    return last[0].stat().st_size == size


# -------------------------------------------------------------------------------------------------------- refusals


def _compiler() -> str:
    return f"libtpu {importlib.metadata.version('libtpu')}"


def _require_installed(packages: tuple[str, ...]) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise BackendError(
            f"plan for a TPU slice: expected the packages {', '.join(NEEDS)}, found no {', '.join(missing)}.\n"
            "  In a checkout of portable_fsdp, on Linux on x86-64: pip install '.[plan]'. No TPU is needed."
        )


def _refusal(topology: str, folder: Path, ended: Ended, limit_s: float) -> str:
    """What the compiler said, in words that say what to do."""
    option = re.search(
        r"No such compile option: '?(\w+)|Unknown command line flag '(\w+)'|Failed to parse.*?'(\w+)'|"
        r"Illegal value '.*' specified for flag '(\w+)'",
        ended.log,
    )
    if option:
        name = next(filter(None, option.groups()))
        return (
            f"plan for {topology}: expected options that {_compiler()} knows and takes, found {name}.\n"
            "  It stands in LIBTPU_INIT_ARGS or is asked for by the plan; a run would refuse it too. Take it out."
        )
    unknown = re.search(
        r"(Invalid TPU external name: \w+|does not match|Topology layout .*|it has \d+ devices.*)", ended.log
    )
    if ended.how == "failed" and unknown:
        newer = "" if not topology.startswith("tpu7x") else "\n  tpu7x needs a newer libtpu: 0.0.51 knows it."
        return (
            f"plan for {topology}: expected a slice that {_compiler()} knows, found: {unknown.group(1)}{newer}\n"
            "  It knows v4, v5e, v5p and v6e: a colon, then the torus in chips, as in v6e:2x4 and v5p:2x2x4."
        )
    full = re.search(r"RESOURCE_EXHAUSTED[^\n]*", ended.log)
    if full:
        return (
            f"plan for {topology}: the step does not fit: {full.group()[:600]}\n"
            "  Lower train.micro_batch or data.seq_len, set memory.gradient_checkpointing=full, or take more chips."
        )
    return f"plan for {topology}: " + _failure("the TPU compiler gave no program", folder, ended, limit_s)


def _failure(what: str, folder: Path, ended: Ended, limit_s: float) -> str:
    """A message with the child's last lines; all that it worked on is kept."""
    how = f"it was stopped after {limit_s:.0f} s" if ended.how == "late" else f"it ended with code {ended.code}"
    kept = _report(folder, ended.log)
    return f"{what}: {how}. Its last lines:\n{ended.last_lines}\n  What it worked on, and all that it said: {kept}"


def _report(folder: Path, log: str) -> str:
    reports = cache_folder(os.environ) / "reports"
    try:
        reports.mkdir(parents=True, exist_ok=True)
        kept = Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=reports))
        for path in folder.iterdir():
            if path.is_file():
                shutil.copy(path, kept)
        (kept / "log").write_text(log)
    except OSError as error:
        return f"could not be kept ({error})"
    return str(kept)
