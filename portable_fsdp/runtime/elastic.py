"""Starts several processes of this host through torch's elastic launcher, alone or along with other hosts."""

import contextlib
import logging
import os
import tempfile
from collections.abc import Sequence

import psutil

from portable_fsdp.runtime.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, EXIT_USAGE
from portable_fsdp.runtime.process import OUR_RUNS, Hosts, cannot_listen


def run_processes(count: int, module: str, arguments: Sequence[str], hosts: Hosts | None = None) -> int:
    """Run `python -m module arguments` in `count` processes of this host, and those of the other `hosts`, with
    torchrun's environment; return one exit code.

    0 where all returned 0, else 2 or 143 where a worker returned that, else 1. SIGTERM and SIGINT reach the workers,
    who have torchrun's 30 s to save; the code is then 143 whether they did or not.
    """
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
