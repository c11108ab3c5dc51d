"""The table of engines, their specs, and the choice of an engine. Names engines without importing them or torch."""

import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

from portable_fsdp.config.describe import autos
from portable_fsdp.config.schema import Config
from portable_fsdp.runtime.errors import BackendError, ConfigError
from portable_fsdp.runtime.host import keep_torch_tpu_out, tpu_chips
from portable_fsdp.runtime.launchers import Launch

if TYPE_CHECKING:
    from portable_fsdp.backends.contract import Backend
    from portable_fsdp.backends.refusals import Rule
    from portable_fsdp.runtime.rendezvous import Hosts

DEVICES = ("cpu", "cuda", "tpu")

ENGINES = {
    "native": "portable_fsdp.backends.native.options:SPEC",
    "xla": "portable_fsdp.backends.torch_xla.options:SPMD",
    "xla_fsdp1": "portable_fsdp.backends.torch_xla.options:FSDP1",
}
"""Name -> location of its `EngineSpec`. --backend=auto is the first on a device whose package is installed."""

_OTHER_NAMES = {"fsdp": "native", "fsdp2": "native", "ddp": "native", "torch": "native", "spmd": "xla", "pjrt": "xla"}

ProcessCount = Callable[[str, int | None, Callable[[str], int]], int]
"""(device, requested devices, `count_devices`) -> processes of a start on one host without a launcher."""

PlanMethod = Literal["fake step", "compiled step"]
"""The method by which `plan` plans a step: run it on fake tensors, or compile its program."""


class Package(NamedTuple):
    """The package that an engine needs on a device."""

    name: str
    fix: str  # how to install it, a sentence
    is_usual: bool = True  # plans and fixes may assume it; users of a device's other engines know about them
    # Functions, as "module:name", which are imported when they are called.
    checked_by: str = ""  # (environment) -> None
    prepared_by: str = ""  # (number of processes on this host, environment) -> Hosts | None

    def check(self) -> None:
        """Raise BackendError if the installation can't work."""
        if self.checked_by:
            pkgutil.resolve_name(self.checked_by)(os.environ)

    def prepare_start(self, processes: int) -> "Hosts | None":
        """Return the rendezvous of several hosts, if there are any; runs in the parent process."""
        return pkgutil.resolve_name(self.prepared_by)(processes, os.environ) if self.prepared_by else None


@dataclass(frozen=True)
class EngineSpec:
    """One engine. It honours each option that it neither refuses nor delegates, as the schema describes it."""

    engine: str  # "module:class", imported when the engine is opened
    packages: Mapping[str, Package]  # supported device -> the package that it needs there
    example_device: str  # `explain` shows its options on this device by default
    rules: "tuple[Rule, ...]"  # refusals, in addition to those of all engines (`refusals.py`)
    processes: ProcessCount
    launcher_counts_devices: bool  # the launcher starts one process per device; else only the engine knows the number
    planned_by: Mapping[str, PlanMethod] = field(default_factory=dict[str, PlanMethod])
    """Device -> method; devices for which nothing plans are left out."""
    notes: Mapping[str, str] = field(default_factory=dict[str, str])
    """`section.key` or `section.key=value` -> what the engine does, if the schema's description doesn't say it."""
    delegated: Mapping[str, str] = field(default_factory=dict[str, str])  # `section.key` -> what decides instead
    other_devices: Mapping[str, str] = field(default_factory=dict[str, str])  # unsupported device -> reason and fix


@cache
def spec_of(engine: str) -> EngineSpec:
    """The spec of an engine; imports neither the engine nor torch."""
    return cast(EngineSpec, pkgutil.resolve_name(ENGINES[engine]))


def engines_on(device: str) -> tuple[str, ...]:
    """The engines that support a device."""
    return tuple(engine for engine in ENGINES if device in spec_of(engine).packages)


def usual_engine(device: str) -> str:
    """The engine of --backend=auto on a device."""
    for engine in ENGINES:  # stops at the first: a run loads no other engine's spec
        package = spec_of(engine).packages.get(device)
        if package is not None and _is_installed(package.name):
            return engine
    return engine_made_for(device)


def engine_made_for(device: str) -> str:
    """The usual engine of a device that this host doesn't have."""
    return next(engine for engine in engines_on(device) if spec_of(engine).packages[device].is_usual)


