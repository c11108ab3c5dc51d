"""Files in the wild: what contradicts itself, can't be honoured or isn't known; how an import lies under our file."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from foreign_files import named, read

from portable_fsdp.config.foreign.launcher import check_launcher_facts
from portable_fsdp.config.load import load_config, read_config
from portable_fsdp.runtime.errors import ConfigError

OURS = "model: {pretrained: folder}\ntrain: {steps: 100}\n"


def problems(folder: Path, text: str, *overrides: str) -> str:
    path = folder / "theirs.yaml"
    path.write_bytes(text.encode())
    with pytest.raises(ConfigError) as error:
        read(path, *overrides)
    return str(error.value).replace(f"{folder}/", "")


F = "distributed_type: FSDP\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            f"{F}mixed_precision: bf16\nmixed_precision: 'no'\n",
            "3: mixed_precision: no contradicts mixed_precision: bf16",
        ),
        (f"{F}num_processes: 2\nnum_processes: 4\n", "theirs.yaml:3: num_processes: 4 contradicts"),
        (
            f"{F}fsdp_config: {{fsdp_offload_params: true, cpu_offload: false}}\n",
            "theirs.yaml:2: cpu_offload: false contradicts fsdp_offload_params: true (theirs.yaml:2)",
        ),
        (
            f"{F}fsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n  fsdp_reshard_after_forward: false\n",
            "theirs.yaml:4: fsdp_reshard_after_forward: false contradicts fsdp_sharding_strategy: FULL_SHARD",
        ),
        (f"{F}mixed_precision: fp16\n", "theirs.yaml:2: mixed_precision: fp16 can't be honoured: float16 needs"),
        (
            "distributed_type: MULTI_GPU\nfsdp_config: {fsdp_offload_params: true}\n",
            "theirs.yaml:2: fsdp_config: expected distributed_type: FSDP, found MULTI_GPU (theirs.yaml:1)",
        ),
        (
            f"{F}fsdp_config: {{fsdp_version: 2, fsdp_reshard_after_forward: 2}}\n",
            "expected true | false with fsdp_version 2, found 2",
        ),
        (f"{F}fsdp_config: {{sharding_strategy: 7}}\n", "expected FULL_SHARD | SHARD_GRAD_OP | NO_SHARD"),
        (f"{F}fsdp_config: fsdp.json\n", "theirs.yaml:2: fsdp_config: expected a mapping, found fsdp.json"),
        (f"{F}parallelism_config: {{tp_size: 2}}\n", "tp_size: 2 can't be honoured: tensor parallelism"),
        (
            f"{F}num_processes: 8\nparallelism_config: {{dp_replicate_size: 2, dp_shard_size: 2}}\n",
            "expected dp_replicate_size * dp_shard_size = num_processes = 8, found 2 * 2 = 4",
        ),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {offload_optimizer_device: nvme}\n",
            "offload_optimizer_device: nvme can't be honoured",
        ),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2, offload_optimizer_device: cpu}\n",
            "offload_optimizer_device: parameters and optimizer state are offloaded together",
        ),
        ("distributed_type: MEGATRON_LM\nmegatron_lm_config: {megatron_lm_tp_degree: 4}\n", "tensor and pipeline"),
        ("fsdp: ''\nfsdp_config: {xla: true}\n", "theirs.yaml:1: fsdp: expected true, found '', under which Trainer"),
        ("learning_rate: fast\nmax_steps: 5\n", "theirs.yaml:1: learning_rate: expected a number, found fast"),
        ("learning_rate: -1\nmax_steps: 100\n", "theirs.yaml:1: optim.lr: expected a number > 0"),
        (f"{F}<<: {{debug: false}}\n", "theirs.yaml:2: <<: expected plain keys"),
        (f"{F}fsdp_config: &a\n  fsdp_config: *a\n", "a mapping within itself"),
    ],
)
def test_what_is_wrong_is_said_by_line_and_key(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in problems(tmp_path, text)


def test_all_problems_come_in_one_message(tmp_path: Path) -> None:
    lines = [
        "distributed_type: FSDP",
        "mixed_precison: bf16",
        "fsdp_config:",
        "  fsdp_ofload_params: true",
        "  tp_size: 2",
    ]
    message = problems(tmp_path, "\r\n".join(lines))
    assert [int(line) for line in re.findall(r"theirs.yaml:(\d+)", message)] == [2, 4, 5]
    assert "nearest: mixed_precision." in message
    assert "nearest: fsdp_offload_params." in message


def test_an_override_settles_what_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(
        f"{F}mixed_precision: fp16\nfsdp_config: {{fsdp_sharding_strategy: 2, reshard_after_forward: true}}\n"
    )
    config = read(path, "precision.compute=bfloat16", "sharding.strategy=FULL_SHARD").config
    assert (config.precision.compute, config.sharding.strategy) == ("bfloat16", "FULL_SHARD")


def test_what_the_file_can_not_say_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(F)
    with pytest.raises(ConfigError, match=r"theirs\.yaml: model: expected(?s:.*)train: expected"):
        load_config(path)


def test_an_import_lies_under_our_file(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.yaml", tmp_path / "theirs.yaml"
    ours.write_text(f"{OURS}precision: {{compute: bfloat16}}\n")
    theirs.write_text(f"{F}mixed_precision: bf16\nfsdp_config: {{fsdp_sharding_strategy: 2}}\n")
    loaded = read_config(ours, ["sharding.strategy=NO_SHARD"], [theirs])
    assert loaded.config.sharding.strategy == "NO_SHARD"
    assert loaded.config.precision.reduce == "bfloat16"
    assert loaded.origins["precision.compute"] == f"{ours}:3"
    assert loaded.origins["precision.reduce"] == f"{theirs}:2"
    assert "optim.lr" not in loaded.origins


def test_where_our_file_and_an_import_differ_both_lines_are_named(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.yaml", tmp_path / "theirs.yaml"
    ours.write_text(f"{OURS}sharding: {{strategy: NO_SHARD}}\n")
    theirs.write_text(f"{F}fsdp_config: {{fsdp_sharding_strategy: 2}}\n")
    with pytest.raises(ConfigError) as error:
        load_config(ours, imports=[theirs])
    assert "theirs.yaml:2: fsdp_sharding_strategy: 2 says sharding.strategy=SHARD_GRAD_OP, and " in str(error.value)
    assert "ours.yaml:3 says sharding.strategy=NO_SHARD" in str(error.value)
    assert load_config(ours, ["sharding.strategy=FULL_SHARD"], [theirs]).sharding.strategy == "FULL_SHARD"


def test_a_key_of_theirs_in_a_file_of_ours(tmp_path: Path) -> None:
    ours = tmp_path / "ours.yaml"
    ours.write_text(f"{OURS}distributed_type: FSDP\n")
    with pytest.raises(
        ConfigError, match=r"ours\.yaml:3: distributed_type: unknown key\.\n  a key of accelerate's: .*--import"
    ):
        load_config(ours)


def test_a_file_of_ours_is_no_import(tmp_path: Path) -> None:
    ours = tmp_path / "ours.yaml"
    ours.write_text(OURS)
    with pytest.raises(ConfigError, match="found none of their keys"):
        load_config(ours, imports=[ours])


def test_a_token_is_not_repeated(tmp_path: Path) -> None:
    message = problems(tmp_path, "learning_rate: 1\nhub_token: abcdef\n")
    assert "hub_token" in message
    assert "abcdef" not in message


# ---------------------------------------------------------------------------------------------------- the launcher


@pytest.mark.parametrize(
    ("processes", "environ", "problem"),
    [
        (2, {}, ""),
        (None, {}, ""),
        (4, {}, "num_processes: expected 4, as the launcher has it, found 2"),
        (2, {"GROUP_WORLD_SIZE": "1", "GROUP_RANK": "0"}, ""),
        (2, {"GROUP_WORLD_SIZE": "2", "GROUP_RANK": "0"}, "num_machines: expected 2"),
        (2, {"GROUP_WORLD_SIZE": "1", "GROUP_RANK": "1"}, "machine_rank: expected 1"),
    ],
)
def test_processes_are_checked_not_obeyed(processes: int | None, environ: Mapping[str, str], problem: str) -> None:
    theirs = named("accelerate_0_20_fsdp.yaml")
    imports = read(theirs).imports
    if not problem:
        return check_launcher_facts(imports, processes=processes, environ=environ)
    with pytest.raises(ConfigError, match=problem):
        check_launcher_facts(imports, processes=processes, environ=environ)
    return None


def test_the_device_is_checked_where_a_file_asks_for_the_cpu(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text("distributed_type: FSDP\nuse_cpu: true\n")
    check_launcher_facts(read(theirs).imports, processes=2, environ={}, device="cpu")
    with pytest.raises(ConfigError, match=r"theirs\.yaml:2: use_cpu: expected device cuda, as --device has it"):
        check_launcher_facts(read(theirs).imports, processes=2, environ={}, device="cuda")


@pytest.mark.parametrize(
    "text",
    [
        "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 1}\n",
        "distributed_type: MEGATRON_LM\nmegatron_lm_config: {megatron_lm_use_distributed_optimizer: true}\n",
    ],
)
def test_sharding_the_optimizer_alone_has_one_answer(tmp_path: Path, text: str) -> None:
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(text)
    loaded = read(theirs)
    assert loaded.config.sharding.strategy == "SHARD_GRAD_OP"
    assert "only optimizer state is sharded" in loaded.imports[0].settings["sharding.strategy"].remark


def test_an_override_of_the_compute_dtype_is_one_of_the_sum_too(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text("distributed_type: FSDP\nmixed_precision: bf16\n")
    assert read(theirs).config.precision.reduce == "bfloat16"
    precision = read(theirs, "precision.compute=float32").config.precision
    assert (precision.compute, precision.reduce) == ("float32", "auto")


def test_the_batch_of_a_device_is_that_of_all_under_spmd(tmp_path: Path) -> None:
    """As Trainer has it: one process feeds all devices."""
    theirs = tmp_path / "theirs.yaml"
    text = "per_device_train_batch_size: 64\nfsdp: full_shard\nfsdp_config: {xla: true, xla_fsdp_v2: true}\n"
    theirs.write_text(text)
    with pytest.raises(ConfigError, match=r"these 64 rows are those of all devices.*\n  Set train\.micro_batch"):
        load_config(theirs, ["model.pretrained=folder", "train.steps=1"])
    theirs.write_text(f"{text}num_processes: 8\ngradient_accumulation_steps: 2\n")
    train = load_config(theirs, ["model.pretrained=folder", "train.steps=1"]).train
    assert (train.global_batch, train.micro_batch) == (128, 8)
