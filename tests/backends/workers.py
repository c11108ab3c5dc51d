"""Long-lived processes that tests send jobs to: one group per (backend, devices), so that imports are paid once.

Native: `devices` gloo processes. XLA: one process with that many virtual PJRT CPU devices. XLA FSDP1: one process with
a thread for each of them, which does what a process does elsewhere. A job is a function of jobs.py, or of
native_jobs.py or xla_jobs.py; each process (or thread) of the group runs it, and the group sends back what they return.
"""

import gc
import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

JOB_TIMEOUT_S = 240
# LLVM runs out of mappings after about a dozen models compiled in one process.
XLA_JOBS_PER_PROCESS = 8


class Group(NamedTuple):
    backend: str
    devices: int

    def __str__(self) -> str:
        return f"{self.backend}-{self.devices}"


GROUPS = [
    *(Group("native", devices) for devices in (1, 2, 3)),
    *(Group("xla", devices) for devices in (1, 3, 4)),
    Group("xla_fsdp1", 2),
]


def _serve(pipe: Connection, environment: dict[str, str], backend: str) -> None:
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)
    if backend == "native":
        import torch.distributed as dist

        dist.init_process_group("gloo")
        import native_jobs as own_jobs
    else:
        import xla_jobs as own_jobs
    import jobs

    known = {**vars(jobs), **vars(own_jobs)}
    run = _run
    if backend == "xla_fsdp1":
        import turnstile

        run = turnstile.Devices().run

    while True:
        try:
            name, arguments = pickle.loads(pipe.recv_bytes())
        except EOFError:
            os._exit(0)  # an orderly end takes gloo and torch_xla seconds
        try:
            if backend == "xla_fsdp1" and "case" in arguments:
                jobs.import_model(arguments["case"])
            answer = ("done", run(partial(known[name], **arguments)))
        except BaseException as error:
            answer = ("failed", (type(error).__name__, str(error), traceback.format_exc()))
        gc.collect()  # a model's cycles hold its process groups, and those have threads
        # Plain pickle: multiprocessing's would send each tensor as an open file, until there are too many of them.
        pipe.send_bytes(pickle.dumps(answer))


def _run(job: Callable[[], Any]) -> list[Any]:
    return [job()]


class JobFailed(Exception):
    """A job raised: the class name, the message, and the traceback of the process."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(trace)
        self.kind, self.message = kind, message


class Workers:
    def __init__(self, group: Group) -> None:
        self._group = group
        self._jobs = 0
        self._start()

    def _start(self) -> None:
        group, context = self._group, multiprocessing.get_context("spawn")
        count = group.devices if group.backend == "native" else 1
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._processes, self._pipes = [], []
        for rank in range(count):
            here, there = context.Pipe()
            environment = {"USE_TORCH_XLA": "0", "OMP_NUM_THREADS": "1", "GROUP_BACKEND": group.backend}
            if group.backend == "native":
                environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
                environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
            else:
                environment |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(group.devices)}
                # Threads that wait for other devices (in a collective, or to free a buffer that a step still reads)
                # must not be all that there are; by default both pools have one a core.
                threads = str(8 * group.devices)
                environment |= {"XLA_THREAD_POOL_SIZE": threads, "PJRT_NPROC": threads}
                # What takes longest is LLVM; what it would gain in speed is nothing in models this small.
                quick = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
                environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {quick}".strip()
            if group.backend == "xla_fsdp1":
                # Else PJRT lets what a thread of torch_xla's pool starts wait for what it started before, and the pool
                # may give one thread the same step of two devices: the second, for which the first one waits.
                environment["PJRT_CPU_ASYNC_CLIENT"] = "0"
            process = context.Process(
                target=_serve, args=(there, environment, group.backend), daemon=True, name=f"{group}-{rank}"
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def run(self, job: str, **arguments: Any) -> list[Any]:
        """What each process (or thread) of the group returned, by rank. Raises JobFailed with the first failure."""
        if self._group.backend != "native":
            self._jobs += 1
            if self._jobs > XLA_JOBS_PER_PROCESS:
                self.close()
                self._start()
                self._jobs = 1
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((job, arguments)))
        answers = [self._receive(rank) for rank in range(len(self._pipes))]
        for kind, value in answers:
            if kind == "failed":
                raise JobFailed(*value)
        return [value for _, values in answers for value in values]

    def _receive(self, rank: int) -> tuple[str, Any]:
        if not self._pipes[rank].poll(JOB_TIMEOUT_S):
            self.close()
            raise TimeoutError(f"{self._group}: process {rank} gave no answer in {JOB_TIMEOUT_S} s")
        try:
            return pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self.close()
            raise RuntimeError(
                f"{self._group}: process {rank} died: exit code {self._processes[rank].exitcode}"
            ) from None

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
