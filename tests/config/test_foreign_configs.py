"""Files of accelerate and Trainer: every key of theirs is in the table, and every file gets a plain answer."""

import ast
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from portable_fsdp import explain
from portable_fsdp.config.describe import option_names
from portable_fsdp.config.foreign.keys_accelerate import ACCELERATE, SAGEMAKER
from portable_fsdp.config.foreign.keys_fsdp import FSDP, PARALLEL, XLA
from portable_fsdp.config.foreign.keys_trainer import TRAINER
from portable_fsdp.config.foreign.launcher import check_launcher_facts
from portable_fsdp.config.foreign.rows import Refuse, Set
from portable_fsdp.config.foreign.table import NESTED, TABLE, find, find_anywhere, nested_place
from portable_fsdp.config.load import Loaded, load_config, read_config
from portable_fsdp.config.translation import translation
from portable_fsdp.runtime.errors import ConfigError

FILES = sorted((Path(__file__).parent / "foreign").iterdir())
OURS = "model: {pretrained: folder}\ntrain: {steps: 100}\n"
REST = ("model.pretrained=folder", "train.steps=100", "train.global_batch=64")


def package(name: str) -> Path:
    """The folder of an installed package, which is not imported."""
    spec = find_spec(name)
    assert spec
    assert spec.origin
    return Path(spec.origin).parent


