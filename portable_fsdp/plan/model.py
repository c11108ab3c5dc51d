"""What a plan needs of a model besides its step, and the batch it gives the step."""

from collections import Counter

import torch

from portable_fsdp.backends.base import Batch
from portable_fsdp.config.data import Data
from portable_fsdp.models.build import BuiltModel
from portable_fsdp.plan.result import ModelFacts
from portable_fsdp.train.measures import VOTES, flops_per_token


def facts_of(built: BuiltModel, seq_len: int) -> ModelFacts:
    """Of the whole model, on meta; `seq_len` in tokens."""
    elements: Counter[int] = Counter()
    for parameter in built.model.parameters():
        elements[parameter.shape[0] if parameter.dim() else 1] += parameter.numel()
    flops, parameters = flops_per_token(built.size, seq_len), built.size.parameters
    return ModelFacts(parameters=parameters, flops_per_token=flops, elements_by_rows=dict(elements))


def empty_batch(data: Data, rows: int, processes: int, device: str) -> Batch:
    """The tensors of a micro batch, without values: int64 `[rows, seq_len]`, and what rides along with each row."""
    names = ["input_ids", "labels"]
    if data.resolved_packing != "stream":
        names += ["positions", "segments"]
    return {
        **{name: torch.empty((rows, data.seq_len), dtype=torch.int64, device=device) for name in names},
        "tokens": torch.empty(rows, device=device),
        "votes": torch.empty((rows, 1 + VOTES * processes), device=device),
    }
