"""The tasks that `srun` or `mpirun` started, read from the variables that they set in each."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from portable_fsdp.runtime.errors import ConfigError

NOT_A_STEP = (2**32 - 6, 2**32 - 5)  # slurm.h: the steps of an interactive shell and of the batch script itself
PORTS = range(20000, 30000)  # below those that Linux gives to clients
MPI_PORT = 29500  # torch's own; mpirun gives no number of a job that all its hosts know


@dataclass(frozen=True)
class Tasks:
    """The tasks that one launcher started, and which of them this process is."""

    launcher: Literal["srun", "mpirun"]
    rank: int
    count: int
    local_rank: int
    local_count: int  # of this host
    rank_variable: str  # where `rank` was read, for messages
    count_variable: str
    first_host: str  # empty where the launcher doesn't name it
    port: int


def read_tasks(environ: Mapping[str, str]) -> Tasks | None:
    """None where neither started this process. Raises ConfigError for variables that are no numbers.

    mpirun in a Slurm allocation starts its own daemons with srun, one a host, whose variables its tasks inherit: then
    MPI's count. srun itself sets PMI's variables too, to the same numbers.
    """
    slurm, mpi = _slurm(environ), _mpi(environ)
    if slurm is None or mpi is None:
        return slurm or mpi
    is_pmi_of_srun = mpi.rank_variable == "PMI_RANK" and (mpi.rank, mpi.count) == (slurm.rank, slurm.count)
    return slurm if is_pmi_of_srun else mpi


def _slurm(environ: Mapping[str, str]) -> Tasks | None:
    """None for the batch script and for shells, which have such variables too."""
    if not environ.get("SLURM_PROCID") or not environ.get("SLURM_STEP_ID"):
        return None
    if integer(environ, "SLURM_STEP_ID") in NOT_A_STEP:
        return None
    count_variable = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    _require(environ, "srun", count_variable, "SLURM_LOCALID", "SLURM_JOB_ID")
    names = ("SLURM_PROCID", count_variable, "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_ID")
    rank, count, local_rank, job, step = (integer(environ, name) for name in names)
    host = first_host(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "")
    port = PORTS[(job + step) % len(PORTS)]  # two jobs that share a host, or two steps of one, don't collide
    local_count = _tasks_of_this_node(environ, count)
    return Tasks("srun", rank, count, local_rank, local_count, "SLURM_PROCID", count_variable, host, port)


def _tasks_of_this_node(environ: Mapping[str, str], count: int) -> int:
    """From `4(x2),3`: four tasks on each of the first two nodes, three on the third."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    per_node: list[int] = []
    for tasks, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        per_node += [int(tasks)] * int(times or 1)
    node = integer(environ, "SLURM_NODEID") if environ.get("SLURM_NODEID") else 0
    if node < len(per_node):
        return per_node[node]
    nodes = integer(environ, "SLURM_NNODES") if environ.get("SLURM_NNODES") else 1
    return max(1, count // max(1, nodes))


def first_host(nodes: str) -> str:
    """`rack2n07` of Slurm's `rack2n[07-09,12],login1`; empty for an empty list."""
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def _mpi(environ: Mapping[str, str]) -> Tasks | None:
    """Open MPI's variables, or those of MPICH and Intel MPI."""
    names = (
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
        if environ.get("OMPI_COMM_WORLD_RANK")
        else ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    )
    if not environ.get(names[0]):
        return None
    if names[0] == "PMI_RANK" and environ.get("SLURM_PROCID") == environ["PMI_RANK"] and not environ.get(names[2]):
        return None  # srun --mpi=pmi2, which knows no other name of these
    _require(environ, "mpirun", *names)
    rank, count, local_rank, local_count = (integer(environ, name) for name in names)
    host = "127.0.0.1" if local_count == count else ""
    return Tasks("mpirun", rank, count, local_rank, local_count, names[0], names[1], host, MPI_PORT)


def _require(environ: Mapping[str, str], launcher: str, *names: str) -> None:
    missing = [name for name in names if not environ.get(name)]
    if missing:
        raise ConfigError(
            f"environment: expected all variables that {launcher} sets, found none of {', '.join(missing)}.\n"
            f"  Start it with {launcher} itself, or unset its other variables."
        )


def integer(environ: Mapping[str, str], name: str) -> int:
    """Raises ConfigError for what is no integer."""
    try:
        return int(environ[name])
    except ValueError:
        raise ConfigError(f"environment: {name}: expected an integer, found {environ[name]!r}.") from None
