"""A classifier with an average of its weights, as written for accelerate: only the import of Accelerator differs."""

from collections.abc import Iterable

import torch
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from portable_fsdp import Accelerator


class EMA:
    def __init__(self, weights: Iterable[Tensor]) -> None:
        self.shadow_params = [weight.clone().detach() for weight in weights]

    def step(self, weights: Iterable[Tensor]) -> None:
        for shadow, weight in zip(self.shadow_params, weights, strict=True):
            shadow.sub_(0.1 * (shadow - weight.detach()))


accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
set_seed(0)
x = torch.randn(720, 8)
rows = DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=24, shuffle=True)
model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 3)).to(accelerator.device)
ema, optimizer = EMA(model.parameters()), torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, rows = accelerator.prepare(model, optimizer, rows)
for step, (points, classes) in enumerate(rows, start=1):
    losses = cross_entropy(model(points), classes, reduction="none")
    accelerator.backward(losses.mean())
    optimizer.step()
    optimizer.zero_grad()
    ema.step(model.parameters())
    if step % 10 == 0:
        accelerator.print(f"step {step}: loss {accelerator.gather_for_metrics(losses.detach()).mean().item()}")
for weight, shadow in zip(model.parameters(), ema.shadow_params, strict=True):
    weight.data.copy_(shadow)
accelerator.save_model(model, "runs/ema")
