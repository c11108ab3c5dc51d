"""The train step on a TPU slice that isn't there: its memory, collectives and work, from the TPU's own compiler.

`plan_tpu` has the trainer's own step traced (`tpu_trace.py`) and compiled by libtpu for the slice (`tpu_compiler.py`),
each in a separate process, and reads what the compiler wrote (`tpu_read.py`). It stops the compiler once buffers are
assigned: code generation, which follows, takes most of the time and can only fail. Imports no torch.
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
from typing import Any

from portable_fsdp.backends.pjrt_options import compiler_options, libtpu_arguments
from portable_fsdp.config.describe import with_value
from portable_fsdp.config.schema import Config
from portable_fsdp.plan import tpu_cache
from portable_fsdp.plan.hardware import Shape
from portable_fsdp.plan.result import EnginePlan, Progress
from portable_fsdp.plan.target import Target
from portable_fsdp.plan.tpu_program import TRACED, Program, Traced
from portable_fsdp.plan.tpu_read import Compiled, expected_of, memory_of, notes_of, read_compiled, work_of
from portable_fsdp.runtime import errors
from portable_fsdp.runtime.child import Child, Ended
from portable_fsdp.runtime.errors import BackendError, PortableFSDPError
from portable_fsdp.runtime.files import cache_folder

COMPILER_PACKAGES = ("jax", "libtpu")
LIMIT_S = 900  # for the trace, and for each program


def plan_tpu(config: Config, target: Target, progress: Progress = lambda stage: None) -> EnginePlan:
    """Memory and work of the config's train step on one device of `target`, one or more TPU slices.

    Calls `progress` at once with `tracing`, later with what is compiled. Raises what opening the backend and building
    the model raise; BackendError where the extra is missing, and where the compiler refuses the slice, an option or the
    program, fails, or takes longer than LIMIT_S. Runs in any thread.
    """
    assert target.topology is not None
    progress("tracing")
    _require_installed("torch_xla", *COMPILER_PACKAGES)
    programs, model = trace_apart(config, target.devices, hosts=target.hosts, torus=target.torus)
    progress(f"compiling {' and '.join(programs)}")
    stop = threading.Event()
    with ThreadPoolExecutor(len(programs)) as pool:
        try:
            pending = {
                name: pool.submit(compile_for, program, target.topology, slices=target.slices, stopped=stop.is_set)
                for name, program in programs.items()
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
    memory = memory_of(compiled, _limit(target.limit_bytes))
    return EnginePlan(model, memory, work, method, tuple(notes), expected_of(compiled, accumulation))


def _limit(limit_bytes: int | None) -> int | None:
    """Lower where LIBTPU_INIT_ARGS gives the compiler a lower one."""
    option = compiler_options(os.environ.get("LIBTPU_INIT_ARGS", "")).get("xla_tpu_max_hbm_size_mib", "")
    limits = [limit_bytes, int(option) * 2**20 if option.isdigit() else None]
    return min((limit for limit in limits if limit is not None), default=None)


# ---------------------------------------------------------------------------------------------------------- tracing


def trace_apart(config: Config, devices: int, *, hosts: int = 1, torus: Shape = ()) -> Traced:
    """`tpu_trace.trace` in a process of its own; raises what it raises, and BackendError where it fails or is late."""
    _require_installed("torch_xla")
    if config.sharding.strategy.startswith("HYBRID") and config.sharding.replicas is None:
        config = with_value(config, "sharding.replicas", hosts)
    with tempfile.TemporaryDirectory(prefix="portable_fsdp_trace") as name:
        folder = Path(name)
        request = {"config": config.model_dump(mode="json"), "devices": devices, "torus": torus}
        (folder / "request.json").write_text(json.dumps(request))
        with Child("portable_fsdp.plan.tpu_trace", name) as child:
            ended = child.wait(LIMIT_S)
        if (folder / "refusal.json").is_file():
            refusal = json.loads((folder / "refusal.json").read_text())
            kind: type[PortableFSDPError] = getattr(errors, refusal["kind"])
            raise kind(refusal["message"])
        if ended.how != "finished":
            raise BackendError(_failure("the train step could not be traced", folder, ended))
        return TRACED.validate_json((folder / "traced.json").read_bytes())


# -------------------------------------------------------------------------------------------------------- compiling


def compile_for(
    program: Program,
    topology: str,
    *,
    slices: int = 1,
    generate_code: bool = False,
    options: Mapping[str, str] | None = None,
    limit_s: float = LIMIT_S,
    stopped: Callable[[], bool] = lambda: False,
) -> Compiled:
    """What the TPU compiler makes of `program` on `slices` of `topology`, as libtpu names it (`v6e:2x4`); needs no TPU.

    Takes an earlier result for the same program from the cache, but for `generate_code`: that compiles to the end,
    where a kernel may still be refused, in minutes for a model of billions. `options` of the compiler count over those
    of LIBTPU_INIT_ARGS; `stopped` says whether nobody waits for the result any more. Raises BackendError where the
    compiler refuses the program, an option or the slice, fails, or takes longer than `limit_s` seconds.
    """
    _require_installed(*COMPILER_PACKAGES)
    arguments = libtpu_arguments(os.environ, topology.partition(":")[0])
    request = {**asdict(program), "topology": topology, "slices": slices, "options": dict(options or {})}
    del request["hlo"]
    versions = [compiler_version(), *(importlib.metadata.version(name) for name in ("jax", "jaxlib"))]
    inputs = [request, arguments, os.environ.get("XLA_FLAGS", ""), versions]
    cache = cache_folder(os.environ) / "plans"
    key = tpu_cache.key_of(program.hlo, json.dumps(inputs, sort_keys=True).encode())
    texts = None if generate_code else tpu_cache.load(cache, key)
    if texts is None or texts.keys() != {"program", "buffers", "seconds"}:
        texts = _run_compiler(program, request, arguments, limit_s, stopped, generate_code=generate_code)
        tpu_cache.save(cache, key, texts)
    seconds = float(texts["seconds"])
    return read_compiled(program, topology, texts["program"], texts["buffers"], slices=slices, compile_s=seconds)


def _run_compiler(
    program: Program,
    request: dict[str, Any],
    arguments: str,
    limit_s: float,
    stopped: Callable[[], bool],
    *,
    generate_code: bool,
) -> dict[str, str]:
    """Run the compiler until it has assigned buffers, or to its end; returns the texts that it wrote."""
    with tempfile.TemporaryDirectory(prefix="portable_fsdp_plan") as name:
        folder, dump = Path(name), Path(name) / "dump"
        (folder / "program.json").write_text(json.dumps(request))
        (folder / "program.hlo.pb").write_bytes(program.hlo)
        # libtpu writes logs into /tmp/tpu_logs otherwise, and nobody removes them.
        environment = {"LIBTPU_INIT_ARGS": arguments, "TPU_LOG_DIR": os.environ.get("TPU_LOG_DIR", name)}
        with Child("portable_fsdp.plan.tpu_compiler", name, environment=environment) as child:
            ended = child.wait(limit_s, lambda: stopped() or (not generate_code and _is_written(dump, program.name)))
        if ended.how not in ("finished", "enough") or not _is_written(dump, program.name):
            topology = request["topology"]
            raise BackendError(f"plan for {topology}: {_refusal(topology, folder, ended)}")
        after = f"*.{program.name}.*after_optimizations"
        return {
            "program": next(dump.glob(f"{after}.txt")).read_text(),
            "buffers": next(dump.glob(f"{after}-buffer-assignment.txt")).read_text(),
            "seconds": str(ended.cpu_s),
        }


def _is_written(dump: Path, name: str) -> bool:
    """Whether the last of the files that are read is complete: the next one has been begun and stopped growing."""
    last = list(dump.glob(f"*.{name}.*after_optimizations_after_buffer_assignment.txt"))
    if not last or not last[0].stat().st_size:
        return False
    size = last[0].stat().st_size
    time.sleep(0.3)
    return last[0].stat().st_size == size


# -------------------------------------------------------------------------------------------------------- refusals


def compiler_version() -> str:
    return f"libtpu {importlib.metadata.version('libtpu')}"


def _require_installed(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise BackendError(
            f"plan for a TPU slice: expected the packages torch_xla, jax and libtpu, found no {', '.join(missing)}.\n"
            "  In a new environment, in a checkout of portable_fsdp on Linux on x86-64: pip install '.[plan]'. No TPU "
            "is needed. Here --backend=native plans the memory of FSDP2 on TorchTPU."
        )


_OPTION = (
    r"(?:No such compile option: '?|Unknown command line flag '|Failed to parse.*?'"
    r"|Illegal value '.*' specified for flag ')(\w+)"
)
_SLICE = r"(Invalid TPU external name: \w+|does not match|Topology layout .*|it has \d+ devices.*)"


def _refusal(topology: str, folder: Path, ended: Ended) -> str:
    """The compiler's error, and what to do about it."""
    if option := re.search(_OPTION, ended.log):
        return (
            f"expected options that {compiler_version()} knows and takes, found {option[1]}.\n"
            "  LIBTPU_INIT_ARGS or the plan sets it; a run would refuse it too. Remove it."
        )
    if ended.how == "failed" and (unknown := re.search(_SLICE, ended.log)):
        newer = (
            "\n  tpu7x needs a newer libtpu: 0.0.51 knows it. --backend=native plans without."
            if topology.startswith("tpu7x")
            else ""
        )
        return (
            f"expected a slice that {compiler_version()} knows, found: {unknown[1]}{newer}\n"
            "  It knows v4, v5e, v5p and v6e: a colon, then the torus in chips, as in v6e:2x4 and v5p:2x2x4."
        )
    if full := re.search(r"RESOURCE_EXHAUSTED[^\n]*", ended.log):
        return (
            f"the step does not fit: {full.group()[:600]}\n"
            "  Lower train.micro_batch or data.seq_len, set memory.gradient_checkpointing=full, or take more chips."
        )
    return _failure("the TPU compiler gave no program", folder, ended)


def _failure(problem: str, folder: Path, ended: Ended) -> str:
    """A message with the child's last lines; keeps its input and log in the cache folder."""
    how = "the time limit stopped it" if ended.how == "late" else f"it ended with code {ended.code}"
    reports = cache_folder(os.environ) / "reports"
    try:
        reports.mkdir(parents=True, exist_ok=True)
        kept = tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-%H%M%S-"), dir=reports)
        shutil.copytree(
            folder, kept, ignore=shutil.ignore_patterns("dump"), ignore_dangling_symlinks=True, dirs_exist_ok=True
        )
        Path(kept, "log").write_text(ended.log)
    except OSError as error:
        kept = f"could not be kept ({error})"
    return f"{problem}: {how}. Its last lines:\n{ended.last_lines}\n  Its input and its whole log: {kept}"
