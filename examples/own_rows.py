"""A training loop with its own rows and loss; its config sets the optimizer: python THIS cpu xla 4, or by torchrun."""

import sys

import torch
from torch import Tensor, nn

import portable_fsdp as pf


class Autoencoder(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 4), nn.GELU(), nn.Linear(4, 64), nn.Linear(64, 32))


def error(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The sum over all numbers, each weighted, and the sum of the weights."""
    squares = (model(batch["noisy"]) - batch["clean"]).square() * batch["weight"][:, None]
    return squares.sum(), batch["weight"].sum() * squares.shape[1]


def rows(step: int, shard: int, count: int) -> dict[str, Tensor]:
    """This process's part of 48 rows: lines on a plane, which four numbers describe."""
    generator = torch.Generator().manual_seed(step)
    clean = torch.randn(48, 2, generator=generator) @ torch.ones(2, 32).cumsum(dim=1) / 32
    noisy = clean + 0.1 * torch.randn(48, 32, generator=generator)
    batch = {"clean": clean, "noisy": noisy, "weight": torch.rand(48, generator=generator)}
    return {name: values.chunk(count)[shard] for name, values in batch.items()}


def main(device: str = "auto", backend: str = "auto", devices: str = "") -> None:
    config, steps = pf.make_config(optim={"lr": 3e-3}), 200
    with pf.open_backend(config, device=device, backend=backend, num_devices=int(devices or 0) or None) as engine:
        model, optimizer = pf.shard(Autoencoder, config, engine)
        train = pf.train_step(engine, model, optimizer, accumulation=1, max_grad_norm=1.0, task=error)
        for step in range(1, steps + 1):
            engine.unshard(model)  # gathers weights while the host makes rows
            batch = engine.place(rows(step, engine.data_shard.index, engine.data_shard.count))
            metrics = train([batch], pf.learning_rate(config.optim, step, steps))
            if step % 50 == 0 and engine.process.index == 0:
                print(f"step {step}: error {engine.fetch(metrics).result()['loss'].item():.6g}")
        with pf.Checkpoints("runs/own_rows", engine, config=config) as checkpoints:
            checkpoints.save(steps, model, optimizer, position=(0, 48 * steps))
            checkpoints.wait()


if __name__ == "__main__":
    with pf.errors_as_sentences():
        main(*sys.argv[1:])
