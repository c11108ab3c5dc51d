"""A pretrained model fine-tuned three ways over the same rows: native, XLA, transformers' own Trainer.

python benchmarks/beside_trainer.py [section.key=value ...]

Needs the extra `xla`, accelerate, gguf, and the model of configs/finetune_smollm2.yaml, which `make demo-finetune`
fetches. Trains that config, in float32 on the CPU, as `portable_fsdp.launch` does on two native processes and on two
XLA devices with scanned layers, and as a Trainer does in one plain process that opens the model by itself. Each way
runs in processes of its own, one after the other. Prints how far the curves lie apart and what the model has learnt,
and writes it to results/beside_trainer.md, with every step in beside_trainer.json.

Alike are the weights (each side opens the file by itself), the rows and their order, the mean over the tokens of a
step, AdamW's numbers, the clipping, and the learning rate of each step. The Trainer takes two things from us: the rows
in our order, as lists of ids, and our schedule, since its own warmup begins at a learning rate of 0, so that its first
step changes nothing. Its rows have a token more, the last label, which as an input has no target: transformers' models
shift labels themselves, and would leave out the last target of each row. Of a model opened from a GGUF file
transformers says that it is quantized, and its Trainer refuses it; the script takes that word back, since the weights
are plain float32. All else is its own: the model, the loss, which weights decay, AdamW (torch's fused one, its
default), the evaluation.
"""

import argparse
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from typing import Any, cast

os.environ["USE_TORCH_XLA"] = "0"  # transformers imports torch_xla otherwise

import numpy as np
import torch
from measuring import RESULTS, ROOT, machine, markdown
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from portable_fsdp.config.schema import Config
from portable_fsdp.convert.read import load_config
from portable_fsdp.data.build import build_data
from portable_fsdp.data.packing import IGNORED, Rows
from portable_fsdp.observe.run_files import read_jsonl
from portable_fsdp.optim.optimizer import learning_rate

OURS = {
    "native, 2 processes": ("--backend=native", "--num_devices=2"),
    "xla, 2 devices, scanned": ("--backend=xla", "--num_devices=2", "compile.scan_layers=true"),
}
TRAINER = "Trainer, 1 process"
CURVES_GOAL = 1e-4  # nats between two curves at any step
FALL_GOAL = 0.2  # of the held-out perplexity
PACKAGES = ("torch", "torch_xla", "transformers", "accelerate", "gguf")
Step = dict[str, float]
"""`step`, `loss`, `grad_norm`, `lr`."""


@dataclass(frozen=True)
class Run:
    """The results of one way."""

    steps: list[Step]
    losses_held_out: tuple[float, float]  # before the first step and after the last, in nats
    tokens_held_out: int

    @property
    def losses(self) -> list[float]:
        return [step["loss"] for step in self.steps]

    @property
    def perplexities(self) -> tuple[float, float]:
        before, after = self.losses_held_out
        return math.exp(before), math.exp(after)

    @property
    def fall(self) -> float:
        before, after = self.perplexities
        return 1 - after / before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="of the config, for all three ways")
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "finetune_smollm2.yaml")
    parser.add_argument("--out", type=Path, default=RESULTS / "beside_trainer.md")
    parser.add_argument("--trainer", type=Path, metavar="JSON", help="the script starts itself so: that way alone")
    options = parser.parse_args()
    config = load_config(options.config, options.overrides)
    if options.trainer is not None:
        options.trainer.write_text(json.dumps(asdict(trained_by_trainer(config))))
        return
    runs = trained(options.config, options.overrides, cast(int, config.train.steps))
    options.out.with_suffix(".json").write_text(json.dumps(record(config, options.overrides, runs), indent=1) + "\n")
    text = report(config, options.overrides, runs)
    options.out.write_text(text)
    print(text)


# ------------------------------------------------------------------------------------------------------ three ways


