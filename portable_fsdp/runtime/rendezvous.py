"""Where the processes of a run meet: torch's elastic launcher, which starts those of a host, and torch's store."""

import contextlib
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache, partial
from itertools import count
from typing import Any, NamedTuple, cast

from portable_fsdp.runtime.errors import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_STOPPED,
    EXIT_USAGE,
    ConfigError,
    TrainingError,
)
from portable_fsdp.runtime.launchers import OUR_RUNS
from portable_fsdp.runtime.limits import begin

_CONNECT_S = 20  # between two looks at the store's address


class Hosts(NamedTuple):
    """The hosts of one run: how many, which one this is, and where they meet."""

    hosts: int
    rank: int
    address: str
    port: int


def run_processes(count: int, module: str, arguments: Sequence[str], hosts: Hosts | None = None) -> int:
    """Run `python -m module arguments` in `count` processes of this host, and those of the other `hosts`, with
    torchrun's environment; return one exit code.

    0 where all returned 0, else 2 or 143 where a worker returned that, else 1. SIGTERM and SIGINT reach the workers,
    who have torchrun's 30 s to save; the code is then 143 whether they did or not.
    """
    import psutil
    from torch.distributed import DistNetworkError, run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # Else torchrun sets it to 1 and prints a paragraph about it.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    # The workers printed what went wrong; the launcher would repeat it with its own stack.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    if hosts is None:  # as `--standalone`, with an id by which the workers know the process that they end with
        rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--rdzv-id={OUR_RUNS}{os.getpid()}"]
    else:
        rendezvous = [f"--nnodes={hosts.hosts}", f"--node-rank={hosts.rank}", "--rdzv-id=portable_fsdp"]
        rendezvous += [f"--master-addr={hosts.address}", f"--master-port={hosts.port}"]
    try:
        # The launcher makes a folder for the workers' logs, which go to the console here, and never removes it.
        with tempfile.TemporaryDirectory(prefix="portable_fsdp_launch_") as logs:
            run.run(
                run.parse_args(
                    [*rendezvous, f"--nproc_per_node={count}", f"--log-dir={logs}", "-m", module, *arguments]
                )
            )
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        return next((code for code in (EXIT_USAGE, EXIT_STOPPED) if code in codes), EXIT_FAILED)
    except SignalException:
        return EXIT_STOPPED
    except DistNetworkError as error:
        if hosts is None:
            raise
        raise cannot_listen(hosts.port, error) from None
    finally:
        # A signal while the launcher starts its processes ends it before it knows them, and they would stay.
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    return EXIT_FINISHED


def open_store(environ: Mapping[str, str], limit: timedelta, *, serves: bool) -> Any:
    """Connect to the store at MASTER_ADDR and MASTER_PORT, where processes meet before they have a process group.

    torch's TCPStore, which does not wait for the other processes.

    `serves`: this process holds the store for its whole life, unless torchrun's agent holds it. `limit`: for connecting
    and for each wait for a key. Raises ConfigError where process 0 can't listen, TrainingError where no store answers.
    """
    import torch.distributed

    host, port, everyone = environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), int(environ["WORLD_SIZE"])
    if serves and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        try:
            _serve(host, port)
        except RuntimeError as error:
            raise cannot_listen(port, error) from None
    # torch's own rendezvous would wait for all workers here, and not say for which one.
    connect = partial(cast(Any, torch.distributed).TCPStore, wait_for_workers=False, timeout=limit)
    waiting = f"process {environ.get('RANK', '?')} waits for the store of process 0 at {host}:{port}"
    return _connected(partial(connect, host, port, everyone, False), limit, host, port, waiting)


def _connected(connect: Callable[[], Any], limit: timedelta, host: str, port: int, waiting: str) -> Any:
    """The store that `connect` makes. Prints each minute what it waits for; raises TrainingError after `limit`."""
    # In a thread: torch waits without end for a program that accepts the connection and doesn't answer.
    connected, state = begin(connect), ""
    for waited_s in count(_CONNECT_S, _CONNECT_S):
        try:
            return connected.result(_CONNECT_S)
        except (TimeoutError, RuntimeError) as error:
            before, state = state, _listener(host, port)
            if isinstance(error, RuntimeError) or waited_s >= limit.total_seconds():
                raise TrainingError(
                    f"{waiting}: {state}.\n  Give all processes the address of process 0, MASTER_ADDR, and a free port "
                    "there, MASTER_PORT."
                ) from None
            if state != before or waited_s % 60 == 0:
                print(f"{waiting}: after {waited_s} s {state}", file=sys.stderr, flush=True)
    raise AssertionError("the loop has no end")


def cannot_listen(port: int, error: Exception) -> ConfigError:
    """The error of the process that was to open the store; `error`: torch's."""
    reason = str(error).partition("message: ")[2] or str(error).partition("\n")[0]
    return ConfigError(
        f"environment: MASTER_PORT={port}: can't open the store where the processes meet: {reason}.\n"
        "  End the program that listens there (ss -ltnp), or give all processes another MASTER_PORT."
    )


def _listener(host: str, port: int) -> str:
    """What a connection to the address finds, for a message."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError as error:
        return f"there is none yet ({error})"
    return "a program listens there, but has not answered as a store"


@cache
def _serve(host: str, port: int) -> Any:
    """Once a process, and until its end: other processes may already wait for its next engine at the same store."""
    import torch.distributed

    dist = cast(Any, torch.distributed)
    return dist.TCPStore(host, port, None, True, wait_for_workers=False, multi_tenant=True)
