"""`accelerate launch -m portable_fsdp.launch`: what its file says reaches the run through the environment."""

from pathlib import Path

import pytest
import yaml
from started import PROGRAMS, committed, launch, losses, started, tiny_config

pytestmark = pytest.mark.slow

ASKED = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "FSDP",
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "fsdp_reshard_after_forward": False,
        "fsdp_activation_checkpointing": True,
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_offload_params": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    },
    "machine_rank": 0,
    "main_process_port": 0,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 2,
    "rdzv_backend": "static",
    "same_network": True,
    "use_cpu": False,
}


def command(folder: Path, *arguments: str) -> list[str | Path]:
    """`accelerate launch` of ours with the file that it asked for."""
    theirs = folder / "theirs.yaml"
    theirs.write_text(yaml.safe_dump(ASKED))
    start = [PROGRAMS / "accelerate", "launch", "--config_file", theirs, "-m", "portable_fsdp.launch", "--device=cpu"]
    return [*start, f"--config={tiny_config(folder)}", *arguments]


def test_the_file_of_accelerate_launch_counts(tmp_path: Path) -> None:
    with started(command(tmp_path, "precision.reduce=float32"), tmp_path, USE_TORCH_XLA="0") as run:
        code = run.wait()
    assert code == 0, run.err
    assert run.err.count("started by torchrun, of accelerate launch: 2 process(es), 2 of them on this host\n") == 1
    assert "sharding.strategy=SHARD_GRAD_OP (FSDP_RESHARD_AFTER_FORWARD)" in run.err
    assert committed(tmp_path / "run") == [4, 6]
    resolved = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert resolved["sharding"]["strategy"] == "SHARD_GRAD_OP"
    assert resolved["sharding"]["wrap_classes"] == ["LlamaDecoderLayer"]
    assert resolved["memory"]["gradient_checkpointing"] == "full"
    assert resolved["precision"]["compute"] == "bfloat16"
    assert resolved["precision"]["reduce"] == "float32"  # the override goes first
    alone = tmp_path / "alone"
    same = [f"--import={tmp_path / 'theirs.yaml'}", "precision.reduce=float32", f"run.dir={alone}", "--num_devices=2"]
    assert launch("--device=cpu", f"--config={tmp_path / 'tiny.yaml'}", *same) == 0
    assert losses(tmp_path / "run") == losses(alone)


def test_a_misspelt_variable_ends_the_start(tmp_path: Path) -> None:
    variables = {"USE_TORCH_XLA": "0", "FSDP_ACTIVATION_CHEKPOINTING": "true"}
    with started(command(tmp_path), tmp_path, **variables) as run:
        assert run.wait() == 1  # torchrun's, of a worker's 2
    expected = "accelerate launch: FSDP_ACTIVATION_CHEKPOINTING: unknown variable.\n  nearest: FSDP_ACTIVATION_CHECK"
    assert expected in run.err
    assert not (tmp_path / "run").exists()
