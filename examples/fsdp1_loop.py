"""A loop on FSDP1; from_fsdp1_loop.py is the same on portable_fsdp. torchrun --standalone --nproc_per_node=2 THIS"""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullStateDictConfig, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.functional import cross_entropy, gelu
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
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = FSDP(
        Net(),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=device,
        sync_module_states=cuda,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    x = torch.randn(480, 16, generator=torch.Generator().manual_seed(0))
    rows = TensorDataset(x, x[:, :4].argmax(dim=1))
    sampler = DistributedSampler(rows, world, rank)
    loader = DataLoader(rows, batch_size=24 // world, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for number, (x, labels) in enumerate(loader, start=1):  # a step has two micro batches
            with model.no_sync() if number % 2 else nullcontext():
                loss = cross_entropy(model(x.to(device)), labels.to(device)) / 2
                loss.backward()
            total += loss.detach()
            if number % 2 == 0:
                model.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {total.item() / world / (len(loader) // 2):.7g}")
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
        weights = model.state_dict()
    if rank == 0:
        os.makedirs("runs", exist_ok=True)
        torch.save(weights, "runs/fsdp1_loop.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
