"""Images for the vision transformer of vit.yaml: any dataset whose rows are dicts of tensors."""

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Images(Dataset[dict[str, Tensor]]):
    """Five colours in noise. `pixel_values` is the argument of the model's forward, `labels` is the task's."""

    def __init__(self, split: str) -> None:
        generator = torch.Generator().manual_seed(0 if split == "train" else 1)
        self.noise = torch.randn(300 if split == "train" else 60, 3, 16, 16, generator=generator)
        self.colours = torch.linspace(-1, 1, 15).view(5, 3, 1, 1)

    def __len__(self) -> int:
        return len(self.noise)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        label = index % 5
        return {"pixel_values": self.colours[label] + self.noise[index], "labels": torch.tensor(label)}


def data(split: str) -> Images:
    return Images(split)