def require_names(device: str, backend: str) -> None:
    """Raise BackendError for an unknown device or engine."""
    if device not in ("auto", *DEVICES):
        cuda = " For NVIDIA GPUs use cuda." if device.lower() == "gpu" else ""
        raise BackendError(f"--device={device}: expected one of auto, {', '.join(DEVICES)}.{cuda}")
    if backend not in ("auto", *ENGINES):
        word = backend.lower().removeprefix("torch_")
        near = get_close_matches(_OTHER_NAMES.get(word, word), ENGINES, n=1)
        nearest = f"\n  nearest: {near[0]}." if near else ""
        raise BackendError(f"--backend={backend}: expected one of auto, {', '.join(ENGINES)}.{nearest}")


def resolve(device: str, backend: str) -> tuple[str, str]:
    """Resolve `auto` to a device and an engine. Raises BackendError if one is unknown, missing or unsupported."""
    require_names(device, backend)
    keep_torch_tpu_out()
    if "torch_tpu" in sys.modules and not tpu_chips():
        raise BackendError(
            "torch has loaded torch_tpu on a host without TPU chips: its first backward would hang.\n"
            "  Set TORCH_DEVICE_BACKEND_AUTOLOAD=0 in the environment of this program."
        )
    if device == "auto":
        device = next((kind for kind in ("cuda", "tpu") if count_devices(kind)), "cpu")
    if backend == "auto":
        backend = usual_engine(device)
    spec = spec_of(backend)
    if device not in spec.packages:
        raise BackendError(f"backend {backend} on {device}: {spec.other_devices[device]}")
    package = spec.packages[device]
    if not _is_installed(package.name):
        raise BackendError(
            f"backend {backend} on {device}: the package {package.name} is not installed.\n  {package.fix}"
        )
    package.check()
    if not count_devices(device):
        raise BackendError(_NO_DEVICE[device].format(backend=backend))
    return device, backend


_NO_DEVICE = {
    "cuda": "--device=cuda: no GPU found (torch.cuda.is_available() is False).\n"
    "  Check nvidia-smi and that torch is a CUDA build, or use --device=cpu.",
    "tpu": "--device=tpu: no TPU chips found on this host (no /dev/accel* and no /dev/vfio/*).\n"
    "  Run this on a TPU VM, on all its workers at once (launch/tpu_vm.sh); to try the same engine here:\n"
    "  --device=cpu --backend={backend} --num_devices=4",
}


def open_backend(
    config: Config, *, device: str = "auto", backend: str = "auto", num_devices: int | None = None
) -> "Backend":
    """Open an engine, for use as a context manager.

    `num_devices`: virtual CPU devices under xla; under torchrun native has one device per process. Raises BackendError
    for options of `config` that this device or engine can't honour, ConfigError for `auto` that a plan resolves.
    """
    device, backend = resolve(device, backend)
    for key in autos(config):
        raise ConfigError(
            f"{key}: expected a value, found auto, which launch resolves.\n"
            "  plan prints one; an own loop opens the engine with portable_fsdp.config.describe.without_plan(config), "
            "then calls portable_fsdp.train.auto.resolve_auto(config, engine)."
        )
    return cast("Backend", pkgutil.resolve_name(spec_of(backend).engine)(device, config, num_devices))


def local_processes(device: str, backend: str, num_devices: int | None) -> int:
    """Number of processes to start on this host without a launcher."""
    return spec_of(backend).processes(device, num_devices, count_devices)


def run_in_processes(
    processes: int,
    launch: Launch,
    device: str,
    backend: str,
    module: str,
    argv: Sequence[str],
    on_failure: Callable[[Mapping[int, int]], None] = lambda codes: None,
) -> int | None:
    """Run `python -m module argv` in `processes` processes of this host, and return their exit code. None if this
    process is the only one, or a launcher started it. For `on_failure` see `run_processes`."""
    hosts = spec_of(backend).packages[device].prepare_start(processes) if launch.is_alone else None
    if processes == 1 and hosts is None:
        return None
    from portable_fsdp.runtime.rendezvous import run_processes

    return run_processes(processes, module, argv, hosts, on_failure)


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def count_devices(device: str) -> int:
    """Number of GPUs or TPU chips of this host; 1 for the CPU."""
    match device:
        case "cuda":
            import torch

            return torch.cuda.device_count() if torch.cuda.is_available() else 0
        case "tpu":
            return len(tpu_chips()) if any(map(_is_installed, ("torch_xla", "torch_tpu"))) else 0
        case _:
            return 1
