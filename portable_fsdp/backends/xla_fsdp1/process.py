"""Which device is this process's: what is told to PJRT before and after torch_xla is imported."""

import os
from typing import Any, cast

from portable_fsdp.runtime.errors import BackendError
from portable_fsdp.runtime.process import detect_launch


def start_process(device: str, runtime: Any) -> None:
    """Tell PJRT which chip is this process's; on CPU there is one device and nothing to tell.

    Raises BackendError after SPMD, for several processes on CPU, and where processes aren't as many as chips.
    """
    launch = detect_launch(os.environ)
    if runtime.is_spmd():
        raise BackendError(
            "backend xla_fsdp1: expected a process without SPMD, found that backend xla was opened in it before.\n"
            "  torch_xla can't leave SPMD: open the two in processes of their own."
        )
    if device == "cpu":
        if launch.world_size > 1:
            raise BackendError(
                f"backend xla_fsdp1 on cpu: expected one process, found {launch.world_size} of a launcher: PJRT's CPU "
                "devices can't talk across processes.\n  Start it plainly, with one device; several CPU devices: "
                "--backend=xla --num_devices=N."
            )
        return
    from torch_xla._internal import pjrt, tpu

    processes, chips = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(cast(Any, tpu).num_local_processes())
    if processes != chips:
        raise BackendError(
            f"backend xla_fsdp1 on tpu: expected one process for each of the {chips} chips of this host, found "
            f"{processes}.\n  Start it plainly on every host, or with torchrun --nproc_per_node={chips}."
        )
    cast(Any, pjrt).initialize_multiprocess(launch.local_rank, processes)
    if runtime.addressable_device_count() > 1:
        raise BackendError(
            "backend xla_fsdp1 on tpu: expected one device a chip, found "
            f"{runtime.addressable_device_count()} (TPU v2 and v3).\n  Use --backend=xla there."
        )


def check_devices(device: str, num_devices: int | None, count: int) -> None:
    """Raise BackendError unless `num_devices` (None: any) is the run's `count` of devices."""
    if num_devices is not None and num_devices != count:
        way = {
            "tpu": "Leave --num_devices out: all chips of the slice take part.",
            "cpu": f"On CPU it has one device; for several: --backend=xla --num_devices={num_devices}.",
        }[device]
        raise BackendError(
            f"backend xla_fsdp1 on {device}: expected --num_devices={num_devices} devices, found {count}.\n  {way}"
        )
