"""Files in the wild: what contradicts itself, can't be honoured or isn't known; how an import lies under our file."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from foreign_files import named, read

from portable_fsdp.backends.support import require_supported
from portable_fsdp.config.load import load_config, read_config
from portable_fsdp.convert.launcher import check_launcher_facts
from portable_fsdp.runtime.errors import BackendError, ConfigError

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
            "bf16: true\nfsdp_config: {fsdp_offload_params: true, cpu_offload: false}\nnum_epochs: 1\n",
            "theirs.yaml:2: cpu_offload: false contradicts fsdp_offload_params: true (theirs.yaml:2)",
        ),
        (
            "num_epochs: 1\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n  reshard_after_forward: false\n",
            "theirs.yaml:4: reshard_after_forward: false contradicts fsdp_sharding_strategy: FULL_SHARD",
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
            f"{F}num_processes: 8\nparallelism_config: {{dp_shard_size: 4}}\n",
            "theirs.yaml:3: dp_shard_size: expected dp_shard_size = num_processes = 8, found 4.",
        ),
        (
            f"{F}num_processes: 4\nparallelism_config: {{dp_shard_size: 1}}\n",
            "dp_shard_size: expected dp_shard_size = num_processes = 4, found 1.",
        ),
        (
            "distributed_type: MULTI_GPU\nparallelism_config: {dp_shard_size: 4}\n",
            "theirs.yaml:2: dp_shard_size: 4 contradicts distributed_type: MULTI_GPU (theirs.yaml:1)",
        ),
        (
            "distributed_type: DEEPSPEED\n",
            "theirs.yaml:1: distributed_type: expected zero_stage in deepspeed_config too, which says what is sharded",
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
        ("learning_rate: nan\nmax_steps: 5\n", "theirs.yaml:1: learning_rate: expected a number, found nan."),
        ("learning_rate: 1e999\nmax_steps: 5\n", "theirs.yaml:1: learning_rate: expected a number, found 1e999."),
        ("learning_rate: -1\nmax_steps: 100\n", "theirs.yaml:1: optim.lr: expected a number > 0"),
        ("gradient_accumulation_steps: 0\nlearning_rate: 1\n", "expected a whole number >= 1, found 0."),
        (
            f"{F}num_machines: 2\nmachine_rank: 2\n",
            "theirs.yaml:3: machine_rank: expected a number from 0 to num_machines - 1 = 1, found 2.",
        ),
        (
            f"{F}fsdp_config: {{fsdp_version: 9.2}}\n",
            "theirs.yaml:2: fsdp_version: expected 1 | 2, found 9.2.",
        ),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 0.3}\n",
            "theirs.yaml:2: zero_stage: expected 0 | 1 | 2 | 3, found 0.3.",
        ),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {gradient_clipping: auto}\n",
            "gradient_clipping: auto can't be honoured: DeepSpeed's auto is filled in by Trainer or by the script.\n"
            "  Way out: set it to a number, 0 for no clipping, or override train.max_grad_norm.",
        ),
        (
            "num_epochs: 1\nfsdp_config: {offload_params: true, cpu_offload_pin_memory: false}\n",
            "cpu_offload_pin_memory: false can't be honoured: offloaded parameters are pinned in host memory.",
        ),
        (
            f"""{F}fsdp_config: '{{"xla": true}}'\n""",
            "theirs.yaml:2: fsdp_config: expected a mapping, found JSON in quotes.\n  Take the quotes away.",
        ),
        (
            f"{F}fsdp_config: fsdp.json\n",
            "\n  Give that file by itself, --import=fsdp.json, and leave fsdp_config out.",
        ),
        (f"{F}fsdp_config: true\n", "theirs.yaml:2: fsdp_config: expected a mapping, found true."),
        (
            f"{F}dispatch_batches: true\n",
            "dispatch_batches: unknown key of accelerate.\n  None is like it; leave it out.",
        ),
        (
            "learning_rate: 1\ntrain_batch_size: 8\n",
            "train_batch_size: unknown key of TrainingArguments.\n  None is like",
        ),
        (f"{F}parallelism_config: {{pp_size: 2}}\n", "pp_size: unknown key of parallelism_config.\n  None is like it"),
        (
            "distributed_type: XLA\ndowncast_bf16: 'yes'\n",
            "downcast_bf16: yes can't be honoured: XLA_DOWNCAST_BF16 would",
        ),
        (f"{F}xla: true\ndowncast_bf16: true\n", "downcast_bf16: true can't be honoured: XLA_DOWNCAST_BF16 would"),
        (
            "fsdp_config: {param_init_fn: {name: init}}\n",
            "can't be honoured: its tool takes a Python object there, which a config file can't hold.",
        ),
        (f"{F}<<: {{debug: false}}\n", "theirs.yaml:2: <<: expected plain keys"),
        (f"{F}fsdp_config: &a\n  fsdp_config: *a\n", "found an alias of what it stands in"),
    ],
)
def test_what_is_wrong_is_said_by_line_and_key(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in problems(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    [
        f"{F}num_processes: 8\nparallelism_config: {{dp_shard_size: 4, tp_size: 2}}\n",
        f"{F}num_processes: 8\nparallelism_config: {{dp_replicate_size: 2, dp_shard_size: 2, cp_size: 2}}\n",
        "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 4}\n",
        "distributed_type: DEEPSPEED\n"
        "deepspeed_config: {zero_stage: 3, offload_param_device: cpu, offload_optimizer_device: nvme}\n",
        "learning_rate: 1\nper_device_train_batch_size: two\ngradient_accumulation_steps: 2\n",
        "learning_rate: 1\nnum_processes: two\nper_device_train_batch_size: 2\n",
        "max_steps: many\nwarmup_ratio: 0.1\n",
        "max_steps: many\neval_strategy: steps\neval_steps: 0.1\n",
        "max_steps: many\ndo_eval: true\n",
        "eval_strategy: epoch\nload_best_model_at_end: true\n",
    ],
)
def test_one_mistake_is_one_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_config(path, ["model.pretrained=folder"])
    assert len(re.findall(r"theirs\.yaml:\d+: \w+: ", str(error.value))) == 1


@pytest.mark.parametrize(
    ("key", "right", "wrong", "expected"),
    [
        ("num_processes", ["1", "auto", "' 2 '"], ["two", "0", "-1", "2.0"], "a whole number >= 1, or auto"),
        ("num_machines", ["1", "16"], ["auto", "-1", "0"], "a whole number >= 1"),
        ("machine_rank", ["0", "9"], ["-1", "first"], "a whole number >= 0"),
        ("main_process_port", ["0", "65535"], ["twelve", "65536", "-1"], "a whole number from 0 to 65535"),
        ("num_cpu_threads_per_process", ["4"], ["0", "4.5"], "a whole number >= 1"),
        ("monitor_interval", ["0.1", "5"], ["soon", "nan"], "a number >= 0"),
        ("debug", ["true", "No", "'1'", "off", "t"], ["maybe", "2"], "true | false"),
        ("same_network", ["yes"], ["local"], "true | false"),
        ("use_fsdp", ["true"], ["FSDP"], "true | false"),
        ("fsdp_limit_all_gathers", ["1", "F"], ["7"], "true | false"),
        ("fsdp_sync_module_states", ["on"], ["always"], "true | false"),
        ("dataloader_num_workers", ["0"], ["-1", "many"], "a whole number >= 0"),
        ("tpu_use_sudo", ["false"], ["3"], "true | false"),
    ],
)
def test_a_value_that_sets_nothing_is_read_all_the_same(
    tmp_path: Path, key: str, right: Sequence[str], wrong: Sequence[str], expected: str
) -> None:
    theirs = tmp_path / "theirs.yaml"
    for value in (*right, "null"):
        theirs.write_text(f"{F}{key}: {value}\n")
        assert read(theirs).config.sharding.strategy == "FULL_SHARD"
    for value in wrong:
        message = problems(tmp_path, f"{F}{key}: {value}\n")
        assert message == f"theirs.yaml:2: {key}: expected {expected}, found {value}."


@pytest.mark.parametrize("words", [("true", "FULL_SHARD"), ("false", "SHARD_GRAD_OP")])
def test_reshard_after_forward_is_taken_in_all_of_accelerates_words(tmp_path: Path, words: tuple[str, str]) -> None:
    spelt = {"true": ("y", "yes", "t", "True", "on", "1"), "false": ("n", "no", "f", "FALSE", "off", "0")}
    for place, key in (("fsdp_config", "fsdp_reshard_after_forward"), ("xla_fsdp_settings", "reshard_after_forward")):
        for word in spelt[words[0]]:
            theirs = tmp_path / "theirs.yaml"
            theirs.write_text(f"distributed_type: FSDP\nfsdp_version: 2\nxla: true\n{place}: {{{key}: {word}}}\n")
            assert read(theirs).config.sharding.strategy == words[1], (key, word)


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


@pytest.mark.parametrize(
    ("text", "option"),
    [
        ("fsdp_config: {xla: true, xla_fsdp_settings: {compute_dtype: float16}}\n", "precision.compute"),
        ("fsdp_config: {xla: true, xla_fsdp_settings: {buffer_dtype: torch.float16}}\n", "xla_fsdp1.buffer_dtype"),
        ("fsdp_config: {fsdp_mixed_precision_policy: fp16}\n", "precision.compute"),
        ("fsdp_config: {fsdp_mixed_precision_policy: fp8}\n", "precision.compute"),
        ("fsdp_config: {mixed_precision_policy: {reduce_dtype: fp16}}\n", "precision.reduce"),
    ],
)
def test_an_override_settles_the_float16_of_a_section(tmp_path: Path, text: str, option: str) -> None:
    assert f", or override {option}." in problems(tmp_path, text)
    assert read(tmp_path / "theirs.yaml", f"{option}=bfloat16")


def test_a_file_of_theirs_alone_is_told_what_a_run_needs(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.yaml"

    def message(text: str, *overrides: str) -> str:
        theirs.write_text(text)
        with pytest.raises(ConfigError) as error:
            load_config(theirs, overrides)
        return str(error.value).replace(f"{tmp_path}/", "")

    assert message(f"{F}mixed_precision: 'no'\n") == (
        "theirs.yaml: a file of accelerate's; a run needs model.pretrained (or model.architecture) and train.steps "
        "(or train.epochs) too.\n"
        "  It says sharding.strategy=FULL_SHARD, precision.compute=float32.\n"
        "  Add: python -m portable_fsdp.launch --config=theirs.yaml model.pretrained=FOLDER train.steps=100 "
        "data.source=text data.path=FILES data.tokenizer=FOLDER\n"
        "  Without data.source a run trains on CPython's documentation, byte by byte.\n"
        "  Or lay it under yours: --config=YOURS.yaml --import=theirs.yaml (explain shows what comes of it)."
    )
    less = message("per_device_train_batch_size: 2\nnum_train_epochs: 1\n", "optim.lr=-1", "train.global_batch=8")
    assert less.startswith("theirs.yaml: a file of Trainer's arguments; a run needs model.pretrained (or model.archit")
    assert "--config=theirs.yaml model.pretrained=FOLDER data.source=text data.path=FILES data.token" in less
    assert "\noverride 'optim.lr=-1': optim.lr: expected a number > 0, found -1." in less
    assert less.count("pretrained=") == 1
    assert load_config(theirs, ["model.pretrained=FOLDER", "train.global_batch=8"]).train.epochs == 1


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
    with pytest.raises(ConfigError, match="found sections of ours"):
        load_config(ours, imports=[ours])


@pytest.mark.parametrize(
    ("text", "found"),
    [("", "nothing"), ("# all of it\n", "nothing"), ("{}\n", "an empty one"), ("[a, b]\n", "the list"), ("a\n", "'a'")],
)
def test_what_holds_no_keys_is_no_import(tmp_path: Path, text: str, found: str) -> None:
    ours, theirs = tmp_path / "ours.yaml", tmp_path / "theirs.yaml"
    ours.write_text(OURS)
    theirs.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(ours, imports=[theirs])
    assert (
        "theirs.yaml: nothing to import: expected a mapping of accelerate's or Trainer's keys (distributed_type, "
        f"fsdp_config, ...), found {found}"
    ) in str(error.value)


def test_a_file_that_names_no_devices_takes_the_number_of_another(tmp_path: Path) -> None:
    """In either order, and from `accelerate launch`; its own number goes first."""
    theirs, trainer, rest = tmp_path / "theirs.yaml", tmp_path / "trainer.yaml", ["model.pretrained=folder"]
    theirs.write_text(f"{F}num_processes: 2\n")
    batch = "max_steps: 9\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 3\n"
    trainer.write_text(batch)
    with pytest.raises(ConfigError, match="expected the number of devices too"):
        load_config(trainer, rest)
    assert load_config(theirs, rest, [trainer]).train.global_batch == 24
    assert load_config(trainer, rest, [theirs]).train.global_batch == 24
    launched = {"ACCELERATE_MIXED_PRECISION": "no", "WORLD_SIZE": "8"}
    assert read_config(trainer, rest, environ=launched).config.train.global_batch == 96
    with pytest.raises(ConfigError, match="expected the number of devices too"):
        read_config(trainer, rest, environ={"WORLD_SIZE": "8"})
    trainer.write_text(f"{batch}num_processes: 4\n")
    assert read_config(theirs, rest, [trainer]).config.train.global_batch == 48


def test_deepspeeds_own_json_is_no_config(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.yaml", tmp_path / "ds.json"
    ours.write_text(OURS)
    for text in (
        '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}',
        '{"train_micro_batch_size_per_gpu": 4}',
    ):
        theirs.write_text(text)
        for config, imports in ((theirs, []), (ours, [theirs])):
            with pytest.raises(
                ConfigError, match=r"ds\.json: DeepSpeed's own JSON is not supported\.\n.*zero_stage"
            ) as error:
                load_config(config, imports=imports)
            assert "unknown key" not in str(error.value)


def test_an_import_that_is_misspelt_as_a_whole_is_told_the_nearest_keys(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.yaml", tmp_path / "theirs.yaml"
    ours.write_text(OURS)
    theirs.write_text("distributd_type: FSDP\nmixed_precison: bf16\n")
    with pytest.raises(ConfigError) as error:
        load_config(ours, imports=[theirs])
    message = str(error.value)
    assert "theirs.yaml:1: distributd_type: unknown key of accelerate.\n  nearest: distributed_type." in message
    assert "theirs.yaml:2: mixed_precison: unknown key of accelerate.\n  nearest: mixed_precision." in message


@pytest.mark.parametrize(
    ("ours", "theirs", "said", "override"),
    [
        (
            OURS,
            "learning_rate: 1\nnum_train_epochs: 3\n",
            "theirs.yaml:2: num_train_epochs: 3 says train.epochs=3.0, and ours.yaml:2 says train.steps=100.\n"
            "  Keep one, or override it: train.steps=...",
            "train.steps=100",
        ),
        (
            "model: {architecture: {model_type: llama}}\ntrain: {steps: 100}\n",
            "model_name_or_path: folder\n",
            "theirs.yaml:1: model_name_or_path: folder says model.pretrained=folder, and ours.yaml:1 says "
            "model.architecture=",
            "model.architecture={model_type: gpt2}",
        ),
    ],
)
def test_options_that_go_instead_of_one_another_differ_by_line(
    tmp_path: Path, ours: str, theirs: str, said: str, override: str
) -> None:
    (tmp_path / "ours.yaml").write_text(ours)
    (tmp_path / "theirs.yaml").write_text(theirs)
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path / "ours.yaml", imports=[tmp_path / "theirs.yaml"])
    message = str(error.value).replace(f"{tmp_path}/", "")
    assert message.startswith(said)
    assert "exactly one" not in message
    assert load_config(tmp_path / "ours.yaml", [override], [tmp_path / "theirs.yaml"])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("torch_dtype: float32\nbf16: true\n", {"precision.master": "float32", "precision.compute": "bfloat16"}),
        ("torch_dtype: torch.bfloat16\n", {"precision.compute": "bfloat16"}),
        ("torch_dtype: bfloat16\nbf16: auto\n", {"precision.compute": "bfloat16"}),
    ],
)
def test_dtypes_of_a_loaded_model_and_the_word_auto(tmp_path: Path, text: str, says: Mapping[str, str]) -> None:
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(f"learning_rate: 1\n{text}")
    [imported] = read(theirs).imports
    found = {name: setting.value for name, setting in imported.settings.items() if name.startswith("precision.")}
    assert found == says


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("torch_dtype: float16\n", "float16 can't be honoured: weights rest in precision.master"),
        ("torch_dtype: bfloat16\nmixed_precision: 'no'\n", "bfloat16 contradicts mixed_precision: no"),
        ("attn_implementation: flash_attention_2\n", "attention is chosen by model.attention, which has no such word"),
        ("attn_implementation: kernels-community/flash-attn\n", "or override model.attention."),
        ("resume_from_checkpoint: out/checkpoint-500\n", "a Trainer's folder is no checkpoint of ours"),
        ("optim: lion_32bit\n", "lion_32bit can't be honoured: AdamW and SGD are the optimizers built"),
    ],
)
def test_a_refusal_of_a_trainers_word_has_a_reason(tmp_path: Path, text: str, said: str) -> None:
    assert said in problems(tmp_path, f"learning_rate: 1\n{text}")


# ----------------------------------------------------------------------------------------------------- evaluations


STEPS = "eval_strategy: steps\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (f"{STEPS}eval_steps: 50\n", {"train.eval_every": 50}),
        ("evaluation_strategy: steps\neval_steps: 50\ndo_eval: true\n", {"train.eval_every": 50}),
        (f"{STEPS}eval_steps: 1\n", {"train.eval_every": 1}),
        (f"{STEPS}eval_steps: 2.0\n", {"train.eval_every": 2}),
        (f"{STEPS}eval_steps: 0.07\n", {"train.eval_every": 8}),  # of 100 steps: 7.000000000000001, as Trainer has it
        (f"{STEPS}eval_steps: null\nlogging_steps: 20\n", {"train.eval_every": 20, "train.log_every": 20}),
        (f"{STEPS}eval_steps: 0\nlogging_steps: 20\n", {"train.eval_every": 20, "train.log_every": 20}),
        (STEPS, {"train.eval_every": 500}),
        (f"{STEPS}eval_on_start: true\neval_delay: 0\n", {"train.eval_every": 500, "train.eval_on_start": True}),
        ("eval_on_start: false\n", {"train.eval_on_start": False}),
        ("eval_strategy: 'no'\neval_steps: 50\ndo_eval: false\neval_delay: 3\n", {}),
        ("eval_steps: 50\n", {}),
        ("do_eval: true\n", {"train.eval_every": 100}),
        (f"{STEPS}load_best_model_at_end: true\nmetric_for_best_model: eval_loss\n", {"train.eval_every": 500}),
        (f"{STEPS}metric_for_best_model: loss\ngreater_is_better: false\n", {"train.eval_every": 500}),
        (f"{STEPS}save_steps: 9\nsave_strategy: best\n", {"train.eval_every": 500, "checkpoint.every": None}),
    ],
)
def test_evaluations_are_trainers(tmp_path: Path, text: str, says: Mapping[str, object]) -> None:
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(f"learning_rate: 1\n{text}")
    [imported] = read(theirs).imports
    assert {name: said.value for name, said in imported.settings.items() if name != "optim.lr"} == says


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("eval_strategy: epoch\n", "epoch can't be honoured: evaluations come by steps.\n  Way out: set it to steps"),
        (f"{STEPS}eval_steps: 2.5\n", "eval_steps: expected a whole number above 1, found 2.5."),
        (f"{STEPS}eval_steps: -1\n", "eval_steps: expected a number >= 0, found -1."),
        (f"{STEPS}eval_delay: 3\n", "eval_delay: the first evaluation comes after the first eval_steps steps.\n  Set"),
        ("load_best_model_at_end: true\n", "load_best_model_at_end: evaluations tell which one is the best, and"),
        (
            "save_strategy: best\n",
            "save_strategy: evaluations tell which one is the best, and eval_strategy asks for n",
        ),
        (f"{STEPS}metric_for_best_model: eval_accuracy\n", "the best is the one of the lowest loss.\n  Way out: set"),
        (
            f"{STEPS}greater_is_better: true\n",
            "greater_is_better: true can't be honoured: the best is the one of the l",
        ),
        (f"{STEPS}bf16_full_eval: true\n", "true can't be honoured: evaluations compute as training does."),
        (f"{STEPS}batch_eval_metrics: true\n", "true can't be honoured: an evaluation measures the loss alone."),
    ],
)
def test_an_evaluation_that_is_not_ours_is_refused(tmp_path: Path, text: str, said: str) -> None:
    assert said in problems(tmp_path, f"learning_rate: 1\n{text}")


def test_evaluations_by_a_share_of_steps_or_after_the_last_need_their_number(tmp_path: Path) -> None:
    theirs, rest = tmp_path / "theirs.yaml", ["model.pretrained=folder"]
    for text, said in (
        (f"{STEPS}eval_steps: 0.1\n", "eval_steps: a share of the steps needs their number.\n  Set train.eval_every"),
        ("do_eval: true\n", "do_eval: an evaluation after the last step needs the number of steps.\n  Set eval_strat"),
    ):
        theirs.write_text(f"num_train_epochs: 2\n{text}")
        with pytest.raises(ConfigError) as error:
            load_config(theirs, rest)
        assert said in str(error.value)
        assert load_config(theirs, [*rest, "train.eval_every=7"]).train.eval_every == 7


def test_the_best_needs_evaluations_that_our_file_may_ask_for(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.yaml", tmp_path / "theirs.yaml"
    theirs.write_text("learning_rate: 1\nload_best_model_at_end: true\n")
    ours.write_text("model: {pretrained: folder}\ntrain: {steps: 9, eval_every: 3}\n")
    loaded = read_config(ours, imports=[theirs])
    assert loaded.config.train.eval_every == 3
    told = {said.key: said.reason for said in loaded.imports[0].not_needed}
    assert told["load_best_model_at_end"].startswith("the best by its evaluation is saved anyhow")


def test_an_import_that_evaluates_is_told_what_to_hold_out(tmp_path: Path) -> None:
    """A Trainer's file has no data: what an evaluation runs over is ours to say."""
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(f"{STEPS}eval_steps: 50\n")
    with pytest.raises(ConfigError, match=r"data\.tokenizer=FOLDER data\.eval_split=5%\n"):
        load_config(theirs)
    config = read(theirs).config
    with pytest.raises(BackendError) as error:
        require_supported(config, engine="native", device="cpu", devices=1, hosts=1)
    assert str(error.value) == (
        "backend native on cpu (1 device(s) of 1 host(s)): train.eval_every=50 without data.eval_split: there "
        "is no validation set.\n  Set data.eval_split=5%, or train.eval_every=null. Nothing was started."
    )


