"""How imports and the environment lie under our own file and overrides, and under one another."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from foreign_files import LAUNCHED, problems

from portable_fsdp.config.load import Loaded
from portable_fsdp.convert.read import load_config, read_config
from portable_fsdp.explain import origin, translation

OURS = "model: {pretrained: folder}\ntrain: {steps: 100}\n"
FSDP = "distributed_type: FSDP\n"
STRATEGY = "fsdp_config: {fsdp_sharding_strategy: 2}\n"
Write = Callable[..., list[Path]]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes ours.yaml, theirs.yaml, more.yaml, in this order."""

    def files(*texts: str) -> list[Path]:
        paths = [tmp_path / name for name in ("ours.yaml", "theirs.yaml", "more.yaml")][: len(texts)]
        for path, text in zip(paths, texts, strict=True):
            path.write_text(text)
        return paths

    return files


def test_an_import_lies_under_our_file(write: Write) -> None:
    ours, theirs = write(f"{OURS}precision: {{compute: bfloat16}}\n", f"{FSDP}mixed_precision: bf16\n{STRATEGY}")
    loaded = read_config(ours, ["sharding.strategy=NO_SHARD"], [theirs])
    assert loaded.config.sharding.strategy == "NO_SHARD"
    assert loaded.config.precision.reduce == "bfloat16"
    assert loaded.origins["precision.compute"] == f"{ours}:3"
    assert loaded.origins["precision.reduce"] == f"{theirs}:2"
    assert "optim.lr" not in loaded.origins


DIFFERENCES = {
    "both lines are named": (
        f"{OURS}sharding: {{strategy: NO_SHARD}}\n",
        f"{FSDP}{STRATEGY}",
        "theirs.yaml:2: fsdp_sharding_strategy: 2 sets sharding.strategy=SHARD_GRAD_OP, but ours.yaml:3 sets "
        "sharding.strategy=NO_SHARD.\n  Keep one, or override it: sharding.strategy=...",
        "sharding.strategy=FULL_SHARD",
    ),
    "epochs and steps": (
        OURS,
        "learning_rate: 1\nnum_train_epochs: 3\n",
        "theirs.yaml:2: num_train_epochs: 3 sets train.epochs=3.0, but ours.yaml:2 sets train.steps=100.\n"
        "  Keep one, or override it: train.steps=...",
        "train.steps=100",
    ),
    "pretrained and architecture": (
        "model: {architecture: {model_type: llama}}\ntrain: {steps: 100}\n",
        "model_name_or_path: folder\n",
        "theirs.yaml:1: model_name_or_path: folder sets model.pretrained=folder, but ours.yaml:1 sets "
        "model.architecture={model_type: llama}.\n  Keep one, or override it: model.architecture=...",
        "model.architecture={model_type: gpt2}",
    ),
}


