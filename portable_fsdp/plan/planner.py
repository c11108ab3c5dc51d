"""Planner: a config and a target become a plan; memory, work and time from the engine's own planner."""

import hashlib
import importlib.metadata
import os
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

from portable_fsdp.backends.open import ENGINES, engine_made_for, spec_of
from portable_fsdp.backends.refusals import Deployment, require_supported
from portable_fsdp.config.describe import default_of, option_names, plain_values, value_of
from portable_fsdp.config.schema import Config
from portable_fsdp.layout import devices_per_row, split_note
from portable_fsdp.models.flops import peak_flops
from portable_fsdp.plan.result import EnginePlan, ModelFacts, Plan, Progress
from portable_fsdp.plan.target import Target
from portable_fsdp.plan.tpu_compiler import failure_message, load_entry, plan_compiled, save_entry
from portable_fsdp.runtime.child import Worker, WorkerFailedError
from portable_fsdp.runtime.errors import BackendError
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
    notes = [*planned.notes, *([f"{split}."] if split else []), *_notes(planned.model)]
    model, tokens = planned.model, config.train.global_batch * planned.model.tokens_per_row
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


def _notes(model: ModelFacts) -> list[str]:
    """Return the note that a reader of figures for `data.factory` needs."""
    if not model.rows:
        return []
    counted = "; each counts as one token" if model.tokens_per_row == 1 else ""
    return [f"planned for the first rows of data.factory: {model.rows}{counted}. Larger rows take more."]


def _expected_note(target: Target, is_compiled: bool) -> str:
    """Return `Plan.expected_note`."""
    name, reached = target.hardware.device_name, target.hardware.reached
    if reached is None:
        return f"no published run shows what {name} reaches"
    if target.hardware.kind == "tpu" and not is_compiled:
        return "on TPUs only a plan of xla has one"
    return "" if reached.source.startswith("fitted") else f"by shares of the peak that are {reached.source}"