@pytest.mark.parametrize(
    ("text", "overrides", "steps"),
    [
        ("lr_scheduler_type: constant\nwarmup_steps: 10\n", (), None),
        ("lr_scheduler_type: constant\nwarmup_ratio: 0.1\n", (), None),
        ("lr_scheduler_type: constant\nwarmup_steps: 10\n", ("optim.schedule=linear",), 10),
        ("lr_scheduler_type: constant_with_warmup\nwarmup_steps: 10\n", (), 10),
    ],
)
def test_a_constant_schedule_has_no_warmup_as_in_trainer(
    tmp_path: Path, text: str, overrides: Sequence[str], steps: int | None
) -> None:
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(f"learning_rate: 1\n{text}")
    [imported] = read(theirs, *overrides).imports
    setting = imported.settings.get("optim.warmup_steps")
    assert (setting and setting.value) == steps
    told = [said.reason for said in imported.not_needed]
    assert told == ([] if steps else ["lr_scheduler_type: constant has no warmup; constant_with_warmup has one"])


def test_a_key_that_another_one_goes_before_is_told(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text("max_steps: 9\nnum_train_epochs: 3\nsave_steps: 5\nsave_strategy: 'no'\nwarmup_steps: 0.5\n")
    loaded = read_config(theirs, ["model.pretrained=folder"])
    assert (loaded.config.train.steps, loaded.config.train.epochs, loaded.config.checkpoint.every) == (9, None, None)
    assert loaded.config.optim.warmup_steps == 5
    told = {said.key: said.reason for said in loaded.imports[0].not_needed}
    assert told == {
        "num_train_epochs": "train.steps goes first, as in Trainer",
        "save_steps": "save_strategy saves none by steps",
    }


@pytest.mark.parametrize(
    ("text", "overrides", "told"),
    [
        (
            f"{F}fsdp_config: {{fsdp_activation_checkpointing: false}}\ngradient_checkpointing: true\n",
            (),
            {"fsdp_activation_checkpointing": "gradient_checkpointing: true goes first"},
        ),
        (
            f"{F}fsdp_config: {{fsdp_activation_checkpointing: true}}\ngradient_checkpointing: true\n",
            (),
            {"gradient_checkpointing": "agrees with fsdp_activation_checkpointing: true"},
        ),
        (
            "learning_rate: 1\nwarmup_steps: 0\nwarmup_ratio: 0.1\n",
            (),
            {"warmup_steps": "warmup_ratio: 0.1 goes first"},
        ),
        (
            "learning_rate: 1\nwarmup_steps: 5\nwarmup_ratio: 0.05\n",
            (),
            {"warmup_ratio": "warmup_steps: 5 goes first"},
        ),
        (
            f"{F}fsdp_config: {{fsdp_sharding_strategy: 1, fsdp_reshard_after_forward: FULL_SHARD}}\n",
            (),
            {"fsdp_reshard_after_forward": "agrees with fsdp_sharding_strategy: 1"},
        ),
        (
            f"{F}fsdp_config: {{fsdp_sharding_strategy: 1, fsdp_reshard_after_forward: NO_SHARD}}\n",
            ("sharding.strategy=HYBRID_SHARD",),
            {"fsdp_reshard_after_forward": "sharding.strategy goes first, as it is set elsewhere"},
        ),
        (
            f"{F}fsdp_config: {{fsdp_sharding_strategy: 1, fsdp_reshard_after_forward: NO_SHARD}}\n",
            (),
            {"fsdp_reshard_after_forward": "fsdp_sharding_strategy: 1 goes first"},
        ),
        (
            "fsdp: full_shard\nfsdp_config: {reshard_after_forward: false}\n",
            (),
            {"fsdp": "reshard_after_forward: false goes first"},
        ),
        (
            "learning_rate: 1\nfsdp: ''\n",
            (),
            {"fsdp": "whether Trainer itself shards; here sharding.strategy says it, by default FULL_SHARD"},
        ),
        (
            "distributed_type: 'NO'\ngradient_accumulation_steps: 4\n",
            (),
            {
                "distributed_type": "says which section counts; sharding.strategy says what is sharded",
                "gradient_accumulation_steps": "train.global_batch goes first",
            },
        ),
    ],
)
def test_a_key_agrees_with_another_one_only_where_both_come_to_the_same(
    tmp_path: Path, text: str, overrides: Sequence[str], told: Mapping[str, str]
) -> None:
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(text)
    found = {said.key: said.reason for said in read(theirs, *overrides).imports[0].not_needed}
    assert {key: found.get(key) for key in told} == told


FILLED = "learning_rate: 1\nfsdp: true\n"  # Trainer's, by its keys
PRE = {"sharding.backward_prefetch": "BACKWARD_PRE"}


@pytest.mark.parametrize(
    ("text", "says", "told"),
    [
        # a name that is another tool's
        (f"{FILLED}fsdp_config: {{fsdp_offload_params: true}}", {}, {"fsdp_offload_params": "its key is cpu_offload"}),
        (
            f"{FILLED}fsdp_config: {{fsdp_sharding_strategy: 2}}",
            {},
            {"fsdp_sharding_strategy": "Trainer doesn't read it"},
        ),
        ("{fsdp_offload_params: true, xla: false}", {}, {"fsdp_offload_params": "its key is cpu_offload"}),
        (f"{FILLED}fsdp_config: {{cpu_offload: true}}", {"memory.cpu_offload": True}, {}),
        (f"{F}fsdp_config: {{offload_params: true}}", {"memory.cpu_offload": True}, {}),
        (
            f"{F}fsdp_config: {{cpu_offload: true}}",
            {},
            {"cpu_offload": "accelerate doesn't read it; its key is offload_params"},
        ),
        (
            f"{F}fsdp_config: {{fsdp_transformer_cls_names_to_wrap: [A]}}",
            {},
            {"fsdp_transformer_cls_names_to_wrap": "its key is transformer_layer_cls_to_wrap"},
        ),
        (
            f"{F}fsdp_config: {{mixed_precision_policy: {{reduce_dtype: fp16}}}}",
            {},
            {"reduce_dtype": "accelerate doesn't"},
        ),
        (
            f"{FILLED}fsdp_config: {{ignored_modules: a, use_orig_params: 1}}",
            {},
            {"ignored_modules": "Trainer doesn't"},
        ),
        (
            f"{F}fsdp_config: {{state_dict_config: {{offload_to_cpu: true}}}}",
            {},
            {"state_dict_config": "accelerate doesn't"},
        ),
        ("fsdp_config: {state_dict_config: {rank0_only: true}}", {}, {"state_dict_config": "checkpoints are sharded"}),
        # version 2
        (
            f"{F}fsdp_config: {{version: 2, sharding_strategy: FULL_SHARD, reshard_after_forward: false}}",
            {"sharding.strategy": "SHARD_GRAD_OP"},
            {"sharding_strategy": "fsdp_version 2 doesn't read it; reshard_after_forward says it"},
        ),
        (
            f"{F}fsdp_config: {{version: 2, sharding_strategy: NO_SHARD}}",
            {},
            {"sharding_strategy": "fsdp_version 2 doesn't"},
        ),
        (
            f"{FILLED}fsdp_config: {{version: 2, backward_prefetch: backward_post, forward_prefetch: true}}",
            {},
            {"backward_prefetch": "fsdp_version 2 has no such", "forward_prefetch": "fsdp_version 2 has no such"},
        ),
        (
            f"{F}fsdp_config: {{reshard_after_forward: false}}",
            {},
            {"reshard_after_forward": "with fsdp_version 2 only"},
        ),
        # beside xla
        (
            f"{FILLED}fsdp_config: {{xla: false, xla_fsdp_v2: false}}",
            {},
            {"xla_fsdp_v2": "counts beside xla: true only"},
        ),
        ("{xla: true, xla_fsdp_v2: false}", {}, {"xla_fsdp_v2": "one process a chip: --backend=xla_fsdp1"}),
        ("{xla_fsdp_grad_ckpt: true}", {}, {"xla_fsdp_grad_ckpt": "counts beside xla: true only"}),
        ("{xla: false, xla_fsdp_settings: {compute_dtype: float16}}", {}, {"compute_dtype": "counts beside xla: true"}),
        (
            "xla: true\nxla_fsdp_v2: true\nxla_fsdp_settings: {compute_dtype: float32}\ncpu_offload: true",
            {},
            {
                "compute_dtype": "xla_fsdp_v2 reads none",
                "cpu_offload": "Trainer doesn't read it beside xla",
            },
        ),
        # beside another key
        (f"{F}downcast_bf16: 'yes'", {}, {"downcast_bf16": "accelerate reads it on TPUs only"}),
        (f"{F}fp8_config: {{backend: TE}}", {}, {"backend": "accelerate reads it with mixed_precision: fp8 only"}),
        (
            f"{F}dynamo_config: {{dynamo_backend: 'NO', dynamo_use_dynamic: true}}",
            {"compile.enabled": False},
            {"dynamo_use_dynamic": "accelerate reads it beside a dynamo_backend only"},
        ),
        (f"{F}fsdp_config: {{min_num_params: 5}}", {}, {"min_num_params": "counts only where units are made by size"}),
        (
            f"{F}fsdp_config: {{auto_wrap_policy: no_wrap, transformer_layer_cls_to_wrap: A}}",
            {"sharding.wrap": "NO_WRAP"},
            {"transformer_layer_cls_to_wrap": "counts only where units are layers"},
        ),
        # Trainer's own dump of what nobody set
        ("learning_rate: 1\nfsdp: []\nfsdp_config: {min_num_params: 0, xla: false, xla_fsdp_v2: false}", {}, {}),
    ],
)
def test_a_key_that_its_own_tool_does_not_read_sets_nothing(
    tmp_path: Path, text: str, says: Mapping[str, object], told: Mapping[str, str]
) -> None:
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(text)
    [imported] = read(theirs).imports
    beside = [("optim.lr", 1), ("sharding.strategy", "FULL_SHARD")]  # what is said in any case
    said = {name: setting.value for name, setting in imported.settings.items()}
    assert {name: value for name, value in said.items() if (name, value) not in beside} == says
    found = {said.key: said.reason for said in (*imported.not_needed, *imported.launcher)}
    assert {key: reason in found.get(key, "") for key, reason in told.items()} == dict.fromkeys(told, True), found


@pytest.mark.parametrize(
    ("text", "option", "remark"),
    [
        (f"{F}fsdp_config: {{fsdp_backward_prefetch: backward_pre}}", "sharding.backward_prefetch", ""),
        (f"{FILLED}fsdp_config: {{version: 1, forward_prefetch: true}}", "sharding.forward_prefetch", ""),
        (
            f"{FILLED}fsdp_config: {{forward_prefetch: true}}",
            "sharding.forward_prefetch",
            "Trainer's default, version 2,",
        ),
        (
            f"{F}fsdp_config: {{fsdp_backward_prefetch_policy: backward_pre}}",
            "sharding.backward_prefetch",
            "documented, but accelerate 1.15 doesn't read it; taken at its word",
        ),
        (
            f"{F}fsdp_config: {{xla: true, xla_fsdp_grad_ckpt: true}}",
            "memory.gradient_checkpointing",
            "documented, but",
        ),
        (
            f"{F}fsdp_config: {{reshard_after_forward: NO_SHARD}}",
            "sharding.strategy",
            "accelerate reads no strategy here",
        ),
        (f"{F}fsdp_config: {{version: 2, reshard_after_forward: false}}", "sharding.strategy", ""),
        (
            f"{F}fsdp_config: {{transformer_layer_cls_to_wrap: A}}",
            "sharding.wrap_classes",
            "fsdp_auto_wrap_policy: TRANSF",
        ),
        (f"{FILLED}fsdp_config: {{transformer_layer_cls_to_wrap: A}}", "sharding.wrap_classes", ""),
        (
            f"{FILLED}transformer_layer_cls_to_wrap: A",
            "sharding.wrap_classes",
            "a key of fsdp_config, found in Training",
        ),
    ],
)
def test_a_key_that_its_tools_manual_has_is_taken_at_its_word(
    tmp_path: Path, text: str, option: str, remark: str
) -> None:
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(text)
    settings = read(theirs).imports[0].settings
    assert (remark in settings[option].remark) if remark else not settings[option].remark


@pytest.mark.parametrize(
    ("sizes", "devices", "problem"),
    [
        ("dp_replicate_size: 2, dp_shard_size: 4", 8, ""),
        ("dp_replicate_size: 2, dp_shard_size: 4", 16, "dp_replicate_size * dp_shard_size: expected 16 devices"),
        ("dp_shard_size: 4", 8, "dp_shard_size: expected 8 devices, as the launcher has it, found 4."),
        ("dp_shard_size: 4", 4, ""),
    ],
)
def test_copies_times_shards_are_the_devices(tmp_path: Path, sizes: str, devices: int, problem: str) -> None:
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(f"{F}parallelism_config: {{{sizes}}}\n")
    imports = read(theirs).imports
    if not problem:
        return check_launcher_facts(imports, processes=devices, environ={})
    with pytest.raises(ConfigError, match=re.escape(problem)):
        check_launcher_facts(imports, processes=devices, environ={})
    return None


def test_a_token_is_not_repeated(tmp_path: Path) -> None:
    message = problems(tmp_path, "learning_rate: 1\nhub_token: abcdef\n")
    assert "hub_token" in message
    assert "abcdef" not in message


def test_a_token_that_trainer_hides_in_its_own_dump_asks_nothing(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.json"
    theirs.write_text('{"learning_rate": 1.0, "push_to_hub": false, "hub_token": "<HUB_TOKEN>"}')
    assert read(theirs).config.optim.lr == 1


def test_a_share_of_steps_that_nobody_knows_is_settled_by_a_file_of_ours(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.yaml", tmp_path / "theirs.yaml"
    theirs.write_text("num_train_epochs: 2\nwarmup_ratio: 0.1\n")
    ours.write_text("model: {pretrained: folder}\n")
    with pytest.raises(ConfigError, match=r"theirs\.yaml:2: warmup_ratio: .*\n  Set optim\.warmup_steps, or max"):
        load_config(ours, imports=[theirs])
    ours.write_text("model: {pretrained: folder}\noptim: {warmup_steps: 7}\n")
    assert load_config(ours, imports=[theirs]).optim.warmup_steps == 7


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
