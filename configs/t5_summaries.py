"""Articles and their summaries for t5_large.yaml: CNN/DailyMail of the hub, tokenized as they are read.

It needs the packages datasets and transformers. `random` gives rows of the same shapes without a download: for a plan,
or to measure a step.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

TOKENIZER = "google-t5/t5-large"
DATASET = ("abisee/cnn_dailymail", "3.0.0")
SOURCE, TARGET = 1024, 128  # tokens of every row, so that XLA compiles one program
VOCABULARY, IGNORED = 32100, -100


class Summaries(Dataset[dict[str, Tensor]]):
    """The article is cut or padded, and its padding masked; padding of the summary is no label."""

    def __init__(self, split: str) -> None:
        from datasets import load_dataset
        from transformers import AutoTokenizer

        self.rows: Any = load_dataset(*DATASET, split=split)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(TOKENIZER)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        source, mask = self.tokens(f"summarize: {row['article']}", SOURCE)
        labels, counted = self.tokens(row["highlights"], TARGET)
        return {"input_ids": source, "attention_mask": mask, "labels": labels.masked_fill(counted == 0, IGNORED)}

    def tokens(self, text: str, length: int) -> tuple[Tensor, Tensor]:
        tokens = self.tokenizer(text, max_length=length, truncation=True, padding="max_length", return_tensors="pt")
        return tokens["input_ids"][0], tokens["attention_mask"][0]


class RandomPairs(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        source, labels = (torch.randint(2, VOCABULARY, (length,)) for length in (SOURCE, TARGET))
        return {"input_ids": source, "attention_mask": torch.ones_like(source), "labels": labels}


def data(split: str) -> Summaries:
    return Summaries(split)


def random(split: str) -> RandomPairs:
    return RandomPairs()
