"""Pairs of token sequences for the T5 of seq2seq.yaml: the target is the source backwards."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

PADDING, IGNORED = 0, -100


class Reversed(Dataset[dict[str, Tensor]]):
    """Rows of one shape: the source is padded with PADDING and masked, the labels are padded with -100."""

    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        length = 6 + index % 7
        ids = torch.randint(2, 64, (length,), generator=generator)
        source, labels = torch.full((12,), PADDING), torch.full((12,), IGNORED)
        source[:length], labels[:length] = ids, ids.flip(0)
        return {"input_ids": source, "attention_mask": (source != PADDING).long(), "labels": labels}


def data(split: str) -> Reversed:
    return Reversed()
