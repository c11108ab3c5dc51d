"""The native engine's devices as threads of one process, by torch's own group for such tests.

A group of processes imports torch and transformers once for each and sends every answer through a pipe; threads share
all of that, and one process serves each number of devices. What a process has once, they share too: settings of torch,
warnings and torch.compile. Tests of those, and of what goes over a wire, run on processes (`gloo`).
"""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg

TERMINATED = "Test termination event occurs."
"""What torch's group says to the threads that wait for one that failed."""


class Threads:
    """Run jobs on any number of devices, each of which is a thread while a job runs."""

    def __init__(self) -> None:
        multi_threaded_pg._install_threaded_pg()
        # Functional collectives find their group by name: in a table for each thread.
        cast(Any, torch._C)._distributed_c10d._set_thread_isolation_mode(True)
        destroy = dist.destroy_process_group

        def destroy_group(group: Any = None) -> None:
            with suppress(KeyError):  # of a part of the group torch removes a record that it made for processes alone
                destroy(group)

        dist.destroy_process_group = destroy_group

    def run(self, job: Callable[[], Any], devices: int) -> list[Any]:
        """Run `job` on each device and return the results; raises the error of the device that failed first."""
        os.environ["CPU_NUM_DEVICES"] = str(devices)
        multi_threaded_pg.ProcessLocalGroup.reset()
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
        answers, failures = list[Any]([None] * devices), list[BaseException]()

        def run_on(rank: int) -> None:
            try:
                dist.init_process_group("threaded", rank=rank, world_size=devices, store=store)
                answers[rank] = job()
                dist.destroy_process_group()
            except BaseException as error:
                failures.append(error)
                multi_threaded_pg.ProcessLocalGroup.exception_handle(error)

        threads = [threading.Thread(target=run_on, args=(rank,), daemon=True) for rank in range(devices)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise next((error for error in failures if TERMINATED not in str(error)), failures[0])
        return answers
