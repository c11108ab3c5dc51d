"""transformers' Trainer on both engines, against the same class alone on one device with the same global batch."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from trainer_runs import CASES, example_losses, model_of, plain_run, portable_run, portable_trainer
from workers import GetWorkers, Group, JobFailed, marked

TWO, THREE, XLA = Group("gloo", 2), Group("gloo", 3), Group("xla", 4)
PLACES = [marked(group, in_suite=True) for group in (TWO, XLA)]
PROOFS = {
    TWO: ("plain", "accumulation", "autocast", "no clipping"),
    XLA: ("plain", "accumulation", "two rows in the last batch", "recomputation", "words of fsdp", "no clipping"),
}
RUNS = [
    marked(group, name, in_suite=name not in PROOFS[group])
    for group in (TWO, XLA)
    for name in CASES
    if (group, name) != (XLA, "autocast")  # torch_xla's autocast leaves queries in float32 beside bfloat16 values
]
ON_THREE = [marked(THREE, name, in_suite=False) for name in ("two rows in the last batch", "a loss that is a mean")]


def require_equal(actual: dict[str, float], expected: dict[str, float], tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        if not (key.endswith("grad_norm") and tolerance > 1e-4):  # bfloat16's norm has other roundings
            assert actual[key] == pytest.approx(value, rel=tolerance, abs=1e-12), key


@cache
def plain_curve(name: str) -> dict[str, float]:
    with TemporaryDirectory() as folder:
        return plain_run(name, Path(folder), **({"fsdp": None} if "fsdp" in CASES[name].arguments else {}))


@pytest.mark.parametrize(("group", "name"), [*RUNS, *ON_THREE])
def test_the_losses_are_those_of_trainer_alone(group: Group, name: str, workers: GetWorkers, tmp_path: Path) -> None:
    expected = plain_curve(name)
    for curve, late in workers(group).run(portable_run, name=name, folder=tmp_path / "ours"):
        require_equal(curve, expected, CASES[name].tolerance)
        assert late == 0


@pytest.mark.parametrize(("first", "second"), [(TWO, XLA), (XLA, TWO)], ids=["native-xla", "xla-native"])
@pytest.mark.xla
def test_a_run_goes_on_elsewhere_in_mid_epoch(first: Group, second: Group, workers: GetWorkers, tmp_path: Path) -> None:
    name, saves = "accumulation", {"save_strategy": "steps", "save_steps": 5, "max_steps": 8}
    expected = plain_run(name, tmp_path / "plain", max_steps=8)
    workers(first).run(portable_run, name=name, folder=tmp_path / "first", **saves)
    checkpoint = tmp_path / "first" / "checkpoint-5"
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    assert (state["global_step"], state["epoch"]) == (5, pytest.approx(5 / 2))
    for curve, _ in workers(second).run(
        portable_run, name=name, folder=tmp_path / "second", resume=str(checkpoint), max_steps=8
    ):
        require_equal(curve, expected, 1e-5)


@pytest.mark.parametrize("group", PLACES)
def test_the_saved_folder_opens_by_from_pretrained(group: Group, workers: GetWorkers, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    saves: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "save_total_limit": 1}
    workers(group).run(portable_run, name="plain", folder=tmp_path, final=str(tmp_path / "final"), **saves)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-4"]
    weights = [LlamaForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("final", "checkpoint-4")]
    first = model_of(CASES["plain"]).state_dict()
    assert weights[0].keys() == first.keys()
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())
    assert not any(torch.equal(value, first[key]) for key, value in weights[0].items())


def best_run(name: str, folder: Path) -> tuple[float, float, str, set[float]]:
    """The best evaluation's loss, that of the model in the end, the best one's folder, and the optimizer's steps."""
    settings = {"save_strategy": "steps", "save_steps": 4, "eval_steps": 4, "max_steps": 12, "learning_rate": 0.02}
    trainer = portable_trainer(name, folder, **settings, load_best_model_at_end=True)
    try:
        trainer.train()
        best = min(entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
        steps = {float(state["step"]) for state in trainer.optimizer.optimizer.state.values()}
        return best, trainer.evaluate()["eval_loss"], Path(trainer.state.best_model_checkpoint).name, steps
    finally:
        trainer.accelerator.end_training()


@pytest.mark.parametrize("group", PLACES)
def test_the_best_weights_come_back(group: Group, workers: GetWorkers, tmp_path: Path) -> None:
    for best, last, folder, steps in workers(group).run(best_run, name="evaluation", folder=tmp_path):
        assert folder == "checkpoint-4"  # these rows are noise: later weights know the training rows by heart
        assert last == pytest.approx(best, rel=1e-6)
        assert steps == {12.0}  # weights alone are loaded


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft reads it
def test_adapters_are_peft_s(workers: GetWorkers, tmp_path: Path) -> None:
    from peft import PeftModel

    workers(TWO).run(portable_run, name="lora", folder=tmp_path, final=str(tmp_path / "final"), max_steps=3)
    assert not (tmp_path / "final" / "model.safetensors").exists()
    model = PeftModel.from_pretrained(model_of(CASES["plain"]), str(tmp_path / "final"))
    assert any(value.abs().sum() > 0 for key, value in model.state_dict().items() if "lora_B" in key)


def evaluate_train_twice(name: str, folder: Path) -> list[float]:
    trainer = portable_trainer(name, folder, max_steps=3)
    try:
        before = trainer.evaluate()["eval_loss"]
        losses = [trainer.train().training_loss for _ in range(2)]
        return [before, *losses]
    finally:
        trainer.accelerator.end_training()


def test_evaluate_comes_before_train_and_train_twice(workers: GetWorkers, tmp_path: Path) -> None:
    for before, first, second in workers(TWO).run(evaluate_train_twice, name="evaluation", folder=tmp_path):
        assert before > second
        assert first > second


REFUSED: dict[str, tuple[Group, dict[str, Any], str]] = {
    "groups of lengths": (XLA, {"train_sampling_strategy": "group_by_length"}, "another program for XLA"),
    "liger": (XLA, {"use_liger_kernel": True}, "its kernels are of GPUs"),
    "batch finder": (TWO, {"auto_find_batch_size": True}, "auto_find_batch_size=True: it retries after errors"),
    "own token counts": (TWO, {"average_tokens_across_devices": False}, "the loss is always per token"),
    "noise": (TWO, {"neftune_noise_alpha": 5.0}, "noise in embeddings is not supported"),
    "float16": (TWO, {"fp16": True}, "mixed_precision=fp16 isn't built"),
    "full evaluation in bf16": (TWO, {"bf16_full_eval": True}, "evaluations compute as training does"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.xla
def test_arguments_that_no_engine_honours_are_refused(name: str, workers: GetWorkers, tmp_path: Path) -> None:
    group, arguments, message = REFUSED[name]
    with pytest.raises(JobFailed) as failure:
        workers(group).run(portable_run, name="plain", folder=tmp_path, **arguments)
    assert failure.value.kind == "ConfigError"
    assert message in failure.value.message


def test_a_plain_trainer_s_checkpoint_is_refused(workers: GetWorkers, tmp_path: Path) -> None:
    plain_run("plain", tmp_path / "plain", max_steps=2, save_strategy="steps", save_steps=2)
    with pytest.raises(JobFailed) as failure:
        workers(TWO).run(portable_run, name="plain", folder=tmp_path, resume=str(tmp_path / "plain/checkpoint-2"))
    assert "plain Trainer saved it, or save_only_model" in failure.value.message


def test_a_plain_import_loads_no_trainer() -> None:
    modules = ("torch", "transformers", "accelerate")
    code = f"import sys, portable_fsdp.trainers; print([name for name in {modules} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.proof
@pytest.mark.xla
def test_the_example_learns_and_resumes_elsewhere(tmp_path: Path) -> None:
    losses = example_losses("trainer", tmp_path)
    assert losses[-1] < losses[0] / 2


def test_only_a_trainer_is_taken() -> None:
    from portable_fsdp.runtime.errors import ConfigError
    from portable_fsdp.trainers import on_portable

    with pytest.raises(ConfigError, match="expected transformers' Trainer or a subclass of it, found <class 'int'>"):
        on_portable(int)
