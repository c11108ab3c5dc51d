"""Rendezvous of a run's processes: torch's elastic launcher, which starts those of a host, and torch's store."""

import logging
import os
import signal
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
from portable_fsdp.runtime.host import begin
from portable_fsdp.runtime.launchers import OUR_RUNS
from portable_fsdp.runtime.signals import Presses, kill_descendants

_CONNECT_S = 20  # between two checks of the store's address


class Hosts(NamedTuple):
    """The hosts of one run: their number, the index of this one, and the rendezvous address."""

    hosts: int
    rank: int
    address: str
    port: int


def run_processes(
    count: int,
    module: str,
    arguments: Sequence[str],
    hosts: Hosts | None = None,
    on_failure: Callable[[Mapping[int, int]], None] = lambda codes: None,
    *,
    is_file: bool = False,
) -> int:
    """Run `python -m module arguments` (`is_file`: without -m) in `count` processes on this host, together with other
    `hosts`, with torchrun's environment; return one exit code.

    0 if all workers returned 0, else 2 or 143 if a worker returned that, else 1, after `on_failure` got the exit codes
    (as in subprocess) of the workers that failed first, by rank. SIGTERM, SIGINT and SIGUSR1 are passed to the workers,
    which have torchrun's 30 s to save. The code is then 143 whether they saved or not.
    """
    from torch.distributed import DistNetworkError, run
    from torch.distributed.elastic.multiprocessing import SignalException, api
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # Else torchrun sets it to 1 and prints a paragraph about it.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // count)))
    # The workers print their errors; the launcher would repeat them with its own stack.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    presses, stops = Presses(), list[int]()

    def stop(number: int, _: object) -> None:
        """Raise at the first signal and at a second request: another exception would end torch's wait for the save."""
        if presses.is_second(number) or not stops:
            stops.append(number)
            raise SignalException(f"stopped by signal {number}", sigval=signal.Signals(number))

    cast(Any, api)._terminate_process_handler = stop  # torch installs it when it starts the workers
    previous = signal.signal(signal.SIGUSR1, stop)  # which torch doesn't handle
    try:
        # The launcher creates a log folder, unused here (logs go to the console), and never removes it.
        with tempfile.TemporaryDirectory(prefix="portable_fsdp_launch_") as logs:
            words = [*_rendezvous_flags(hosts), f"--nproc_per_node={count}", f"--log-dir={logs}"]
            run.run(run.parse_args([*words, *(() if is_file else ("-m",)), module, *arguments]))
    except ChildFailedError as error:
        codes = {int(rank): failure.exitcode for rank, failure in error.failures.items()}
        if not {EXIT_USAGE, EXIT_STOPPED}.isdisjoint(codes.values()):
            return EXIT_USAGE if EXIT_USAGE in codes.values() else EXIT_STOPPED
        on_failure(codes)
        return EXIT_FAILED
    except SignalException:
        return EXIT_STOPPED
    except DistNetworkError as error:
        if hosts is None:
            raise
        raise cannot_listen(hosts.port, error) from None
    finally:
        signal.signal(signal.SIGUSR1, previous)
        # A signal during the start of its processes ends the launcher before it knows them; they would survive.
        kill_descendants()
    return EXIT_FINISHED


def _rendezvous_flags(hosts: Hosts | None) -> list[str]:
    """Return torchrun's flags."""
    if hosts is None:  # like `--standalone`, with an id that names the agent's process to the workers
        return ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--rdzv-id={OUR_RUNS}{os.getpid()}"]
    flags = [f"--nnodes={hosts.hosts}", f"--node-rank={hosts.rank}", "--rdzv-id=portable_fsdp"]
    return [*flags, f"--master-addr={hosts.address}", f"--master-port={hosts.port}"]


def open_store(environ: Mapping[str, str], limit: timedelta, *, serves: bool) -> Any:
    """Connect to torch's TCPStore at MASTER_ADDR and MASTER_PORT, without waiting for the other processes.

    Processes use it before there is a process group. `serves`: this process hosts the store until it exits, unless
    torchrun's agent does. `limit`: timeout for connecting and for each key. Raises ConfigError if process 0 can't
    listen, TrainingError if no store answers.
    """
    import torch.distributed

    host, port, everyone = environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), int(environ["WORLD_SIZE"])
    if serves and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        try:
            _serve(host, port)
        except RuntimeError as error:
            raise cannot_listen(port, error) from None
    # torch's own rendezvous would wait for all workers here, without naming the missing one.
    connect = partial(cast(Any, torch.distributed).TCPStore, wait_for_workers=False, timeout=limit)
    waiting = f"process {environ.get('RANK', '?')} waits for the store of process 0 at {host}:{port}"
    return _connected(partial(connect, host, port, everyone, False), limit, host, port, waiting)


def _connected(connect: Callable[[], Any], limit: timedelta, host: str, port: int, waiting: str) -> Any:
    """Return the store of `connect`. Prints every minute what it waits for; raises TrainingError after `limit`."""
    # In a thread: torch waits forever for a program that accepts the connection and doesn't answer.
    connected, state = begin(connect), ""
    for waited_s in count(_CONNECT_S, _CONNECT_S):
        try:
            return connected.result(_CONNECT_S)
        except (TimeoutError, RuntimeError) as error:
            before, state = state, _listener(host, port)
            if isinstance(error, RuntimeError) or waited_s >= limit.total_seconds():
                raise TrainingError(
                    f"{waiting}: {state}.\n  For all processes set MASTER_ADDR to the address of process 0, and "
                    "MASTER_PORT to a free port there."
                ) from None
            if state != before or waited_s % 60 == 0:
                print(f"{waiting}: after {waited_s} s {state}", file=sys.stderr, flush=True)
    raise AssertionError("the loop has no end")


def cannot_listen(port: int, error: Exception) -> ConfigError:
    """Return the error of the process that can't open the store; `error`: torch's."""
    reason = str(error).partition("message: ")[2] or str(error).partition("\n")[0]
    return ConfigError(
        f"environment: MASTER_PORT={port}: can't open the rendezvous store: {reason}.\n"
        "  End the program that listens there (ss -ltnp), or set another MASTER_PORT for all processes."
    )


def _listener(host: str, port: int) -> str:
    """Describe the listener at the address, for a message."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError as error:
        return f"nothing listens there yet ({error})"
    return "a program listens there, but has not answered as a store"


@cache
def _serve(host: str, port: int) -> Any:
    """Host the store once per process, until its exit: other processes may already wait there for the next engine."""
    import torch.distributed

    dist = cast(Any, torch.distributed)
    return dist.TCPStore(host, port, None, True, wait_for_workers=False, multi_tenant=True)
