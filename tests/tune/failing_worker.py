"""The worker of a tuning with planted faults, each in candidates with one setting; as a script, such a tuning."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from portable_fsdp.config.schema import Config
from portable_fsdp.parity.__main__ import work
from portable_fsdp.parity.record import PlaceTask
from portable_fsdp.train.build import Training
from portable_fsdp.tune.__main__ import main


def _fails(graph: Any, _: object) -> Any:
    raise RuntimeError("no kernel for this graph")


def plant(config: Config, training: Training) -> None:
    kept, mode = config.memory.save_ops, config.memory.gradient_checkpointing
    weight = next(iter(training.model.parameters()))
    if config.train.micro_batch == 2:
        weight.register_hook(lambda gradient: 2 * gradient)
    elif config.train.micro_batch == 4:
        weight.register_hook(lambda gradient: gradient * float("nan"))
    elif kept == ("attention",):
        torch.compile(torch.nn.Linear(1, 1), backend=_fails)(torch.ones(1))
    elif kept:
        time.sleep(10_000)
    elif mode == "none" and int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


if __name__ == "__main__":
    if not sys.argv[1].isdecimal():
        sys.exit(main(sys.argv[1:], worker="failing_worker"))
    task = PlaceTask.model_validate_json(Path(sys.argv[2]).read_bytes())
    config = Config.model_validate_json(task.runs[0].config)
    sys.exit(work(sys.argv[1:], lambda training: plant(config, training)))
