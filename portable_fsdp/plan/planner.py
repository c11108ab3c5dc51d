"""A config and a target to a plan: memory and work from the engine's own planner, then the bounds of time."""

import multiprocessing
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from time import perf_counter
from typing import Any, Self

from portable_fsdp.backends.open import engine_made_for
from portable_fsdp.backends.refusals import Deployment, require_supported
from portable_fsdp.config.describe import default_of, option_names, plain_values, value_of
from portable_fsdp.config.schema import Config
from portable_fsdp.layout import mesh_axes
from portable_fsdp.plan.result import EnginePlan, Expected, Plan, Progress, Time
from portable_fsdp.plan.target import Target
from portable_fsdp.plan.time import bound
from portable_fsdp.plan.tpu import plan_tpu
from portable_fsdp.runtime.errors import BackendError
from portable_fsdp.runtime.process import end_with_parent

SETTINGS = (
    *("train.micro_batch", "train.global_batch", "data.seq_len", "sharding.strategy", "memory.gradient_checkpointing"),
    *("memory.cpu_offload", "compile.scan_layers", "precision.compute"),
)
"""Keys on which memory and time depend most: a plan always shows them."""

SECTIONS = ("sharding.", "memory.", "precision.", "compile.")
"""Of these a plan also shows each key that isn't at its default."""

SHARED_LINKS = "two devices share a chip's links: what crosses ici isn't bounded."  # counted by device, some in a chip


class Apart:
    """Runs functions in one other process, one at a time; it starts with the first, and stays for the next.

    Importing torch and transformers takes seconds, and the planner replaces parts of torch, which this process keeps.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="portable_fsdp_plan")  # torch's too, which a kill would leave
        self._pool = self._new()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # nobody waits for the plan any more
            for child in multiprocessing.active_children():
                child.kill()
        self._pool.shutdown()
        self._folder.cleanup()

    def __call__(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """`work(*arguments)`; raises what it raises, and BackendError where the process was killed."""
        # A child that is half started would print a traceback for Ctrl-C.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            future = self._pool.submit(work, *arguments)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        try:
            return future.result()
        except BrokenProcessPool:
            self._pool = self._new()
            raise BackendError(
                "plan: the process that plans was killed.\n  Was memory short? A plan takes up to 3 GiB."
            ) from None

    def _new(self) -> ProcessPoolExecutor:
        spawn = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(1, spawn, initializer=_start, initargs=(os.getpid(), self._folder.name))


def _start(parent: int, folder: str) -> None:
    """In the child: it ends with its parent, its temporary files with `folder`, and Ctrl-C ends it silently."""
    end_with_parent(parent)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def make_plan(
    config: Config,
    target: Target,
    apart: Apart,
    progress: Progress = lambda stage: None,
    *,
    backend: str = "auto",
) -> Plan:
    """Plan one step of `config` on `target`; takes seconds to a minute, and needs none of the hardware.

    `backend`: an engine, or `auto`.
    What the trainer would refuse there is refused here, by the same checks. Raises ConfigError, BackendError.
    """
    began = perf_counter()
    kind = target.hardware.kind
    engine = engine_made_for(kind) if backend == "auto" else backend
    planners = dict(PLANNERS[kind])
    if engine not in planners:
        raise BackendError(
            f"plan on {target.text}: expected --backend={' or '.join(planners)}, found {backend}: no other engine "
            f"has a planner for {kind}."
        )
    generation = target.hardware.name if kind == "tpu" else ""
    require_supported(config, Deployment(engine, kind, target.devices, target.hosts, generation))
    planned = planners[engine](config, target, apart, progress)
    shares_links = target.devices > target.chips and planned.work.sent_bytes.pop("ici", 0)
    model, tokens = planned.model, config.train.global_batch * planned.model.tokens_per_row
    flops = None if model.flops_per_token is None else model.flops_per_token * tokens / target.devices
    compute = config.precision.compute
    time = bound(planned.work, target, tokens_per_step=tokens, model_flops_per_device=flops, compute=compute)
    return Plan(
        on=target.text,
        hardware=target.in_words,
        devices=target.devices,
        backend=engine,
        settings=_settings(config, without=("data.seq_len",) if model.rows else ()),
        parameters=model.parameters,
        memory=planned.memory,
        work=planned.work,
        time=time,
        expected=planned.expected and _no_shorter(planned.expected, time),
        method=planned.method,
        notes=(*planned.notes, *((SHARED_LINKS,) if shares_links else ()), *_notes(config, target, planned, time)),
        planned_in_s=perf_counter() - began,
    )


def _settings(config: Config, without: tuple[str, ...]) -> dict[str, Any]:
    changed = (k for k in option_names() if k.startswith(SECTIONS) and value_of(config, k) != default_of(k))
    keys = dict.fromkeys((*SETTINGS, *changed))
    return {key: plain_values(value_of(config, key)) for key in keys if key not in without}


def _no_shorter(expected: Expected, time: Time) -> Expected:
    """Than the bound: copies into on-chip memory, that the time of a TPU's program counts as free, bind small steps."""
    missing = max(0.0, (time.seconds or 0.0) - expected.seconds)
    return expected + Expected(seconds=missing, parts={"copies": missing} if missing else {}, synchronous_bytes={})


