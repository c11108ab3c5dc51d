"""Long-lived processes that tests send jobs to: one group per (backend, devices), so that imports are paid once.

Native: one process with a thread for each device, for every number of devices. gloo: the same engine in `devices`
processes, for what threads can't show: the contract, checkpoints, the wire and torch.compile. XLA: one process with
that many virtual PJRT CPU devices. XLA FSDP1: one process with a thread for each of them. A job is a function of a
test's own file, or of jobs.py; each process (or thread) of the group runs it, and the group sends back what they
return.
"""

import gc
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any, NamedTuple
from unittest.mock import patch

import psutil
import pytest

JOB_TIMEOUT_S = 240
# Each program that LLVM compiles adds mappings of memory; Linux allows a process 65,530 (vm.max_map_count).
MOST_MAPPINGS = 30_000
MOST_BYTES = 3 * 2**30


class Group(NamedTuple):
    backend: str
    devices: int

    def __str__(self) -> str:
        return f"{self.backend}-{self.devices}"

    @property
    def engine(self) -> "Engine":
        return ENGINES[self.backend]

    @property
    def in_suite(self) -> bool:
        """Each commit; the other groups are for the proofs."""
        return self.devices in self.engine.in_suite

    def for_case(self, case: Any) -> "Group":
        """Native's devices as processes where the case compiles: threads can't use torch.compile at once."""
        compiles = self.backend == "native" and case.settings.get("compile.enabled")
        return self._replace(backend="gloo") if compiles else self

    @property
    def processes(self) -> int:
        return self.devices if self.engine.process_a_device else 1


class Engine(NamedTuple):
    """An engine as the tests see it: how to start its processes, and what its step does."""

    devices: tuple[int, ...]  # a group of workers of each number
    in_suite: tuple[int, ...]  # those of every commit; the others are for the proofs: minutes each
    backend: str  # as the package calls it
    device: str = "cpu"
    begin: Callable[[], None] = lambda: None  # in each process, before the first job
    environment: Callable[[int], dict[str, str]] = lambda devices: {}
    process_a_device: bool = False
    compiles: bool = False  # steps become programs, which a process keeps
    needs_xla: bool = False
    threads: bool = False  # one for each device, in one process
    any_size: bool = False  # the process runs jobs on any number of devices
    before_torch: bool = False  # `begin` comes before torch is imported


def _begin_native() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")


def _begin_torchtpu() -> None:
    import rig

    rig.install()
    from portable_fsdp.backends.native import torchtpu

    torchtpu.load()
    import torch.distributed as dist

    dist.init_process_group("cpu:gloo,tpu:tpu_dist")


def _begin_toy() -> None:
    import toy

    from portable_fsdp.backends import open as table

    _begin_native()
    table.ENGINES["toy"] = toy.SPEC


def _on_loopback(devices: int) -> dict[str, str]:
    return {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}


def _on_chips(devices: int) -> dict[str, str]:
    # As from a launcher that told libtpu the slice; the rig's chip doesn't read it.
    return {**_on_loopback(devices), "TORCH_TPU_SLICEBUILDER_ADDRESSES": ",".join(["localhost:1"] * devices)}


def _on_pjrt(devices: int) -> dict[str, str]:
    # Threads that wait for other devices (in a collective, or to free a buffer that a step still reads) must not be all
    # that there are; by default both pools have one a core.
    threads = str(8 * devices)
    # What takes longest is LLVM; what it would gain in speed is nothing in models this small.
    quick = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    folder = tempfile.mkdtemp(prefix="programs-")
    programs = f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=train_step|micro_batch"
    return {
        "PJRT_DEVICE": "CPU",
        "CPU_NUM_DEVICES": str(devices),
        "XLA_THREAD_POOL_SIZE": threads,
        "PJRT_NPROC": threads,
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {quick} {programs}".strip(),
        "XLA_PROGRAMS": folder,
    }


def _in_order(devices: int) -> dict[str, str]:
    # Else PJRT lets what a thread of torch_xla's pool starts wait for what it started before, and the pool may give one
    # thread the same step of two devices: the second, for which the first one waits.
    return {**_on_pjrt(devices), "PJRT_CPU_ASYNC_CLIENT": "0"}


ENGINES = {
    "native": Engine((), (3,), "native", threads=True, any_size=True),
    "gloo": Engine((1, 2, 3), (3,), "native", "cpu", _begin_native, _on_loopback, process_a_device=True),
    "xla": Engine((1, 3, 4), (4,), "xla", environment=_on_pjrt, compiles=True, needs_xla=True),
    "xla_fsdp1": Engine((2,), (), "xla_fsdp1", environment=_in_order, compiles=True, needs_xla=True, threads=True),
    "toy": Engine((4,), (), "toy", begin=_begin_toy, environment=_on_loopback, process_a_device=True),
    "torchtpu": Engine(
        (1,), (1,), "native", "tpu", _begin_torchtpu, _on_chips, process_a_device=True, before_torch=True
    ),
}
"""3 and 4 are numbers that divide no size of the models."""

GROUPS = [
    Group(name, devices)
    for name, engine in ENGINES.items()
    for devices in engine.devices
    if (name == "torchtpu") == bool(os.environ.get("TEST_TORCHTPU"))  # make test-torchtpu: its environment has no other
]


IN_THREADS = [group._replace(backend="native") if group.backend == "gloo" else group for group in GROUPS]
"""The same with native's devices as threads."""


