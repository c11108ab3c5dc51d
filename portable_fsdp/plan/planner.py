"""A config and a target to a plan: memory and work from the engine's own planner, then the bounds of time."""

import os
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

from portable_fsdp.backends.open import ENGINES, engine_made_for, options_of
from portable_fsdp.backends.support import require_supported
from portable_fsdp.config.describe import default_of, option_names, plain_values, value_of
from portable_fsdp.config.rules import Deployment
from portable_fsdp.config.schema import Config
from portable_fsdp.layout import mesh_axes
from portable_fsdp.plan.compiled import plan_compiled
from portable_fsdp.plan.result import EnginePlan, Expected, Plan, Progress, Time
from portable_fsdp.plan.target import Target
from portable_fsdp.plan.time import bound
from portable_fsdp.runtime.child import Worker, WorkerFailedError
from portable_fsdp.runtime.errors import BackendError

SETTINGS = (
    *("train.micro_batch", "train.global_batch", "data.seq_len", "sharding.strategy", "memory.gradient_checkpointing"),
    *("memory.cpu_offload", "compile.scan_layers", "precision.compute"),
)
"""Keys on which memory and time depend most: a plan always shows them."""

SECTIONS = ("sharding.", "memory.", "precision.", "compile.")
"""Of these a plan also shows each key that isn't at its default."""

SHARED_LINKS = "two devices share a chip's links: what crosses ici isn't bounded."  # counted by device, some in a chip


def make_plan(
    config: Config,
    target: Target,
    worker: Worker,
    progress: Progress = lambda stage: None,
    *,
    backend: str = "auto",
) -> Plan:
    """Plan one step of `config` on `target`; takes seconds to a minute, and needs none of the hardware.

    `backend`: an engine, or `auto`. `worker` runs what needs torch; give it to the next plan too.
    What the trainer would refuse there is refused here, by the same checks. Raises ConfigError, BackendError.
    """
    began = perf_counter()
    kind = target.hardware.kind
    engine = engine_made_for(kind) if backend == "auto" else backend
    methods = {name: options_of(name).planned_by[kind] for name in ENGINES if kind in options_of(name).planned_by}
    if engine not in methods:
        names = sorted(methods, key=lambda name: name != engine_made_for(kind))
        raise BackendError(
            f"plan on {target.text}: expected --backend={' or '.join(names)}, found {backend}: no other engine "
            f"has a planner for {kind}."
        )
    generation = target.hardware.name if kind == "tpu" else ""
    require_supported(config, Deployment(engine, kind, target.devices, target.hosts, generation))
    planned = PLANNERS[methods[engine]](config, target, worker, progress)
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


def _compiled_step(config: Config, target: Target, worker: Worker, progress: Progress) -> EnginePlan:
    return plan_compiled(config, target, progress)


def _fake_step(config: Config, target: Target, worker: Worker, progress: Progress) -> EnginePlan:
    if target.hardware.kind == "tpu":
        _require_eager_on_one_slice(config, target)
    progress("running a step on fake tensors")
    try:
        return worker(_run_fake_step, config, target)
    except WorkerFailedError as failed:
        raise BackendError(
            f"plan: the process that plans failed with code {failed.ended.code}. Its last lines:\n"
            f"{failed.ended.last_lines}\n  Was memory short? A plan takes up to 3 GiB."
        ) from None


def _run_fake_step(config: Config, target: Target) -> EnginePlan:
    os.environ["USE_TORCH_XLA"] = "0"  # transformers imports torch_xla otherwise
    from portable_fsdp.plan.fake_step import plan_memory

    return plan_memory(config, target)


def _require_eager_on_one_slice(config: Config, target: Target) -> None:
    other = f"--backend={engine_made_for('tpu')}"
    if target.slices > 1:
        raise BackendError(f"plan on {target.text}: TorchTPU trains on one slice only.\n  Use {other}.")
    if config.compile.enabled:
        raise BackendError(
            f"plan on {target.text}: compile.enabled=true: TorchTPU's compiler makes its programs on a chip only, and "
            f"they keep less than the eager step.\n  Plan with compile.enabled=false, or {other}."
        )


PLANNERS: dict[str, Callable[[Config, Target, Worker, Progress], EnginePlan]] = {
    "fake step": _fake_step,
    "compiled step": _compiled_step,
}
"""By the words of `EngineOptions.planned_by`."""


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
