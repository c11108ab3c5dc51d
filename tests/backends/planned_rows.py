"""A plain model and its rows, for plans and runs of a step: their tensors take tens of MB."""

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

Row = dict[str, Tensor]


class Made(Dataset[Row]):
    """A dataset with the same tensors in every row, and a label per row."""

    def __init__(self, **row: Tensor) -> None:
        self.row = row

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Row:
        return self.row


def images(split: str) -> Made:
    return Made(pixel_values=torch.ones(3, 64, 64), labels=torch.tensor(3))


def pairs(split: str) -> Made:
    source, labels = torch.ones(256, dtype=torch.int64), torch.full((64,), 5)
    return Made(input_ids=source, attention_mask=source, labels=labels)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.GroupNorm(8, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.relu(self.norm(self.convolution(hidden)))


class Looks(Block):
    """A block that reads a value on the host."""

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) if hidden.isfinite().all() else hidden


class Pictures(nn.Module):
    """Convolutions, a buffer, and logits."""

    mean: Tensor

    def __init__(self, width: int = 128, block: type[Block] = Block) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3, 1, 1))
        self.stem = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.ModuleList(block(width) for _ in range(6))
        self.head = nn.Linear(width, 10)

    def forward(self, pixel_values: Tensor) -> Tensor:
        hidden = self.stem(pixel_values - self.mean.to(pixel_values.dtype))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden.mean(dim=(2, 3)))


def model() -> Pictures:
    return Pictures()


def looking() -> Pictures:
    return Pictures(block=Looks)
