"""Processes of a script that no launcher started, and of a notebook."""

import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from torch.multiprocessing.spawn import start_processes

from portable_fsdp.accelerator.state import with_variable
from portable_fsdp.backends.open import local_processes, resolve
from portable_fsdp.runtime.errors import BackendError
from portable_fsdp.runtime.launchers import detect_launch
from portable_fsdp.runtime.rendezvous import run_processes

log = logging.getLogger("portable_fsdp")


def start_workers(start: Mapping[str, Any]) -> None:
    """Run the script again in a process for each device, and exit with their code, where native has several devices and
    no launcher started it. In a worker, in a notebook and under `python -c` do nothing."""
    if "WORLD_SIZE" in os.environ and "RANK" not in os.environ and dist.is_initialized():  # accelerate's debug_launcher
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(dist.get_rank())
    main = sys.modules["__main__"]
    file: str | None = getattr(main, "__file__", None)
    spec: Any = getattr(main, "__spec__", None)
    if file is None or not detect_launch(os.environ).is_alone:
        return
    count = _processes(start)
    if count == 1:
        return
    log.warning("starting %d processes of %s: the lines before Accelerator() run again in each", count, file)
    name = spec.name.removesuffix(".__main__") if spec is not None else file
    sys.stdout.flush()
    raise SystemExit(run_processes(count, name, sys.argv[1:], is_file=spec is None))


def notebook_launcher(
    function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int | None = None, **_: Any
) -> None:
    """Run `function(*args)`, which makes an Accelerator, from a notebook: on native in `num_processes` forked processes
    (by default one for each GPU), on XLA here, since one process drives all devices.

    accelerate's arguments about mixed precision, hosts and restarts aren't read: pass those of Accelerator. Raises
    BackendError if this process has used CUDA, or has an Accelerator.
    """
    count = _processes({"device": "auto", "backend": "auto", "num_devices": num_processes})
    if count == 1:
        function(*args)
        return
    if torch.cuda.is_initialized() or PartialState._shared_state:  # pyright: ignore[reportPrivateUsage]
        raise BackendError(
            "notebook_launcher: this process has used CUDA or has an Accelerator, so it can't be forked.\n"
            "  Restart the kernel, and make the Accelerator and models inside the function."
        )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start_processes(_run, args=(function, args, count, port), nprocs=count, start_method="fork")


def _processes(start: Mapping[str, Any]) -> int:
    """The number of processes on this host."""
    resolved = with_variable({}, start)[1]
    device, backend = resolve(resolved["device"], resolved["backend"])
    return local_processes(device, backend, resolved["num_devices"])


def _run(index: int, function: Callable[..., Any], args: Sequence[Any], count: int, port: int) -> None:
    os.environ |= {
        **{"RANK": str(index), "LOCAL_RANK": str(index), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "FORK_LAUNCHED": "1"},
    }
    function(*args)
