"""What accelerate's objects share (`PartialState`, `AcceleratorState`), filled from an engine before they are made.

accelerate would choose XLA wherever torch_xla can be imported, count one process there, and form groups of its own.
Filled before, its states tell `get_logger`, `set_seed`, trackers, `gather` and the rest what the engine does.
"""

# accelerate keeps what its objects share in class attributes.
# pyright: reportPrivateUsage=false

import atexit
import logging
import os
import shlex
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from types import MethodType, SimpleNamespace, TracebackType
from typing import Any, NamedTuple, cast

import accelerate
import yaml
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from packaging.version import Version

from portable_fsdp.accelerator import keep_xla_out
from portable_fsdp.accelerator.prepare import Twins
from portable_fsdp.backends.contract import Backend
from portable_fsdp.backends.gathered import GradientGraphs
from portable_fsdp.backends.open import open_backend
from portable_fsdp.config.describe import with_settings
from portable_fsdp.config.load import STAND_INS, parse_file, yaml_value
from portable_fsdp.config.schema import Config, Model, Train
from portable_fsdp.convert.plugin import as_keys, dtypes_of
from portable_fsdp.convert.read import load_config
from portable_fsdp.runtime.command import number_of, to_stderr
from portable_fsdp.runtime.errors import ConfigError, PortableFSDPError

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
    twins: Twins
    graphs: GradientGraphs


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
    plugin: FullyShardedDataParallelPlugin | None,
) -> Opened:
    """Open the engine of this process, or return the open one. Raises ConfigError if that has other arguments, and the
    shared states weren't reset meanwhile."""
    arguments = {"config": config and str(config), **sections, **start, "processes": processes}
    if _opened and _were_reset() and arguments != _opened[0].arguments:
        close()
    if _opened:
        if arguments != _opened[0].arguments:
            before = _opened[0].arguments
            names = [name for name in {**before, **arguments} if before.get(name) != arguments.get(name)]
            raise ConfigError(
                f"Accelerator: another one in this process has a different {names[0]}: {before.get(names[0])!r}, now "
                f"{arguments.get(names[0])!r}.\n  Pass equal arguments, or call end_training() of the first before."
            )
        _accumulate(_opened[0], steps)
        return _opened[0]
    require_version()
    keep_xla_out()
    overrides, start = with_variable(sections, start)
    resolved = resolved_config(config, overrides, plugin)
    handlers = logging.root.handlers[:]
    with _lines_of_gloo():
        engine = open_backend(resolved, **start)
    logging.root.handlers[:] = handlers  # torch_xla's import logs, which would make the script's basicConfig do nothing
    engine.__enter__()
    atexit.register(_close_at_exit)
    is_one = processes == "one" and engine.device.type == "xla"
    _opened.append(Opened(engine, resolved, arguments, 1 if is_one else engine.row_shards, Twins(), GradientGraphs()))
    _accumulate(_opened[0], steps)
    return _opened[0]


def is_open() -> bool:
    """Whether an Accelerator has opened the engine of this process."""
    return bool(_opened)


def has_sharded(model: object) -> bool:
    """Whether the open engine has sharded this model, for another Accelerator."""
    return any(opened.twins.has(model) for opened in _opened)


def _accumulate(opened: Opened, steps: int) -> None:
    """Let gradients stay with several steps, as inputs of the next program. Accelerators may have different numbers."""
    if steps > 1:
        rows = {"train.micro_batch": "1", "train.global_batch": str(opened.engine.row_shards * steps)}
        opened.engine.adopt(with_settings(opened.config, rows))


def _were_reset() -> bool:
    """Whether somebody emptied the shared states (`AcceleratorState._reset_state()`), and so begins anew."""
    return (
        not AcceleratorState._shared_state
        or cast(dict[str, Any], PartialState._shared_state).get("_engine") is not _opened[0].engine
    )


