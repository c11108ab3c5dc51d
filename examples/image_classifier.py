"""A plain image classifier and its data, without transformers: see image_classifier.yaml beside it."""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    """Patches of 4 x 4 pixels, blocks, the mean over all patches."""

    def __init__(self, classes: int = 10, width: int = 48, depth: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=4, stride=4)
        self.positions = nn.Parameter(torch.randn(16, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=1))


class Shapes(Dataset[dict[str, Tensor]]):
    """Ten patterns in noise, shifted by up to two pixels: augmentation that is the same on any number of devices."""

    def __init__(self, split: str) -> None:
        generator = torch.Generator().manual_seed(0)
        self.patterns = torch.randn(10, 1, 16, 16, generator=generator)
        generator.manual_seed(1 if split == "train" else 2)
        self.noise = torch.randn(2000 if split == "train" else 200, 1, 16, 16, generator=generator)

    def __len__(self) -> int:
        return len(self.noise)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        label, shift = index % 10, int(torch.randint(-2, 3, ()))
        image = self.patterns[label].roll(shift, dims=-1) + 0.5 * self.noise[index]
        return {"images": image, "labels": torch.tensor(label)}


def model() -> nn.Module:
    return Classifier()


def data(split: str) -> Shapes:
    return Shapes(split)
