"""What accelerate's objects share (`PartialState`, `AcceleratorState`), filled from an engine before they are made.

accelerate would choose XLA wherever torch_xla can be imported, count one process there, and form groups of its own.
Filled before, its states tell `get_logger`, `set_seed`, trackers, `gather` and the rest what the engine does.
"""

# accelerate keeps what its objects share in class attributes.
# pyright: reportPrivateUsage=false

import logging
import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple, cast

import accelerate
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, imports
from packaging.version import Version

from portable_fsdp.backends.contract import Backend
from portable_fsdp.backends.open import open_backend
from portable_fsdp.config.describe import with_settings
from portable_fsdp.config.load import make_config, parse_file
from portable_fsdp.config.schema import Config
from portable_fsdp.config.yaml_text import parse
from portable_fsdp.runtime.errors import ConfigError

log = logging.getLogger("portable_fsdp")

VERSIONS = ("1.14", "2")
"""The accelerate that this module knows: from the first, below the second."""

STARTS = ("device", "backend", "num_devices")
VARIABLE = "PORTABLE_FSDP"
"""Variable with arguments of every Accelerator: `device=cpu backend=xla num_devices=4 sharding.strategy=NO_SHARD`."""


class Opened(NamedTuple):
    """The engine of this process, and the arguments that opened it."""

    engine: Backend
    config: Config
    arguments: Mapping[str, Any]
    processes: int  # groups of devices that get different rows, or 1
    steps: int  # of gradient accumulation


_opened: list[Opened] = []


def require_version() -> None:
    """Raise ConfigError for an accelerate that is too old or too new."""
    version = Version(accelerate.__version__)
    if not Version(VERSIONS[0]) <= version < Version(VERSIONS[1]):
        raise ConfigError(
            f"Accelerator: expected accelerate {VERSIONS[0]} or newer, below {VERSIONS[1]}, found {version}.\n"
            f"  pip install 'accelerate>={VERSIONS[0]},<{VERSIONS[1]}'"
        )


def open_engine(
    config: str | os.PathLike[str] | None,
    sections: Mapping[str, Any],
    start: Mapping[str, Any],
    steps: int,
    processes: str,
) -> Opened:
    """Open the engine of this process, or return the open one. Raises ConfigError if that has other arguments, and the
    shared states weren't reset meanwhile."""
    arguments = {"config": config and str(config), **sections, **start, "processes": processes}
    if (
        _opened
        and _were_reset()
        and {**arguments, "steps": steps} != {**_opened[0].arguments, "steps": _opened[0].steps}
    ):
        close()
    if _opened:
        if arguments != _opened[0].arguments:
            before = _opened[0].arguments
            names = [name for name in {**before, **arguments} if before.get(name) != arguments.get(name)]
            raise ConfigError(
                f"Accelerator: another one in this process has a different {names[0]}: {before.get(names[0])!r}, now "
                f"{arguments.get(names[0])!r}.\n  Pass equal arguments, or call end_training() of the first before."
            )
        return _opened[0]
    require_version()
    if "WORLD_SIZE" in os.environ and "RANK" not in os.environ and dist.is_initialized():  # accelerate's debug_launcher
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(dist.get_rank())
    # accelerate must not touch XLA: its first device would fix their number.
    cast(Any, imports)._torch_xla_available = False
    values, start = _with_variable(config, sections, start)
    resolved = make_config(**values)
    engine = open_backend(resolved, **start)
    engine.__enter__()
    if steps > 1:  # gradients then stay, as inputs of the next program
        rows = {"train.micro_batch": "1", "train.global_batch": str(engine.row_shards * steps)}
        engine.adopt(resolved := with_settings(resolved, rows))
    is_one = processes == "one" and engine.device.type == "xla"
    _opened.append(Opened(engine, resolved, arguments, 1 if is_one else engine.row_shards, steps))
    return _opened[0]


def _were_reset() -> bool:
    """Whether somebody emptied the shared states (`AcceleratorState._reset_state()`), and so begins anew."""
    return (
        not AcceleratorState._shared_state
        or cast(dict[str, Any], PartialState._shared_state).get("_engine") is not _opened[0].engine
    )


def _with_variable(
    config: str | os.PathLike[str] | None, sections: Mapping[str, Any], start: Mapping[str, Any]
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """The sections of a config file, the constructor and the variable, the last of which counts; and the start."""
    values = {} if config is None else parse_file(Path(config))[1]
    values = {name: {**values.get(name, {}), **sections.get(name, {})} for name in {**values, **sections}}
    started = dict(start)
    for word in shlex.split(os.environ.get(VARIABLE, "")):
        name, equals, text = word.partition("=")
        section, dot, key = name.partition(".")
        if not equals or (name not in STARTS and not dot):
            raise ConfigError(f"{VARIABLE}: expected device=, backend=, num_devices= or section.key=, found {word!r}.")
        if dot:
            values.setdefault(section, {})[key] = parse(text)[1]
        else:
            started[name] = int(text) if name == "num_devices" else text
    return values, started


def fill_states(opened: Opened, mixed_precision: str, wait: Callable[[], None]) -> None:
    """Fill the shared states, unless an Accelerator of the same engine has. `wait`: until all processes are there."""
    engine, partial = opened.engine, cast(dict[str, Any], PartialState._shared_state)
    if partial.get("_engine") is engine:
        return
    for state in (PartialState, AcceleratorState, GradientState):
        cast(Any, state)._shared_state.clear()
    per_host = opened.processes // max(1, engine.process.count) if engine.device.type == "xla" else 1
    index = engine.process.index * per_host
    is_sharded = engine.device.type != "xla" and engine.process.count > 1
    partial |= {
        "_cpu": engine.device.type == "cpu",
        "_engine": engine,
        "backend": {"cpu": "gloo", "cuda": "nccl"}.get(engine.device.type) if is_sharded else None,
        "debug": False,
        "device": engine.device,
        "distributed_type": DistributedType.FSDP if is_sharded else DistributedType.NO,
        "fork_launched": False,
        "local_process_index": int(os.environ.get("LOCAL_RANK", 0)) if is_sharded else 0,
        "num_processes": opened.processes,
        "process_index": index,
        "wait_for_everyone": wait,  # all of accelerate waits here
    }
    if engine.device.type == "xla":  # a host computes what accelerate would give to each of its devices
        host = SimpleNamespace(num_processes=engine.process.count, process_index=engine.process.index, device="cpu")
        partial["split_between_processes"] = MethodType(PartialState.split_between_processes, host)


def plugin_of(opened: Opened) -> FullyShardedDataParallelPlugin | None:
    """What a script asks of `state.fsdp_plugin`; None where accelerate's type isn't FSDP."""
    if PartialState().distributed_type != DistributedType.FSDP:
        return None
    config = opened.config
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=config.sharding.strategy not in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"),
        cpu_offload=config.memory.cpu_offload,
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=False,
        activation_checkpointing=config.memory.gradient_checkpointing != "none",
    )


def close() -> None:
    """Close the engine, so that another Accelerator may open one."""
    while _opened:
        _opened.pop().engine.__exit__(None, None, None)
    PartialState._shared_state.clear()
    AcceleratorState._shared_state.clear()
    GradientState._shared_state.clear()
