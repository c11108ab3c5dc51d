"""Every launcher, by the variables that it sets in a process."""

import re

import pytest

from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.launchers import OUR_RUNS, Launch, detect_launch, first_host

Environ = dict[str, str]

SRUN = {
    **{"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train", "SLURM_JOB_NODELIST": "gpu[07-09,12],login1"},
    **{"SLURM_STEP_ID": "0", "SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_NODEID": "1", "SLURM_PROCID": "6"},
    **{"SLURM_LOCALID": "2", "SLURM_TASKS_PER_NODE": "4(x2)"},
}
ONE_TASK = {**SRUN, "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
ONE_A_NODE = {**SRUN, "SLURM_NTASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_TASKS_PER_NODE": "1(x4)"}
OPEN_MPI = {
    **{"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"},
    **{"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
}
ONE_OF_MPI = {name: "1" if "SIZE" in name else "0" for name in OPEN_MPI}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
VARIABLES = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "gpu07", "MASTER_PORT": "29500"}
TORCHRUN = {
    **{"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1", "TORCHELASTIC_MAX_RESTARTS": "3"},
    **{**VARIABLES, "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "4"},
}
OURS = {**TORCHRUN, "TORCHELASTIC_RUN_ID": f"{OUR_RUNS}12", "TORCHELASTIC_MAX_RESTARTS": "0"}
WORKERS = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "a,b,c"}
TWO_SLICES = {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "0"}
BY_ACCELERATE = {"ACCELERATE_MIXED_PRECISION": "no"}


def without(environ: Environ, *names: str) -> Environ:
    return {name: value for name, value in environ.items() if name not in names}


PLAIN, TPU_VM = Launch("plain"), Launch("tpu_vm")
OF_TORCHRUN, OF_VARIABLES = Launch("torchrun", 5, 1, 8), Launch("variables", 5, 1, 8)
OF_SRUN, OF_MPIRUN = Launch("srun", 6, 2, 8), Launch("mpirun", 3, 1, 4)
ALL_VARIABLES = "RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"
TWO_HERE = "8 process(es), 2 of them on this host"
LAUNCHES: list[tuple[Environ, Launch, str | None]] = [  # and the description
    ({"PATH": "/bin"}, PLAIN, "hand (no launcher)"),
    (TORCHRUN, OF_TORCHRUN, f"torchrun (restart 1 of 3): {TWO_HERE}"),
    (OURS, OF_TORCHRUN, f"portable_fsdp.launch: {TWO_HERE}"),
    (VARIABLES, OF_VARIABLES, f"{ALL_VARIABLES} in the environment: 8 process(es)"),
    (SRUN, OF_SRUN, "srun: 8 process(es), 4 of them on this host"),
    # srun typed into a shell of Slurm's inherits the job's name: of salloc's shell, of `srun --pty bash`.
    *(({**SRUN, "SLURM_JOB_NAME": name}, OF_SRUN, None) for name in ("interactive", "bash")),
    # srun sets PMI's variables too.
    ({**SRUN, "PMI_RANK": "6", "PMI_SIZE": "8"}, OF_SRUN, None),
    ({**SRUN, "PMI_RANK": "6", "PMI_SIZE": "8", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"}, OF_SRUN, None),
    ({**OPEN_MPI, "MASTER_ADDR": "a"}, OF_MPIRUN, "mpirun: 4 process(es), 2 of them on this host"),
    (MPICH, Launch("mpirun", 1, 1, 2), None),
    # mpirun in a Slurm job: its daemons are Slurm's tasks, one a host.
    ({**ONE_A_NODE, **OPEN_MPI, "MASTER_ADDR": "gpu07"}, OF_MPIRUN, None),
    # torchrun in a task a node: 4 tasks, 8 processes; and in a batch script.
    ({**ONE_A_NODE, **TORCHRUN}, OF_TORCHRUN, None),
    ({**without(SRUN, "SLURM_STEP_ID"), **TORCHRUN}, OF_TORCHRUN, None),
    # Plain starts within a launcher: the batch script, as newer Slurm says it, salloc's shell, single tasks.
    (without(SRUN, "SLURM_STEP_ID"), PLAIN, "hand (no launcher)"),
    *(({**SRUN, "SLURM_STEP_ID": number}, PLAIN, None) for number in ("4294967291", "4294967290")),
    (ONE_TASK, PLAIN, "srun, as its only task"),
    ({**ONE_TASK, "MASTER_ADDR": "a", "MASTER_PORT": "1"}, PLAIN, "srun, as its only task"),
    (ONE_OF_MPI, PLAIN, "mpirun, as its only task"),
    (WORKERS, TPU_VM, "TPU worker 1 of 3"),
    ({**WORKERS, **TWO_SLICES}, TPU_VM, "TPU worker 1 of 3, slice 0 of 2"),
    # What doesn't contradict itself: two processes on each host, all on one, torchrun on each host of a slice.
    *(({**VARIABLES, **WORKERS, "TPU_WORKER_HOSTNAMES": names}, OF_VARIABLES, None) for names in ("a,b", "localhost")),
    ({**TORCHRUN, **WORKERS}, OF_TORCHRUN, None),
    ({**VARIABLES, "LOCAL_WORLD_SIZE": "8"}, OF_VARIABLES, None),
    (BY_ACCELERATE, Launch("plain", by_accelerate=True), "accelerate launch: 1 process(es)"),
    ({**WORKERS, **BY_ACCELERATE}, Launch("tpu_vm", by_accelerate=True), "TPU worker 1 of 3, of accelerate launch"),
    (
        {**without(TORCHRUN, "TORCHELASTIC_MAX_RESTARTS"), **BY_ACCELERATE},
        Launch("torchrun", 5, 1, 8, by_accelerate=True),
        f"torchrun, of accelerate launch: {TWO_HERE}",
    ),
]


@pytest.mark.parametrize(("environ", "launch", "description"), LAUNCHES)
def test_a_launcher_is_known_by_its_variables(environ: Environ, launch: Launch, description: str | None) -> None:
    detected = detect_launch(environ)
    assert detected == launch
    assert detected.is_alone == (launch.kind in ("plain", "tpu_vm"))
    assert description is None or detected.description == description
    again = detect_launch({**environ, **detected.variables})  # a translated environment says the same
    assert (again, again.variables, again.description) == (detected, detected.variables, detected.description)


OWN_ADDRESS = {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "1234"}
STEP = {"SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_NODELIST": "gpu12", "SLURM_STEP_TASKS_PER_NODE": "4,3"}
OF_TORCH: list[tuple[Environ, str]] = [
    *(({"PATH": "/bin"}, ""), (ONE_TASK, "")),
    (SRUN, "RANK=6 WORLD_SIZE=8 LOCAL_RANK=2 LOCAL_WORLD_SIZE=4 MASTER_ADDR=gpu07 MASTER_PORT=24711"),
    ({**OPEN_MPI, "MASTER_ADDR": "host-1"}, "LOCAL_WORLD_SIZE=2 MASTER_PORT=29500"),
    (MPICH, "MASTER_ADDR=127.0.0.1"),
    # The user's own address counts, and the step where it is a part of the job.
    ({**SRUN, **OWN_ADDRESS, "WORLD_SIZE": "8"}, "MASTER_ADDR=10.0.0.7 MASTER_PORT=1234"),
    ({**SRUN, **STEP, "SLURM_STEP_ID": "3"}, "WORLD_SIZE=7 LOCAL_WORLD_SIZE=3 MASTER_ADDR=gpu12 MASTER_PORT=24714"),
]
FIRST_HOSTS = {
    **{"gpu1": "gpu1", "gpu[1-3]": "gpu1", "gpu[07-09,12],login1": "gpu07", "rack[2-3]n[07,9]-ib": "rack2n07-ib"},
    **{"a,b[1-2]": "a", "tpu-1.zone.example,x": "tpu-1.zone.example", "": ""},
}


def test_torch_reads_torchruns_variables_and_the_first_host_of_a_list_is_the_address() -> None:
    for environ, variables in OF_TORCH:
        detected = [f"{name}={value}" for name, value in detect_launch(environ).variables.items()]
        assert {*variables.split()} <= {*detected}, environ
        assert bool(variables) == bool(detected), environ
    assert {nodes: first_host(nodes) for nodes in FIRST_HOSTS} == FIRST_HOSTS


REFUSED: dict[str, Environ] = {
    "found RANK=5, WORLD_SIZE=8 without LOCAL_RANK, MASTER_ADDR, MASTER_PORT": {"RANK": "5", "WORLD_SIZE": "8"},
    "without MASTER_ADDR": {**VARIABLES, "MASTER_ADDR": ""},
    "found none without RANK": {"TORCHELASTIC_RUN_ID": "none"},
    **{
        f"environment: {name}: expected an integer, found 'x'": {**VARIABLES, name: "x"}
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
    },
    **{
        f"< WORLD_SIZE, found {words}": VARIABLES | dict(word.split("=") for word in words.split(", "))
        for lr, rank, size in ((1, 8, 8), (1, -1, 8), (6, 5, 8), (1, 5, 0))
        for words in (f"LOCAL_RANK={lr}, RANK={rank}, WORLD_SIZE={size}",)
    },
    "RANK=0, but by srun's variables it is 6 (SLURM_PROCID=6, SLURM_NTASKS=8)": {**SRUN, "RANK": "0"},
    "WORLD_SIZE=2, but by srun's variables it is 8": {**SRUN, "WORLD_SIZE": "2"},
    "LOCAL_RANK=0, but by mpirun's variables it is 1 (PMI_RANK=1, PMI_SIZE=2)": {**MPICH, "LOCAL_RANK": "0"},
    "one task of srun per host to run torchrun, found 4 on this host (SLURM_NTASKS=8)": {**SRUN, **TORCHRUN},
    "SLURM_NTASKS=4, but torchrun's GROUP_WORLD_SIZE=1": {**ONE_A_NODE, **TORCHRUN, "GROUP_WORLD_SIZE": "1"},
    "SLURM_LOCALID: expected an integer, found ''": without(SRUN, "SLURM_LOCALID"),
    "srun doesn't name the first host": without(SRUN, "SLURM_JOB_NODELIST"),
    "mpirun -x MASTER_ADDR=HOST": OPEN_MPI,
    "RANK=8, WORLD_SIZE=8": {**SRUN, "SLURM_PROCID": "8"},
    "SLURM_NTASKS: expected an integer, found 'many'": {**SRUN, "SLURM_NTASKS": "many"},
    "MASTER_PORT: expected an integer, found 'http'": {**SRUN, "MASTER_PORT": "http"},
    "MASTER_PORT: expected a port from 1 to 65535, found 99999": {**SRUN, "MASTER_PORT": "99999"},
    "MASTER_PORT: expected a port from 1 to 65535, found 65536": {**VARIABLES, "MASTER_PORT": "65536"},
    "MASTER_PORT: expected a port from 1 to 65535, found 0": {**VARIABLES, "MASTER_PORT": "0"},
    "LOCAL_WORLD_SIZE: expected at least 1, found 0": {**VARIABLES, "LOCAL_WORLD_SIZE": "0"},
    "LOCAL_WORLD_SIZE: expected an integer, found 'two'": {"LOCAL_WORLD_SIZE": "two"},
    "two launchers: WORLD_SIZE=8 (by RANK, ": {**VARIABLES, **WORKERS},
}


@pytest.mark.parametrize("message", REFUSED)
def test_contradictions_name_the_variables(message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        detect_launch(REFUSED[message])
