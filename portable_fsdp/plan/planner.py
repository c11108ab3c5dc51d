"""Planner: a config and a target become a plan; memory, work and time from the engine's own planner.

And plans of several settings: a grid, the fastest that fits (what `auto` takes), or the nearest that fits.
"""

import hashlib
import importlib.metadata
import itertools
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

from portable_fsdp.backends.open import ENGINES, engine_made_for, spec_of
from portable_fsdp.backends.refusals import Deployment, require_supported
from portable_fsdp.config.describe import (
    Settings,
    autos,
    default_of,
    option_names,
    plain_values,
    value_of,
    with_value,
    yaml_value,
)
from portable_fsdp.config.schema import Config
from portable_fsdp.layout import devices_per_row, micro_batches, split_batch, split_note
from portable_fsdp.models.flops import peak_flops
from portable_fsdp.plan.result import EnginePlan, Plan, Progress, Tried
from portable_fsdp.plan.target import Target
from portable_fsdp.plan.tpu_compiler import failure_message, load_entry, plan_compiled, save_entry
from portable_fsdp.runtime.child import Worker, WorkerFailedError
from portable_fsdp.runtime.errors import BackendError, PortableFSDPError
from portable_fsdp.runtime.files import cache_folder

SETTINGS = (
    *("train.micro_batch", "train.global_batch", "data.seq_len", "sharding.strategy", "memory.gradient_checkpointing"),
    *("memory.cpu_offload", "compile.scan_layers", "precision.compute"),
)
"""Keys that matter most for memory and time: a plan always shows them."""

SECTIONS = ("sharding.", "memory.", "precision.", "compile.")
"""A plan also shows each key of these sections that isn't at its default."""


