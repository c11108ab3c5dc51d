"""In a child process of each process of a launch: who is there, and how far are the hosts' clocks apart?

They meet at the launcher's store, where those that don't come can be named; then a gloo group, as a run would make
one. All leave a barrier at about the same moment, and each notes its clock's time then.
"""

import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast

from portable_fsdp.runtime.process import detect_launch, end_with_parent
from portable_fsdp.runtime.store import open_store

ROUNDS = 5
LEAVE_S = 5.0


def main(argv: list[str]) -> int:
    """Arguments: PARENT, and the seconds to wait for the others."""
    end_with_parent(int(argv[0]))
    until = time.monotonic() + float(argv[1])
    launch = detect_launch(os.environ)
    os.environ.update(launch.variables)
    store = _store(launch.rank, timedelta(seconds=float(argv[1])))
    store.set(f"here/{launch.rank}", socket.gethostname())
    everyone = range(launch.world_size)
    missing = _missing(store, "here", everyone, until)
    here = [rank for rank in everyone if rank not in missing]
    if missing:
        hosts = sorted({store.get(f"here/{rank}").decode() for rank in here})
        answer: dict[str, Any] = {"missing": missing, "hosts": hosts}
    else:
        answer = _group(store, launch.rank, launch.world_size, until)
    print(json.dumps(answer))
    store.set(f"done/{launch.rank}", "")
    if launch.rank == 0:  # it may hold the store: it goes last, or the others would be cut off
        _missing(store, "done", here, until + LEAVE_S)
    return 0


def _store(rank: int, limit: timedelta) -> Any:
    """Where the run's processes meet: torchrun's agent holds it, else process 0."""
    import torch.distributed

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = open_store(os.environ, limit, serves=rank == 0)
    return cast(Any, torch.distributed).PrefixStore(f"portable_fsdp.doctor/{attempt}", store)


def _missing(store: Any, word: str, ranks: Sequence[int], until: float) -> list[int]:
    """Processes that haven't said `word` by `until`."""
    while True:
        missing = [rank for rank in ranks if not store.check([f"{word}/{rank}"])]
        if not missing or time.monotonic() > until:
            return missing
        time.sleep(0.1)


def _group(store: Any, rank: int, count: int, until: float) -> dict[str, Any]:
    """Make a gloo group and compare clocks in it."""
    import torch.distributed as dist

    limit = timedelta(seconds=max(1.0, until - time.monotonic()))
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=limit)
        return {"processes": count, "offsets": _offsets(socket.gethostname())}
    except RuntimeError as error:
        return {"problem": f"gloo: {str(error).strip().splitlines()[0]}"}


def _offsets(host: str) -> dict[str, float]:
    """Host -> seconds that its clock is ahead of process 0's, right to about the time of a barrier."""
    import torch.distributed as dist

    stamps: list[float] = []
    for _ in range(ROUNDS):
        dist.barrier()
        stamps.append(time.time())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (host, stamps))
    first = everyone[0][1]
    return {
        name: round(statistics.median(there - here for there, here in zip(theirs, first, strict=True)), 3)
        for name, theirs in everyone
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
