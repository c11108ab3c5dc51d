"""Processor time of a step of an accelerate loop on `portable_fsdp.Accelerator` over that of `train_step`.

python benchmarks/accelerator_step.py [--beside=train_step|fsdp2] [--pairs=300] [--write]; two processes: by torchrun

The image classifier of examples/, 24 rows, AdamW, clipped at 1, with a loss that the host reads after each step; both
in one process, in turns. `fsdp2`: a loop on FSDP2 by hand. PORTABLE_FSDP chooses the engine:
PORTABLE_FSDP="device=cpu backend=xla num_devices=4". `--write` adds a line to results/accelerator_step.md.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from measuring import RESULTS, ROOT, in_turns, median_ratio
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset

import portable_fsdp as pf

sys.path.insert(0, str(ROOT / "examples"))
from image_classifier import Classifier  # pyright: ignore[reportMissingImports]

ROWS = 24


class SameRows(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"images": torch.full((1, 16, 16), index % 10 / 10), "labels": torch.tensor(index % 10)}


def batches(rows: int) -> DataLoader[dict[str, Tensor]]:
    return DataLoader(SameRows(), batch_size=rows)


def of_accelerator(accelerator: pf.Accelerator) -> Callable[[], None]:
    model = Classifier()
    model, optimizer, rows = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), batches(ROWS))
    each = iter(rows)

    def step() -> None:
        batch = next(each)
        with accelerator.accumulate(model):
            loss = cross_entropy(model(batch["images"]), batch["labels"])
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        loss.detach().cpu()

    return step


def of_train_step(engine: Any) -> Callable[[], None]:
    def task(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        loss = cross_entropy(model(batch["images"]), batch["labels"], reduction="sum")
        return loss, torch.tensor(float(len(batch["labels"])), device=loss.device)

    config = pf.make_config(optim={"lr": 1e-3})
    model, optimizer = pf.shard(Classifier, config, engine)
    step = pf.train_step(engine, model, optimizer, accumulation=1, max_grad_norm=1.0, task=task)
    each = iter(batches(ROWS // engine.data_shard.count))

    def run() -> None:
        engine.fetch(step([engine.place(next(each))], 1e-3)).result()["loss"].item()

    return run


def of_fsdp2() -> Callable[[], None]:
    model = Classifier()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    each = iter(batches(ROWS // torch.distributed.get_world_size()))

    def step() -> None:
        batch = next(each)
        loss = cross_entropy(model(batch["images"]), batch["labels"])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def processor_seconds(step: Callable[[], None]) -> float:
    began = time.process_time()
    step()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--beside", choices=["train_step", "fsdp2"], default="train_step")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    accelerator = pf.Accelerator(split_batches=True)
    engine = accelerator.engine
    other = of_fsdp2() if arguments.beside == "fsdp2" else of_train_step(engine)
    seconds = in_turns(
        {"ours": of_accelerator(accelerator), "other": other}, arguments.pairs, processor_seconds, warm_up=10
    )
    ratio = median_ratio(seconds["ours"], seconds["other"])
    line = (
        f"| {engine.name} x {engine.devices} | {arguments.beside} | {arguments.pairs} | "
        f"{ratio.median:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] |"
    )
    if accelerator.is_main_process:
        print(line)
        if arguments.write:
            with (RESULTS / "accelerator_step.md").open("a") as file:
                file.write(f"{line}\n")
    accelerator.end_training()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