def marked(group: Group, *more: Any, in_suite: bool | None = None) -> Any:
    """The parameters of a test that runs on a group; `in_suite` overrides that of the group."""
    marks = [pytest.mark.xla] * group.engine.needs_xla
    proof = [] if (group.in_suite if in_suite is None else in_suite) else [pytest.mark.proof]
    names = [value for value in more if isinstance(value, str)][:1]
    return pytest.param(group, *more, marks=[*marks, *proof], id="-".join([str(group), *names]))


def marked_meshes(
    models: Iterable[str], meshes: Mapping[str, tuple[int, Any]], in_suite: Sequence[tuple[str, str, str]]
) -> list[Any]:
    """The parameters (group, model, mesh) of a test of every model on every mesh, (devices, settings), of both engines:
    proofs, but for those `in_suite`, as (engine, model, mesh)."""
    return [
        pytest.param(
            group := Group(engine, devices),
            model,
            mesh,
            marks=[pytest.mark.xla] * group.engine.needs_xla
            + [pytest.mark.proof] * ((engine, model, mesh) not in in_suite),
            id=f"{engine}-{model}-{mesh}",
        )
        for engine in ("native", "xla")
        for model in models
        for mesh, (devices, _) in meshes.items()
    ]


def _serve(pipe: Connection, environment: dict[str, str], backend: str) -> None:
    os.environ.update(environment)
    engine = ENGINES[backend]
    engine.begin()
    import torch

    torch.set_num_threads(1)
    import jobs

    def run(job: Callable[[], Any], devices: int) -> list[Any]:
        return [job()]

    if engine.any_size:
        import threaded_native

        run = threaded_native.Threads().run
    elif engine.threads:
        import threaded_pjrt

        run = threaded_pjrt.Devices().run

    while True:
        try:
            received = pipe.recv_bytes()
        except EOFError:
            os._exit(0)  # an orderly end takes gloo and torch_xla seconds
        try:
            job, devices, arguments = pickle.loads(received)  # imports the job's file
            if engine.threads and "case" in arguments:
                jobs.import_model(arguments["case"])
            answer = ("done", run(partial(job, **arguments), devices))
        except BaseException as error:
            answer = ("failed", (type(error).__name__, str(error), traceback.format_exc()))
        for program in os.scandir(os.environ["XLA_PROGRAMS"]) if engine.compiles else ():
            os.unlink(program)
        gc.collect()  # a model's cycles hold its process groups, and those have threads
        # Plain pickle: multiprocessing's would send each tensor as an open file, until there are too many of them.
        pipe.send_bytes(pickle.dumps(answer))


def _is_full(process: Any) -> bool:
    with open(f"/proc/{process.pid}/maps", encoding="utf-8") as maps:
        mappings = sum(1 for _ in maps)
    return mappings > MOST_MAPPINGS or psutil.Process(process.pid).memory_info().rss > MOST_BYTES


def _forking() -> ForkServerContext:
    """Return a context that forks each process from one that has imported preloaded.py."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    # Python 3.11 doesn't pass sys.path on. NumPy would start threads, which a fork doesn't have.
    variables = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    # Python removes the server's socket after pytest has removed the suite's folder, so it lies elsewhere.
    folder = patch.object(tempfile, "tempdir", os.environ["PYTEST_DEBUG_TEMPROOT"])
    with patch.dict(os.environ, variables), folder:
        forkserver.ensure_running()
    return context


class JobFailed(Exception):
    """A job raised: the class name, the message, and the traceback of the process."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(trace)
        self.kind, self.message = kind, message


class Workers:
    def __init__(self, group: Group) -> None:
        self._group = group
        self._processes, self._pipes = list[Any](), list[Connection]()  # `on` shares them
        self._start()

    def _start(self) -> None:
        group = self._group
        context = multiprocessing.get_context("spawn") if group.engine.before_torch else _forking()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._processes.clear()
        self._pipes.clear()
        for rank in range(group.processes):
            here, there = context.Pipe()
            environment = {"USE_TORCH_XLA": "0", "OMP_NUM_THREADS": "1", "GROUP_DEVICE": group.engine.device}
            environment |= {"GROUP_BACKEND": group.engine.backend}
            environment |= group.engine.environment(group.devices)
            if group.engine.process_a_device:
                environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(group.processes)}
                environment |= {"MASTER_PORT": str(port)}
            process = context.Process(
                target=_serve, args=(there, environment, group.backend), daemon=True, name=f"{group}-{rank}"
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def run(self, job: Callable[..., Any], **arguments: Any) -> list[Any]:
        """Run `job` in each process (or thread); return results by rank. Raises JobFailed with the first failure."""
        if any(
            not process.is_alive() or (self._group.engine.compiles and _is_full(process)) for process in self._processes
        ):
            self.close()
            self._start()
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((job, self._group.devices, arguments)))
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

    def on(self, group: Group) -> "Workers":
        """The same processes, to run jobs on another number of devices."""
        other = copy(self)
        other._group = group
        return other

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


GetWorkers = Callable[[Group], Workers]
Run = Callable[[Group, Any], list[dict[str, Any]]]
"""Fixtures of conftest.py: `workers`, and `run`, which gives what each process says of a whole run of a case."""


def started_on_demand() -> Iterator[Callable[[Group], Workers]]:
    """The workers of a group, started once; for a fixture, at whose end all are closed."""
    started: dict[Group, Workers] = {}

    def get(group: Group) -> Workers:
        if group not in started:
            started[group] = Workers(group)
        return started[group]

    yield get
    for each in started.values():
        each.close()