def trained(config: Path, overrides: Sequence[str], steps: int) -> dict[str, Run]:
    """Each way in turn, by its name."""
    runs: dict[str, Run] = {}
    common = [f"--config={config}", *overrides, "train.eval_on_start=true", f"train.eval_every={steps}"]
    with tempfile.TemporaryDirectory() as temporary:
        for number, (name, flags) in enumerate(OURS.items()):
            folder = Path(temporary) / str(number)
            words = ["-m", "portable_fsdp.launch", "--device=cpu", *flags, *common, f"run.dir='{folder}'"]
            finish(name, words)
            runs[name] = read_run(folder)
            shutil.rmtree(folder)  # three times the model's weights
        result = Path(temporary) / "trainer.json"
        finish(TRAINER, [__file__, f"--trainer={result}", *common])
        runs[TRAINER] = Run(**json.loads(result.read_text()))
    counted = {name: run.tokens_held_out for name, run in runs.items()}
    assert len(set(counted.values())) == 1, f"expected the same held-out rows, found these tokens: {counted}"
    return runs


def finish(name: str, words: Sequence[str]) -> None:
    """Run `python WORDS`."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, *words], stdout=sys.stderr, check=True)


def read_run(folder: Path) -> Run:
    """Read the files of one of our runs."""
    first, last = (event for event in read_jsonl(folder / "events.jsonl") if event["event"] == "evaluation")
    rows = read_jsonl(folder / "metrics.jsonl")
    assert (first["step"], last["step"], first["tokens"]) == (0, len(rows), last["tokens"])
    steps = [{key: row[key] for key in ("step", "loss", "grad_norm", "lr")} for row in rows]
    return Run(steps, (first["loss"], last["loss"]), last["tokens"])


# ----------------------------------------------------------------------------------------------- transformers' own


def trained_by_trainer(config: Config) -> Run:
    """In this process, as one does who has transformers alone."""
    corpus = build_data(config.data, config.model)
    assert corpus.eval_rows is not None
    positions = np.arange(cast(int, config.train.steps) * config.train.global_batch)
    held_out = unshifted(corpus.eval_rows, evenly_spread(len(corpus.eval_rows), config))
    with tempfile.TemporaryDirectory() as output:
        trainer: Any = Trainer(
            model=opened(config),
            args=cast(Any, TrainingArguments)(output, **arguments(config)),
            train_dataset=cast(Any, unshifted(corpus.rows, corpus.rows.order(config.run.seed, positions))),
            eval_dataset=cast(Any, held_out),
        )
        before = trainer.evaluate()["eval_loss"]
        trainer.lr_scheduler = our_schedule(config, trainer.create_optimizer())
        trainer.train()
        after = trainer.evaluate()["eval_loss"]
    assert "torch_xla" not in sys.modules, "expected a Trainer without torch_xla"
    keys = {"step": "step", "loss": "loss", "grad_norm": "grad_norm", "lr": "learning_rate"}
    logged = [row for row in trainer.state.log_history if "loss" in row]
    steps = [{ours: row[theirs] for ours, theirs in keys.items()} for row in logged]
    return Run(steps, (before, after), sum(int((row["labels"] != IGNORED).sum()) for row in held_out))


def our_schedule(config: Config, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    steps = cast(int, config.train.steps)

    def share(updates: int) -> float:
        return learning_rate(config.optim, updates + 1, steps) / config.optim.lr

    return torch.optim.lr_scheduler.LambdaLR(optimizer, share)


def opened(config: Config) -> Any:
    """The model as transformers opens it: plain float32 modules, also from a GGUF file."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        cast(str, config.model.pretrained), gguf_file=config.model.gguf_file, dtype=torch.float32
    )
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    model.is_quantized = False  # transformers 5.23 says so of an unpacked GGUF file too, and then refuses to train it
    return model


def arguments(config: Config) -> dict[str, Any]:
    """Of TrainingArguments: the config's numbers, one process of the CPU, every step logged, nothing saved or sent."""
    optim = config.optim
    return {
        "max_steps": config.train.steps,
        "per_device_train_batch_size": config.train.global_batch,
        "per_device_eval_batch_size": config.train.global_batch,
        "train_sampling_strategy": "sequential",
        "learning_rate": optim.lr,
        "adam_beta1": optim.betas[0],
        "adam_beta2": optim.betas[1],
        "adam_epsilon": optim.eps,
        "weight_decay": optim.weight_decay,
        "max_grad_norm": config.train.max_grad_norm or 0.0,  # 0: no clipping
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
    }


