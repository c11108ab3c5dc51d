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
from pathlib import Path
from typing import Any, cast

RIG = Path(__file__).parents[1] / "tests" / "torchtpu"
RESULT = Path(__file__).parent / "results" / "torchtpu_step.json"
WAYS = {"cpu": [], "tpu": [], "tpu, compiled": ["compile.enabled=true"]}
WARM_UP_STEPS = 5


def measure(device: str, overrides: list[str], steps: int) -> dict[str, float]:
    """Processor seconds of a step in this process, and the last loss; on tpu also `programs` compiled in all, and how
    many a step dispatches."""
    if device == "tpu":
        sys.path.insert(0, str(RIG))
        import rig

        rig.install(quick=False)
    import torch

    import portable_fsdp as pf

    torch.set_num_threads(1)
    names = [f"train.steps={steps + WARM_UP_STEPS}", "train.global_batch=4", "optim.warmup_steps=0", *overrides]
    config = pf.load_config(Path(__file__).parents[1] / "configs" / "quickstart.yaml", names)
    with pf.open_backend(config, device=device, backend="native") as backend:
        corpus = pf.build_data(config.data)
        training = pf.build_training(config, backend, corpus.tokenizer)
        loss, began, dispatched = 0.0, 0.0, 0
        programs = cast(Any, backend)._programs  # pyright: ignore[reportPrivateUsage]
        stats = programs and programs._device._get_cache_stats
        with pf.open_batches(config, backend, training, corpus) as batches:
            for step in range(steps + WARM_UP_STEPS):
                if step == WARM_UP_STEPS:
                    began, dispatched = time.process_time(), stats().num_cache_reqs if stats else 0
                rows = next(batches)
                placed = [backend.place(batch) for batch in rows.micro_batches]
                metrics = training.step(placed, 1e-3, [rows.count])
                loss = backend.fetch(metrics).result()["loss"].item()
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
    measured: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(options.rounds):
        for way in WAYS if number % 2 == 0 else reversed(WAYS):
            command = [sys.executable, __file__, f"--only={way}", f"--steps={options.steps}"]
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            measured[way].append(json.loads(done.stdout.splitlines()[-1]))
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
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
