"""How long a run is away when a process is killed: from its end to the next counted step, over a cold start to step 1.

    python benchmarks/restart_time.py --rounds 5

A start by hand on two gloo processes (configs/quickstart.yaml), which its supervisor restarts. Each round starts a run,
notes when its first step is in metrics.jsonl, kills a worker a few steps later, and notes when the step after that is.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from loop_overhead import RESULTS, cpu_model

ROOT = Path(__file__).parents[1]
GOAL = 1.2
LIMIT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Time until a killed run counts its next step, over a cold start.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "restart_time.json", help="the JSON file to write")
    arguments = parser.parse_args()
    rounds = [measure() for _ in range(arguments.rounds)]
    ratio = statistics.median(restart / cold for cold, restart in rounds)
    print(f"cold start, restart (s): {', '.join(f'{cold:.1f}, {restart:.1f}' for cold, restart in rounds)}")
    print(f"ratio {ratio:.2f}, the median of {len(rounds)} (goal: <= {GOAL})")
    result = {"ratio": ratio, "goal": GOAL, "rounds": rounds, "cpu": cpu_model(), "cores": os.cpu_count()}
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")


def measure() -> tuple[float, float]:
    """Seconds of a cold start to step 1, and from the end of a worker to the next step that wasn't counted before."""
    with tempfile.TemporaryDirectory() as folder:
        keys = [f"run.dir={folder}/run", "checkpoint.every=1", "checkpoint.keep=2", "train.log_every=1"]
        command = [sys.executable, "-m", "portable_fsdp.launch", "--device=cpu", "--num_devices=2"]
        began = time.monotonic()
        with (Path(folder) / "log").open("w") as log:
            run = subprocess.Popen(
                [*command, f"--config={ROOT}/configs/quickstart.yaml", *keys], stdout=log, stderr=log
            )
        try:
            metrics, saved = Path(folder, "run/metrics.jsonl"), Path(folder, "run/checkpoints/step-00000003")
            wait_until(lambda: count_steps(metrics) >= 1)
            cold = time.monotonic() - began
            wait_until(saved.is_dir)
            children = psutil.Process(run.pid).children(recursive=True)
            worker = [child for child in children if "portable_fsdp.launch" in " ".join(child.cmdline())][-1]
            worker.kill()
            killed, counted = time.monotonic(), count_steps(metrics)
            wait_until(lambda: count_steps(metrics) > counted)
            return cold, time.monotonic() - killed
        finally:
            run.terminate()
            run.wait(LIMIT_S)


def count_steps(metrics: Path) -> int:
    """The last step in the file; a restart removes those after its checkpoint."""
    lines = metrics.read_text().splitlines() if metrics.is_file() else []
    return int(json.loads(lines[-1])["step"]) if lines and lines[-1].endswith("}") else 0


def wait_until(happened: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not happened():
        assert time.monotonic() < deadline, "the run doesn't go on"
        time.sleep(0.02)


if __name__ == "__main__":
    main()