def class_fields(path: Path, *classes: str) -> Iterator[str]:
    found = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)]
    for node in found:
        if node.name in classes:
            fields = [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
            yield from (target.id for target in fields if isinstance(target, ast.Name))


# ------------------------------------------------------------------------------------------ the table and other tools


def missing(place: str, keys: Iterator[str] | tuple[str, ...] | list[str]) -> list[str]:
    found = [key for key in keys if not find(place, key) and not nested_place(place, key)]
    return sorted(found)


def test_every_field_of_accelerates_file_is_in_the_table() -> None:
    path = package("accelerate") / "commands/config/config_args.py"
    keys = list(class_fields(path, "BaseConfig", "ClusterConfig"))
    assert len(keys) > 30
    assert missing(ACCELERATE, keys) == []
    own = [key for key in class_fields(path, "SageMakerConfig") if not find(ACCELERATE, key)]
    assert missing(SAGEMAKER, own) == ["dynamo_config"] or missing(SAGEMAKER, own) == []


def test_every_key_that_accelerate_config_writes_is_in_the_table() -> None:
    text = (package("accelerate") / "commands/config/cluster.py").read_text()
    written = re.findall(r'(\w+_config)\[(?:prefix \+ )?"(\w+)"\]', text)
    assert len(written) > 50
    assert [(place, key) for place, key in written if not find(place, key)] == []


def test_every_flag_of_accelerate_launch_for_a_section_is_in_the_table() -> None:
    text = (package("accelerate") / "commands/launch.py").read_text()
    places = {"fsdp_": FSDP, "parallelism_config_": PARALLEL, "megatron_lm_": "megatron_lm_config"}
    flags = [
        (place, f"{prefix}{key}") for prefix, place in places.items() for key in re.findall(rf'"--{prefix}(\w+)"', text)
    ]
    assert len(flags) > 40
    assert [flag for flag in flags if not find(*flag)] == []


def test_every_field_of_accelerates_plugins_is_in_the_table() -> None:
    path = package("accelerate") / "utils/dataclasses.py"
    keys = list(class_fields(path, "FullyShardedDataParallelPlugin"))
    assert len(keys) > 20
    assert missing(FSDP, keys) == []
    sizes = list(class_fields(package("accelerate") / "parallelism_config.py", "ParallelismConfig"))
    assert missing(PARALLEL, [key for key in sizes if not key.startswith("_")]) == []


def test_every_key_of_trainers_fsdp_config_is_in_the_table() -> None:
    text = (package("transformers") / "training_args.py").read_text()
    keys = re.findall(r'(?<!xla_)fsdp_config(?:\.get\(|\.setdefault\(|\[)"(\w+)"', text)
    assert len(set(keys)) > 15
    assert missing(FSDP, keys) == []


def test_every_training_argument_is_in_the_table() -> None:
    keys = list(class_fields(package("transformers") / "training_args.py", "TrainingArguments"))
    assert len(keys) > 100
    assert missing(TRAINER, [key for key in keys if not key.startswith("_")]) == []


@pytest.mark.xla
def test_every_argument_of_torch_xlas_fsdp_is_in_the_table() -> None:
    path = package("torch_xla") / "distributed/fsdp/xla_fully_sharded_data_parallel.py"
    nodes = ast.walk(ast.parse(path.read_text()))
    [found] = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == "XlaFullyShardedDataParallel"]
    [init] = [part for part in found.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
    keys = [argument.arg for argument in init.args.args if argument.arg not in ("self", "module")]
    assert len(keys) > 20
    assert missing(XLA, keys) == []


# What `accelerate config` of 0.20, 0.34 and 1.0 writes (config_args.py, cluster.py), written down without the
# releases at hand: unlike the installed one's above, these lists were not compared with their sources.
_TOP = (
    "compute_environment distributed_type mixed_precision use_cpu debug num_processes machine_rank num_machines "
    "gpu_ids main_process_ip main_process_port rdzv_backend same_network main_training_function deepspeed_config "
    "fsdp_config megatron_lm_config downcast_bf16 tpu_name tpu_zone tpu_use_cluster tpu_use_sudo command_file commands "
    "tpu_vm tpu_env dynamo_config"
)
_FSDP_1 = (
    "fsdp_sharding_strategy fsdp_offload_params fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap "
    "fsdp_min_num_params fsdp_state_dict_type fsdp_forward_prefetch fsdp_use_orig_params fsdp_sync_module_states"
)
_DEEPSPEED = (
    "deepspeed_config_file zero_stage offload_optimizer_device offload_param_device offload_param_nvme_path "
    "offload_optimizer_nvme_path gradient_accumulation_steps gradient_clipping zero3_save_16bit_model zero3_init_flag "
    "deepspeed_multinode_launcher deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter"
)
_MEGATRON = (
    "megatron_lm_tp_degree megatron_lm_sequence_parallelism megatron_lm_pp_degree megatron_lm_num_micro_batches "
    "megatron_lm_recompute_activations megatron_lm_use_distributed_optimizer megatron_lm_gradient_clipping"
)
_DYNAMO = "dynamo_backend dynamo_mode dynamo_use_fullgraph dynamo_use_dynamic"
OLDER: dict[str, dict[str, str]] = {
    "0.20": {
        "accelerate": _TOP,
        "fsdp_config": f"{_FSDP_1} fsdp_backward_prefetch_policy",
        "deepspeed_config": _DEEPSPEED,
        "megatron_lm_config": _MEGATRON,
        "dynamo_config": _DYNAMO,
    },
    "0.34": {
        "accelerate": f"{_TOP} enable_cpu_affinity mpirun_config",
        "fsdp_config": f"{_FSDP_1} fsdp_backward_prefetch fsdp_cpu_ram_efficient_loading fsdp_activation_checkpointing",
        "deepspeed_config": f"{_DEEPSPEED} deepspeed_moe_layer_cls_names",
        "megatron_lm_config": _MEGATRON,
        "dynamo_config": _DYNAMO,
        "mpirun_config": "mpirun_hostfile mpirun_ccl",
    },
    "1.0": {
        "accelerate": f"{_TOP} enable_cpu_affinity mpirun_config fp8_config",
        "fsdp_config": f"{_FSDP_1} fsdp_backward_prefetch fsdp_cpu_ram_efficient_loading fsdp_activation_checkpointing",
        "deepspeed_config": f"{_DEEPSPEED} deepspeed_moe_layer_cls_names",
        "megatron_lm_config": _MEGATRON,
        "dynamo_config": _DYNAMO,
        "mpirun_config": "mpirun_hostfile mpirun_ccl",
        "fp8_config": "backend use_autocast_during_eval margin interval fp8_format amax_history_length "
        "amax_compute_algorithm override_linear_precision optimization_level",
    },
}


@pytest.mark.parametrize("version", OLDER)
def test_every_key_of_older_versions_is_in_the_table(version: str) -> None:
    lost = {place: missing(place, keys.split()) for place, keys in OLDER[version].items()}
    assert not any(lost.values()), lost


def test_rows_set_what_our_config_has() -> None:
    for row in TABLE:
        for _, answer in row.takes.cases():
            if isinstance(answer, Set):
                assert {name for name in answer.settings if not name.startswith("~")} <= set(option_names()), row.key
            if isinstance(answer, Refuse):
                assert answer.reason
                assert answer.way, row.key
                assert set(answer.about) <= set(option_names()), row.key


# --------------------------------------------------------------------------------------------------------- real files


def read(path: Path, *overrides: str) -> Loaded:
    ours = [text for text in REST if text.partition("=")[0] not in {given.partition("=")[0] for given in overrides}]
    return read_config(path, [*ours, *overrides])


def settings(path: Path) -> Mapping[str, object]:
    [imported] = read(path).imports
    return {name: setting.value for name, setting in imported.settings.items()}


BF16 = {"precision.compute": "bfloat16", "precision.reduce": "bfloat16"}
SAYS: dict[str, dict[str, object]] = {
    "accelerate_0_20_fsdp.yaml": {
        "sharding.strategy": "FULL_SHARD",
        "sharding.backward_prefetch": "BACKWARD_PRE",
        "memory.cpu_offload": True,
        "precision.compute": "float32",
    },
    "accelerate_0_34_fsdp.yaml": {
        "sharding.strategy": "SHARD_GRAD_OP",
        "sharding.wrap": "SIZE_BASED_WRAP",
        "sharding.min_num_params": 100_000_000,
        "sharding.forward_prefetch": 1,
        "memory.gradient_checkpointing": "full",
        **BF16,
    },
    "accelerate_1_0_fsdp_hybrid.yaml": {
        "sharding.strategy": "HYBRID_SHARD",
        "sharding.backward_prefetch": "NO_PREFETCH",
    },
    "accelerate_1_15_fsdp2.yaml": {
        "sharding.strategy": "HYBRID_SHARD_ZERO2",
        "sharding.replicas": 2,
        "compile.enabled": True,
        "memory.gradient_checkpointing": "none",
        **BF16,
    },
    "accelerate_inside_trainer.json": {"sharding.strategy": "FULL_SHARD", "optim.lr": 1e-4, **BF16},
    "axolotl_style_fsdp2.yaml": {
        "sharding.strategy": "FULL_SHARD",
        "memory.cpu_offload": True,
        "memory.gradient_checkpointing": "full",
        "train.micro_batch": 2,
        "optim.lr": 2e-5,
    },
    "deepspeed_zero3.yaml": {
        "sharding.strategy": "FULL_SHARD",
        "memory.cpu_offload": True,
        "train.max_grad_norm": 0.5,
        "checkpoint.export": True,
    },
    "hybrid_on_one_machine.yaml": {"sharding.strategy": "SHARD_GRAD_OP"},
    "json_inside.yaml": {"sharding.strategy": "FULL_SHARD", **BF16},
    "megatron.yaml": {"sharding.strategy": "SHARD_GRAD_OP", "train.max_grad_norm": 1.0},
    "multi_gpu.yaml": {"sharding.strategy": "NO_SHARD", "precision.compute": "bfloat16"},
    "tpu.yaml": {"sharding.strategy": "NO_SHARD", "precision.compute": "bfloat16"},
    "trainer_fsdp_config.json": {"sharding.backward_prefetch": "BACKWARD_PRE", "memory.gradient_checkpointing": "full"},
    "trainer_inside_accelerate.yaml": {"sharding.strategy": "FULL_SHARD", "train.micro_batch": 4},
    "trainer_xla_fsdp_v1.json": {"xla_fsdp1.shard_param_on_dim_0": True, "precision.compute": "bfloat16"},
    "trainer_xla_fsdp_v2.json": {
        "memory.gradient_checkpointing": "full",
        "sharding.wrap_classes": ["LlamaDecoderLayer"],
    },
    "training_arguments.json": {
        "train.steps": 1000,
        "optim.warmup_steps": 3,  # 0.03 of the 100 steps that an override asks for
        "optim.betas": [0.9, 0.95],
        "data.path": "corpus.txt",
        "memory.cpu_offload": True,
        "checkpoint.keep": 3,
        **BF16,
    },
    "unquoted_no.yaml": {"compile.enabled": False, "precision.compute": "float32"},
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_says(path: Path) -> None:
    said = settings(path)
    assert {name: said.get(name) for name in SAYS[path.name]} == SAYS[path.name]


def keys_of(path: Path) -> list[str]:
    found = re.findall(r'^\s*"?([A-Za-z_0-9]+)"?:|[{,]\s*"(\w+)":', path.read_text(), re.MULTILINE)
    return [one or other for one, other in found if not (one or other).startswith("_")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_key_of_a_file_is_answered_by_name(path: Path) -> None:
    [imported] = read(path).imports
    answered = {setting.key for setting in imported.settings.values()}
    answered |= {said.key for said in (*imported.launcher, *imported.not_needed)}
    remarks = " ".join(setting.remark for setting in imported.settings.values())
    lost = [key for key in keys_of(path) if key not in answered and key not in NESTED and key not in remarks]
    lost = [key for key in lost if find_anywhere("", key) is not None]
    assert lost == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_misspelt_key_is_named_with_its_nearest(path: Path, tmp_path: Path) -> None:
    for key in keys_of(path):
        if key in ("xla", "fsdp", "debug", "tf32", "bf16", "seed"):  # too short: another key may be as near
            continue
        cut = len(key) // 2
        twin = tmp_path / path.name
        twin.write_text(re.sub(rf"\b{key}\b(?=\"?:)", key[:cut] + key[cut + 1 :], path.read_text(), count=1))
        if key in NESTED:
            continue
        with pytest.raises(ConfigError, match="unknown key") as error:
            read(twin)
        bare = key.removeprefix("fsdp_")
        row = find_anywhere(FSDP, key)
        assert row is not None
        near = re.findall(r"nearest: (\w+)", str(error.value))
        assert near == [row.key] or bare in near[0] or near[0] in (row.key, *row.aliases), (key, near)


# ------------------------------------------------------------------------------------------------- files in the wild


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
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 1}\n", "zero_stage: 1 can't be honoured"),
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


# ------------------------------------------------------------------------------------------- explain and the launcher


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
    theirs = next(path for path in FILES if path.name == "accelerate_0_20_fsdp.yaml")
    ours = tmp_path / "ours.yaml"
    arguments = [f"--import={theirs}", f"--write={ours}", "--backend=native", *REST]
    assert explain.main(arguments) == 0
    text = capsys.readouterr().out
    assert f"memory.cpu_offload = true\n  from {theirs}:" in text
    assert "the launcher's business:" in text
    assert load_config(ours).memory.cpu_offload
    assert explain.main(arguments) == 2
    assert "expected a new file, found one" in capsys.readouterr().err


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
    theirs = next(path for path in FILES if path.name == "accelerate_0_20_fsdp.yaml")
    imports = read(theirs).imports
    if not problem:
        return check_launcher_facts(imports, processes=processes, environ=environ)
    with pytest.raises(ConfigError, match=problem):
        check_launcher_facts(imports, processes=processes, environ=environ)
    return None
