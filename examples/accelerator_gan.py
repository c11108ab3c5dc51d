"""A GAN on points of a ring, as written for accelerate: only the import of Accelerator differs."""

import torch
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

from portable_fsdp import Accelerator


def net(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, outputs))


accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
set_seed(0)
angles, noise = torch.rand(960, 1) * 6.2832, torch.randn(960, 4)
points = torch.cat([angles.sin(), angles.cos()], dim=1)
generator, judge = net(4, 2), net(2, 1)
of_generator = torch.optim.AdamW(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
of_judge = torch.optim.AdamW(judge.parameters(), lr=1e-3, betas=(0.5, 0.9))
generator, judge, of_generator, of_judge, rows = accelerator.prepare(
    generator, judge, of_generator, of_judge, DataLoader(TensorDataset(points, noise), batch_size=32, shuffle=True)
)
for step, (real, latent) in enumerate(rows, start=1):
    fake = generator(latent)
    judged = softplus(judge(fake.detach())) + softplus(-judge(real))
    accelerator.backward(judged.mean())
    of_judge.step()
    of_judge.zero_grad()
    fooled = softplus(-judge(fake))
    accelerator.backward(fooled.mean())
    of_generator.step()
    of_generator.zero_grad()
    of_judge.zero_grad()
    if step % 10 == 0:
        accelerator.print(f"step {step}: loss {accelerator.gather_for_metrics(judged.detach()).mean().item()}")
accelerator.save_state("runs/gan")
