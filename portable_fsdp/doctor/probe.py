"""A child process of the doctor that may hang or crash: `python -m portable_fsdp.doctor.probe PARENT PROBE [ARGUMENT]`.

Prints one JSON object as its last line. Probes: `import PACKAGE`, `torch`, and `processes SECONDS` (who is there).
"""

import importlib
import json
import os
import socket
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

from portable_fsdp.runtime.process import detect_launch, end_with_parent, open_store

ROUNDS = 5
LEAVE_S = 5.0


def main(argv: list[str]) -> int:
    parent, probe, *arguments = argv
    end_with_parent(int(parent))
    if probe == "import":
        importlib.import_module(arguments[0])  # an extension built for another torch fails only here
        print("{}")
    elif probe == "torch":
        print(json.dumps(_torch()))
    else:
        _meet_processes(float(arguments[0]))
    return 0


# --------------------------------------------------------------------------------------------------------------- torch


def _torch() -> dict[str, Any]:
    """What torch knows about this host's GPUs."""
    import torch

    answer: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "driver_cuda": 0, "devices": []}
    if torch.version.cuda is None:
        return answer
    # The newest CUDA that the driver supports, as 12080 for 12.8; 0 without a driver. No public name gives it.
    driver_cuda = getattr(cast(Any, torch)._C, "_cuda_getDriverVersion", lambda: 0)
    with warnings.catch_warnings():  # `problem` has the same text
        warnings.simplefilter("ignore")
        available = torch.cuda.is_available()
    problem = "" if available else "torch.cuda.is_available() is False"
    try:
        if problem:
            torch.cuda.init()
    except Exception as error:
        problem = str(error).strip().splitlines()[0]
    nccl = cast(Any, torch.cuda).nccl.version() if torch.distributed.is_nccl_available() else ()
    return answer | {
        "driver_cuda": int(driver_cuda()),
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] * available,
        "problem": problem,
        "nccl": ".".join(map(str, nccl)),
    }


# ----------------------------------------------------------------------------------------------------------- processes


def _meet_processes(limit_s: float) -> None:
    """In each process of a launch: print which processes are missing, or how far the hosts' clocks are apart.

    They meet at the launcher's store, where a missing process can be named; then in a gloo group, as a run makes one.
    """
    until = time.monotonic() + limit_s
    import torch.distributed

    launch = detect_launch(os.environ)
    os.environ.update(launch.variables)
    rank, everyone = launch.rank, range(launch.world_size)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    # The launch's store: torchrun's agent holds it, else process 0.
    store: Any = open_store(os.environ, timedelta(seconds=limit_s), serves=rank == 0)
    store = cast(Any, torch.distributed).PrefixStore(f"portable_fsdp.doctor/{attempt}", store)
    store.set(f"here/{rank}", socket.gethostname())
    missing = _missing(store, "here", everyone, until)
    here = [rank for rank in everyone if rank not in missing]
    if missing:
        hosts = sorted({store.get(f"here/{rank}").decode() for rank in here})
        answer: dict[str, Any] = {"missing": missing, "hosts": hosts}
    else:
        answer = _compare_clocks(store, rank, launch.world_size, until)
    print(json.dumps(answer))
    store.set(f"done/{rank}", "")
    if rank == 0:  # it may hold the store: it goes last, or the others would lose it
        _missing(store, "done", here, until + LEAVE_S)


def _missing(store: Any, key: str, ranks: Sequence[int], until: float) -> list[int]:
    """Ranks that haven't set `key` by `until`."""
    while True:
        missing = [rank for rank in ranks if not store.check([f"{key}/{rank}"])]
        if not missing or time.monotonic() > until:
            return missing
        time.sleep(0.1)


def _compare_clocks(store: Any, rank: int, count: int, until: float) -> dict[str, Any]:
    """Host -> seconds that its clock is ahead of process 0's, right to about the time of a barrier.

    All leave a barrier at about the same moment, and each notes its clock's time then.
    """
    import torch.distributed as dist

    limit = timedelta(seconds=max(1.0, until - time.monotonic()))
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=limit)
        times: list[float] = []
        for _ in range(ROUNDS):
            dist.barrier()
            times.append(time.time())
        gathered: list[Any] = [None] * count
        dist.all_gather_object(gathered, (socket.gethostname(), times))
    except RuntimeError as error:
        return {"problem": f"gloo: {str(error).strip().splitlines()[0]}"}
    first = gathered[0][1]
    offsets = {
        host: round(statistics.median(there - here for there, here in zip(theirs, first, strict=True)), 3)
        for host, theirs in gathered
    }
    return {"processes": count, "offsets": offsets}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
