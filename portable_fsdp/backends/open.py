"""The table of engines, and the choice of one. Imports no other engine, and no torch where a name is wrong."""

import importlib
import importlib.util
import sys
from functools import cache
from typing import TYPE_CHECKING, cast

from portable_fsdp.backends.options import EngineOptions
from portable_fsdp.config.schema import Config
from portable_fsdp.runtime.errors import BackendError
from portable_fsdp.runtime.host import keep_torch_tpu_out, tpu_chips

if TYPE_CHECKING:
    from portable_fsdp.backends.base import Backend

DEVICES = ("cpu", "cuda", "tpu")

ENGINES = {
    "native": "portable_fsdp.backends.native.options",
    "xla": "portable_fsdp.backends.xla.options",
    "xla_fsdp1": "portable_fsdp.backends.xla_fsdp1.options",
}
"""Name -> the module of its `OPTIONS`. On a device, --backend=auto is the first whose package is installed."""


@cache
def options_of(engine: str) -> EngineOptions:
    """The declarations of an engine; imports neither the engine nor torch."""
    return cast(EngineOptions, importlib.import_module(ENGINES[engine]).OPTIONS)


def engines_on(device: str) -> tuple[str, ...]:
    """The engines that a device has."""
    return tuple(engine for engine in ENGINES if device in options_of(engine).packages)


def usual_engine(device: str) -> str:
    """What --backend=auto is on a device."""
    installed = (engine for engine in engines_on(device) if _is_installed(options_of(engine).packages[device].name))
    return next(installed, None) or engine_made_for(device)


def engine_made_for(device: str) -> str:
    """The usual engine of a device that isn't here."""
    return next(engine for engine in engines_on(device) if options_of(engine).packages[device].is_usual)


def require_names(device: str, backend: str) -> None:
    """Raises BackendError for a device or an engine that doesn't exist."""
    if device not in ("auto", *DEVICES):
        raise BackendError(f"--device={device}: expected one of auto, {', '.join(DEVICES)}.")
    if backend not in ("auto", *ENGINES):
        raise BackendError(f"--backend={backend}: expected one of auto, {', '.join(ENGINES)}.")


def resolve(device: str, backend: str) -> tuple[str, str]:
    """The device and the engine that `auto` stands for; raises BackendError for what is absent or can't be."""
    require_names(device, backend)
    keep_torch_tpu_out()
    if "torch_tpu" in sys.modules and not tpu_chips():
        raise BackendError(
            "torch has loaded torch_tpu, on a host without TPU chips: its first backward would hang.\n"
            "  Set TORCH_DEVICE_BACKEND_AUTOLOAD=0 in the environment of this program."
        )
    if device == "auto":
        device = next((kind for kind in ("cuda", "tpu") if count_devices(kind)), "cpu")
    if backend == "auto":
        backend = usual_engine(device)
    options = options_of(backend)
    if device not in options.packages:
        raise BackendError(f"backend {backend} on {device}: {options.other_devices[device]}")
    package = options.packages[device]
    if not _is_installed(package.name):
        raise BackendError(
            f"backend {backend} on {device}: expected the package {package.name}, found none installed.\n"
            f"  {package.way}"
        )
    package.check()
    if not count_devices(device):
        raise BackendError(_NO_DEVICE[device].format(backend=backend))
    return device, backend


_NO_DEVICE = {
    "cuda": "--device=cuda: expected a GPU, found none (torch.cuda.is_available() is False).\n"
    "  Check nvidia-smi and that torch is a CUDA build, or use --device=cpu.",
    "tpu": "--device=tpu: expected TPU chips, found none on this host (no /dev/accel* and no /dev/vfio/*).\n"
    "  Run this on a TPU VM, on all its workers at once (launch/tpu_vm.sh); to try the same engine here:\n"
    "  --device=cpu --backend={backend} --num_devices=4",
}


def open_backend(
    config: Config, *, device: str = "auto", backend: str = "auto", num_devices: int | None = None
) -> "Backend":
    """Open an engine, to be used as a context manager.

    `num_devices`: for virtual CPU devices under xla; under torchrun native has one a process. Raises BackendError for
    what this device or engine can't do with `config`.
    """
    device, backend = resolve(device, backend)
    module, _, name = options_of(backend).engine.partition(":")
    return cast("Backend", getattr(importlib.import_module(module), name)(device, config, num_devices))


def local_processes(device: str, backend: str, num_devices: int | None) -> int:
    """Processes that a plain start needs on this host."""
    return options_of(backend).processes(device, num_devices, count_devices)


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def count_devices(device: str) -> int:
    """GPUs or TPU chips of this host; one CPU."""
    match device:
        case "cuda":
            import torch

            return torch.cuda.device_count() if torch.cuda.is_available() else 0
        case "tpu":
            return len(tpu_chips()) if any(map(_is_installed, ("torch_xla", "torch_tpu"))) else 0
        case _:
            return 1
