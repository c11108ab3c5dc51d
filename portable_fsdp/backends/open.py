"""Which engine runs on which device, chosen without importing an engine that isn't asked for."""

import importlib
import importlib.util
from dataclasses import dataclass
from typing import cast

from portable_fsdp.backends.base import Backend
from portable_fsdp.config.refusals import usual_engine
from portable_fsdp.config.schema import Config
from portable_fsdp.runtime.chips import tpu_chips
from portable_fsdp.runtime.errors import BackendError


@dataclass(frozen=True)
class _Engine:
    module: str
    name: str
    needs: str  # a package that must be installed
    extra: str


_ENGINES = {
    "native": _Engine("portable_fsdp.backends.native.engine", "NativeBackend", "torch", ""),
    "xla": _Engine("portable_fsdp.backends.xla.engine", "XlaBackend", "torch_xla", "[xla]"),
    "xla_fsdp1": _Engine("portable_fsdp.backends.xla_fsdp1.engine", "XlaFsdp1Backend", "torch_xla", "[xla]"),
}
DEVICES = ("auto", "cpu", "cuda", "tpu")
BACKENDS = ("auto", *_ENGINES)


def resolve(device: str, backend: str) -> tuple[str, str]:
    """The device and the engine that `auto` stands for; raises BackendError for what is absent or can't be."""
    if device == "auto":
        device = "cuda" if _cuda_devices() else "tpu" if _tpu_chips() else "cpu"
    if device not in DEVICES:
        raise BackendError(f"--device={device}: expected one of {', '.join(DEVICES)}.")
    if backend not in BACKENDS:
        raise BackendError(f"--backend={backend}: expected one of {', '.join(BACKENDS)}.")
    if backend in ("xla", "xla_fsdp1") and device == "cuda":
        raise BackendError(
            f"backend {backend} on cuda: torch_xla dropped its CUDA support with release 2.8.\n"
            "  Use --backend=native (FSDP2 on NCCL) on GPUs; the config and the checkpoints are the same."
        )
    if backend == "auto":
        backend = usual_engine(device)
    engine = _ENGINES[backend]
    if importlib.util.find_spec(engine.needs) is None:
        extra = "[tpu]" if device == "tpu" else engine.extra
        raise BackendError(
            f"backend {backend}: expected the package {engine.needs}, found none installed.\n"
            f"  In a checkout of portable_fsdp: pip install '.{extra}'"
        )
    _check_present(device, backend)
    return device, backend


def open_backend(
    config: Config, *, device: str = "auto", backend: str = "auto", num_devices: int | None = None
) -> Backend:
    """Open an engine, to be used as a context manager.

    `num_devices` is the number of devices to use, where that can be chosen (virtual CPU devices under xla); under
    torchrun native has one a process. Raises BackendError for what this device or engine can't do with `config`.
    """
    device, backend = resolve(device, backend)
    engine = _ENGINES[backend]
    kind = getattr(importlib.import_module(engine.module), engine.name)
    return cast(Backend, kind(device, config, num_devices))


def local_processes(device: str, backend: str, num_devices: int | None) -> int:
    """Processes that a plain start needs on this host: one in all under xla, one per device under the others.

    PJRT's CPU devices can't talk across processes: on CPU xla_fsdp1 has one.
    """
    if backend == "xla_fsdp1" and device == "tpu":
        return _tpu_chips()
    if backend != "native":
        return 1
    return num_devices or (_cuda_devices() if device == "cuda" else 1)


def _check_present(device: str, backend: str) -> None:
    if device == "cuda" and not _cuda_devices():
        raise BackendError(
            "--device=cuda: expected a GPU, found none (torch.cuda.is_available() is False).\n"
            "  Check nvidia-smi and that torch is a CUDA build, or use --device=cpu."
        )
    if device == "tpu" and backend == "native":
        if importlib.util.find_spec("torch_tpu") is None:
            raise BackendError(
                "backend native on tpu: it needs TorchTPU (the package torch_tpu, with torch 2.11 or newer), which is "
                "not installed.\n  Use --backend=xla on TPUs."
            )
    elif device == "tpu" and not _tpu_chips():
        raise BackendError(
            "--device=tpu: expected TPU chips, found none on this host (no /dev/accel* and no /dev/vfio/*).\n"
            "  Run this on a TPU VM, on all its workers at once (launch/tpu_vm.sh); to try the same engine here:\n"
            "  --device=cpu --backend=xla --num_devices=4"
        )


def _cuda_devices() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _tpu_chips() -> int:
    return 0 if importlib.util.find_spec("torch_xla") is None else len(tpu_chips())
