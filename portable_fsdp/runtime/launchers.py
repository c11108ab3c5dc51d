"""Detect the launcher of this process. Device counts come from the engine, never from here."""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

from portable_fsdp.runtime.errors import ConfigError

COUNTING_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
LAUNCH_VARIABLES = (*COUNTING_VARIABLES, "MASTER_ADDR", "MASTER_PORT")
OUR_RUNS = "portable_fsdp.launch-"
"""Prefix of the elastic run id when `launch` starts the processes itself; the agent's PID follows."""

RESTARTS = "PORTABLE_FSDP_RESTARTS"
"""The variable in which the supervisor (failures.py) tells a run how often it was started before."""

NOT_A_STEP = (2**32 - 6, 2**32 - 5)  # slurm.h: the steps of an interactive shell and of the batch script itself
PORTS = range(20000, 30000)  # below Linux's ephemeral ports
MPI_PORT = 29500  # torch's default; mpirun provides no job number that all hosts know


@dataclass(frozen=True)
class _Tasks:
    """The tasks that one launcher started, and the index of this process among them."""

    launcher: Literal["srun", "mpirun"]
    rank: int
    count: int
    local_rank: int
    local_count: int  # tasks on this host
    rank_variable: str  # source of `rank`, for messages
    count_variable: str
    first_host: str  # empty if the launcher doesn't name it
    port: int


def _read_tasks(environ: Mapping[str, str]) -> _Tasks | None:
    """Return the tasks of srun or mpirun, or None. Raises ConfigError for variables that aren't numbers.

    In a Slurm allocation mpirun starts its daemons with srun, one per host, and its tasks inherit their variables: then
    MPI's count is right. srun itself also sets PMI's variables, to the same numbers.
    """
    slurm, mpi = _slurm(environ), _mpi(environ)
    if slurm is None or mpi is None:
        return slurm or mpi
    is_pmi_of_srun = mpi.rank_variable == "PMI_RANK" and (mpi.rank, mpi.count) == (slurm.rank, slurm.count)
    return slurm if is_pmi_of_srun else mpi


def _slurm(environ: Mapping[str, str]) -> _Tasks | None:
    """Return srun's tasks; None for the batch script and for shells, which also have these variables."""
    is_step = environ.get("SLURM_PROCID") and environ.get("SLURM_STEP_ID")
    if not is_step or _integer(environ, "SLURM_STEP_ID") in NOT_A_STEP:
        return None
    count_variable = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    names = ("SLURM_PROCID", count_variable, "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_ID")
    rank, count, local_rank, job, step = (_integer(environ, name) for name in names)
    host = first_host(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "")
    port = PORTS[(job + step) % len(PORTS)]  # different for jobs that share a host, and for steps of a job
    local_count = _tasks_of_this_node(environ, count)
    return _Tasks("srun", rank, count, local_rank, local_count, "SLURM_PROCID", count_variable, host, port)


