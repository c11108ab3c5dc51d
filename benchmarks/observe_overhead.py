"""What observing costs: CPU time of a step with console, files, imbalance and TensorBoard over one with none of them.

    torchrun --standalone --nproc_per_node=1 benchmarks/observe_overhead.py --pairs 120

Steps of `loop_overhead.py`, but of one row (256 tokens), alternate A B B A in one process, with a line on the console
and a row of imbalance after each step (`log_every: 1`, ten times as often as usual). TensorBoard's own process runs
beside it and isn't counted, nor is the live line, which needs a terminal. Goodput is computed once, at a run's end.
"""

import argparse
import json
import logging
import os
import tempfile
from pathlib import Path

import torch.distributed as dist
from loop_overhead import RESULTS, SEED, WARM_UP_STEPS, OurStep, config, cpu_model, measure, median_ratio

from portable_fsdp.backends.open import open_backend
from portable_fsdp.data.batches import Batches
from portable_fsdp.data.build import build_data
from portable_fsdp.observe.callbacks import Callback, Callbacks
from portable_fsdp.observe.console import Console
from portable_fsdp.observe.run_files import RunFiles
from portable_fsdp.observe.trackers import Trackers
from portable_fsdp.runtime.command import RunLog
from portable_fsdp.train.build import build_training
from portable_fsdp.train.measures import run_start

GOAL = 1.01


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of an observed step over that of one that isn't.")
    parser.add_argument("--pairs", type=int, default=120)
    pairs = parser.parse_args().pairs
    dist.init_process_group("gloo")
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        plain = config(Path(folder) / "run", steps=2 * pairs + 2 * WARM_UP_STEPS)
        train = plain.train.model_copy(update={"log_every": 1, "global_batch": 1, "micro_batch": 1})
        observe = plain.observe.model_copy(update={"trackers": ("tensorboard",)})
        observed = plain.model_copy(update={"train": train, "observe": observe})
        with open_backend(observed, device="cpu", backend="native") as backend:
            corpus = build_data(observed.data)
            training = build_training(observed, backend, corpus.tokenizer)
            with Batches(corpus.rows, seed=SEED, global_batch=train.global_batch, shard=(0, 1), accumulation=1) as rows:
                on, off = (OurStep(observed, backend, training, rows) for _ in range(2))
                log = logging.getLogger("portable_fsdp")
                log.addHandler(file := RunLog())
                log.addHandler(logging.StreamHandler())
                log.setLevel(logging.INFO)
                file.open(Path(folder) / "run")
                on._callbacks = Callbacks([RunFiles(), Console(), Trackers()], [], backend)
                on._callbacks.call(
                    Callback.on_start, run_start(observed, backend, training.built.size, train.steps or 0, None)
                )
                off._callbacks = Callbacks([], [], backend)
                for _ in range(WARM_UP_STEPS):
                    on()
                    off()
                seconds = measure(on, off, pairs)
    ratio = median_ratio(seconds)
    result = {
        "what": "CPU seconds of a step: console, files, imbalance, TensorBoard after each step / none",
        "ratio": ratio._asdict(),
        "goal_of_high": GOAL,
        "pairs": pairs,
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count(), "load": [load, os.getloadavg()[0]]},
    }
    (RESULTS / "observe_overhead.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
