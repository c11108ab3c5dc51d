"""Rows and a loss of one's own for test_tasks.py, which a config finds beside it."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset


class Texts(Dataset[dict[str, Tensor]]):
    """Padded ids whose labels follow from them."""

    def __init__(self, kind: str, split: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(3, 60, (12,), generator=generator)
        mask = (torch.arange(12) < 12 - index % 5).long()
        ids = ids * mask + (1 - mask)
        tokens = {"words": ids % 3, "masked": ids.where(ids % 2 == 0, torch.tensor(-100))}
        each = tokens.get(self.kind, ids).where(mask == 1, torch.tensor(-100))
        of_row = {"rows": ids[0] % 3, "scores": ids[0] / 60, "tags": (ids[:3] % 2).float()}
        return {"input_ids": ids, "attention_mask": mask, "labels": of_row.get(self.kind, each)}


rows, scores, tags, words, masked = (partial(Texts, kind) for kind in ("rows", "scores", "tags", "words", "masked"))


class Lengths(Dataset[dict[str, Tensor]]):
    """Rows of 3 to 12 tokens; the first id tells how many."""

    def __init__(self, split: str) -> None:
        pass

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        length = 3 + index % 10
        ids = torch.randint(3, 40, (length,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": torch.cat([torch.tensor([40 + length]), ids[1:]]), "labels": ids % 3}


class Sees(nn.Module):
    """A classifier that takes images of one dtype only."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.head = dtype, nn.Linear(256, 10)

    def forward(self, images: Tensor) -> Tensor:
        if images.dtype != self.dtype and not images.is_meta:  # the trial of a row casts nothing
            raise TypeError(f"images are {images.dtype}")
        return self.head(images.flatten(1).to(self.head.weight.dtype))


sees_float32, sees_bfloat16 = partial(Sees, torch.float32), partial(Sees, torch.bfloat16)


@dataclass(frozen=True)
class Answer:
    logits: tuple[Tensor, Tensor]


class Answers(nn.Module):
    """A classifier whose logits lie in a tuple in a dataclass in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(256, 10)

    def forward(self, images: Tensor) -> dict[str, Answer]:
        logits = self.head(images.flatten(1))
        return {"answer": Answer((logits, logits.argmax(1)))}


def of_answers(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Loss in the dtype of the logits."""
    logits, best = model(batch["images"])["answer"].logits
    losses = F.cross_entropy(logits, batch["labels"], reduction="none")
    return losses.sum(), torch.ones_like(best).sum()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(256), nn.Linear(256, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(images.flatten(1)))


def some_rows(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Counts rows by their label, so that micro batches and devices count differently."""
    losses = F.cross_entropy(model(batch["images"]), batch["labels"], reduction="none")
    weights = (batch["labels"] % 3).float()
    return (weights * losses).sum(), weights.sum()


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 9))


def critic() -> nn.Module:
    return nn.Sequential(nn.Linear(9, 12), nn.GELU(), nn.Linear(12, 1))


def pairs_of(step: int) -> dict[str, Tensor]:
    """12 rows of noise and of what the generator is to imitate; in steps 1 and 4 no row has a weight."""
    draw = torch.Generator().manual_seed(step)
    weights = torch.arange(12) % 3 * float(step not in (1, 4))
    return {
        "noise": torch.randn(12, 6, generator=draw),
        "real": torch.randn(12, 9, generator=draw) + 2,
        "weights": weights * (torch.arange(12) > 3),  # one of three micro batches or devices counts nothing either
    }


def critics_losses(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    losses = F.softplus(-model(batch["real"])) + F.softplus(model(batch["fake"]))
    return (losses[:, 0] * batch["weights"]).sum(), batch["weights"].sum()


def generators_losses(model: nn.Module, batch: dict[str, Tensor], judge: nn.Module) -> tuple[Tensor, Tensor]:
    losses = F.softplus(-judge(model(batch["noise"])))
    return losses.sum(), torch.ones_like(losses).sum()