def make_plan(
    config: Config, target: Target, worker: Worker, progress: Progress = lambda stage: None, *, backend: str = "auto"
) -> Plan:
    """Plan one step of `config` on `target`; takes seconds to a minute, and needs none of the hardware.

    `backend`: an engine, or `auto`. `worker` runs the code that needs torch; reuse it for the next plan.
    Runs the trainer's own checks, and raises their ConfigError and BackendError.
    """
    began = perf_counter()
    kind = target.hardware.kind
    usual = engine_made_for(kind)
    engine = usual if backend == "auto" else backend
    methods = {name: spec_of(name).planned_by[kind] for name in ENGINES if kind in spec_of(name).planned_by}
    if engine not in methods:
        names = " or ".join(sorted(methods, key=lambda name: name != usual))
        found = f"found {backend}, which has no planner for {kind}"
        raise BackendError(f"plan on {target.text}: expected --backend={names}, {found}.")
    generation = target.hardware.name if kind == "tpu" else ""
    require_supported(config, Deployment(engine, kind, target.devices, target.hosts, generation))
    is_compiled = methods[engine] == "compiled step"
    planned = plan_compiled(config, target, progress) if is_compiled else _fake_step(config, target, worker, progress)
    split = split_note(config, target.devices // devices_per_row(config))
    notes = [*planned.notes, *([f"{split}."] if split else [])]
    model, tokens = planned.model, config.train.global_batch * planned.model.tokens_per_row
    if model.rows:
        counted = "; each counts as one token" if model.tokens_per_row == 1 else ""
        notes.append(f"planned for the first rows of data.factory: {model.rows}{counted}. Larger rows take more.")
    flops = None if model.flops_per_token is None else model.flops_per_token * tokens / target.devices
    return Plan(
        on=target.text,
        hardware=target.in_words,
        devices=target.devices,
        backend=engine,
        settings=_settings(config, without=("data.seq_len",) if model.rows else ()),
        parameters=model.parameters,
        memory=planned.memory,
        work=planned.work,
        tokens_per_step=tokens,
        model_flops_per_device=flops,
        peak_flops=peak_flops(target.hardware.device_name, config.precision.compute),
        expected=planned.expected,
        expected_note=_expected_note(target, is_compiled),
        method=planned.method,
        notes=tuple(notes),
        planned_in_s=perf_counter() - began,
    )


def _settings(config: Config, without: tuple[str, ...]) -> dict[str, Any]:
    changed = (k for k in option_names() if k.startswith(SECTIONS) and value_of(config, k) != default_of(k))
    keys = dict.fromkeys((*SETTINGS, *changed))
    return {key: plain_values(value_of(config, key)) for key in keys if key not in without}


def _fake_step(config: Config, target: Target, worker: Worker, progress: Progress) -> EnginePlan:
    other = f"--backend={engine_made_for(target.hardware.kind)}"
    if target.slices > 1:
        raise BackendError(f"plan on {target.text}: TorchTPU trains on one slice only.\n  Use {other}.")
    if target.hardware.kind == "tpu" and config.compile.enabled:
        raise BackendError(
            f"plan on {target.text}: compile.enabled=true: TorchTPU compiles programs on a chip only, and they need "
            f"less memory than the eager step.\n  Plan with compile.enabled=false, or {other}."
        )
    folder, key = cache_folder(os.environ) / "plans", _key(config, target)
    if key and (entry := load_entry(folder, key)):
        return EnginePlan.model_validate_json(entry["plan"])
    progress("running a step on fake tensors")
    try:
        plan: EnginePlan = worker("portable_fsdp.plan.fake_step:plan_memory", config, target)
    except WorkerFailedError as failed:
        problem = "the step could not be planned (planning needs up to 3 GiB of memory)"
        raise BackendError(failure_message(problem, failed.ended)) from None
    if key:
        save_entry(folder, key, {"plan": plan.model_dump_json(exclude_computed_fields=True)})
    return plan


def _key(config: Config, target: Target) -> str:
    """Return the cache's key for a plan; empty if the plan depends on files: a model's, or the user's code."""
    is_here = isinstance(config.model.architecture, dict) and not (config.model.lora and config.model.lora.start_from)
    if not is_here or config.data.factory or config.optim.factory or ":" in config.train.task:
        return ""
    parts = [config.model_dump_json(exclude={"run", "observe", "checkpoint"}), repr(target), *_versions()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@cache
def _versions() -> tuple[str, ...]:
    """Return the versions of torch and transformers, and a hash of this package's sources: once for all of a sweep."""
    package = Path(__file__).parents[1]
    sources = [path.read_bytes() for path in sorted(package.rglob("*")) if path.suffix in (".py", ".yaml")]
    versions = (importlib.metadata.version(name) for name in ("torch", "transformers"))
    return (*versions, hashlib.sha256(b"".join(sources)).hexdigest())


def _expected_note(target: Target, is_compiled: bool) -> str:
    """Return `Plan.expected_note`."""
    name, reached = target.hardware.device_name, target.hardware.reached
    if reached is None:
        return f"no published run shows what {name} reaches"
    if target.hardware.kind == "tpu" and not is_compiled:
        return "on TPUs only a plan of xla has one"
    return "" if reached.source.startswith("fitted") else f"by shares of the peak that are {reached.source}"


# ----------------------------------------------------------------------------------------------------- several settings

FREE = 0.05  # share of a device's memory that a plan can't see: code, drivers, gaps

PlanOf = Callable[[Settings], Plan]
"""Plans the config, overridden by these settings. Raises what planning raises."""


CHECKPOINTING, COMPILE, ROWS = "memory.gradient_checkpointing", "compile.enabled", "train.micro_batch"
COMPILE_S = 60.0
"""Seconds to compile a layer's forward and backward with inductor on the host of a GPU. By rule, not measured by us."""

MODES = (
    {CHECKPOINTING: "none"},
    {CHECKPOINTING: "selective", "memory.save_ops": "[matmul, attention]"},
    {CHECKPOINTING: "selective", "memory.save_ops": "[attention]"},
    {CHECKPOINTING: "full"},
)
"""What gradient_checkpointing=auto tries: each recomputes more than the one before, and needs less memory."""


def grid(axes: Mapping[str, Sequence[str]]) -> list[Settings]:
    """Return the Cartesian product of the keys' values."""
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def sweep(points: Iterable[Settings], best: Callable[[Settings], Tried]) -> Iterator[tuple[Settings, Tried]]:
    """Plan points in order; yield each with its plan, or the reason why `best` refuses it. If a `train.micro_batch`
    doesn't fit, skip larger ones."""
    too_many: dict[tuple[tuple[str, str], ...], int] = {}  # settings but for the micro batch -> rows that don't fit
    for settings in points:
        rows = settings.get("train.micro_batch", "")
        others = tuple(item for item in settings.items() if item[0] != "train.micro_batch")
        if rows.isdecimal() and int(rows) >= too_many.get(others, int(rows) + 1):
            continue
        tried = _try(settings, best)
        if tried.plan is not None and tried.plan.memory.verdict == "does not fit" and rows.isdecimal():
            too_many[others] = int(rows)
        yield settings, tried


def nearest_that_fits(config: Config, plan_of: PlanOf, *, offload: bool) -> Iterator[Tried]:
    """Plan with cumulative measures up to the first that fits; the last may not fit either.

    The order is that of their cost: recompute layers, smaller micro batch, FULL_SHARD, and with `offload` the
    optimizer's state on the host. None of them changes the loss curve.
    """
    measures: list[Settings] = []
    if config.memory.gradient_checkpointing != "full":
        only_others_take = ("memory.every", "memory.save_ops", "memory.budget")
        reset = {
            key: yaml_value(default_of(key)) for key in only_others_take if value_of(config, key) != default_of(key)
        }
        measures.append({CHECKPOINTING: "full"} | reset)
    size = config.train.resolved_micro_batch
    while size > 1:
        size = size // 2 if size % 2 == 0 else 1
        measures.append({"train.micro_batch": str(size)})
    if config.sharding.strategy != "FULL_SHARD":
        measures.append({"sharding.strategy": "FULL_SHARD"})
    if offload and not config.memory.cpu_offload:
        measures.append({"memory.cpu_offload": "true"})
    for settings in itertools.accumulate(measures, lambda before, measure: before | measure):
        yield (tried := _try(settings, plan_of))
        if tried.fits:
            return


def fastest_that_fits(
    config: Config, target: Target, plan_of: PlanOf, worker: Callable[[str, Config], Any], progress: Progress
) -> Tried:
    """Plan the values that `auto` may take in this config, and return the fastest that fits and leaves FREE of the
    memory; if none does, the one that needs the least, whether it fits or not.

    `worker` runs the function that tells whether the layers compile, which needs torch. Each plan is reported to
    `progress`. Raises ConfigError for a global batch that needs padding and can't have it, BackendError for a plan
    without a verdict, and what planning the result raises.
    """
    if not autos(config):
        return Tried(settings={}, plan=plan_of({}))
    if COMPILE not in autos(config):
        return _fastest(config, {}, target, plan_of, progress, [])
    keys = ["compile.backend", "compile.cache_dir"][: 2 if target.hardware.kind == "cuda" else 1]  # TPUs cache all
    unused = [key for key in keys if value_of(config, key) != default_of(key)]
    eager = {COMPILE: "false", **{key: yaml_value(default_of(key)) for key in unused}}
    programs: int | str = "only GPUs need it"
    if target.hardware.kind == "cuda":
        programs = worker("portable_fsdp.plan.compile_trial:count_programs", config)
    if isinstance(programs, str):
        progress(f"{COMPILE}=false: {programs}")
        return _fastest(config, eager, target, plan_of, progress, [])
    compiled = list[Tried]()
    best = _fastest(config, {COMPILE: "true"}, target, plan_of, progress, compiled)
    slower = _try(best.settings | eager, plan_of)
    if any(tried.refusal for tried in compiled):  # compiled layers with dropout refuse selective
        slower = _fastest(config, eager, target, plan_of, progress, [])
    if not (best.plan and best.plan.expected and slower.plan and slower.plan.expected):
        return best
    steps, saved, cost = config.train.steps, slower.plan.expected.seconds - best.plan.expected.seconds, 0.0
    words = f"a step saves {saved:.3g} s by plan"
    if steps:
        saved, cost = saved * steps, programs * COMPILE_S
        words = f"take about {cost:.0f} s, {steps} steps save {saved:.0f} s by plan"
    is_on = saved >= cost or not _has_room(slower)
    progress(f"{COMPILE}={yaml_value(is_on)}: {programs} program(s) {words}")
    return best if is_on else _fastest(config, eager, target, plan_of, progress, [])


def _fastest(
    config: Config, fixed: Settings, target: Target, plan_of: PlanOf, progress: Progress, tries: list[Tried]
) -> Tried:
    """Search the modes of recomputation and the micro batches that `auto` leaves open, with `fixed` settings; append
    each try to `tries`."""
    modes = [dict[str, str]()]
    if CHECKPOINTING in autos(config):  # on TPUs a recomputed layer always keeps the output of the attention kernel
        modes = [
            mode for mode in MODES if target.hardware.kind != "tpu" or mode.get("memory.save_ops") != "[attention]"
        ]
    roomy = list[Tried]()

    def has_room(settings: Settings) -> bool:
        tries.append(tried := _try(settings | fixed, plan_of))
        progress(tried.line)
        plan = tried.plan
        if plan is not None and plan.memory.verdict == "unknown":
            why = "is a lower bound" if plan.memory.is_least else "of a device isn't known; set --memory"
            raise BackendError(f"plan on {plan.on}: can't tell what fits: memory {why}.")
        if _has_room(tried):
            roomy.append(tried)
        return _has_room(tried)

    if config.train.micro_batch == "auto":
        shards = target.devices // devices_per_row(config)
        split_batch(with_value(config, ROWS, 1), shards)
        sizes = micro_batches(config.train.global_batch, shards)
        for mode in reversed(modes):  # less recomputation needs more memory, so it fits no larger micro batch
            *smaller, largest = sizes
            # First: a single micro batch accumulates no gradients, and may need less than half of it.
            if has_room(mode | {ROWS: str(largest)}):
                continue
            at = bisect_left(smaller, True, key=lambda size: not has_room(mode | {ROWS: str(size)}))
            if at > 0:
                sizes = smaller[:at]
            elif tries[-1].plan is not None:  # not refused, but too large
                break
    else:
        sizes = [config.train.micro_batch]
        next(filter(has_room, modes), None)  # at equal rows, more recomputation only takes more time
    if roomy:
        return min(reversed(roomy), key=_seconds)
    least = modes[-1] | ({ROWS: str(sizes[0])} if config.train.micro_batch == "auto" else {}) | fixed
    return Tried(settings=least, plan=plan_of(least))


def _has_room(tried: Tried) -> bool:
    memory = tried.plan.memory if tried.plan is not None else None
    return memory is not None and memory.peak_bytes <= (1 - FREE) * (memory.limit_bytes or 0)


def _seconds(tried: Tried) -> float:
    """Return the expected time of a step; 0 if unknown: the search ends with the least recomputation."""
    return tried.plan.expected.seconds if tried.plan is not None and tried.plan.expected else 0.0


def _try(settings: Settings, made: Callable[[Settings], Plan | Tried]) -> Tried:
    """Return what was `made` of the settings, or the reason for their refusal."""
    try:
        plan = made(settings)
    except PortableFSDPError as error:
        return Tried(settings=settings, refusal=str(error))
    return plan if isinstance(plan, Tried) else Tried(settings=settings, plan=plan)