def _tasks_of_this_node(environ: Mapping[str, str], count: int) -> int:
    """Return this node's tasks from `4(x2),3`: four tasks on each of the first two nodes, three on the third."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    per_node: list[int] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        per_node += [int(tasks)] * int(times or 1)
    node = _integer(environ, "SLURM_NODEID", 0)
    return per_node[node] if node < len(per_node) else max(1, count // max(1, _integer(environ, "SLURM_NNODES", 1)))


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's list: `rack2n07` of `rack2n[07-09,12],login1`; empty for an empty list."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def _mpi(environ: Mapping[str, str]) -> _Tasks | None:
    """Return mpirun's tasks from the variables of Open MPI, or of MPICH and Intel MPI; None without them."""
    names = (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
        if environ.get("OMPI_COMM_WORLD_RANK")
        else ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    )
    if not environ.get(names[0]):
        return None
    if names[0] == "PMI_RANK" and environ.get("SLURM_PROCID") == environ["PMI_RANK"] and not environ.get(names[2]):
        return None  # srun --mpi=pmi2, which sets none of the other variables
    rank, count, local_rank, local_count = (_integer(environ, name) for name in names)
    host = "127.0.0.1" if local_count == count else ""
    return _Tasks("mpirun", rank, count, local_rank, local_count, names[0], names[1], host, MPI_PORT)


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the variable as an integer, or `default` without it. Raises ConfigError if it is missing or no integer."""
    if default is not None and not environ.get(name):
        return default
    try:
        return int(environ.get(name, ""))
    except ValueError:
        raise ConfigError(f"environment: {name}: expected an integer, found {environ.get(name, '')!r}.") from None


@dataclass(frozen=True)
class Launch:
    """The launch of this process, in torchrun's terms."""

    kind: Literal["plain", "torchrun", "srun", "mpirun", "variables", "tpu_vm"]
    rank: int = 0  # among all processes
    local_rank: int = 0  # among the processes of this host
    world_size: int = 1  # processes
    description: str = field(default="", compare=False)  # the launcher, for the first line of a run
    variables: Mapping[str, str] = field(default_factory=dict, compare=False)
    """torch's environment variables, if the launcher sets others."""
    by_accelerate: bool = False  # `accelerate launch`, which sets the number of processes
    restarts: int = field(default=0, compare=False)
    """Failed starts before this one, as counted by torchrun or by our supervisor."""

    @property
    def is_alone(self) -> bool:
        """Whether no launcher counts this host's processes, so that there is no rendezvous address."""
        return self.kind in ("plain", "tpu_vm")


def detect_launch(environ: Mapping[str, str]) -> Launch:
    """Detect the launcher: torchrun, srun, mpirun, another one that sets torchrun's five variables, or none.

    Raises ConfigError with the variables if only some are set, or two launchers contradict each other.
    """
    tasks = _read_tasks(environ)
    if (local_size := _integer(environ, "LOCAL_WORLD_SIZE", 1)) < 1:
        raise ConfigError(f"environment: LOCAL_WORLD_SIZE: expected at least 1, found {local_size}.")
    # A script may export an address for its tasks although a single task needs none.
    names = LAUNCH_VARIABLES if tasks is None else COUNTING_VARIABLES
    if environ.get("TORCHELASTIC_RUN_ID"):
        launch = _torchrun(environ, tasks)
    elif tasks is not None and tasks.count > 1:
        launch = _of_tasks(environ, tasks)
    elif any(environ.get(name) for name in names):
        launch = _of_variables(environ, "variables", f"{', '.join(LAUNCH_VARIABLES)} in the environment")
        _require_all_tpu_workers(environ, launch)
    elif tpu_workers(environ):
        launch = _tpu_vm(environ)
    else:
        launcher = "hand (no launcher)" if tasks is None else f"{tasks.launcher}, as its only task"
        launch = Launch("plain", description=launcher)
    by_accelerate = is_by_accelerate(environ)
    restarts = sum(_integer(environ, name, 0) for name in (RESTARTS, "TORCHELASTIC_RESTART_COUNT"))
    description = _describe(launch, by_accelerate, environ)
    return replace(launch, by_accelerate=by_accelerate, description=description, restarts=restarts)


def is_by_accelerate(environ: Mapping[str, str]) -> bool:
    """Return whether `accelerate launch` started this process: it always sets this variable."""
    return bool(environ.get("ACCELERATE_MIXED_PRECISION"))


def _describe(launch: Launch, by_accelerate: bool, environ: Mapping[str, str]) -> str:
    if by_accelerate and launch.kind == "plain":
        return "accelerate launch: 1 process(es)"  # it started only this process
    description = launch.description + (", of accelerate launch" if by_accelerate else "")
    if launch.is_alone:
        return description
    local = {**environ, **launch.variables}.get("LOCAL_WORLD_SIZE")
    return f"{description}: {launch.world_size} process(es)" + (f", {local} of them on this host" if local else "")


# ------------------------------------------------------------------------------------------------------------- TPU VMs


def tpu_workers(environ: Mapping[str, str]) -> list[str]:
    """Return the hosts of a TPU slice; empty if the environment doesn't name them."""
    return [name for name in environ.get("TPU_WORKER_HOSTNAMES", "").split(",") if name]


