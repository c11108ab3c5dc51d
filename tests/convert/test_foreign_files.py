"""Files as other tools' documentations have them: each says what it says, and so do their misspelt twins."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from foreign_files import FILES, REST, named, read

from portable_fsdp import explain
from portable_fsdp.config.load import load_config
from portable_fsdp.convert.table import NESTED, find_anywhere
from portable_fsdp.convert.translation import translation
from portable_fsdp.runtime.errors import ConfigError


def settings(path: Path) -> Mapping[str, object]:
    [imported] = read(path).imports
    return {name: setting.value for name, setting in imported.settings.items()}


BF16 = {"precision.compute": "bfloat16", "precision.reduce": "bfloat16"}
LAYERS = {"sharding.wrap": "TRANSFORMER_BASED_WRAP", "sharding.wrap_classes": ["LlamaDecoderLayer"]}
COSINE = {"optim.schedule": "cosine", "optim.min_lr_ratio": 1e-6}
PAGE = {
    "sharding.strategy": "FULL_SHARD",
    "sharding.backward_prefetch": "BACKWARD_PRE",
    "sharding.forward_prefetch": 0,
    "memory.cpu_offload": True,
    "precision.compute": "bfloat16",
    **LAYERS,
}
SAYS: dict[str, dict[str, object]] = {
    "accelerate_0_20_fsdp.yaml": {
        "sharding.strategy": "FULL_SHARD",
        "sharding.backward_prefetch": "BACKWARD_PRE",
        "memory.cpu_offload": True,
        "precision.compute": "float32",
        **LAYERS,
    },
    "accelerate_0_34_fsdp.yaml": {
        "sharding.strategy": "SHARD_GRAD_OP",
        "sharding.wrap": "SIZE_BASED_WRAP",
        "sharding.min_num_params": 100_000_000,
        "sharding.backward_prefetch": "BACKWARD_POST",
        "sharding.forward_prefetch": 1,
        "memory.cpu_offload": False,
        "memory.gradient_checkpointing": "full",
        **BF16,
    },
    "accelerate_1_0_fsdp_hybrid.yaml": {
        "sharding.strategy": "HYBRID_SHARD",
        "sharding.wrap": "TRANSFORMER_BASED_WRAP",
        "sharding.backward_prefetch": "NO_PREFETCH",
        **BF16,
    },
    "accelerate_1_15_fsdp2.yaml": {
        "sharding.strategy": "HYBRID_SHARD_ZERO2",
        "sharding.replicas": 2,
        "compile.enabled": True,
        "compile.backend": "inductor",
        "memory.cpu_offload": False,
        "memory.gradient_checkpointing": "none",
        **LAYERS,
        **BF16,
    },
    "accelerate_inside_trainer.json": {
        "sharding.strategy": "FULL_SHARD",
        "memory.cpu_offload": False,
        "optim.lr": 1e-4,
        **BF16,
    },
    "axolotl_style_fsdp2.yaml": {
        "sharding.strategy": "FULL_SHARD",
        "memory.cpu_offload": True,
        "memory.gradient_checkpointing": "full",
        "train.micro_batch": 2,
        "train.epochs": 3.0,  # which the steps that an override asks for replace
        "optim.lr": 2e-5,
        **COSINE,
        **LAYERS,
        **BF16,
    },
    "deepspeed_zero3.yaml": {
        "sharding.strategy": "FULL_SHARD",
        "memory.cpu_offload": True,
        "train.max_grad_norm": 0.5,
        "checkpoint.export": True,
        "precision.compute": "bfloat16",
    },
    "hugging_face_page.yaml": {**PAGE, **BF16},
    "hugging_face_page_xla.yaml": {**PAGE, "memory.gradient_checkpointing": "full"},
    "hybrid_on_one_machine.yaml": {"sharding.strategy": "SHARD_GRAD_OP"},
    "json_inside.yaml": {"sharding.strategy": "FULL_SHARD", **BF16},
    "megatron.yaml": {
        "sharding.strategy": "SHARD_GRAD_OP",
        "train.max_grad_norm": 1.0,
        "memory.gradient_checkpointing": "none",
        "precision.compute": "bfloat16",
    },
    "multi_gpu.yaml": {"sharding.strategy": "NO_SHARD", "precision.compute": "bfloat16"},
    "tpu.yaml": {"sharding.strategy": "NO_SHARD", "precision.compute": "bfloat16"},
    "trainer_fsdp_config.json": {
        "sharding.backward_prefetch": "BACKWARD_PRE",
        "sharding.forward_prefetch": 0,
        "sharding.wrap_classes": ["LlamaDecoderLayer"],
        "memory.gradient_checkpointing": "full",
    },
    "trainer_inside_accelerate.yaml": {"sharding.strategy": "FULL_SHARD", "train.micro_batch": 4, "optim.lr": 1e-4},
    "trainer_xla_fsdp_v1.json": {
        "xla_fsdp1.shard_param_on_dim_0": True,
        "xla_fsdp1.pin_layout_in_collective_ops": True,
        "xla_fsdp1.flatten_parameters": False,
        "sharding.wrap_classes": ["LlamaDecoderLayer"],
        "precision.compute": "bfloat16",
    },
    "trainer_xla_fsdp_v2.json": {
        "memory.gradient_checkpointing": "full",
        "sharding.wrap_classes": ["LlamaDecoderLayer"],
    },
    "training_arguments.json": {
        "run.dir": "runs/trainer",
        "run.seed": 42,
        "model.pretrained": "models/llama",
        "data.source": "text",
        "data.path": "corpus.txt",
        "train.steps": 1000,
        "train.micro_batch": 4,  # no train.global_batch, which an override says
        "train.max_grad_norm": 1.0,
        "train.log_every": 5,
        "optim.name": "adamw",
        "optim.lr": 3e-4,
        "optim.betas": [0.9, 0.95],
        "optim.weight_decay": 0.1,
        "optim.warmup_steps": 3,  # 0.03 of the 100 steps that an override asks for
        "sharding.strategy": "FULL_SHARD",
        "sharding.wrap_classes": ["LlamaDecoderLayer"],
        "memory.cpu_offload": True,
        "memory.gradient_checkpointing": "full",
        "precision.matmul": "high",
        "compile.enabled": False,
        "checkpoint.every": 100,
        "checkpoint.keep": 3,
        **COSINE,
        **BF16,
    },
    "unquoted_no.yaml": {"compile.enabled": False, "precision.compute": "float32"},
}
LAUNCHERS = {"compute_environment", "num_processes", "num_machines", "machine_rank", "use_cpu", "gpu_ids"} | {
    *("main_process_ip", "main_process_port", "main_training_function", "rdzv_backend", "same_network"),
    *("enable_cpu_affinity", "deepspeed_multinode_launcher"),
    *("tpu_name", "tpu_zone", "tpu_env", "tpu_use_cluster", "tpu_use_sudo"),
}
"""The keys of these files that are the launcher's business."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_says_this_and_nothing_else(path: Path) -> None:
    assert settings(path) == SAYS[path.name]
    [imported] = read(path).imports
    null = {said.key for said in imported.not_needed if said.typed == "null"}
    assert {said.key for said in imported.launcher} == LAUNCHERS.intersection(keys_of(path)) - null


