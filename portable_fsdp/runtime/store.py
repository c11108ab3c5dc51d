"""Where the processes of a launch meet before they have a process group: the store at MASTER_ADDR and MASTER_PORT."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, cast


def open_store(environ: Mapping[str, str], limit: timedelta, *, serves: bool) -> Any:
    """A connection to it of torch's kind (TCPStore), on which nothing has been waited for yet.

    `serves`: this process holds the store, which lives as long as what is returned, unless torchrun's agent holds it.
    `limit`: for the connection, and for each answer that waits for a key.
    """
    import torch.distributed

    dist = cast(Any, torch.distributed)
    host, port, count = environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), int(environ["WORLD_SIZE"])
    is_master = serves and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    # torch's own rendezvous would wait for all workers here, and not say which one it waits for.
    return dist.TCPStore(host, port, count, is_master, timeout=limit, wait_for_workers=False, multi_tenant=True)
