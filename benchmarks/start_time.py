"""Seconds from a command to the end of a step of configs/quickstart.yaml.

    python benchmarks/start_time.py first_step --rounds 5     # beside a plain script with transformers' Trainer
    python benchmarks/start_time.py restart_time --rounds 5   # after a killed worker, beside a cold start

first_step: one native CPU process, its tokens in the cache; ours and the Trainer start in turn, each in a new process.
`launch --verbose` gives the times of our phases.
restart_time: a start by hand on two gloo processes, which its supervisor restarts. Each round starts a run, notes when
its first step is in metrics.jsonl, kills a worker a few steps later, and notes when the step after that is.
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
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from measuring import RESULTS, ROOT, in_turns, machine, write_json

GOALS = {"first_step": 0.55, "restart_time": 1.2}
LIMIT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*GOALS, "trainer"], help="trainer: the script starts itself so")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="the JSON file to write, instead of one in results/")
    arguments = parser.parse_args()
    if arguments.what == "trainer":
        return train_with_trainer()
    if arguments.what == "first_step":
        start_ours()  # fills the caches
        ways = {"ours": start_ours, "trainer": start_trainer}
        rounds = in_turns(ways, arguments.rounds, lambda start: start())
        medians = {
            way: {part: statistics.median(row[part] for row in of) for part in of[0]} for way, of in rounds.items()
        }
        result = {"ratio": medians["ours"]["all"] / medians["trainer"]["all"], "medians": medians, "rounds": rounds}
    else:
        pairs = [restart() for _ in range(arguments.rounds)]
        result = {"ratio": statistics.median(after / cold for cold, after in pairs), "rounds": pairs}
    result |= {"goal": GOALS[arguments.what], **machine()}
    print(json.dumps(result, indent=2))
    write_json(arguments.out or RESULTS / f"{arguments.what}.json", result)


@contextmanager
def launched(*words: str) -> Generator[tuple[subprocess.Popen[bytes], Path, Path]]:
    """A run of the quickstart: its process, its folder and the log of its output."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "portable_fsdp.launch",
            "--device=cpu",
            f"--config={ROOT}/configs/quickstart.yaml",
        ]
        log = Path(folder, "log")
        with log.open("w") as output:
            run = subprocess.Popen([*command, f"run.dir={folder}/run", *words], stdout=output, stderr=output)
        try:
            yield run, Path(folder, "run"), log
        finally:
            run.terminate()
            run.wait(LIMIT_S)


def count_steps(run: Path) -> int:
    """The last step in metrics.jsonl; a restart removes those after its checkpoint."""
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.is_file() else []
    return int(json.loads(lines[-1])["step"]) if lines and lines[-1].endswith("}") else 0


def wait_until(happened: Callable[[], object], log: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not happened():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.01)


def parts_of(began: float, ends: list[tuple[str, float]]) -> dict[str, float]:
    """Seconds of each part, from (name, end) in order."""
    before = [began, *(end for _, end in ends)]
    return {name: round(end - start, 2) for (name, end), start in zip(ends, before, strict=False)}


def start_ours() -> dict[str, float]:
    """Seconds of each part, and until metrics.jsonl has step 1."""
    began = time.monotonic()
    with launched("--backend=native", "--verbose", "train.stop_at=1") as (process, run, log):
        wait_until(lambda: count_steps(run) or process.poll(), log)
        seconds = time.monotonic() - began
        assert process.wait(LIMIT_S) == 0, log.read_text()
        ends = [(name, float(end)) for end, name in re.findall(r"^ +([\d.]+) s  (.+)$", log.read_text(), re.M)]
    return {"all": seconds, **parts_of(0.0, ends)}


def start_trainer() -> dict[str, float]:
    """Seconds of each part, and until the Trainer's first step has ended."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"USE_TORCH_XLA": "0", "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, __file__, "trainer"]
        run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        assert run.returncode == 0, run.stderr
    ends = [(name, float(end)) for name, end in re.findall(r"^(.+) at (\S+)$", run.stdout, re.M)]
    return {"all": ends[-1][1] - began, **parts_of(began, ends)}


def restart() -> tuple[float, float]:
    """Seconds of a cold start to step 1, and from the end of a worker to the next step that wasn't counted before."""
    began = time.monotonic()
    keys = ("checkpoint.every=1", "checkpoint.keep=2", "train.log_every=1")
    with launched("--num_devices=2", *keys) as (process, run, log):
        wait_until(lambda: count_steps(run) >= 1, log)
        cold = time.monotonic() - began
        wait_until((run / "checkpoints/step-00000003").is_dir, log)
        children = psutil.Process(process.pid).children(recursive=True)
        worker = [child for child in children if "portable_fsdp.launch" in " ".join(child.cmdline())][-1]
        worker.kill()
        killed, counted = time.monotonic(), count_steps(run)
        wait_until(lambda: count_steps(run) > counted, log)
        return cold, time.monotonic() - killed


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
