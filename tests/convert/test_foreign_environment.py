"""The environment of `accelerate launch`: read as strictly as a file, under ours, beside an import that must agree."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from portable_fsdp.config.load import Loaded, read_config
from portable_fsdp.convert.launcher import check_launcher_facts
from portable_fsdp.convert.rows import in_words
from portable_fsdp.convert.translation import origin, translation
from portable_fsdp.runtime.errors import ConfigError

SIMPLE = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "False", "ACCELERATE_DYNAMO_BACKEND": "NO"}
FSDP = {
    **SIMPLE,
    "ACCELERATE_DYNAMO_MODE": "default",
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "1",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
}
"""What `accelerate launch --use_fsdp` of 1.15 sets where its user says nothing more."""
OURS = "model: {pretrained: folder}\ntrain: {steps: 100}\n"


def load(
    folder: Path, environ: Mapping[str, str], *overrides: str, ours: str = OURS, theirs: str | None = None
) -> Loaded:
    (folder / "ours.yaml").write_text(ours)
    (folder / "theirs.yaml").write_text(theirs or "")
    return read_config(folder / "ours.yaml", overrides, [folder / "theirs.yaml"] if theirs else [], environ)


def problem(
    folder: Path, environ: Mapping[str, str], *overrides: str, ours: str = OURS, theirs: str | None = None
) -> str:
    with pytest.raises(ConfigError) as error:
        load(folder, environ, *overrides, ours=ours, theirs=theirs)
    return str(error.value).replace(f"{folder}/", "")


def test_nothing_is_read_where_accelerate_launch_is_not_the_starter(tmp_path: Path) -> None:
    environ = {name: value for name, value in FSDP.items() if name != "ACCELERATE_MIXED_PRECISION"}
    loaded = load(tmp_path, {**environ, "FSDP_OFFLOAD_PARAMS": "true", "FSDP_NO_SUCH_THING": "1"})
    assert loaded.imports == ()
    assert not loaded.config.memory.cpu_offload


@pytest.mark.parametrize(
    ("more", "option", "value", "by"),
    [
        ({}, "sharding.strategy", "FULL_SHARD", "FSDP_SHARDING_STRATEGY"),
        ({"FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"}, "sharding.strategy", "SHARD_GRAD_OP", "FSDP_SHARDING_STRATEGY"),
        ({"FSDP_SHARDING_STRATEGY": "3"}, "sharding.strategy", "NO_SHARD", "FSDP_SHARDING_STRATEGY"),
        (
            {"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"},
            "sharding.strategy",
            "SHARD_GRAD_OP",
            "FSDP_RESHARD_AFTER_FORWARD",
        ),
        (  # a word under the key of version 2, which accelerate lower-cases and never reads
            {"FSDP_RESHARD_AFTER_FORWARD": "shard_grad_op"},
            "sharding.strategy",
            "SHARD_GRAD_OP",
            "FSDP_RESHARD_AFTER_FORWARD",
        ),
        (
            {"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD", "GROUP_WORLD_SIZE": "1", "WORLD_SIZE": "2"},
            "sharding.strategy",
            "FULL_SHARD",
            "FSDP_SHARDING_STRATEGY",
        ),
        ({"FSDP_OFFLOAD_PARAMS": "true"}, "memory.cpu_offload", True, "FSDP_OFFLOAD_PARAMS"),
        (
            {"FSDP_TRANSFORMER_CLS_TO_WRAP": "['A', 'B']"},  # a list in a file arrives as Python writes it
            "sharding.wrap_classes",
            ("A", "B"),
            "FSDP_TRANSFORMER_CLS_TO_WRAP",
        ),
        (  # version 2 reads no strategy, whose variable the launcher sets in any case
            {"FSDP_VERSION": "2", "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"},
            "sharding.strategy",
            "FULL_SHARD",
            "FSDP_RESHARD_AFTER_FORWARD",
        ),
        (  # and version 1 nothing but the strategy
            {"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD", "FSDP_RESHARD_AFTER_FORWARD": "false"},
            "sharding.strategy",
            "HYBRID_SHARD",
            "FSDP_SHARDING_STRATEGY",
        ),
        (
            {"FSDP_MIN_NUM_PARAMS": "5000", "FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"},
            "sharding.min_num_params",
            5000,
            "FSDP_MIN_NUM_PARAMS",
        ),
        (
            {"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"},
            "sharding.min_num_params",
            100_000_000,
            "FSDP_MIN_NUM_PARAMS",
        ),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "precision.reduce", "bfloat16", "ACCELERATE_MIXED_PRECISION"),
        ({"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "compile.enabled", True, "ACCELERATE_DYNAMO_BACKEND"),
        (
            {
                "FSDP_VERSION": "2",
                "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
                "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2",
                "PARALLELISM_CONFIG_DP_SHARD_SIZE": "4",
                "PARALLELISM_CONFIG_TP_SIZE": "1",
                "PARALLELISM_CONFIG_CP_BACKEND": "torch",
                "WORLD_SIZE": "8",
            },
            "sharding.replicas",
            2,
            "PARALLELISM_CONFIG_DP_REPLICATE_SIZE",
        ),
    ],
)
def test_a_variable_says(tmp_path: Path, more: Mapping[str, str], option: str, value: object, by: str) -> None:
    loaded = load(tmp_path, {**FSDP, **more})
    section, _, key = option.partition(".")
    assert loaded.config.model_dump()[section][key] == value
    assert loaded.origins[option] == f"accelerate launch: {by}"
    assert origin(loaded, option).startswith(f"accelerate launch: {by}: ")


def test_units_are_not_made_by_size_where_nobody_asks(tmp_path: Path) -> None:
    assert load(tmp_path, FSDP).config.sharding.wrap == "TRANSFORMER_BASED_WRAP"
    assert load(tmp_path, SIMPLE).config.sharding.strategy == "FULL_SHARD"  # ours: no variable speaks of it


def test_every_variable_is_answered(tmp_path: Path) -> None:
    [imported] = load(tmp_path, {**FSDP, "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}).imports
    answered = {setting.key for setting in imported.settings.values()}
    answered |= {said.key for said in (*imported.launcher, *imported.not_needed)}
    assert answered == {*FSDP, "FSDP_STATE_DICT_TYPE"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            {"FSDP_ACTIVATION_CHEKPOINTING": "true"},
            "accelerate launch: FSDP_ACTIVATION_CHEKPOINTING: unknown variable.\n  nearest: "
            "FSDP_ACTIVATION_CHECKPOINTING.",
        ),
        ({"FSDP_CPU_OFFLOAD": "true"}, "FSDP_CPU_OFFLOAD: unknown variable.\n  nearest: FSDP_OFFLOAD_PARAMS."),
        ({"ACCELERATE_MIXED_PRECISON": "bf16"}, "nearest: ACCELERATE_MIXED_PRECISION."),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "ACCELERATE_MIXED_PRECISION: fp16 can't be honoured: float16 needs"),
        ({"ACCELERATE_DYNAMO_BACKEND": "TVM"}, "ACCELERATE_DYNAMO_BACKEND: TVM can't be honoured"),
        ({"FSDP_IGNORED_MODULES": "embed"}, "FSDP_IGNORED_MODULES: embed can't be honoured: every parameter"),
        ({"ACCELERATE_DEBUG_MODE": "maybe"}, "ACCELERATE_DEBUG_MODE: expected true | false, found maybe."),
        ({"FSDP_SYNC_MODULE_STATES": "7"}, "FSDP_SYNC_MODULE_STATES: expected true | false, found 7."),
        ({"FSDP_VERSION": "9.2"}, "FSDP_VERSION: expected 1 | 2, found 9.2."),
        ({"ACCELERATE_GRADIENT_CLIPPING": "nan"}, "ACCELERATE_GRADIENT_CLIPPING: expected a number, found nan."),
        (
            {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_SP_SEQ_LENGTH": "long"},
            "PARALLELISM_CONFIG_SP_SEQ_LENGTH: expected a whole number >= 1, found long.",
        ),
        ({"FSDP_SHARDING_STRATEGY": "7"}, "FSDP_SHARDING_STRATEGY: expected FULL_SHARD | SHARD_GRAD_OP"),
        ({"ACCELERATE_USE_SOMETHING": "1"}, "ACCELERATE_USE_SOMETHING: unknown variable.\n  None is like it; leave it"),
        (
            {"ACCELERATE_USE_FSDP": "false"},
            "expected ACCELERATE_USE_FSDP=true beside it, without which accelerate doesn't read it, found false.\n"
            "  Start with accelerate launch --use_fsdp, or unset FSDP_ACTIVATION_CHECKPOINTING, ",
        ),
        (
            {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"},
            "PARALLELISM_CONFIG_TP_SIZE: 2 can't be honoured: tensor parallelism is not built",
        ),
    ],
)
def test_a_variable_that_cannot_be_honoured_is_named(tmp_path: Path, more: Mapping[str, str], said: str) -> None:
    assert said in problem(tmp_path, {**FSDP, **more})


def test_our_file_and_overrides_lie_over_it(tmp_path: Path) -> None:
    ours = f"{OURS}precision: {{compute: bfloat16}}\n"
    loaded = load(tmp_path, {**FSDP, "ACCELERATE_MIXED_PRECISION": "fp16"}, "sharding.strategy=NO_SHARD", ours=ours)
    assert loaded.config.sharding.strategy == "NO_SHARD"
    assert loaded.config.precision.compute == "bfloat16"
    assert loaded.origins["precision.compute"] == f"{tmp_path}/ours.yaml:3"
    assert "#   FSDP_SHARDING_STRATEGY: FULL_SHARD: override 'sharding.strategy=NO_SHARD' goes first" in translation(
        loaded
    )


def test_a_file_of_accelerates_beside_it_must_agree(tmp_path: Path) -> None:
    theirs = "distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config: {fsdp_sharding_strategy: 2}\n"
    message = problem(tmp_path, FSDP, theirs=theirs)
    assert (
        "accelerate launch: FSDP_SHARDING_STRATEGY: FULL_SHARD says sharding.strategy=FULL_SHARD, and theirs.yaml:3 "
        "says sharding.strategy=SHARD_GRAD_OP.\n  Keep one, or override it: sharding.strategy=..."
    ) in message
    assert (
        "accelerate launch: ACCELERATE_MIXED_PRECISION: no says precision.compute=float32, and theirs.yaml:2" in message
    )
    same = {**FSDP, "FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP", "ACCELERATE_MIXED_PRECISION": "bf16"}
    loaded = load(tmp_path, same, theirs=theirs)
    assert loaded.config.sharding.strategy == "SHARD_GRAD_OP"
    assert loaded.origins["sharding.strategy"] == f"{tmp_path}/theirs.yaml:3"
    assert load(tmp_path, FSDP, "sharding.strategy=NO_SHARD", "precision.compute=float32", theirs=theirs)


def test_a_trainers_arguments_go_first_as_in_trainer(tmp_path: Path) -> None:
    """It sets the variables itself; `gradient_checkpointing` is its own, whatever the plugin says of activations."""
    theirs = "bf16: true\ngradient_checkpointing: true\nlearning_rate: 1.0e-4\nper_device_train_batch_size: 8\n"
    loaded = load(tmp_path, FSDP, "train.global_batch=64", theirs=theirs)
    assert loaded.config.precision.compute == "bfloat16"
    assert loaded.config.memory.gradient_checkpointing == "full"


@pytest.mark.parametrize(
    ("more", "device", "said"),
    [
        ({}, "cuda", ""),
        ({"ACCELERATE_USE_CPU": "True"}, "cpu", ""),
        ({"ACCELERATE_USE_CPU": "True"}, "cuda", "ACCELERATE_USE_CPU: expected device cuda, as --device has it"),
        ({"ACCELERATE_TORCH_DEVICE": "cuda:0"}, "cpu", "ACCELERATE_TORCH_DEVICE: expected device cpu"),
    ],
)
def test_the_device_is_checked(tmp_path: Path, more: Mapping[str, str], device: str, said: str) -> None:
    imports = load(tmp_path, {**SIMPLE, **more}).imports
    if not said:
        return check_launcher_facts(imports, processes=2, environ={}, device=device)
    with pytest.raises(ConfigError, match=said):
        check_launcher_facts(imports, processes=2, environ={}, device=device)
    return None


def test_values_are_shown_as_they_were_set(tmp_path: Path) -> None:
    [imported] = load(tmp_path, {**FSDP, "FSDP_TRANSFORMER_CLS_TO_WRAP": "A,B"}).imports
    setting = imported.settings["sharding.wrap_classes"]
    assert in_words(setting.typed) == "A,B"
