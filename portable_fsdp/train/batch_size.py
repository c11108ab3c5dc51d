"""Resolve `train.micro_batch: auto`: the run's earlier value when it resumes, else the largest that the plan fits.

A training run doesn't import the planner: process 0 starts `plan --largest-batch` as a child process.
"""

import json
import logging
import os
import tempfile
from contextlib import suppress
from pathlib import Path

from portable_fsdp.backends.contract import Backend
from portable_fsdp.backends.open import open_backend, resolve
from portable_fsdp.backends.refusals import Deployment, require_supported
from portable_fsdp.config.describe import with_value
from portable_fsdp.config.load import config_text, read_file
from portable_fsdp.config.schema import Config
from portable_fsdp.layout import micro_batches
from portable_fsdp.observe.run_files import read_jsonl
from portable_fsdp.runtime.child import Child
from portable_fsdp.runtime.collective_errors import on_process_0
from portable_fsdp.runtime.command import configure_log
from portable_fsdp.runtime.errors import ConfigError, UsageError
from portable_fsdp.runtime.host import host_identity

log = logging.getLogger("portable_fsdp")

LIMIT_S = 1500  # for all plans; the other processes wait in a collective, whose timeout is 30 minutes
DECIDE_MEMORY = ("model", "data", "optim", "sharding", "precision", "memory", "compile")
# Prefixes of variables that would make the planner a process of the run.
LAUNCHERS = ("RANK", "WORLD_SIZE", "MASTER_", "LOCAL_RANK", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "TPU_WORKER_")


def with_resolved_micro_batch(config: Config, *, device: str, backend: str, num_devices: int | None) -> Config:
    """Return the config with a number for `auto`, identical on all processes. *collective*

    Opens a separate engine: the programs of one depend on the number. Raises BackendError if the engine has no
    planner, ConfigError if the plan gives no number.
    """
    device, backend = resolve(device, backend)
    require_supported(config, Deployment(backend, device))
    config = with_value(config, "train.micro_batch", 1)
    with open_backend(config, device=device, backend=backend, num_devices=num_devices) as engine:
        configure_log(engine.process.index)
        memory, hosts = engine.memory(), engine.gather(host_identity())
        sharing = hosts.count(host_identity()) if device == "cpu" else 1
        limit_bytes = min(engine.gather(((memory and memory.limit_bytes) or 0) // sharing))
        size = on_process_0(engine, lambda: _kept(config, engine) or _planned(config, engine, limit_bytes))
        return with_value(config, "train.micro_batch", size)


def _kept(config: Config, engine: Backend) -> int | None:
    """Return the value in this run's folder, if devices and the settings that affect memory are unchanged."""
    path = Path(config.run.dir, "config.yaml")
    now = {"backend": engine.name, "device": engine.device_name, "devices": engine.devices}
    if config.checkpoint.resume == "none" or not path.is_file():
        return None
    with suppress(UsageError, LookupError, OSError):  # written by another release, or incomplete: plan again
        saved = read_file(path).config
        size, events = saved.train.resolved_micro_batch, read_jsonl(path.with_name("events.jsonl"))
        start = [event for event in events if event["event"] == "start"][-1]
        is_same = all(getattr(saved, name) == getattr(config, name) for name in DECIDE_MEMORY)
        fits = size in micro_batches(config.train.global_batch, engine.row_shards)
        if is_same and now.items() <= start.items() and fits:
            log.info("train.micro_batch: %d, as before in this run (%s)", size, path)
            return size
    return None


def _planned(config: Config, engine: Backend, limit_bytes: int) -> int:
    """Plan the largest micro batch; `limit_bytes`: memory of a device, 0: unknown. Raises the planner's message."""
    on = f"{engine.device_name}:{engine.devices}"
    log.info("train.micro_batch: planning the largest that fits on %s", on)
    words = [f"--on={on}", f"--backend={engine.name}", "--largest-batch", "--json"]
    words += [f"--memory={limit_bytes / 2**30}"] if limit_bytes else []
    words += [f"sharding.replicas={engine.axes['replicate']}"] * config.sharding.strategy.startswith("HYBRID")
    environment = {name: "" for name in os.environ if name.startswith(LAUNCHERS)}
    with tempfile.TemporaryDirectory(prefix="portable_fsdp_plan") as folder:
        path = Path(folder, "config.yaml")
        path.write_text(config_text(config), encoding="utf-8")
        with Child("portable_fsdp.plan", f"--config={path}", *words, environment=environment) as child:
            ended = child.wait(LIMIT_S)
    if ended.how != "finished":
        raise ConfigError(
            f"train.micro_batch: auto: planning failed ({ended.how}, exit code {ended.code}):\n"
            f"{ended.last_lines}\n  Fix the cause, or set train.micro_batch to a number."
        )
    size = json.loads(ended.output)["largest_micro_batch"]
    log.info("train.micro_batch: %d, the largest that fits by plan", size)
    return size