def evenly_spread(rows: int, config: Config) -> NDArray[np.int64]:
    """The held-out rows that `train.evaluate.Evaluator` evaluates over."""
    batches = config.train.eval_batches
    count = rows if batches is None else min(rows, batches * config.train.global_batch)
    return np.arange(count) * rows // count


def unshifted(rows: Rows, indices: NDArray[np.int64]) -> list[dict[str, torch.Tensor]]:
    """Rows with labels as transformers takes them: its models shift by one themselves.

    Ours have labels shifted already, so that the last token of a row predicts one that the row doesn't hold. Here each
    row has it as a token of its own, which predicts nothing: the same `seq_len` targets, from the same contexts.
    """
    batch = rows.rows(indices)
    ids = torch.cat([batch["input_ids"], batch["labels"][:, -1:]], dim=1)
    labels = ids.clone()
    labels[:, 0] = IGNORED
    return [{"input_ids": ids[row], "labels": labels[row]} for row in range(len(ids))]


# ---------------------------------------------------------------------------------------------------------- report


def pairs(runs: dict[str, Run]) -> list[tuple[str, float, float, float]]:
    """Rows of a table: two ways, the largest absolute difference between their losses, its step, and the largest
    relative difference between gradient norms, whose scale AdamW and clipping hide."""
    rows: list[tuple[str, float, float, float]] = []
    for one, other in combinations(runs, 2):
        both = [*zip(runs[one].steps, runs[other].steps, strict=True)]
        apart, step = max((abs(a["loss"] - b["loss"]), a["step"]) for a, b in both)
        norms = max(abs(a["grad_norm"] - b["grad_norm"]) / b["grad_norm"] for a, b in both)
        rows.append((f"{one}; {other}", apart, step, norms))
    return rows


def record(config: Config, overrides: Sequence[str], runs: dict[str, Run]) -> dict[str, Any]:
    return {
        "command": " ".join(["python benchmarks/beside_trainer.py", *overrides]),
        "config": config.model_dump(mode="json"),
        "machine": machine(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "runs": {name: asdict(run) for name, run in runs.items()},
    }


def report(config: Config, overrides: Sequence[str], runs: dict[str, Run]) -> str:
    command = " ".join(["python benchmarks/beside_trainer.py", *overrides])
    steps, rows, length = cast(int, config.train.steps), config.train.global_batch, config.data.seq_len
    shown = sorted({1, steps, *range(5, steps + 1, 5)})
    losses = [[str(at), *(f"{run.losses[at - 1]:.6f}" for run in runs.values())] for at in shown]
    perplexities = [
        [when, *(f"{run.perplexities[at]:.4f}" for run in runs.values())] for at, when in enumerate(("before", "after"))
    ]
    head = ["two ways", "largest difference of losses", "at step", "of gradient norms, relative"]
    apart = [[ways, f"{losses:.1e}", f"{step:.0f}", f"{norms:.1e}"] for ways, losses, step, norms in pairs(runs)]
    lines = [
        "# Beside transformers' Trainer",
        "",
        f"`{command}`: {config.run.name} in float32,",
        f"{steps} steps of {rows * length:,} tokens ({rows} rows of {length}).",
        f"{', '.join(f'{name} {version(name)}' for name in PACKAGES)}, Python {platform.python_version()};",
        "{cpu}, {cores} cores, shared with other work.".format(**machine()),
        "",
        *goals(runs),
        "",
        *markdown(["held-out perplexity", *runs], perplexities),
        "",
        *markdown(["loss of step", *runs], losses),
        "",
        *markdown(head, apart),
        "",
        "Alike are" + (__doc__ or "").partition("Alike are")[2],
    ]
    return "\n".join(lines)


def goals(runs: dict[str, Run]) -> list[str]:
    worst = max(apart for _, apart, *_ in pairs(runs))
    fall = min(run.fall for run in runs.values())
    tokens = next(iter(runs.values())).tokens_held_out
    said = {True: "met", False: "missed"}
    return [
        f"- The curves lie within {worst:.1e} of each other (goal: {CURVES_GOAL:g}): {said[worst <= CURVES_GOAL]}.",
        f"- The perplexity of {tokens:,} held-out tokens falls by {fall:.0%} (goal: {FALL_GOAL:.0%}): "
        f"{said[fall >= FALL_GOAL]}.",
    ]


if __name__ == "__main__":
    main()
