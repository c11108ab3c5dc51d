"""fsdp2_loop.py on portable_fsdp: python THIS cpu xla 2, or torchrun --standalone --nproc_per_node=2 THIS cpu native"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import portable_fsdp as pf


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input, self.head = nn.Linear(16, 32), nn.Linear(32, 4)
        self.blocks = nn.ModuleList(Block(32) for _ in range(2))
        for layer in (layer for layer in self.modules() if isinstance(layer, nn.Linear)):
            nn.init.zeros_(layer.bias)  # and no random weights: both scripts start alike
            layer.weight.data.copy_(torch.arange(layer.weight.numel()).sin().view_as(layer.weight) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.input(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main(device: str = "auto", backend: str = "auto", devices: str = "") -> None:
    config = pf.make_config(sharding={"strategy": "FULL_SHARD"})
    with pf.open_backend(config, device=device, backend=backend, num_devices=int(devices or 0) or None) as engine:
        rank, world = engine.data_shard.index, engine.data_shard.count
        model = pf.shard_model(Net, config, engine)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        engine.shard_optimizer(optimizer)
        schedule = CosineAnnealingLR(optimizer, T_max=30, eta_min=3e-4)

        def step(batch: dict[str, Tensor]) -> dict[str, Tensor]:
            with engine.accumulate(True):  # gradients are sums over all devices
                loss = cross_entropy(model(batch["x"]), batch["labels"], reduction="sum") / 48
                loss.backward()
            engine.clip_grad_norm(model, 1.0)
            optimizer.step()
            engine.zero_gradients(optimizer, keep=False)
            return {"loss": engine.sum(loss.detach())}

        train = engine.compile(step, "train")
        x = torch.randn(480, 16, generator=torch.Generator().manual_seed(0))
        rows = TensorDataset(x, x[:, :4].argmax(dim=1))
        sampler = DistributedSampler(rows, world, rank)
        loader = DataLoader(rows, batch_size=48 // world, sampler=sampler)
        with pf.Checkpoints(f"runs/from_fsdp2_{engine.name}", engine, config=config) as checkpoints:
            begin, objects = 0, {"schedule": schedule}
            if point := checkpoints.find("auto"):
                begin = checkpoints.load(point, model, optimizer, objects).position[0]
            for epoch in range(begin, 3):
                sampler.set_epoch(epoch)
                metrics = list[Any]()
                for x, labels in loader:
                    metrics.append(engine.fetch(train(engine.place({"x": x, "labels": labels}))))
                    schedule.step()
                if engine.process.index == 0:  # which waits for the device here alone
                    losses = [each.result()["loss"].item() for each in metrics]
                    print(f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.7g}")
                checkpoints.save((epoch + 1) * len(loader), model, optimizer, (epoch + 1, 0), objects=objects)


if __name__ == "__main__":
    with pf.errors_as_sentences():
        main(*sys.argv[1:])
