"""What a plan asks of a model besides its step."""

from collections import Counter

from portable_fsdp.models.build import BuiltModel
from portable_fsdp.plan.result import Model
from portable_fsdp.train.records import flops_per_token


def model_of(built: BuiltModel, seq_len: int) -> Model:
    """Of the whole model, on meta; `seq_len` in tokens."""
    rows: Counter[int] = Counter()
    for parameter in built.model.parameters():
        rows[parameter.shape[0] if parameter.dim() else 1] += parameter.numel()
    size = built.size
    return Model(
        parameters=size.parameters, flops_per_token=flops_per_token(size, seq_len), elements_by_rows=dict(rows)
    )
