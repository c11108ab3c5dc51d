"""What a plan needs of a model besides its step, and the batch it gives the step."""

from collections import Counter

import torch

from portable_fsdp.backends.contract import Batch
from portable_fsdp.config.schema import Config
from portable_fsdp.data.build import build_data
from portable_fsdp.data.packing import Rows
from portable_fsdp.plan.result import ModelFacts
from portable_fsdp.train.build import Training
from portable_fsdp.train.measures import VOTES, flops_per_token


def rows_of(config: Config) -> Rows | None:
    """The rows of `data.factory`, the first of which say what a batch holds; None: text. Raises as the run does."""
    if config.data.factory is None:
        return None
    return build_data(config.data.model_copy(update={"eval_split": None})).rows


def facts_of(training: Training, seq_len: int) -> ModelFacts:
    """The facts of the whole model, on meta, as a run counts them (measures.run_start). `seq_len`: tokens in a row of
    text."""
    elements: Counter[int] = Counter()
    for parameter in training.built.model.parameters():
        elements[parameter.shape[0] if parameter.dim() else 1] += parameter.numel()
    size, trial = training.built.size, training.trial
    tokens, flops, rows = seq_len, None, ""
    if trial is None:
        flops = flops_per_token(size, seq_len)
    else:
        tokens, row_flops = trial.cost
        flops = None if row_flops is None else row_flops / tokens
        rows = ", ".join(
            f"{name} {str(dtype).removeprefix('torch.')} {list(shape)}" for name, (shape, dtype) in trial.row.items()
        )
    return ModelFacts(
        parameters=size.parameters,
        tokens_per_row=tokens,
        rows=rows,
        flops_per_token=flops,
        elements_by_rows=dict(elements),
    )


def empty_batch(config: Config, training: Training, rows: int, device: str) -> Batch:
    """The tensors of a micro batch, without values: those of `data.factory`'s first rows, or text as int64
    `[rows, seq_len]`."""
    names = ["input_ids", "labels"]
    if config.data.resolved_packing != "stream":
        names += ["positions", "segments"]
    text = dict.fromkeys(names, ((config.data.seq_len,), torch.int64))
    row = text if training.trial is None else training.trial.row
    return {name: torch.empty((rows, *shape), dtype=dtype, device=device) for name, (shape, dtype) in row.items()}


def control_numbers(processes: int) -> list[float]:
    """As many as a step of a run has."""
    return [0.0] * (2 + VOTES * processes)