def hosts_of(device: str, environ: Mapping[str, str]) -> int:
    """Return the number of hosts of a run without a launcher: those of the TPU slice on TPUs, else 1."""
    return max(1, len(tpu_workers(environ))) if device == "tpu" else 1


def problem_of_tpu_hosts(environ: Mapping[str, str]) -> str:
    """Return the problem of a slice of several hosts that doesn't number this one, with its fix, or an empty string."""
    if (count := len(tpu_workers(environ))) < 2 or environ.get("TPU_WORKER_ID"):
        return ""
    return (
        f"TPU_WORKER_HOSTNAMES names {count} hosts, but TPU_WORKER_ID is not set.\n"
        "  Set it to this host's index in that list, from 0 (launch/tpu_vm.sh does)."
    )


def problem_of_tpu_worker(environ: Mapping[str, str]) -> str:
    """Return the problem with the worker's number in the environment, or an empty string."""
    number, count = environ.get("TPU_WORKER_ID", ""), len(tpu_workers(environ))
    if number and not number.isdecimal():
        return f"TPU_WORKER_ID={number} is not a number"
    if number and count and int(number) >= count:
        return f"TPU_WORKER_ID={number}, but TPU_WORKER_HOSTNAMES names {count} worker(s)"
    return ""


def _tpu_vm(environ: Mapping[str, str]) -> Launch:
    """Return the launch of one process per host: PJRT itself finds their number and the index of this one."""
    slices = environ.get("MEGASCALE_NUM_SLICES")
    of_slice = f", slice {environ.get('MEGASCALE_SLICE_ID', '?')} of {slices}" if slices else ""
    worker = f"TPU worker {environ.get('TPU_WORKER_ID', '?')} of {len(tpu_workers(environ))}"
    return Launch("tpu_vm", description=worker + of_slice)


def _require_all_tpu_workers(environ: Mapping[str, str], launch: Launch) -> None:
    """Require a WORLD_SIZE that covers all TPU workers; only torchrun may run on each host separately."""
    workers = len(tpu_workers(environ))
    if workers > 1 and launch.world_size % workers:
        raise ConfigError(
            f"environment: two launchers: WORLD_SIZE={launch.world_size} (by {launch.description}), but "
            f"TPU_WORKER_HOSTNAMES names {workers} workers, which must have equal numbers of processes.\n"
            f"  Unset {', '.join(LAUNCH_VARIABLES)}: on a TPU slice start the command on each host without them."
        )


# ------------------------------------------------------------------------------------------------ torchrun's variables


def _of_variables(
    environ: Mapping[str, str], kind: Literal["torchrun", "srun", "mpirun", "variables"], description: str
) -> Launch:
    missing = [name for name in LAUNCH_VARIABLES if not environ.get(name)]
    if missing:
        present = [f"{name}={environ[name]}" for name in LAUNCH_VARIABLES if name not in missing]
        raise ConfigError(
            f"environment: expected all or none of {', '.join(LAUNCH_VARIABLES)}, found {', '.join(present) or 'none'} "
            f"without {', '.join(missing)}.\n  Start with torchrun, which sets all five, or unset them."
        )
    rank, local_rank, world_size = (_integer(environ, name) for name in COUNTING_VARIABLES)
    if not 1 <= _integer(environ, "MASTER_PORT") <= 65535:
        port = environ["MASTER_PORT"]
        raise ConfigError(f"environment: MASTER_PORT: expected a port from 1 to 65535, found {port}.")
    if not 0 <= local_rank <= rank < world_size:
        raise ConfigError(
            "environment: expected 0 <= LOCAL_RANK <= RANK < WORLD_SIZE, found "
            f"LOCAL_RANK={local_rank}, RANK={rank}, WORLD_SIZE={world_size}.\n"
            "  Start with torchrun, which sets them, or unset them."
        )
    return Launch(kind, rank, local_rank, world_size, description)


