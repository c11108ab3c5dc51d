"""Every launcher, by the variables that it sets in a process."""

import pytest

from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.process import OUR_RUNS, Launch, _require_fixed_hosts, detect_launch
from portable_fsdp.runtime.tasks import first_host

SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NAME": "train",
    "SLURM_JOB_NODELIST": "gpu[07-09,12],login1",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_TASKS_PER_NODE": "4(x2)",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_MAX_RESTARTS": "3",
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "4",
    "MASTER_ADDR": "gpu07",
    "MASTER_PORT": "29500",
}
VARIABLES = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "gpu07", "MASTER_PORT": "29500"}
WORKERS = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "a,b,c"}
ONE_A_NODE = {**SRUN, "SLURM_NTASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_TASKS_PER_NODE": "1(x4)"}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize("name", ["interactive", "bash"])
def test_srun_typed_into_a_shell_of_slurms_starts_tasks(name: str) -> None:
    """It inherits the job's name: of salloc's shell, of `srun --pty bash`."""
    assert detect_launch({**SRUN, "SLURM_JOB_NAME": name}) == detect_launch(SRUN)


def test_srun_in_the_words_of_torchrun() -> None:
    launch = detect_launch(SRUN)
    assert launch == Launch("srun", rank=6, local_rank=2, world_size=8)
    assert launch.variables == {
        "RANK": "6",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "2",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "24711",
    }
    assert launch.said == "srun: 8 process(es), 4 of them on this host"
    assert not launch.is_alone


def test_a_translated_environment_says_the_same_again() -> None:
    for environ in (SRUN, {**OPEN_MPI, "MASTER_ADDR": "a"}, MPICH):
        launch = detect_launch(environ)
        again = detect_launch({**environ, **launch.variables})
        assert (again, again.variables, again.said) == (launch, launch.variables, launch.said)


def test_the_users_own_address_counts() -> None:
    variables = detect_launch({**SRUN, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "1234", "WORLD_SIZE": "8"}).variables
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("10.0.0.7", "1234")


def test_the_step_counts_where_it_is_a_part_of_the_job() -> None:
    step = {"SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_NODELIST": "gpu12", "SLURM_STEP_TASKS_PER_NODE": "4,3"}
    launch = detect_launch({**SRUN, **step, "SLURM_STEP_ID": "3"})
    assert launch.world_size == 7
    assert [launch.variables[name] for name in ("LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")] == [
        "3",
        "gpu12",
        "24714",
    ]


@pytest.mark.parametrize(
    "environ",
    [
        without(SRUN, "SLURM_STEP_ID"),  # the batch script
        {**SRUN, "SLURM_STEP_ID": "4294967291"},  # the same, as newer Slurm says it
        {**SRUN, "SLURM_STEP_ID": "4294967290"},  # salloc's shell
        {**SRUN, "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        {
            **SRUN,
            "SLURM_NTASKS": "1",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "MASTER_ADDR": "a",
            "MASTER_PORT": "1",
        },
        {"OMPI_COMM_WORLD_RANK": "0", **{name: "1" for name in OPEN_MPI if "SIZE" in name}}
        | {"OMPI_COMM_WORLD_LOCAL_RANK": "0"},
    ],
    ids=["batch", "batch step", "salloc", "one task", "one task and an address", "one of mpirun"],
)
def test_a_plain_start_within_a_launcher(environ: dict[str, str]) -> None:
    launch = detect_launch(environ)
    assert launch == Launch("plain", rank=0, local_rank=0, world_size=1)
    assert launch.is_alone
    assert launch.variables == {}


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu1", "gpu1"),
        ("gpu[1-3]", "gpu1"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("rack[2-3]n[07,9]-ib", "rack2n07-ib"),
        ("a,b[1-2]", "a"),
        ("tpu-1.zone.example,x", "tpu-1.zone.example"),
        ("", ""),
    ],
)
def test_the_first_host_of_a_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


