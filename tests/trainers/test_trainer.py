"""transformers' Trainer on both engines, against the same class alone on one device with the same global batch."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset
from trainer_runs import (
    CASES,
    Case,
    example_losses,
    model_of,
    plain_run,
    portable_class,
    portable_run,
    portable_trainer,
    rows_of,
)
from workers import GetWorkers, Group, JobFailed, marked

ONE, TWO, THREE, XLA = Group("native", 1), Group("gloo", 2), Group("gloo", 3), Group("xla", 4)
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


class Refused(NamedTuple):
    group: Group
    message: str
    arguments: Mapping[str, Any] = {}
    options: Mapping[str, Any] = {}
    deepspeed: Mapping[str, Any] | None = None  # set afterwards: TrainingArguments imports the package
    wrap: Callable[[nn.Module], object] = lambda model: model


FULL_SHARD_BY_WORDS: Any = {"fsdp": True, "fsdp_config": {"reshard_after_forward": True}}
REFUSED = {
    "groups of lengths": Refused(XLA, "another program for XLA", {"train_sampling_strategy": "group_by_length"}),
    "liger": Refused(XLA, "its kernels are of GPUs", {"use_liger_kernel": True}),
    "compiling": Refused(XLA, "XLA compiles each step itself", {"torch_compile": True}),
    "generation": Refused(XLA, "each token would be another program", {"predict_with_generate": True}),
    "autocast": Refused(XLA, "autocast=True: torch_xla casts some layers alone", {"bf16": True}, {"autocast": True}),
    "8 bits": Refused(XLA, "AdamW of bitsandbytes steps whole weights", {"optim": "adamw_bnb_8bit"}),
    "8 bits in shards": Refused(TWO, "AdamW of bitsandbytes steps whole weights", {"optim": "adamw_bnb_8bit"}),
    "batch finder": Refused(TWO, "auto_find_batch_size=True: it retries after errors", {"auto_find_batch_size": True}),
    "own token counts": Refused(TWO, "the loss is always per token", {"average_tokens_across_devices": False}),
    "noise": Refused(TWO, "noise in embeddings is not supported", {"neftune_noise_alpha": 5.0}),
    "float16": Refused(TWO, "mixed_precision=fp16 isn't built", {"fp16": True}),
    "evaluation in bf16": Refused(TWO, "evaluations compute as training does", {"bf16_full_eval": True}),
    "evaluation in fp16": Refused(TWO, "evaluations compute as training does", {"fp16_full_eval": True}),
    "a mode of compiling": Refused(TWO, "torch_compile_mode=max-autotune", {"torch_compile_mode": "max-autotune"}),
    "rebalanced batches": Refused(
        TWO, "deals rows to processes itself", {"train_sampling_strategy": "batch_rebalance"}
    ),
    "saves on each node": Refused(TWO, "the first host has the whole weights", {"save_on_each_node": True}),
    "losses for metrics": Refused(TWO, "losses of single rows aren't kept", {"include_for_metrics": ["loss"]}),
    "the best of weights alone": Refused(
        TWO,
        "load_best_model_at_end reads whole checkpoints",
        {"save_only_model": True, "load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"},
    ),
    "torch_xla's wrapper": Refused(TWO, "torch_xla's wrapper isn't used", {"fsdp": True, "fsdp_config": {"xla": True}}),
    "contradicting words": Refused(
        TWO,
        "its words say strategy=FULL_SHARD, and on_portable(sharding=...) SHARD_GRAD_OP",
        FULL_SHARD_BY_WORDS,
        {"sharding": {"strategy": "SHARD_GRAD_OP"}},
    ),
    "deepspeed": Refused(TWO, "DeepSpeed is not an engine here", deepspeed={"zero_optimization": {"stage": 3}}),
    "a wrapped model": Refused(TWO, "the model is wrapped already (DataParallel)", wrap=nn.DataParallel),
    "a wrapped part": Refused(
        TWO, "the model is wrapped already (DataParallel)", wrap=lambda model: nn.Sequential(nn.DataParallel(model))
    ),
    "a sharded model": Refused(TWO, "the model is wrapped already (its weights are DTensors)", wrap=fully_shard),
}


def refused_run(name: str, folder: Path) -> None:
    case = REFUSED[name]
    trainer = portable_class(Case(sections=case.options))
    from transformers import Seq2SeqTrainingArguments, TrainingArguments

    kind = Seq2SeqTrainingArguments if "predict_with_generate" in case.arguments else TrainingArguments
    args = kind(str(folder), use_cpu=True, report_to=[], disable_tqdm=True, **case.arguments)
    args.deepspeed = cast(Any, case.deepspeed)
    rows = rows_of(24, classes=False)
    made = trainer(case.wrap(model_of(CASES["plain"])), args, train_dataset=rows, eval_dataset=rows)
    made.training_step = begun
    made.train()


def begun(*_: Any) -> None:
    raise AssertionError("the first step has begun")


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.xla
def test_what_no_engine_honours_is_refused_before_the_first_step(
    name: str, workers: GetWorkers, tmp_path: Path
) -> None:
    with pytest.raises(JobFailed) as failure:
        workers(REFUSED[name].group).run(refused_run, name=name, folder=tmp_path)
    assert failure.value.kind == "ConfigError"
    assert REFUSED[name].message in failure.value.message
    assert "\n  " in failure.value.message  # how to fix it


@pytest.mark.xla
def test_arguments_that_have_taken_xla_s_device_are_refused(tmp_path: Path) -> None:
    code = f"""
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
args = TrainingArguments({str(tmp_path)!r}, report_to=[])
from portable_fsdp.trainers import on_portable
sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1)
on_portable(Trainer)(LlamaForCausalLM(LlamaConfig(**sizes)), args)
"""
    env = {name: value for name, value in os.environ.items() if name != "USE_TORCH_XLA"} | {"PJRT_DEVICE": "CPU"}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert "TrainingArguments has chosen XLA's first device.\n  Call on_portable(Trainer) before it." in result.stderr


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


EIGHT_BITS: dict[str, Any] = {"optim": "adamw_bnb_8bit", "save_strategy": "steps", "save_steps": 3, "max_steps": 6}


def test_bitsandbytes_optimizers_train_and_resume_on_one_device(workers: GetWorkers, tmp_path: Path) -> None:
    expected = plain_run("plain", tmp_path / "plain", **EIGHT_BITS)
    ((curve, _),) = workers(ONE).run(portable_run, name="plain", folder=tmp_path, **EIGHT_BITS)
    require_equal(curve, expected, 1e-5)
    checkpoint = str(tmp_path / "checkpoint-3")
    ((again, _),) = workers(ONE).run(portable_run, name="plain", folder=tmp_path, resume=checkpoint, **EIGHT_BITS)
    assert again == curve


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(rows_of(21, classes=False, seed=5))


def evaluate_a_stream(name: str, folder: Path) -> list[float]:
    trainer = portable_trainer(name, folder)
    try:
        return [trainer.evaluate(rows)["eval_loss"] for rows in (trainer.eval_dataset, Stream())]
    finally:
        trainer.accelerator.end_training()


def test_a_stream_s_evaluation_weighs_by_rows(workers: GetWorkers, tmp_path: Path) -> None:
    ((loss, of_stream),) = workers(ONE).run(evaluate_a_stream, name="evaluation", folder=tmp_path)
    assert of_stream == pytest.approx(loss, rel=1e-6)


def test_a_folder_that_is_not_there_is_refused(workers: GetWorkers, tmp_path: Path) -> None:
    with pytest.raises(JobFailed, match=r"Can't find a valid checkpoint at .*/nothing"):
        workers(ONE).run(portable_run, name="plain", folder=tmp_path, resume=str(tmp_path / "nothing"))


def train_by_two(name: str, folder: Path) -> list[float]:
    """The loss of an evaluation by the Trainer that has trained a model, by another one, and after it has trained."""
    first = portable_trainer(name, folder, max_steps=3)
    try:
        first.train()
        second = type(first)(
            first.model, first.args, train_dataset=first.train_dataset, eval_dataset=first.eval_dataset
        )
        losses = [trainer.evaluate()["eval_loss"] for trainer in (first, second)]
        second.train()
        return [*losses, second.evaluate()["eval_loss"]]
    finally:
        first.accelerator.end_training()


@pytest.mark.parametrize("group", PLACES)
def test_a_second_trainer_takes_the_trained_model(group: Group, workers: GetWorkers, tmp_path: Path) -> None:
    for first, second, third in workers(group).run(train_by_two, name="evaluation", folder=tmp_path):
        assert second == first
        assert third < first
