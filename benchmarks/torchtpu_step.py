"""CPU time of a native step on TorchTPU's device, whose chip is XLA's CPU plugin (tests/torchtpu), over that on cpu;
the programs of a run, and those that a step dispatches.

    .venv-torchtpu/bin/python benchmarks/torchtpu_step.py

Processes of one device each run A B C, then C B A, and so on. Each trains the same steps, and counts its processor time
after the first ones. It says what eager dispatch costs on a host, and nothing about TPUs.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any, cast

from measuring import RESULTS, ROOT, Steps, in_turns, write_json

WAYS = {"cpu": [], "tpu": [], "tpu, compiled": ["compile.enabled=true"]}
WARM_UP_STEPS = 5


def measure(device: str, overrides: list[str], steps: int) -> dict[str, float]:
    """Processor seconds of a step in this process, and the last loss; on tpu also `programs` compiled in all, and how
    many a step dispatches."""
    if device == "tpu":
        sys.path.insert(0, str(ROOT / "tests" / "torchtpu"))
        import rig

        rig.install(quick=False)
    import torch

    import portable_fsdp as pf

    torch.set_num_threads(1)
    names = [f"train.steps={steps + WARM_UP_STEPS}", "train.global_batch=4", "optim.warmup_steps=0", *overrides]
    config = pf.load_config(ROOT / "configs" / "quickstart.yaml", names)
    with ExitStack() as held:
        step, loss, began, dispatched = Steps(config, held, device=device), 0.0, 0.0, 0
        programs = cast(Any, step.backend)._programs  # pyright: ignore[reportPrivateUsage]
        stats = programs and programs._device._get_cache_stats
        for number in range(steps + WARM_UP_STEPS):
            if number == WARM_UP_STEPS:
                began, dispatched = time.process_time(), stats().num_cache_reqs if stats else 0
            loss = step()["loss"].item()
        measured = {"seconds": (time.process_time() - began) / steps, "loss": loss}
        if stats:
            measured |= {"programs": programs.count, "dispatched": (stats().num_cache_reqs - dispatched) / steps}
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of a step on TorchTPU's device over that on cpu.")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", choices=WAYS, help="measure in this process, and print it")
    options = parser.parse_args()
    if options.only:
        print(json.dumps(measure(options.only.partition(",")[0], WAYS[options.only], options.steps)))
        return
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}

    def child(way: str) -> dict[str, float]:
        command = [sys.executable, __file__, f"--only={way}", f"--steps={options.steps}"]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    measured = in_turns({way: way for way in WAYS}, options.rounds, child)
    seconds = {way: statistics.median(row["seconds"] for row in rows) for way, rows in measured.items()}
    result = {
        "what": "processor seconds of a step of configs/quickstart.yaml with train.global_batch=4, one process, native",
        "seconds": seconds,
        "over_cpu": {way: value / seconds["cpu"] for way, value in seconds.items()},
        "losses": {way: rows[-1]["loss"] for way, rows in measured.items()},
        "programs": {way: rows[-1]["programs"] for way, rows in measured.items() if "programs" in rows[-1]},
        "dispatched_by_a_step": {
            way: rows[-1]["dispatched"] for way, rows in measured.items() if "programs" in rows[-1]
        },
        "rounds": options.rounds,
        "steps": options.steps,
        "load": os.getloadavg()[0],
    }
    write_json(RESULTS / "torchtpu_step.json", result)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