def _compiled(config: Config, target: Target, apart: Apart, progress: Progress) -> EnginePlan:
    return plan_tpu(config, target, progress)


def _on_fake_tensors(config: Config, target: Target, apart: Apart, progress: Progress) -> EnginePlan:
    progress("running a step on fake tensors")
    return apart(_plan_memory, config, target)


def _on_torchtpu(config: Config, target: Target, apart: Apart, progress: Progress) -> EnginePlan:
    if target.slices > 1:
        raise BackendError(f"plan on {target.text}: backend native trains on one slice only.\n  Use --backend=xla.")
    if config.compile.enabled:
        raise BackendError(
            f"plan on {target.text}: compile.enabled=true: TorchTPU's compiler makes its programs on a chip only, and "
            "they keep less than the eager step.\n  Plan with compile.enabled=false, or --backend=xla."
        )
    return _on_fake_tensors(config, target, apart, progress)


Planner = Callable[[Config, Target, Apart, Progress], EnginePlan]
PLANNERS: dict[str, tuple[tuple[str, Planner], ...]] = {
    "cpu": (("native", _on_fake_tensors),),
    "cuda": (("native", _on_fake_tensors),),
    "tpu": (("xla", _compiled), ("native", _on_torchtpu)),
}
"""The engines that have a planner, by device; the usual one first."""


def _plan_memory(config: Config, target: Target) -> EnginePlan:
    os.environ["USE_TORCH_XLA"] = "0"  # transformers imports torch_xla otherwise
    from portable_fsdp.plan.cuda import plan_memory

    return plan_memory(config, target)


def _notes(config: Config, target: Target, planned: EnginePlan, time: Time) -> Iterator[str]:
    """What a reader may misread the figures without."""
    model, memory = planned.model, planned.memory
    if model.rows:
        counted = "; each counts as one token" if model.tokens_per_row == 1 else ""
        yield f"rows as data.factory gives them first: {model.rows}{counted}. Larger ones take more."
    shards = mesh_axes(config, target.devices, target.hosts)["shard"]
    thin = sum(elements for rows, elements in model.elements_by_rows.items() if rows < shards)
    if thin > model.parameters / 100:
        yield (
            f"{thin / model.parameters:.0%} of the weights have fewer rows than the {shards} shards, as a mixture's "
            "experts do: they are split by rows, so that more devices don't divide them any further."
        )
    reached = target.hardware.reached
    if planned.expected is None and target.hardware.kind != "cpu":
        yield f"no expected time: no run is known here that tells what {target.hardware.device_name} reaches."
    elif planned.expected and reached and not reached.source.startswith("fitted"):
        yield f"the expected time is made of shares of the peak that are {reached.source}."
    if memory.limit_bytes and 0.95 * memory.limit_bytes < memory.peak_bytes <= memory.limit_bytes:
        yield "over 95 % of the memory is taken: keep 5 % for code, drivers and what else a plan can't see."
    for link in planned.work.sent_bytes.keys() - time.links_s.keys():
        yield f"no bandwidth of {link} is known here: what crosses it isn't bounded."
