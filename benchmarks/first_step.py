"""From the command to the end of step 1: ours beside a plain script with transformers' Trainer, same model and rows.

    python benchmarks/first_step.py --rounds 5

configs/quickstart.yaml on one native CPU process, its tokens in the cache. In turn, each start in a process of its own;
writes the medians and the parts of ours, from `launch --verbose`, to results/first_step.json.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from loop_overhead import RESULTS, cpu_model

ROOT = Path(__file__).parents[1]
GOAL = 0.55
LIMIT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description="From the command to the end of step 1, beside the Trainer.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "first_step.json", help="the JSON file to write")
    parser.add_argument("--trainer", action="store_true", help="the script starts itself so")
    arguments = parser.parse_args()
    if arguments.trainer:
        return train_with_trainer()
    start_ours()  # fills the caches
    rounds: list[dict[str, Any]] = []
    for number in range(arguments.rounds):
        (ours, parts), trainer = start_ours(), start_trainer()
        rounds.append({"ours": ours, "trainer": trainer, "parts": parts})
        print(f"{number + 1}: ours {ours:.2f} s, Trainer {trainer:.2f} s; {parts}", flush=True)
    ours, trainer = (statistics.median(round_[way] for round_ in rounds) for way in ("ours", "trainer"))
    ratio = ours / trainer
    print(f"medians: {ours:.2f} s, {trainer:.2f} s, ratio {ratio:.2f} (goal: <= {GOAL})")
    result = {"ratio": ratio, "goal": GOAL, "ours": ours, "trainer": trainer, "rounds": rounds}
    result |= {"cpu": cpu_model(), "cores": os.cpu_count()}
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")


def start_ours() -> tuple[float, dict[str, float]]:
    """Seconds until metrics.jsonl has step 1, and the seconds of each part."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "portable_fsdp.launch", "--device=cpu", "--backend=native", "--verbose"]
        command += [f"--config={ROOT}/configs/quickstart.yaml", f"run.dir={folder}/run", "train.stop_at=1"]
        metrics = Path(folder, "run", "metrics.jsonl")
        began, log = time.monotonic(), Path(folder, "log")
        with log.open("w") as output:
            process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output)
            while not (metrics.is_file() and metrics.stat().st_size):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < began + LIMIT_S, log.read_text()
                time.sleep(0.01)
            seconds = time.monotonic() - began
            process.wait(LIMIT_S)
        ends = [(name, float(end)) for end, name in re.findall(r"^ +([\d.]+) s  (.+)$", log.read_text(), re.M)]
        before = [0.0, *(end for _, end in ends)]
        return seconds, {name: round(end - start, 2) for (name, end), start in zip(ends, before, strict=False)}


def start_trainer() -> float:
    """Seconds until the Trainer's first step has ended."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--trainer"]
        environment = os.environ | {"USE_TORCH_XLA": "0", "HF_HUB_OFFLINE": "1"}
        run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        assert run.returncode == 0, run.stderr
        (ended,) = re.findall(r"^step 1 ended at (\S+)$", run.stdout, re.M)
    return float(ended) - began


def train_with_trainer() -> None:
    """As people write it; prints the time at the end of step 1 (CLOCK_MONOTONIC, as the parent's)."""
    from pydoc_data.topics import topics

    import yaml
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class End(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            print(f"step 1 ended at {time.monotonic()}", flush=True)
            control.should_training_stop = True

    config: dict[str, Any] = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())
    length, rows = config["data"]["seq_len"], config["train"]["micro_batch"]
    tokens = "\0".join(topics.values()).encode()
    data = [
        {"input_ids": (ids := list(tokens[at : at + length])), "labels": ids}
        for at in range(0, len(tokens) - length, length)
    ]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config["model"]["architecture"]))
    arguments = TrainingArguments(
        output_dir="run",
        use_cpu=True,
        max_steps=config["train"]["steps"],
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=config["train"]["global_batch"] // rows,
        learning_rate=float(config["optim"]["lr"]),
        warmup_steps=config["optim"]["warmup_steps"],
        lr_scheduler_type="cosine",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    Trainer(model=model, args=arguments, train_dataset=data, callbacks=[End()]).train()  # pyright: ignore[reportArgumentType]


if __name__ == "__main__":
    main()
