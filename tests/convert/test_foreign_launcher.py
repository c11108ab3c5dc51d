"""What a file or environment says of processes, hosts and the device is compared with the actual start."""

import re
from contextlib import nullcontext
from pathlib import Path

import pytest
from foreign_files import REST, environ_of

from portable_fsdp import launch
from portable_fsdp.convert.facts import check_launcher_facts
from portable_fsdp.convert.read import load_config, read_config
from portable_fsdp.runtime.errors import ConfigError

OURS = Path(__file__).parents[2] / "configs/quickstart.yaml"


TORCHRUN = "GROUP_WORLD_SIZE=2 GROUP_RANK=1"
BATCH_SCRIPT = "SLURM_JOB_ID=1 SLURM_NTASKS=8 SLURM_NNODES=2 SLURM_NODEID=1 SLURM_PROCID=4 SLURM_LOCALID=0"
SRUN = f"{BATCH_SCRIPT} SLURM_STEP_ID=0"
MPIRUN = "PMI_RANK=4 PMI_SIZE=8 MPI_LOCALRANKID=0 MPI_LOCALNRANKS="
TPU = "TPU_WORKER_HOSTNAMES=a,b TPU_WORKER_ID="
SLICES = f"{TPU}0 MEGASCALE_NUM_SLICES=2 MEGASCALE_SLICE_ID=1"
BOTH = "num_machines: expected {}, machine_rank: expected {}"


@pytest.mark.parametrize(
    ("environ", "machines", "rank", "wrong"),
    [
        (TORCHRUN, 2, 1, ""),
        (TORCHRUN, 3, 0, BOTH.format(2, 1)),
        (f"{SRUN} {TORCHRUN} SLURM_NTASKS=2", 2, 1, ""),
        (SRUN, 2, 1, ""),
        (SRUN, 1, 0, BOTH.format(2, 1)),
        (f"{SRUN} SLURM_NNODES=9 SLURM_STEP_NUM_NODES=2", 2, 1, ""),
        (BATCH_SCRIPT, 5, 4, ""),
        (f"{MPIRUN}4", 2, 0, ""),  # it doesn't number its hosts
        (f"{MPIRUN}4", 1, 0, "num_machines: expected 2"),
        (f"{MPIRUN}8", 2, 1, BOTH.format(1, 0)),
        (f"{TPU}1", 2, 1, ""),
        (f"{TPU}1", 3, 0, BOTH.format(2, 1)),
        (f"{TPU}1", 1, 0, ""),  # `accelerate config` doesn't ask for the hosts of a TPU
        (SLICES, 4, 2, ""),
        (SLICES, 2, 0, BOTH.format(4, 2)),
        ("", 5, 4, ""),  # nothing is started here: explain
        ("WORLD_SIZE=4 LOCAL_WORLD_SIZE=4", 2, 1, BOTH.format(1, 0)),
        ("WORLD_SIZE=4 LOCAL_WORLD_SIZE=2", 2, 1, ""),
        ("WORLD_SIZE=4", 2, 1, ""),  # how many of them are here is unknown
    ],
)
def test_hosts_are_those_of_the_launcher(tmp_path: Path, environ: str, machines: int, rank: int, wrong: str) -> None:
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(f"distributed_type: FSDP\nnum_machines: {machines}\nmachine_rank: {rank}\n")
    imports = read_config(OURS, (), [theirs]).imports
    problems = ""
    try:
        check_launcher_facts(imports, processes=None, environ=environ_of(environ))
    except ConfigError as error:
        problems = ", ".join(re.findall(r"\w+: expected \d+", str(error)))
    assert problems == wrong