@pytest.mark.parametrize(("ours", "theirs", "message", "override"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_an_override_settles_a_difference(write: Write, ours: str, theirs: str, message: str, override: str) -> None:
    path, imported = write(ours, theirs)
    assert problems(path, imports=(imported,)) == message
    assert load_config(path, [override], [imported])


IMPORTED = "nothing to import: expected a mapping of accelerate or Trainer keys (distributed_type, "
NO_IMPORTS = {
    "": f"theirs.yaml: {IMPORTED}fsdp_config, ...), found nothing.",
    "# all of it\n": f"theirs.yaml: {IMPORTED}fsdp_config, ...), found nothing.",
    "{}\n": f"theirs.yaml: {IMPORTED}fsdp_config, ...), found an empty mapping.",
    "[a, b]\n": f"theirs.yaml: {IMPORTED}fsdp_config, ...), found the list ['a', 'b'].",
    "a\n": f"theirs.yaml: {IMPORTED}fsdp_config, ...), found 'a'.",
    '{"zero_optimization": {"stage": 3}}': "theirs.yaml: DeepSpeed's own JSON is not supported.",
    "distributd_type: FSDP\nmixed_precison: bf16\n": (
        "theirs.yaml:1: distributd_type: unknown key of accelerate.\n  nearest: distributed_type.\n"
        "theirs.yaml:2: mixed_precison: unknown key of accelerate.\n  nearest: mixed_precision."
    ),
}


@pytest.mark.parametrize("text", NO_IMPORTS)
def test_what_holds_no_keys_is_no_import(write: Write, text: str) -> None:
    ours, theirs = write(OURS, text)
    assert problems(ours, imports=(theirs,)).startswith(NO_IMPORTS[text])


def test_ours_and_theirs_are_told_apart(write: Write) -> None:
    [ours] = write(f"{OURS}{FSDP}")
    assert problems(ours).startswith("ours.yaml:3: distributed_type: unknown key.\n  a key of accelerate: pass")
    [ours] = write(OURS)
    assert "found our own sections" in problems(ours, imports=(ours,))


def test_a_file_that_names_no_devices_takes_the_number_of_another(write: Write) -> None:
    """In either order, and from `accelerate launch`; its own number goes first."""
    batch, rest = (
        "max_steps: 9\nper_device_train_batch_size: 4\ngradient_accumulation_steps: 3\n",
        ["model.pretrained=a"],
    )
    theirs, trainer = write(f"{FSDP}num_processes: 2\n", batch)
    assert "the global batch also needs num_processes" in problems(trainer, *rest)
    assert "the global batch also needs num_processes" in problems(trainer, *rest, environ={"WORLD_SIZE": "8"})
    assert load_config(theirs, rest, [trainer]).train.global_batch == 24
    assert load_config(trainer, rest, [theirs]).train.global_batch == 24
    launched = {"ACCELERATE_MIXED_PRECISION": "no", "WORLD_SIZE": "8"}
    assert read_config(trainer, rest, environ=launched).config.train.global_batch == 96
    trainer.write_text(f"{batch}num_processes: 4\n")
    assert read_config(theirs, rest, [trainer]).config.train.global_batch == 48


def test_the_best_needs_evaluations_that_our_file_may_set(write: Write) -> None:
    ours, theirs = write(
        "model: {pretrained: folder}\ntrain: {steps: 9, eval_every: 3}\n",
        "learning_rate: 1\nload_best_model_at_end: true\n",
    )
    loaded = read_config(ours, imports=[theirs])
    assert loaded.config.train.eval_every == 3
    reasons = {note.key: note.remark for note in loaded.imports[0].not_needed}
    assert reasons["load_best_model_at_end"].startswith("the best evaluation is always saved")


# ------------------------------------------------------------------------------------------------- accelerate launch


def launched(write: Write, environ: dict[str, str], *overrides: str, texts: tuple[str, ...] = (OURS,)) -> Loaded:
    ours, *imports = write(*texts)
    return read_config(ours, overrides, imports, {**LAUNCHED, **environ})


def test_nothing_is_read_where_accelerate_launch_is_not_the_starter(write: Write) -> None:
    [ours] = write(OURS)
    environ = {name: value for name, value in LAUNCHED.items() if name != "ACCELERATE_MIXED_PRECISION"}
    loaded = read_config(ours, environ={**environ, "FSDP_OFFLOAD_PARAMS": "true", "FSDP_NO_SUCH_THING": "1"})
    assert loaded.imports == ()
    assert not loaded.config.memory.cpu_offload


def test_every_variable_is_answered_and_named_as_an_origin(write: Write) -> None:
    loaded = launched(write, {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"})
    [imported] = loaded.imports
    keys = {entry.key for entry in (*imported.settings.values(), *imported.launcher, *imported.not_needed)}
    assert keys == {*LAUNCHED, "FSDP_STATE_DICT_TYPE"}
    assert loaded.origins["sharding.strategy"] == "accelerate launch: FSDP_SHARDING_STRATEGY"
    assert origin(loaded, "sharding.strategy") == "accelerate launch: FSDP_SHARDING_STRATEGY: FULL_SHARD"
    assert loaded.config.sharding.wrap == "TRANSFORMER_BASED_WRAP"  # FSDP_MIN_NUM_PARAMS is the launcher's default


def test_our_file_and_overrides_lie_over_the_environment(write: Write, tmp_path: Path) -> None:
    ours = f"{OURS}precision: {{compute: bfloat16}}\n"
    environ = {"ACCELERATE_MIXED_PRECISION": "fp16"}
    loaded = launched(write, environ, "sharding.strategy=NO_SHARD", texts=(ours,))
    assert loaded.config.sharding.strategy == "NO_SHARD"
    assert loaded.origins["precision.compute"] == f"{tmp_path}/ours.yaml:3"
    line = "#   FSDP_SHARDING_STRATEGY: FULL_SHARD: override 'sharding.strategy=NO_SHARD' takes precedence"
    assert line in translation(loaded)


def test_a_file_of_accelerates_beside_the_environment_must_agree(write: Write, tmp_path: Path) -> None:
    texts = (OURS, f"{FSDP}mixed_precision: bf16\n{STRATEGY}")
    ours, theirs = write(*texts)
    message = problems(ours, imports=(theirs,), environ=LAUNCHED)
    assert (
        "accelerate launch: FSDP_SHARDING_STRATEGY: FULL_SHARD sets sharding.strategy=FULL_SHARD, but theirs.yaml:3 "
        "sets sharding.strategy=SHARD_GRAD_OP.\n  Keep one, or override it: sharding.strategy=..."
    ) in message
    assert "launch: ACCELERATE_MIXED_PRECISION: no sets precision.compute=float32, but theirs.yaml:2" in message
    same: dict[str, Any] = {"FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP", "ACCELERATE_MIXED_PRECISION": "bf16"}
    assert launched(write, same, texts=texts).origins["sharding.strategy"] == f"{tmp_path}/theirs.yaml:3"
    assert launched(write, {}, "sharding.strategy=NO_SHARD", "precision.compute=float32", texts=texts)


def test_a_trainers_arguments_go_first_as_in_trainer(write: Write) -> None:
    """It sets the variables itself; `gradient_checkpointing` is its own, whatever the plugin says of activations."""
    theirs = "bf16: true\ngradient_checkpointing: true\nlearning_rate: 1.0e-4\nper_device_train_batch_size: 8\n"
    config = launched(write, {}, "train.global_batch=64", texts=(OURS, theirs)).config
    assert config.precision.compute == "bfloat16"
    assert config.memory.gradient_checkpointing == "full"
