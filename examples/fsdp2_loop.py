"""A loop on FSDP2; from_fsdp2_loop.py is the same on portable_fsdp. torchrun --standalone --nproc_per_node=2 THIS"""
# pyright: reportPrivateImportUsage=false

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, gelu
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


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


def main() -> None:
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]) if kind == "cuda" else 0)
    if kind == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh, model = init_device_mesh(kind, (world,)), Net().to(device)
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = CosineAnnealingLR(optimizer, T_max=30, eta_min=3e-4)
    begin, folder = 0, "runs/fsdp2_loop"
    if os.path.exists(folder):
        weights, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": moments, "schedule": schedule.state_dict(), "epoch": 0}
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        schedule.load_state_dict(state["schedule"])
        begin = state["epoch"]
    x = torch.randn(480, 16, generator=torch.Generator().manual_seed(0))
    rows = TensorDataset(x, x[:, :4].argmax(dim=1))
    sampler = DistributedSampler(rows, world, rank)
    loader = DataLoader(rows, batch_size=48 // world, sampler=sampler)
    for epoch in range(begin, 3):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for x, labels in loader:
            loss = cross_entropy(model(x.to(device)), labels.to(device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {total.item() / world / len(loader):.7g}")
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "schedule": schedule.state_dict(), "epoch": epoch + 1}
        dcp.save(state, checkpoint_id=folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
