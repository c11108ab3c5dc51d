"""Resolve the keys that are `auto`: the values that this run had before if it resumes, else the fastest by plan.

A training run doesn't import the planner: process 0 starts `plan` as a child process.
"""

import json
import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from portable_fsdp.backends.contract import Backend
from portable_fsdp.backends.refusals import refusals, require_supported
from portable_fsdp.config.describe import (
    autos,
    option_names,
    value_of,
    with_settings,
    with_value,
    without_plan,
    yaml_value,
)
from portable_fsdp.config.load import config_text, read_file
from portable_fsdp.config.schema import Config
from portable_fsdp.observe.run_files import read_jsonl
from portable_fsdp.runtime.child import Child
from portable_fsdp.runtime.collective_errors import on_process_0
from portable_fsdp.runtime.command import configure_log
from portable_fsdp.runtime.errors import ConfigError, UsageError, without_passwords
from portable_fsdp.runtime.host import host_identity

log = logging.getLogger("portable_fsdp")

LIMIT_S = 1500  # for all plans; the other processes wait in a collective, whose timeout is 30 minutes
UNKNOWN_HARDWARE = "expected a TPU slice"  # part of the planner's message for it
# Prefixes of variables that would make the planner a process of the run.
LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_RANK", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "TPU_WORKER_")

PLANNED = ("train.micro_batch", "memory.gradient_checkpointing", "memory.save_ops", "compile.")
"""Prefixes of the keys that a plan sets."""

SPEED = (
    *("model.", "data.", "sharding.", "precision.", "memory.", "compile."),
    *("train.task", "train.micro_batch", "train.global_batch", "optim.name", "optim.factory"),
)
"""Prefixes of the keys that decide how fast a step is, and what fits."""


def resolve_auto(config: Config, engine: Backend) -> Config:
    """Return the config with values for `auto`, identical on all processes; the engine adopts them. *collective*

    `engine`: opened with `without_plan(config)`. Raises BackendError if it refuses `auto`, ConfigError if nothing fits.
    """
    place = engine.deployment
    require_supported(config, place)
    resolved = without_plan(config)
    if not refusals(with_value(config, "train.micro_batch", "auto"), place):  # else nothing plans there
        configure_log(engine.process.index)
        memory, hosts = engine.memory(), engine.gather(host_identity())
        sharing = hosts.count(host_identity()) if place.device == "cpu" else 1
        limit_bytes = min(engine.gather(((memory and memory.limit_bytes) or 0) // sharing))

        chosen = on_process_0(engine, lambda: _kept(config, engine) or _planned(config, engine, limit_bytes))
        resolved = with_settings(resolved, chosen or {})
    engine.adopt(resolved)
    return resolved


def _speed_settings(config: Config) -> dict[str, str]:
    """Return the values of the keys that decide the speed, in YAML, without passwords."""
    keys = (key for key in option_names() if key.startswith(SPEED))
    return {key: without_passwords(yaml_value(value_of(config, key))) for key in keys}


def _kept(config: Config, engine: Backend) -> dict[str, str] | None:
    """Return the values of the last start in this run's folder, if devices and the keys that decide are unchanged."""
    path = Path(config.run.dir, "config.yaml")
    now = {"backend": engine.name, "device": engine.device_name, "devices": engine.devices}
    if config.checkpoint.resume == "none" or not path.is_file():
        return None
    with suppress(UsageError, LookupError, OSError):  # written by another release, or incomplete: plan again
        saved = read_file(path).config
        start = [event for event in read_jsonl(path.with_name("events.jsonl")) if event["event"] == "start"][-1]
        if _speed_settings(saved) == _speed_settings(config) and now.items() <= start.items() and start["chosen"]:
            chosen = {key: value for key, value in start["chosen"].items() if key.startswith(PLANNED)}
            log.info("auto: as before in this run (%s)", path)
            return chosen
    return None


def _planned(config: Config, engine: Backend, limit_bytes: int) -> dict[str, str] | None:
    """Plan the fastest values; `limit_bytes`: memory of a device, 0: unknown. None for hardware that no plan knows,
    unless the micro batch depends on it. Raises the planner's message."""
    on = f"{engine.device_name}:{engine.devices}"
    log.info("planning %s on %s", ", ".join(f"{key}=auto" for key in autos(config)), on)
    words = [f"--on={on}", f"--backend={engine.name}", "--json"]
    words += [f"--memory={limit_bytes / 2**30}"] if limit_bytes else []
    words += [f"sharding.replicas={engine.axes['replicate']}"] * config.sharding.is_hybrid
    environment = {name: "" for name in os.environ if name.startswith(LAUNCHERS)}
    with tempfile.TemporaryDirectory(prefix="portable_fsdp_plan") as folder:
        path = Path(folder, "config.yaml")
        path.write_text(config_text(config), encoding="utf-8")
        with Child("portable_fsdp.plan", f"--config={path}", *words, environment=environment) as child:
            ended = child.wait(LIMIT_S)
    if ended.how != "finished":
        key = autos(config)[0]
        if UNKNOWN_HARDWARE in ended.log and config.train.micro_batch != "auto":
            log.warning("%s: no plan knows %s: all layers are recomputed, none is compiled", key, on)
            return None
        raise ConfigError(
            f"{key}: auto: planning failed ({ended.how}, exit code {ended.code}):\n"
            f"{ended.last_lines}\n  Fix the cause, or set {key} to a value."
        )
    return json.loads(ended.output)["chosen"]