def with_variable(sections: Mapping[str, Any], start: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """The overrides of the constructor and of the variable, whose count; and the start by both."""
    for name, values in sections.items():
        if not isinstance(values, Mapping):
            raise ConfigError(f"Accelerator: {name}={values!r}: expected a dict, as {name}={{'KEY': VALUE}}.")
    overrides = [
        f"{name}.{key}={yaml_value(value)}" for name, values in sections.items() for key, value in values.items()
    ]
    started = dict(start)
    for word in shlex.split(os.environ.get(VARIABLE, "")):
        name, equals, text = word.partition("=")
        if not equals or (name not in STARTS and "." not in name):
            raise ConfigError(f"{VARIABLE}: expected device=, backend=, num_devices= or section.key=, found {word!r}.")
        if name in STARTS:
            started[name] = number_of(name, text) if name == "num_devices" else text
        else:
            overrides.append(word)
    return overrides, started


def resolved_config(
    path: str | os.PathLike[str] | None, overrides: list[str], plugin: FullyShardedDataParallelPlugin | None
) -> Config:
    """The config of a script: our YAML or accelerate's file, the plugin, what `accelerate launch` passes, and the
    overrides, which come first. Raises ConfigError with all problems."""
    with TemporaryDirectory() as folder:
        file, imports = Path(path or Path(folder) / "Accelerator.yaml"), list[Path]()
        if path is None or not parse_file(file)[1].keys() <= Config.model_fields.keys():  # none, or accelerate's
            imports += [] if path is None else [file]
            file = Path(folder) / "Accelerator.yaml"
            file.write_text("{}")
        if plugin is not None:
            imports.append(Path(folder) / "fsdp_plugin.yaml")
            imports[-1].write_text(yaml.safe_dump(as_keys(plugin)))
        absent = [(section, keys) for section, keys in STAND_INS.items() if section not in parse_file(file)[1]]
        needed = [f"{section}.{key}={value}" for section, keys in absent for key, value in keys.items()]
        loaded = load_config(file, [*needed, *dtypes_of(plugin), *overrides], imports, os.environ)
    # As in `make_config` without these sections: the loop has its own model and batches.
    return loaded.model_copy(update={"model": Model.model_construct(), "train": Train.model_construct(global_batch=0)})


def fill_states(opened: Opened, wait: Callable[[], None]) -> None:
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
    config, variable = opened.config, "FSDP_CPU_RAM_EFFICIENT_LOADING"
    was_set = variable in os.environ
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=config.sharding.strategy not in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2"),
        cpu_offload=config.memory.cpu_offload,
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=False,
        activation_checkpointing=config.memory.gradient_checkpointing != "none",
    )
    if not was_set:  # the plugin has set it, and the next Accelerator would read it
        os.environ.pop(variable, None)
    return plugin


@contextmanager
def _lines_of_gloo() -> Generator[None]:
    """Context in which what C++ prints to the standard output goes to the log: gloo's line of each group."""
    sys.stdout.flush()
    with TemporaryFile() as lines:
        kept = os.dup(1)
        os.dup2(lines.fileno(), 1)
        try:
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)
            lines.seek(0)
            for line in lines.read().decode(errors="replace").splitlines():
                log.debug("%s", line)


def end_with_a_sentence(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End a script that raises a PortableFSDPError, or meets the end of another process, with its message, without a
    traceback."""
    ours = error if isinstance(error, PortableFSDPError) else None
    try:
        close(error)
    except PortableFSDPError as lost:
        ours = ours or lost
    if ours is not None:
        with redirect_stderr(sys.__stderr__):  # torch.distributed calls this with one that it prints later
            to_stderr(str(ours))
        raise SystemExit(ours.exit_code)
    sys.__excepthook__(kind, error, trace)


def close(error: BaseException | None = None) -> None:
    """Close the engine, so that another Accelerator may open one. `error` ends the script."""
    atexit.unregister(_close_at_exit)
    while _opened:
        _opened.pop().engine.__exit__(type(error) if error else None, error, None)
    for state in (PartialState, AcceleratorState, GradientState):
        cast(Any, state)._shared_state.clear()


def _close_at_exit() -> None:
    try:
        close(getattr(sys, "last_value", None))
    except PortableFSDPError as lost:
        to_stderr(str(lost))
