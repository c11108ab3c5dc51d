"""Where the processes of a launch meet before they have a process group: the store at MASTER_ADDR and MASTER_PORT."""

from collections.abc import Mapping
from datetime import timedelta
from functools import cache
from typing import Any, cast


def open_store(environ: Mapping[str, str], limit: timedelta, *, serves: bool) -> Any:
    """A connection to it: torch's TCPStore, which hasn't waited for the other processes.

    `serves`: this process holds the store for its whole life, unless torchrun's agent holds it. `limit`: for connecting
    and for each wait for a key.
    """
    import torch.distributed

    host, port, count = environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), int(environ["WORLD_SIZE"])
    if serves and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        _serve(host, port)
    # torch's own rendezvous would wait for all workers here, and not say for which one.
    return cast(Any, torch.distributed).TCPStore(host, port, count, False, timeout=limit, wait_for_workers=False)


@cache
def _serve(host: str, port: int) -> Any:
    """Once a process, and until its end: other processes may already wait for its next engine at the same store."""
    import torch.distributed

    dist = cast(Any, torch.distributed)
    return dist.TCPStore(host, port, None, True, wait_for_workers=False, multi_tenant=True)
