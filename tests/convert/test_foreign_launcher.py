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


SRUN = "SLURM_JOB_ID=1 SLURM_NTASKS=8 SLURM_NNODES=2 SLURM_NODEID=1 SLURM_PROCID=4 SLURM_LOCALID=0 SLURM_STEP_ID=0"


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
    assert not (tmp_path / "run").exists()


ACCELERATE_FILE = "distributed_type: FSDP\nnum_machines: 1\nmachine_rank: 0\nnum_processes: 2\n"
SIZES = "distributed_type: FSDP\nparallelism_config: {dp_replicate_size: 2, dp_shard_size: 4}\n"
SHARDS = "distributed_type: FSDP\nparallelism_config: {dp_shard_size: 4}\n"


NONE = "learning_rate: 1\n"
CPU_FILE, CPU = "distributed_type: FSDP\nuse_cpu: true\n", "ACCELERATE_USE_CPU=True"
PRODUCT = ":2: dp_replicate_size * dp_shard_size: expected 16 devices (the launcher), found 2 * 4 = 8."


@pytest.mark.parametrize(
    ("text", "processes", "environ", "device", "message"),
    [
        (ACCELERATE_FILE, 2, "", "", ""),
        (ACCELERATE_FILE, None, "", "", ""),
        (ACCELERATE_FILE, 4, "", "", ":4: num_processes: expected 4 (the launcher), found 2."),
        (ACCELERATE_FILE, 2, "GROUP_WORLD_SIZE=1", "", ""),
        (ACCELERATE_FILE, 2, "GROUP_WORLD_SIZE=2", "", ":2: num_machines: expected 2 "),
        (ACCELERATE_FILE, 2, "GROUP_WORLD_SIZE=2 TPU_WORKER_HOSTNAMES=a,b", "", ""),
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