def _torchrun(environ: Mapping[str, str], tasks: _Tasks | None) -> Launch:
    """Return torchrun's launch. In a task of srun or mpirun, torchrun is one agent: its group has one host per task.

    So 4 tasks and a WORLD_SIZE of 8 are two processes per host.
    """
    is_ours = environ["TORCHELASTIC_RUN_ID"].startswith(OUR_RUNS)
    description = "portable_fsdp.launch" if is_ours else "torchrun"
    if environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        count, limit = environ.get("TORCHELASTIC_RESTART_COUNT"), environ["TORCHELASTIC_MAX_RESTARTS"]
        description += f" (restart {count} of {limit})"
    launch = _of_variables(environ, "torchrun", description)
    if tasks is None or tasks.count == 1:
        return launch
    of_tasks = f"{tasks.count_variable}={tasks.count}"
    if tasks.local_count > 1:
        raise ConfigError(
            f"environment: two launchers: expected one task of {tasks.launcher} per host to run torchrun, "
            f"found {tasks.local_count} on this host ({of_tasks}) and torchrun's WORLD_SIZE={launch.world_size}.\n"
            "  Start torchrun with --ntasks-per-node=1 (mpirun: one task per host), or leave torchrun out."
        )
    if environ.get("GROUP_WORLD_SIZE") == "1":
        raise ConfigError(
            f"environment: two launchers: {of_tasks}, but torchrun's GROUP_WORLD_SIZE=1: each of the {tasks.count} "
            "hosts would train its own run.\n  Pass torchrun --nnodes and --rdzv-endpoint instead of --standalone."
        )
    return launch


def elastic_hosts(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Return MIN and MAX of `torchrun --nnodes=MIN:MAX`, which workers get no variable for; None without them."""
    import psutil

    if not environ.get("TORCHELASTIC_RUN_ID") or environ["TORCHELASTIC_RUN_ID"].startswith(OUR_RUNS):
        return None
    nnodes = environ.get("PET_NNODES", "")  # torchrun's variable for the flag, which takes precedence
    for process in psutil.Process().parents():
        with suppress(psutil.Error):  # another user's, where /proc is hidden
            words = process.cmdline()
            if any(word.endswith("torchrun") or word == "torch.distributed.run" for word in words):
                found = re.search(r" --nnodes[= ](\S+)", " ".join(words))
                nnodes = found[1] if found else nnodes
                break
    least, _, most = nnodes.partition(":")
    is_range = least.isdecimal() and most.isdecimal() and int(least) < int(most)
    return (int(least), int(most)) if is_range else None


def _of_tasks(environ: Mapping[str, str], tasks: _Tasks) -> Launch:
    """Return the launch of srun or mpirun in torchrun's terms; torchrun variables that are already set must agree."""
    counts = {
        "RANK": tasks.rank,
        "WORLD_SIZE": tasks.count,
        "LOCAL_RANK": tasks.local_rank,
        "LOCAL_WORLD_SIZE": tasks.local_count,
    }
    for name, value in counts.items():
        if _integer(environ, name, value) != value:
            raise ConfigError(
                f"environment: two launchers: {name}={environ[name]}, but by {tasks.launcher}'s variables it is "
                f"{value} ({tasks.rank_variable}={tasks.rank}, {tasks.count_variable}={tasks.count}).\n"
                f"  Unset {name}, or start it without {tasks.launcher}."
            )
    address = environ.get("MASTER_ADDR") or tasks.first_host
    if not address:
        raise ConfigError(
            f"environment: {tasks.launcher} doesn't name the first host, where all processes meet.\n"
            "  Set it for all processes: export MASTER_ADDR=HOST before srun, mpirun -x MASTER_ADDR=HOST (Open MPI), "
            "mpirun -genv MASTER_ADDR HOST (MPICH, Intel MPI)."
        )
    meeting = {"MASTER_ADDR": address, "MASTER_PORT": environ.get("MASTER_PORT") or str(tasks.port)}
    variables = {name: str(value) for name, value in counts.items()} | meeting
    return replace(_of_variables(variables, tasks.launcher, tasks.launcher), variables=variables)
