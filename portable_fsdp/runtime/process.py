"""Who launched this process, and who asks it to stop. Device counts come from the engine, never from here."""

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache, partial
from itertools import count
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from portable_fsdp.runtime.errors import EXIT_FAILED, ConfigError, TrainingError
from portable_fsdp.runtime.limits import begin
from portable_fsdp.runtime.tasks import Tasks, integer, read_tasks

if TYPE_CHECKING:  # Python 3.10 has none, and the doctor reports that version
    from typing import Self

COUNTING_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
LAUNCH_VARIABLES = (*COUNTING_VARIABLES, "MASTER_ADDR", "MASTER_PORT")
OUR_RUNS = "portable_fsdp.launch-"  # begins the elastic run's id in a start of our own; the agent's PID follows
_CONNECT_S = 20  # between two looks at the store's address
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


@dataclass(frozen=True)
class Launch:
    """How this process was started, in torchrun's words."""

    kind: Literal["plain", "torchrun", "srun", "mpirun", "variables", "tpu_vm"]
    rank: int = 0  # among all processes
    local_rank: int = 0  # among the processes of this host
    world_size: int = 1  # processes
    description: str = field(default="", compare=False)  # who started it, for the first line of a run
    variables: Mapping[str, str] = field(default_factory=dict, compare=False)
    """What torch reads from the environment, where the launcher has other names for it."""
    by_accelerate: bool = False  # `accelerate launch`, which sets the number of processes

    @property
    def is_alone(self) -> bool:
        """No launcher counts this host's processes, and there is no address where they could meet."""
        return self.kind in ("plain", "tpu_vm")


class Hosts(NamedTuple):
    """The hosts of one run: how many, which one this is, and where they meet."""

    hosts: int
    rank: int
    address: str
    port: int


def detect_launch(environ: Mapping[str, str]) -> Launch:
    """Who started this process: torchrun, srun, mpirun, something that sets torchrun's five variables, or nobody.

    Raises ConfigError, naming the variables, where only some are set and where two launchers contradict each other.
    """
    tasks = read_tasks(environ)
    # A script may export an address for its tasks, though this time it has only one, which needs none.
    telling = LAUNCH_VARIABLES if tasks is None else COUNTING_VARIABLES
    if environ.get("TORCHELASTIC_RUN_ID"):
        launch = _torchrun(environ, tasks)
    elif tasks is not None and tasks.count > 1:
        launch = _of_tasks(environ, tasks)
    elif any(environ.get(name) for name in telling):
        launch = _of_variables(environ, "variables", f"{', '.join(LAUNCH_VARIABLES)} of its environment")
        _require_all_tpu_workers(environ, launch)
    elif tpu_workers(environ):
        launch = _tpu_vm(environ)
    else:
        launcher = "hand (no launcher)" if tasks is None else f"{tasks.launcher}, as its only task"
        launch = Launch("plain", description=launcher)
    by_accelerate = is_by_accelerate(environ)
    return replace(launch, by_accelerate=by_accelerate, description=_describe(launch, by_accelerate, environ))


def is_by_accelerate(environ: Mapping[str, str]) -> bool:
    """Whether `accelerate launch` started this process: it always sets this variable."""
    return bool(environ.get("ACCELERATE_MIXED_PRECISION"))


def _describe(launch: Launch, by_accelerate: bool, environ: Mapping[str, str]) -> str:
    if by_accelerate and launch.kind == "plain":
        return "accelerate launch: 1 process(es)"  # it starts no others, and has counted this one
    description = launch.description + (", of accelerate launch" if by_accelerate else "")
    if launch.is_alone:
        return description
    here = {**environ, **launch.variables}.get("LOCAL_WORLD_SIZE")
    return f"{description}: {launch.world_size} process(es)" + (f", {here} of them on this host" if here else "")


# ------------------------------------------------------------------------------------------------------------ TPU VMs


def tpu_workers(environ: Mapping[str, str]) -> list[str]:
    """The hosts of a TPU slice; none where the environment doesn't name them."""
    return [name for name in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if name]


def problem_of_tpu_worker(environ: Mapping[str, str]) -> str:
    """What is wrong with the worker's number; empty where the environment shows nothing wrong."""
    number, count = environ.get("TPU_WORKER_ID", ""), len(tpu_workers(environ))
    if number and not number.isdecimal():
        return f"TPU_WORKER_ID={number} is no number"
    if number and count and int(number) >= count:
        return f"TPU_WORKER_ID={number}, but TPU_WORKER_HOSTNAMES names {count} worker(s)"
    return ""


def _tpu_vm(environ: Mapping[str, str]) -> Launch:
    """One process a host: PJRT itself finds out how many there are, and which one this is."""
    if problem := problem_of_tpu_worker(environ):
        raise ConfigError(f"environment: {problem}.\n  Set the TPU_* variables as the TPU VM does, or unset them.")
    slices = environ.get("MEGASCALE_NUM_SLICES")
    of_slice = f", slice {environ.get('MEGASCALE_SLICE_ID', '?')} of {slices}" if slices else ""
    worker = f"TPU worker {environ.get('TPU_WORKER_ID', '?')} of {len(tpu_workers(environ))}"
    return Launch("tpu_vm", description=worker + of_slice)