def test_mpirun() -> None:
    launch = detect_launch({**OPEN_MPI, "MASTER_ADDR": "host-1"})
    assert launch == Launch("mpirun", rank=3, local_rank=1, world_size=4)
    assert launch.variables["LOCAL_WORLD_SIZE"] == "2"
    assert launch.variables["MASTER_PORT"] == "29500"
    alone = detect_launch(MPICH)
    assert alone == Launch("mpirun", rank=1, local_rank=1, world_size=2)
    assert alone.variables["MASTER_ADDR"] == "127.0.0.1"


def test_mpirun_on_several_hosts_asks_for_the_first() -> None:
    with pytest.raises(ConfigError, match="mpirun -x MASTER_ADDR=HOST"):
        detect_launch(OPEN_MPI)


def test_mpirun_in_a_slurm_job() -> None:
    """Its daemons are Slurm's tasks, one a host."""
    inside = {**ONE_A_NODE, **OPEN_MPI, "MASTER_ADDR": "gpu07"}
    assert detect_launch(inside) == Launch("mpirun", rank=3, local_rank=1, world_size=4)


@pytest.mark.parametrize("more", [{}, {"MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "4"}])
def test_srun_that_speaks_pmi(more: dict[str, str]) -> None:
    assert detect_launch({**SRUN, "PMI_RANK": "6", "PMI_SIZE": "8", **more}).kind == "srun"


def test_torchrun_says_its_restarts() -> None:
    launch = detect_launch(TORCHRUN)
    assert launch == Launch("torchrun", rank=5, local_rank=1, world_size=8)
    assert launch.said == "torchrun (restart 1 of 3): 8 process(es), 2 of them on this host"


def test_torchrun_in_a_task_a_node() -> None:
    """4 tasks, 8 processes: two on each node."""
    assert detect_launch({**ONE_A_NODE, **TORCHRUN}) == Launch("torchrun", rank=5, local_rank=1, world_size=8)
    assert detect_launch({**without(SRUN, "SLURM_STEP_ID"), **TORCHRUN}).kind == "torchrun"


def test_torchrun_with_a_number_of_hosts_that_changes() -> None:
    with pytest.raises(ConfigError, match=r"found --nnodes=1:4: a host .*\n  Give --nnodes=4\.") as error:
        detect_launch({**TORCHRUN, "PET_NNODES": "1:4"})
    assert "Nothing was started" in str(error.value)
    assert detect_launch({**TORCHRUN, "PET_NNODES": "4:4"}).kind == "torchrun"


@pytest.mark.parametrize("flag", [["--nnodes=2:4"], ["--nnodes", "2:4"]])
def test_the_flag_counts_before_the_variable(flag: list[str]) -> None:
    command = ["python", "torchrun", *flag, "-m", "portable_fsdp.launch"]
    with pytest.raises(ConfigError, match="found --nnodes=2:4"):
        _require_fixed_hosts({"PET_NNODES": "4"}, command)
    _require_fixed_hosts({"PET_NNODES": "1:4"}, ["torchrun", "--nnodes=4", "-m", "portable_fsdp.launch"])


def test_our_own_start() -> None:
    launch = detect_launch({**TORCHRUN, "TORCHELASTIC_RUN_ID": f"{OUR_RUNS}12", "TORCHELASTIC_MAX_RESTARTS": "0"})
    assert launch.said == "portable_fsdp.launch: 8 process(es), 2 of them on this host"


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "accelerate launch: 1 process(es)"),
        (
            {"ACCELERATE_MIXED_PRECISION": "bf16", "TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"},
            "TPU worker 1 of 2, of accelerate launch",
        ),
        (
            {**TORCHRUN, "ACCELERATE_MIXED_PRECISION": "no"},
            "torchrun (restart 1 of 3), of accelerate launch: 8 process(es), 2 of them on this host",
        ),
    ],
)
def test_accelerate_launch_is_named(environ: dict[str, str], said: str) -> None:
    launch = detect_launch(environ)
    assert launch.by_accelerate
    assert launch.said == said


