"""Runs of transformers' Trainer, by itself on one device and on our engines, of the same small models and rows."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from jobs import device_count
from torch import Tensor, nn

BATCH = 12
STEPS = 20
LABELS_OF_CLASSES = 3


class Case(NamedTuple):
    """What a run differs in from the plain one."""

    arguments: Mapping[str, Any] = {}
    rows: int = 96
    lora: bool = False
    classes: bool = False  # a model whose loss is a mean, not a sum over counted tokens
    takes_number: bool = False  # as Bert's forward takes `num_items_in_batch`, and ignores it
    evaluates: bool = False
    tolerance: float = 1e-5
    sections: Mapping[str, Any] = {}


CASES = {
    "plain": Case(),
    "accumulation": Case({"gradient_accumulation_steps": 4}, rows=96),
    "uneven batches and windows": Case({"gradient_accumulation_steps": 4, "max_steps": 9}, rows=101),
    "two rows in the last batch": Case(rows=50),
    "a loss that is a mean": Case({"gradient_accumulation_steps": 2}, rows=41, classes=True),
    "a mean that ignores the number of items": Case(rows=41, classes=True, takes_number=True),
    "bf16": Case({"bf16": True}, tolerance=2e-3),
    "autocast": Case({"bf16": True}, tolerance=2e-3, sections={"autocast": True}),
    "lora": Case(lora=True),
    "evaluation": Case({"eval_strategy": "steps", "eval_steps": 10}, evaluates=True),
    "recomputation": Case({"activation_checkpointing": True}),
    "words of fsdp": Case({"fsdp": True, "fsdp_config": {"reshard_after_forward": False}, "max_steps": 5}),
    "no clipping": Case({"max_grad_norm": 0.0, "train_sampling_strategy": "sequential"}),
}


class Classifier(nn.Module):
    """Rows of numbers to classes; its forward takes no `num_items_in_batch`."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(2))
        self.down = nn.Linear(32, LABELS_OF_CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.up(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        logits = self.down(hidden)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class TakesNumber(Classifier):
    def forward(self, x: Tensor, labels: Tensor, **kwargs: Any) -> dict[str, Tensor]:
        return super().forward(x, labels)


def rows_of(count: int, classes: bool, seed: int = 0) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    if classes:
        xs = torch.randn(count, 16, generator=draw)
        return [{"x": x, "labels": x[:LABELS_OF_CLASSES].argmax()} for x in xs]
    rows: list[dict[str, Tensor]] = []
    for ids in torch.randint(0, 64, (count, 16), generator=draw):
        labels = ids.clone()
        labels[: int(torch.randint(0, 12, (), generator=draw))] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def model_of(case: Case) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    if case.classes:
        return TakesNumber() if case.takes_number else Classifier()
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, max_position_embeddings=32, **sizes))
    if not case.lora:
        return model
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def accuracy(prediction: Any) -> dict[str, float]:
    return {
        "accuracy": float((prediction.predictions[:, :-1].argmax(-1) == prediction.label_ids[:, 1:]).mean()),
        "rows": len(prediction.label_ids),
    }


def trainer_of(cls: Callable[[], Any], name: str, folder: Path, devices: int, more: Mapping[str, Any]) -> Any:
    """`cls`: makes the class, before TrainingArguments."""
    case, trainer = CASES[name], cls()
    from transformers import TrainingArguments

    settings: dict[str, Any] = {"max_steps": STEPS, "logging_steps": 1, "save_strategy": "no"}
    settings |= {"report_to": [], "disable_tqdm": True, "learning_rate": 1e-2, "warmup_steps": 3, "use_cpu": True}
    settings |= {**case.arguments, **more}
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH // devices,
        per_device_eval_batch_size=BATCH // devices,
        **settings,
    )
    extra: dict[str, Any] = {}
    if case.evaluates:
        extra = {"eval_dataset": rows_of(21, False, seed=5), "compute_metrics": accuracy}
    return trainer(model=model_of(case), args=args, train_dataset=rows_of(case.rows, case.classes), **extra)


def curve(trainer: Any) -> dict[str, float]:
    """Step and name -> number, of what it has logged."""
    names = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "eval_rows")
    return {
        f"{entry['step']} {name}": entry[name] for entry in trainer.state.log_history for name in names if name in entry
    }


def plain_class() -> Any:
    from transformers import Trainer

    from portable_fsdp.trainers import on_portable

    on_portable(Trainer)  # keeps XLA out of transformers
    return Trainer


def plain_run(name: str, folder: Path, **more: Any) -> dict[str, float]:
    """The curve of transformers' own class."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trainer_of(plain_class, name, folder, 1, more)
        trainer.train()
    return curve(trainer)


def portable_class(case: Case) -> Any:
    from transformers import Trainer

    from portable_fsdp.trainers import on_portable

    start = {"device": os.environ["GROUP_DEVICE"], "backend": os.environ["GROUP_BACKEND"]}
    return on_portable(Trainer, **start, num_devices=device_count(), **case.sections)


def portable_trainer(name: str, folder: Path, **more: Any) -> Any:
    """On all devices of the worker's group."""
    return trainer_of(lambda: portable_class(CASES[name]), name, folder, device_count(), more)


def portable_run(
    name: str, folder: Path, resume: str | None = None, final: str | None = None, **more: Any
) -> tuple[dict[str, float], int]:
    """The curve, and how many programs XLA has compiled in the last quarter; `final`: where to write the model."""
    trainer = portable_trainer(name, folder, **more)
    programs: list[int] = []
    try:
        trainer.add_callback(_counting(programs))
        trainer.train(resume_from_checkpoint=resume)
        if final is not None:
            trainer.save_model(final)
        return curve(trainer), programs[-1] - programs[len(programs) * 3 // 4]
    finally:
        trainer.accelerator.end_training()


def _counting(programs: list[int]) -> Any:
    from transformers import TrainerCallback

    class Counting(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if os.environ["GROUP_BACKEND"] == "xla":
                import torch_xla.debug.metrics as met

                programs.append((met.metric_data("CompileTime") or [0])[0])
            else:
                programs.append(0)

    return Counting()


def example_losses(name: str, folder: Path) -> list[float]:
    """The losses of a documented example on two native processes, whose second half two XLA devices run again."""
    script, output = Path(__file__).parents[2] / "examples" / f"{name}.py", folder / "runs" / name
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    curves: list[list[float]] = []
    for start, variable in ((torchrun, "device=cpu"), ([sys.executable], "device=cpu backend=xla num_devices=2")):
        env = os.environ | {"PORTABLE_FSDP": variable, "OMP_NUM_THREADS": "1"}
        subprocess.run([*start, str(script)], cwd=folder, env=env, check=True, capture_output=True)
        log = json.loads((output / "checkpoint-60/trainer_state.json").read_text())["log_history"]
        curves.append([entry["loss"] for entry in log if "loss" in entry])
        assert [entry["step"] for entry in log if "loss" in entry] == [10, 20, 30, 40, 50, 60]
        (output / "checkpoint-60").rename(folder / variable)
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
    return curves[0]
