"""What a plan asks of a model besides its step, and what it gives the step."""

from collections import Counter

import torch

from portable_fsdp.backends.base import Batch
from portable_fsdp.config.data import Data
from portable_fsdp.models.build import BuiltModel
from portable_fsdp.plan.result import Model
from portable_fsdp.train.measures import flops_per_token


def model_of(built: BuiltModel, seq_len: int) -> Model:
    """Of the whole model, on meta; `seq_len` in tokens."""
    rows: Counter[int] = Counter()
    for parameter in built.model.parameters():
        rows[parameter.shape[0] if parameter.dim() else 1] += parameter.numel()
    size = built.size
    return Model(
        parameters=size.parameters, flops_per_token=flops_per_token(size, seq_len), elements_by_rows=dict(rows)
    )


def token_tensors(data: Data, rows: int, device: str) -> Batch:
    """What the rows of a batch hold, without values: int64 `[rows, seq_len]`."""
    names = ["input_ids", "labels"]
    if data.resolved_packing != "stream":
        names += ["positions", "segments"]
    return {name: torch.empty((rows, data.seq_len), dtype=torch.int64, device=device) for name in names}
