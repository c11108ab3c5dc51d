"""Tries the first rows of `data.factory` on the task before the first step; checks that later rows are like them."""

import copy
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from portable_fsdp.data.batches import Check
from portable_fsdp.data.packing import IGNORED
from portable_fsdp.models.tasks import CAUSAL_LM, Task, check_scores, count_classes
from portable_fsdp.runtime.errors import DataError


class RowCost(NamedTuple):
    """Of a row: tokens (1 where rows have none), and model FLOPs of forward and backward where torch counts them."""

    tokens: int
    flops: float | None


class RowTrial(NamedTuple):
    cost: RowCost
    check: Check
    row: dict[str, tuple[tuple[int, ...], torch.dtype]]
    """Of the first rows: each tensor's shape, without the rows, and its dtype."""


def tokens_of(batch: Mapping[str, Tensor]) -> int:
    """Tokens of each row: the length of `input_ids`, or 1 where rows have none."""
    ids = batch.get("input_ids")
    return ids.shape[1] if ids is not None and ids.dim() == 2 else 1


def try_rows(batch: Mapping[str, Tensor], model: nn.Module, task: Task, *, has_fixed_shapes: bool) -> RowTrial:
    """Run the corpus's first rows through a copy of `model` (parameters on meta): it takes no memory, and little time.

    `has_fixed_shapes`: the engine compiles a program for each shape. Raises ConfigError and DataError.
    """
    if task.counts_labels:
        _require_labels(task, batch)
    if task.name == CAUSAL_LM.name:
        classes, flops = getattr(getattr(model, "config", None), "vocab_size", None), None
    else:
        twin, on_meta = copy.deepcopy(model).to("meta"), {name: value.to("meta") for name, value in batch.items()}
        with FlopCounterMode(display=False) as counter:
            check_scores(task, twin, on_meta)
        # Backward computes twice what forward does: the gradients of inputs and of weights.
        flops = 3.0 * counter.get_total_flops() / len(next(iter(batch.values()))) or None
        classes = count_classes(task, twin, on_meta)
    shapes = {name: value.shape[1:] for name, value in batch.items()} if has_fixed_shapes else None

    def check(batch: Mapping[str, Tensor], numbers: NDArray[np.int64]) -> None:
        if shapes is not None and (actual := {name: value.shape[1:] for name, value in batch.items()}) != shapes:
            name = next(name for name in {**shapes, **actual} if actual.get(name) != shapes.get(name))
            raise DataError(
                f"data.factory: expected rows of one shape, for which XLA compiles one program; found {name} "
                f"{list(shapes.get(name, ()))} first, {list(actual.get(name, ()))} from row {numbers[0]} on.\n"
                "  Pad or resize the rows to one shape, or train with --backend=native."
            )
        if classes is not None:
            _require_range(batch["labels"], classes, numbers)

    check(batch, np.arange(len(next(iter(batch.values())))))
    row = {name: (tuple(value.shape[1:]), value.dtype) for name, value in batch.items()}
    return RowTrial(RowCost(tokens_of(batch), flops), check, row)


def _require_labels(task: Task, batch: Mapping[str, Tensor]) -> None:
    labels = batch.get("labels")
    if labels is None or labels.is_floating_point():
        found = f"found {', '.join(batch)}" if labels is None else f"found {labels.dtype}"
        raise DataError(
            f"data.factory: train.task={task.name} expects rows with integer `labels`, {found}.\n"
            "  Name them so in the dataset, or write a function of your own: train.task=module:function."
        )
    ids = batch.get("input_ids")
    if task.name == CAUSAL_LM.name and ids is not None and ids.shape == labels.shape:
        counted = labels != IGNORED
        if counted.any() and bool((ids == labels)[counted].all()):
            raise DataError(
                "data.factory: expected labels[t] to be the token after input_ids[t], found labels that equal "
                "input_ids.\n  Shift them: input_ids=tokens[:-1], labels=tokens[1:]."
            )


def _require_range(labels: Tensor, classes: int, numbers: NDArray[np.int64]) -> None:
    wrong = ((labels < 0) & (labels != IGNORED)) | (labels >= classes)
    if wrong.any():
        row = int(wrong.view(len(labels), -1).any(dim=1).nonzero()[0])
        value = int(labels[row][wrong[row]].flatten()[0])
        raise DataError(
            f"data.factory: expected labels from 0 to {classes - 1} (the classes of the model), or {IGNORED} for none, "
            f"found {value} in row {numbers[row]}.\n  Give the model more classes, or correct the labels."
        )
