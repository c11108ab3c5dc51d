"""Images for vit_large.yaml: a folder of images by class, as ImageNet's, opened by `datasets`.

`data` reads $IMAGES (data/imagenet without it): train/CLASS/*.jpg and validation/CLASS/*.jpg. It needs the packages
datasets and pillow. `random` gives rows of the same shapes without a file: for a plan, or to measure a step.
"""

import os
import random as python_random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

SIZE, CLASSES = 224, 1000  # the model's image_size and num_labels


class Images(Dataset[dict[str, Tensor]]):
    """`pixel_values` is the argument of the model's forward, `labels` is the task's."""

    def __init__(self, split: str) -> None:
        from datasets import load_dataset

        folder = os.environ.get("IMAGES", "data/imagenet")
        self.rows: Any = load_dataset("imagefolder", data_dir=folder, split=split)
        self.is_trained_on = split == "train"

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        image = row["image"].convert("RGB")
        image = augmented(image) if self.is_trained_on else centre(image)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1
        return {"pixel_values": pixels, "labels": torch.tensor(row["label"])}


def augmented(image: Any) -> Any:
    """A square of 8 to 100 % of the image, half of them mirrored. Python's generator is seeded for each row."""
    side = int((image.width * image.height * python_random.uniform(0.08, 1.0)) ** 0.5)
    side = max(1, min(side, image.width, image.height))
    left, top = python_random.randint(0, image.width - side), python_random.randint(0, image.height - side)
    square = image.resize((SIZE, SIZE), box=(left, top, left + side, top + side))
    return square.transpose(0) if python_random.random() < 0.5 else square  # 0: left to right


def centre(image: Any) -> Any:
    """The largest square in the middle."""
    side = min(image.width, image.height)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return image.resize((SIZE, SIZE), box=(left, top, left + side, top + side))


class RandomImages(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixel_values": torch.randn(3, SIZE, SIZE), "labels": torch.tensor(index % CLASSES)}


def data(split: str) -> Images:
    return Images(split)


def random(split: str) -> RandomImages:
    return RandomImages()
