"""From the command to the end of step 1: ours beside a plain script with transformers' Trainer, same model and rows.

    python benchmarks/first_step.py --rounds 5

configs/quickstart.yaml on one native CPU process, its tokens in the cache. The two start alternately, each in a new
process. Writes the medians and the time of each part (ours from `launch --verbose`) to results/first_step.json.
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
    rounds: dict[str, list[dict[str, float]]] = {"ours": [], "trainer": []}
    for _ in range(arguments.rounds):
        for way, start in {"ours": start_ours, "trainer": start_trainer}.items():
            rounds[way].append(start())
            print(way, rounds[way][-1], flush=True)
    medians = {
        way: {part: statistics.median(each[part] for each in of) for part in of[0]} for way, of in rounds.items()
    }
    ratio = medians["ours"]["all"] / medians["trainer"]["all"]
    print(f"medians: {medians}, ratio {ratio:.2f} (goal: <= {GOAL})")
    result = {"ratio": ratio, "goal": GOAL, "medians": medians, "rounds": rounds}
    result |= {"cpu": cpu_model(), "cores": os.cpu_count()}
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")


def start_ours() -> dict[str, float]:
    """Seconds of each part, and until metrics.jsonl has step 1."""
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
        parts = {name: round(end - start, 2) for (name, end), start in zip(ends, before, strict=False)}
        return {"all": seconds, **parts}


def start_trainer() -> dict[str, float]:
    """Seconds of each part, and until the Trainer's first step has ended."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--trainer"]
        environment = os.environ | {"USE_TORCH_XLA": "0", "HF_HUB_OFFLINE": "1"}
        run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        assert run.returncode == 0, run.stderr
    ends = [(name, float(end)) for name, end in re.findall(r"^(.+) at (\S+)$", run.stdout, re.M)]
    before = [began, *(end for _, end in ends)]
    parts = {name: round(end - start, 2) for (name, end), start in zip(ends, before, strict=False)}
    return {"all": ends[-1][1] - began, **parts}


def train_with_trainer() -> None:
    """Train as a user's script would; print when each part ends (CLOCK_MONOTONIC, the parent's clock)."""

    def say(part: str) -> None:
        print(f"{part} at {time.monotonic()}", flush=True)

    from pydoc_data.topics import topics

    import yaml
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    say("torch and transformers imported")

    class End(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            say("step 1 ended")
            control.should_training_stop = True

    config: dict[str, Any] = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())
    length, rows = config["data"]["seq_len"], config["train"]["micro_batch"]
    tokens = "\0".join(topics.values()).encode()
    data = [
        {"input_ids": (ids := list(tokens[at : at + length])), "labels": ids}
        for at in range(0, len(tokens) - length, length)
    ]
    say("data ready")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config["model"]["architecture"]))
    say("model built")
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