def _require_all_tpu_workers(environ: Mapping[str, str], launch: Launch) -> None:
    """Who sets the variables counts the processes of all hosts; torchrun may run on each host by itself."""
    workers = len(tpu_workers(environ))
    if workers > 1 and launch.world_size % workers:
        raise ConfigError(
            f"environment: two launchers: WORLD_SIZE={launch.world_size} (by {launch.description}), but "
            f"TPU_WORKER_HOSTNAMES names {workers} workers, on each of which the run has as many processes.\n"
            f"  Unset {', '.join(LAUNCH_VARIABLES)}: on a TPU slice a plain start on each host is enough."
        )


# ------------------------------------------------------------------------------------------- torchrun's variables


def _of_variables(environ: Mapping[str, str], kind: Literal["torchrun", "variables"], description: str) -> Launch:
    missing = [name for name in LAUNCH_VARIABLES if not environ.get(name)]
    if missing:
        present = [f"{name}={environ[name]}" for name in LAUNCH_VARIABLES if name not in missing]
        raise ConfigError(
            f"environment: expected all or none of {', '.join(LAUNCH_VARIABLES)}, found {', '.join(present) or 'none'} "
            f"without {', '.join(missing)}.\n  Start with torchrun, which sets all five, or unset them."
        )
    rank, local_rank, world_size = (integer(environ, name) for name in COUNTING_VARIABLES)
    _require_port(environ)
    here = integer(environ, "LOCAL_WORLD_SIZE") if environ.get("LOCAL_WORLD_SIZE") else world_size
    if not (0 <= local_rank <= rank < world_size and local_rank < here <= world_size):
        raise ConfigError(
            "environment: expected 0 <= LOCAL_RANK <= RANK < WORLD_SIZE and LOCAL_RANK < LOCAL_WORLD_SIZE <= "
            f"WORLD_SIZE, found LOCAL_RANK={local_rank}, RANK={rank}, WORLD_SIZE={world_size}, LOCAL_WORLD_SIZE={here}."
            "\n  Start with torchrun, which sets them, or unset them."
        )
    return Launch(kind, rank, local_rank, world_size, description)


def _require_port(environ: Mapping[str, str]) -> None:
    if not 1 <= integer(environ, "MASTER_PORT") <= 65535:
        port = environ["MASTER_PORT"]
        raise ConfigError(f"environment: MASTER_PORT: expected a port from 1 to 65535, found {port}.")


def _torchrun(environ: Mapping[str, str], tasks: Tasks | None) -> Launch:
    """In a task of srun or mpirun, torchrun is one agent: its group has one host for each task.

    So 4 tasks and a WORLD_SIZE of 8 are two processes a host.
    """
    is_ours = environ["TORCHELASTIC_RUN_ID"].startswith(OUR_RUNS)
    description = "portable_fsdp.launch" if is_ours else "torchrun"
    if environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        count, most = environ.get("TORCHELASTIC_RESTART_COUNT"), environ["TORCHELASTIC_MAX_RESTARTS"]
        description += f" (restart {count} of {most})"
    launch = _of_variables(environ, "torchrun", description)
    if tasks is None or tasks.count == 1:
        return launch
    of_tasks = f"{tasks.count_variable}={tasks.count}"
    if tasks.local_count > 1:
        raise ConfigError(
            f"environment: two launchers: expected one task of {tasks.launcher} a host where the task is torchrun, "
            f"found {tasks.local_count} on this host ({of_tasks}) and torchrun's WORLD_SIZE={launch.world_size}.\n"
            "  Start torchrun with --ntasks-per-node=1 (mpirun: one task a host), or leave torchrun out."
        )
    if environ.get("GROUP_WORLD_SIZE") == "1":
        raise ConfigError(
            f"environment: two launchers: {of_tasks}, but torchrun's GROUP_WORLD_SIZE=1: each of the {tasks.count} "
            "hosts would train a run of its own.\n  Give torchrun --nnodes and --rdzv-endpoint instead of --standalone."
        )
    return launch


