"""The kinds of devices, and which of them this host has."""

import importlib.util

from portable_fsdp.runtime.chips import tpu_chips
from portable_fsdp.runtime.errors import BackendError

DEVICES = ("cpu", "cuda", "tpu")


def count_devices(device: str) -> int:
    """GPUs or TPU chips of this host; one CPU."""
    match device:
        case "cuda":
            import torch

            return torch.cuda.device_count() if torch.cuda.is_available() else 0
        case "tpu":
            packages = ("torch_xla", "torch_tpu")
            return len(tpu_chips()) if any(importlib.util.find_spec(name) is not None for name in packages) else 0
        case _:
            return 1


def require_present(device: str) -> None:
    """Raises BackendError where this host has no such device."""
    if count_devices(device):
        return
    if device == "cuda":
        raise BackendError(
            "--device=cuda: expected a GPU, found none (torch.cuda.is_available() is False).\n"
            "  Check nvidia-smi and that torch is a CUDA build, or use --device=cpu."
        )
    raise BackendError(
        "--device=tpu: expected TPU chips, found none on this host (no /dev/accel* and no /dev/vfio/*).\n"
        "  Run this on a TPU VM, on all its workers at once (launch/tpu_vm.sh); to try the same engine here:\n"
        "  --device=cpu --backend=xla --num_devices=4"
    )