def keys_of(path: Path) -> list[str]:
    found = re.findall(r'^\s*"?([A-Za-z_0-9]+)"?:|[{,]\s*"(\w+)":', path.read_text(), re.MULTILINE)
    return [one or other for one, other in found if not (one or other).startswith("_")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_key_of_a_file_is_answered_by_name(path: Path) -> None:
    [imported] = read(path).imports
    answered = {setting.key for setting in imported.settings.values()}
    answered |= {said.key for said in (*imported.launcher, *imported.not_needed)}
    lost = [key for key in keys_of(path) if key not in answered and key not in NESTED]
    lost = [key for key in lost if find_anywhere("", key) is not None]
    assert lost == []


def misspelt(key: str) -> str:
    """One letter left out; one too many where the key is short, and another one would be as near."""
    cut = len(key) // 2
    return key[:cut] + key[cut + 1 :] if len(key) > 5 else f"{key}{key[-1]}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_misspelt_key_is_named_with_its_nearest(path: Path, tmp_path: Path) -> None:
    twin = tmp_path / path.name
    for key in dict.fromkeys(keys_of(path)):
        twin.write_text(re.sub(rf"\b{key}\b(?=\"?:)", misspelt(key), path.read_text(), count=1))
        with pytest.raises(ConfigError, match="unknown key") as error:
            read(twin)
        row = find_anywhere("", key)
        names = {row.key, *row.aliases} if row else {key}
        names |= {key.removeprefix("fsdp_"), f"fsdp_{key}"}
        [near] = re.findall(rf"{misspelt(key)}: unknown key of .*\n  nearest: (\w+)\.", str(error.value))
        assert near in names, key


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_translation_reads_back_to_an_equal_config(path: Path, tmp_path: Path) -> None:
    loaded = read(path)
    ours = tmp_path / "ours.yaml"
    ours.write_text(translation(loaded))
    assert load_config(ours) == loaded.config
    [imported] = loaded.imports
    for setting in imported.settings.values():
        if loaded.origins.get(setting.option) == setting.where:
            assert f"# {setting.where}: {setting.key}: " in ours.read_text()


def test_explain_writes_and_says_where_a_key_comes_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = named("accelerate_0_20_fsdp.yaml")
    ours = tmp_path / "ours.yaml"
    arguments = [f"--import={theirs}", f"--write={ours}", "--backend=native", *REST]
    assert explain.main(arguments) == 0
    text = capsys.readouterr().out
    assert re.search(rf"memory\.cpu_offload = true\s+# {re.escape(str(theirs))}:\d+: fsdp_offload_params: true\n", text)
    assert "the launcher's business:" in text
    assert load_config(ours).memory.cpu_offload
    assert explain.main(arguments) == 2
    assert "expected a new file, found one" in capsys.readouterr().err