@pytest.mark.parametrize(
    ("more", "said"),
    [({}, ""), ({"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "0"}, ", slice 0 of 2")],
)
def test_tpu_vm(more: dict[str, str], said: str) -> None:
    launch = detect_launch({"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "10.0.0.2,10.0.0.3", **more})
    assert launch == Launch("tpu_vm", rank=0, local_rank=0, world_size=1)
    assert launch.is_alone
    assert launch.said == f"TPU worker 1 of 2{said}"


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({**SRUN, "RANK": "0"}, r"RANK=0, but by srun's variables it is 6 \(SLURM_PROCID=6, SLURM_NTASKS=8\)"),
        ({**SRUN, "WORLD_SIZE": "2"}, "WORLD_SIZE=2, but by srun's variables it is 8"),
        ({**MPICH, "LOCAL_RANK": "0"}, r"LOCAL_RANK=0, but by mpirun's variables it is 1 \(PMI_RANK=1, PMI_SIZE=2\)"),
        ({**SRUN, **TORCHRUN}, "expected one task of srun a host .* found 4 on this host .SLURM_NTASKS=8."),
        ({**ONE_A_NODE, **TORCHRUN, "GROUP_WORLD_SIZE": "1"}, "SLURM_NTASKS=4, but torchrun's GROUP_WORLD_SIZE=1"),
        ({"TORCHELASTIC_RUN_ID": "none"}, "found none without RANK"),
        (without(SRUN, "SLURM_LOCALID"), "variables that srun sets, found none of SLURM_LOCALID"),
        (without(MPICH, "PMI_SIZE"), "variables that mpirun sets, found none of PMI_SIZE"),
        (without(SRUN, "SLURM_JOB_NODELIST"), "srun doesn't say which host is the first"),
        (
            {**SRUN, "SLURM_PROCID": "8"},
            "srun: expected a task among those of its host and of its job, found task 8 of 8",
        ),
        ({**SRUN, "SLURM_LOCALID": "4"}, "and 4 of 4 on this host"),
        ({**SRUN, "SLURM_NTASKS": "many"}, "SLURM_NTASKS: expected an integer, found 'many'"),
        ({**SRUN, "MASTER_PORT": "http"}, "MASTER_PORT: expected an integer, found 'http'"),
        ({**SRUN, "MASTER_PORT": "99999"}, "MASTER_PORT: expected a port from 1 to 65535, found 99999"),
        ({**VARIABLES, "MASTER_PORT": "99999"}, "MASTER_PORT: expected a port from 1 to 65535, found 99999"),
        ({**VARIABLES, "MASTER_PORT": "0"}, "MASTER_PORT: expected a port from 1 to 65535, found 0"),
        (
            {**VARIABLES, "LOCAL_WORLD_SIZE": "8"},
            "LOCAL_WORLD_SIZE <= WORLD_SIZE, found LOCAL_RANK=1, LOCAL_WORLD_SIZE=8, WORLD_SIZE=4",
        ),
        ({**VARIABLES, "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK < LOCAL_WORLD_SIZE <= WORLD_SIZE, found LOCAL_RANK=1"),
        ({**VARIABLES, "LOCAL_WORLD_SIZE": "two"}, "LOCAL_WORLD_SIZE: expected an integer, found 'two'"),
        ({**WORKERS, "TPU_WORKER_ID": "3"}, "TPU_WORKER_ID=3, but TPU_WORKER_HOSTNAMES names 3 worker"),
        ({**WORKERS, "TPU_WORKER_ID": "first"}, "TPU_WORKER_ID=first is no number"),
        ({**VARIABLES, **WORKERS}, r"two launchers: WORLD_SIZE=4 .* TPU_WORKER_HOSTNAMES names 3 workers"),
    ],
)
def test_contradictions_name_the_variables(environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        detect_launch(environ)


@pytest.mark.parametrize(
    ("environ", "kind"),
    [
        ({**VARIABLES, **WORKERS, "TPU_WORKER_HOSTNAMES": "a,b"}, "variables"),  # two processes on each host
        ({**VARIABLES, **WORKERS, "TPU_WORKER_HOSTNAMES": "localhost"}, "variables"),  # all on one
        ({**TORCHRUN, **WORKERS}, "torchrun"),  # on each host of a slice by itself, a process for each chip
        (WORKERS, "tpu_vm"),
        ({**VARIABLES, "LOCAL_WORLD_SIZE": "4"}, "variables"),
    ],
)
def test_what_does_not_contradict_itself(environ: dict[str, str], kind: str) -> None:
    assert detect_launch(environ).kind == kind