def test_load_config_compares_with_the_file_too(tmp_path: Path) -> None:
    theirs, tasks = tmp_path / "accelerate.yaml", environ_of(f"{SRUN} SLURM_STEP_NODELIST=a,b")
    theirs.write_text("distributed_type: FSDP\nnum_processes: 4\nnum_machines: 2\nmachine_rank: 1\n")
    with pytest.raises(ConfigError, match="num_processes: expected 8 \\(the launcher\\), found 4"):
        load_config(OURS, ["train.global_batch=32"], [theirs], environ=tasks)
    theirs.write_text(theirs.read_text().replace("4", "8"))
    assert load_config(OURS, ["train.global_batch=32"], [theirs], environ=tasks).sharding.strategy == "FULL_SHARD"


def test_a_start_by_hand_is_one_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On two hosts these would be two separate runs."""
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text("distributed_type: FSDP\nnum_machines: 2\nmachine_rank: 1\n")
    assert launch.main([f"--config={OURS}", f"--import={theirs}", "--device=cpu", f"run.dir={tmp_path}/run"]) == 2
    message = capsys.readouterr().err
    assert "theirs.yaml:2: num_machines: expected 1 (the launcher), found 2." in message
    assert "theirs.yaml:3: machine_rank: expected 0 (the launcher), found 1." in message
    assert not (tmp_path / "run").exists()


ACCELERATE_FILE = "distributed_type: FSDP\nnum_machines: 1\nmachine_rank: 0\nnum_processes: 2\n"
SIZES = "distributed_type: FSDP\nparallelism_config: {dp_replicate_size: 2, dp_shard_size: 4}\n"
SHARDS = "distributed_type: FSDP\nparallelism_config: {dp_shard_size: 4}\n"


NONE, AS_FOUND = "learning_rate: 1\n", "GROUP_WORLD_SIZE={} GROUP_RANK={}"
CPU_FILE, CPU = "distributed_type: FSDP\nuse_cpu: true\n", "ACCELERATE_USE_CPU=True"
PRODUCT = ":2: dp_replicate_size * dp_shard_size: expected 16 devices (the launcher), found 2 * 4 = 8."


@pytest.mark.parametrize(
    ("text", "processes", "environ", "device", "message"),
    [
        (ACCELERATE_FILE, 2, "", "", ""),
        (ACCELERATE_FILE, None, "", "", ""),
        (ACCELERATE_FILE, 4, "", "", ":4: num_processes: expected 4 (the launcher), found 2."),
        (ACCELERATE_FILE, 2, AS_FOUND.format(1, 0), "", ""),
        (ACCELERATE_FILE, 2, AS_FOUND.format(2, 0), "", ":2: num_machines: expected 2 "),
        (ACCELERATE_FILE, 2, AS_FOUND.format(1, 1), "", ":3: machine_rank: expected 1 "),
        (SIZES, 8, "", "", ""),
        (SIZES, 16, "", "", PRODUCT),
        (SHARDS, 4, "", "", ""),
        (SHARDS, 8, "", "", ":2: dp_shard_size: expected 8 devices (the launcher), found 4."),
        (CPU_FILE, 2, "", "cpu", ""),
        (CPU_FILE, 2, "", "cuda", "yaml:2: use_cpu: expected device cuda (--device), found"),
        (NONE, 2, "ACCELERATE_USE_CPU=False", "cuda", ""),
        (NONE, 2, CPU, "cpu", ""),
        (NONE, 2, CPU, "cuda", "ACCELERATE_USE_CPU: expected device cuda"),
        (NONE, 2, "ACCELERATE_TORCH_DEVICE=cuda:0", "cpu", "TORCH_DEVICE: expected device cpu"),
    ],
)
def test_processes_and_the_device_are_compared_and_never_obeyed(
    tmp_path: Path, text: str, processes: int | None, environ: str, device: str, message: str
) -> None:
    theirs, start = tmp_path / "theirs.yaml", environ_of(environ)
    theirs.write_text(text)
    launched = {"ACCELERATE_MIXED_PRECISION": "no", **start} if text in (NONE, CPU_FILE) else None
    imports = read_config(theirs, REST, environ=launched).imports
    with pytest.raises(ConfigError, match=re.escape(message)) if message else nullcontext():
        check_launcher_facts(imports, processes=processes, environ=start, device=device)