def _of_tasks(environ: Mapping[str, str], tasks: Tasks) -> Launch:
    """srun and mpirun in torchrun's words; a variable of torchrun's that is set already must agree."""
    counts = {
        "RANK": tasks.rank,
        "WORLD_SIZE": tasks.count,
        "LOCAL_RANK": tasks.local_rank,
        "LOCAL_WORLD_SIZE": tasks.local_count,
    }
    for name, value in counts.items():
        if environ.get(name) and integer(environ, name) != value:
            raise ConfigError(
                f"environment: two launchers: {name}={environ[name]}, but by {tasks.launcher}'s variables it is "
                f"{value} ({tasks.rank_variable}={tasks.rank}, {tasks.count_variable}={tasks.count}).\n"
                f"  Unset {name}, or start it without {tasks.launcher}."
            )
    if not 0 <= tasks.local_rank < tasks.local_count <= tasks.count or not 0 <= tasks.rank < tasks.count:
        raise ConfigError(
            f"environment: {tasks.launcher}: expected a task among those of its host and of its job, found task "
            f"{tasks.rank} of {tasks.count} ({tasks.rank_variable}, {tasks.count_variable}), and {tasks.local_rank} of "
            f"{tasks.local_count} on this host."
        )
    address = environ.get("MASTER_ADDR") or tasks.first_host
    if not address:
        raise ConfigError(
            f"environment: {tasks.launcher} doesn't say which host is the first, where all processes meet.\n"
            "  Set it for all of them: export MASTER_ADDR=HOST before srun, mpirun -x MASTER_ADDR=HOST (Open MPI), "
            "mpirun -genv MASTER_ADDR HOST (MPICH, Intel MPI)."
        )
    meeting = {"MASTER_ADDR": address, "MASTER_PORT": environ.get("MASTER_PORT") or str(tasks.port)}
    _require_port(meeting)
    variables = {name: str(value) for name, value in counts.items()} | meeting
    return Launch(tasks.launcher, tasks.rank, tasks.local_rank, tasks.count, tasks.launcher, variables)


# --------------------------------------------------------------------------------------------------------- the end


def end_with_agent(environ: Mapping[str, str]) -> None:
    """Have the kernel kill a worker of torch's elastic agent (torchrun's, or our own) when the agent ends.

    Without it a SIGKILL of the agent leaves workers that train on, and the same command started again races them.
    Linux only. A plain start is left alone: whoever started it may end before it.
    """
    run = environ.get("TORCHELASTIC_RUN_ID")
    if run:
        end_with_parent(int(run.removeprefix(OUR_RUNS)) if run.startswith(OUR_RUNS) else os.getppid())


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent, process `parent`, ends. Linux only; else nothing."""
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL)) != 0:
        print("prctl failed: this process will outlive its launcher if that is killed", file=sys.stderr)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


class Stopped(BaseException):
    """A stop was requested before the first step, when there is nothing to save. No Exception: nobody takes it for a
    file's fault."""


class Interrupted(KeyboardInterrupt):
    """A second request: whoever sent it won't wait for the step and its save."""


def is_signal(error: BaseException) -> bool:
    """Whether a signal raised it: a request to stop, or Ctrl-C where Python's own handler is installed."""
    if not isinstance(error, KeyboardInterrupt):
        return isinstance(error, Stopped)
    is_main = threading.current_thread() is threading.main_thread()  # no other thread handles signals
    return isinstance(error, Interrupted) or (is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler)


@contextmanager
def early_stop() -> Generator[None]:
    """Before a StopRequest: SIGTERM raises Stopped. Else a shell would see 143, which promises a save."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # once
        raise Stopped(signal.Signals(number).name)

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)


class StopRequest:
    """While entered, SIGTERM and SIGINT request a stop.

        with StopRequest() as stop:
            ...                       # before the first step: a request raises Stopped here
            stop.begin_steps()        # from now on it only sets a flag and prints one line
            while not stop.requested: ...

    A second request ends the run at once by Interrupted, for someone who won't wait for the step and the save.
    Enter it in the main thread (Python handles signals nowhere else). Python runs a handler only between two of its own
    instructions, and a compiler may work for minutes: before the first step a thread ends the process if the main
    thread hasn't within `grace_s`.
    """

    def __init__(self, same_press_s: float = 1.0, grace_s: float = 2.0) -> None:
        # torch's elastic launcher passes a signal on to processes that already had it from the terminal or a
        # scheduler, so one request can arrive twice within milliseconds.
        self._same_press_s, self._grace_s = same_press_s, grace_s
        self._requested_at: float | None = None
        self._previous: dict[signal.Signals, Any] = {}
        self._ends_at_once, self._over = True, threading.Event()
        self.reason: str | None = None

    @property
    def requested(self) -> bool:
        return self.reason is not None

    def begin_steps(self) -> None:
        """From now on there is something to lose: a request waits for the current step and its save."""
        self._ends_at_once = False

    def __enter__(self) -> "Self":
        self._signals, self._wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        self._previous_wakeup = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._guard, name="portable_fsdp stop", daemon=True)
        self._thread.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            # None: the handler was installed by C code, which Python can't put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        self._over.set()
        os.close(self._wakeup)  # which ends the thread
        self._thread.join()
        os.close(self._signals)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._requested_at is not None:
            if now - self._requested_at > self._same_press_s:
                raise Interrupted
            return
        self._requested_at, self.reason = now, signal.Signals(number).name
        if self._ends_at_once:
            raise Stopped(self.reason)
        self._write(f"{self.reason}: ending after the current step and its save")

    def _guard(self) -> None:
        while numbers := os.read(self._signals, 1):
            number = numbers[0]
            if self._ends_at_once and number in self._previous and not self._over.wait(self._grace_s):
                self._write(f"stopped before the first step on request ({signal.Signals(number).name})")
                os._exit(EXIT_FAILED)

    def _write(self, sentence: str) -> None:
        if os.environ.get("RANK", "0") == "0":  # not by the log or print: the signal may have come while either writes
            os.write(2, f"{sentence}\n".encode())


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
