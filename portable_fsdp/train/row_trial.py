"""Run the task on the first rows of `data.factory` before the first step; check that later rows are like them."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from portable_fsdp.backends.contract import ShardPolicy
from portable_fsdp.backends.weight_uses import in_own_dtype
from portable_fsdp.data.batches import Check
from portable_fsdp.data.packing import IGNORED, tokens_of
from portable_fsdp.models.flops import RowCost
from portable_fsdp.models.tasks import CAUSAL_LM, MULTI_LABEL, SINGLE_LABEL, Task, check_scores, count_classes
from portable_fsdp.runtime.errors import ConfigError, DataError
from portable_fsdp.runtime.factory import described


class RowTrial(NamedTuple):
    cost: RowCost
    check: Check
    row: dict[str, tuple[tuple[int, ...], torch.dtype]]
    """Shape (without the batch dimension) and dtype of each tensor of the first rows, in the largest data.buckets."""


Shapes = dict[str, tuple[int, ...]]
"""Shapes of a batch's tensors, without the batch dimension."""


@dataclass(frozen=True)
class RowCheck:
    """Raises DataError for rows unlike the first. Picklable: `data.workers` call it in their processes."""

    shapes: tuple[Shapes, ...] | None  # that rows may have; None: any
    classes: int | None  # number of classes, or of labels per row if the problem isn't SINGLE_LABEL
    problem: str

    def __call__(self, batch: Mapping[str, Tensor], place: Callable[[int], str]) -> None:
        if self.shapes is not None and (actual := _shapes(batch)) not in self.shapes:
            raise _other_shape(self.shapes, actual, place(0))
        if self.classes is not None:
            _require_values(batch["labels"], self.classes, self.problem, place)


def try_rows(
    batches: Sequence[Mapping[str, Tensor]],
    model: nn.Module,
    task: Task,
    *,
    has_fixed_shapes: bool,
    policy: ShardPolicy | None = None,
) -> RowTrial:
    """Run the corpus's first rows through a copy of `model` (parameters on meta), without memory and in little time.

    `batches`: one per shape that a run may have, the largest last; the smallest and the largest are tried.
    `has_fixed_shapes`: the engine compiles a program per shape. `policy`: with its compute dtype. Raises
    ConfigError if the model or task fails on the shapes of the rows, DataError for wrong labels. A mistake in dtypes
    fails in the first step.
    """
    policy = policy or ShardPolicy(())
    largest, several = batches[-1], len(batches) > 1
    if task.counts_labels:
        _require_labels(task, largest)
    if task.name == CAUSAL_LM.name:
        classes, flops = getattr(getattr(model, "config", None), "vocab_size", None), None
    else:
        twin = _twin(model, policy)
        on_meta = [{name: value.to("meta") for name, value in batch.items()} for batch in batches]
        if several:
            check_scores(task, twin, on_meta[0])
        counter = cast(Any, FlopCounterMode(display=False))
        # Its hooks on modules, which tell FLOPs by module, fail where the loss holds a gradient (torch 2.9).
        counter.mod_tracker = SimpleNamespace(parents={"Global"}, __enter__=nullcontext, __exit__=lambda *_: None)
        with counter:
            check_scores(task, twin, on_meta[-1])
        # Backward has twice the FLOPs of forward: the gradients of inputs and of weights.
        flops = 3.0 * counter.get_total_flops() / len(next(iter(largest.values()))) or None
        classes = count_classes(task, twin, on_meta[-1])
    if classes == 1 and task.problem == SINGLE_LABEL and task.name != CAUSAL_LM.name:
        raise ConfigError(
            f"train.task={task.name}: the model has one class, whose cross entropy is always 0: nothing would train.\n"
            "  Give the model more classes (num_labels). For regression, use sequence_classification or\n"
            "  image_classification with num_labels: 1 and problem_type: regression, or a function of your own."
        )
    check = RowCheck(tuple(map(_shapes, batches)) if has_fixed_shapes else None, classes, task.problem)
    check(largest, "the first rows ({})".format)
    # Rows of several lengths count as rows: no number of tokens or FLOPs would hold for every step.
    cost = RowCost(1, None) if several else RowCost(tokens_of(largest), flops)
    return RowTrial(cost, check, {name: (tuple(value.shape[1:]), value.dtype) for name, value in largest.items()})


def _twin(model: nn.Module, policy: ShardPolicy) -> nn.Module:
    """Copy the model on meta, with all weights and perhaps the inputs in the compute dtype; modules with a dtype of
    their own, and casts at units, are left to the run."""
    twin = copy.deepcopy(model).to("meta")
    for weight in twin.parameters():
        if weight.is_floating_point():
            weight.data = weight.data.to(policy.compute)
    if policy.cast_inputs:
        twin.forward = in_own_dtype(twin.forward, policy.compute, None)
    return twin


_ROWS = 37  # a prime: no other dimension is a multiple of it by chance


class _NoRowsError(Exception):
    pass


class _RowsFirst(TorchFunctionMode):
    """Refuses dropout of tensors whose dimension 0 is neither rows, nor rows and positions flattened, nor 1."""

    drops = False  # whether torch's dropout ran, whatever its module calls the rate

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_on = func is F.dropout and kwargs.get("training", True) and 0 < kwargs.get("p", 0.5) < 1
        self.drops |= is_on or (func is F.scaled_dot_product_attention and kwargs.get("dropout_p", 0.0) > 0)
        if is_on and args[0].dim():
            shape = ["rows" if size == _ROWS else size for size in args[0].shape]
            if args[0].shape[0] % _ROWS and args[0].shape[0] != 1:
                raise _NoRowsError(f"dropout of a tensor [{', '.join(map(str, shape))}]")
        return func(*args, **kwargs)


def require_rows_first(
    model: nn.Module, task: Task, row: Mapping[str, tuple[Sequence[int], torch.dtype]], policy: ShardPolicy
) -> bool:
    """Return whether the model calls dropout, True if it can't run on meta. Raise ConfigError for dropout of a tensor
    whose dimension 0 isn't rows: masks are drawn by row.

    `row`: shape and dtype of each tensor of a row. Other errors of the model are found elsewhere.
    """
    batch = {name: torch.empty(_ROWS, *shape, dtype=dtype, device="meta") for name, (shape, dtype) in row.items()}
    twin = _twin(model, policy)
    try:
        with _RowsFirst() as trial:
            task.function(twin, batch)
        return trial.drops
    except _NoRowsError as error:
        raise ConfigError(
            f"model.factory: expected rows in dimension 0, found {described(error).partition(': ')[2]}\n"
            "  Put rows first there (torch's layers: batch_first=True), or set the rate of this dropout to 0."
        ) from None
    except Exception:
        return True


def _shapes(batch: Mapping[str, Tensor]) -> Shapes:
    return {name: tuple(value.shape[1:]) for name, value in batch.items()}


def _other_shape(shapes: tuple[Shapes, ...], actual: Shapes, first: str) -> DataError:
    nearest = max(shapes, key=lambda shape: len(shape.items() & actual.items()))
    name = next(name for name in {**nearest, **actual} if actual.get(name) != nearest.get(name))
    expected, before = ("a shape of data.buckets", "in the nearest bucket") if shapes[1:] else ("one shape", "first")
    return DataError(
        f"data.factory: expected rows of {expected}, since XLA compiles one program per shape; found {name} "
        f"{list(nearest.get(name, ()))} {before}, {list(actual.get(name, ()))} from {first} on.\n"
        f"  List {name} in data.buckets, which pads rows to a few sizes, resize the rows, or train with "
        "--backend=native."
    )


def _require_labels(task: Task, batch: Mapping[str, Tensor]) -> None:
    labels = batch.get("labels")
    if labels is None or (labels.is_floating_point() and task.problem == SINGLE_LABEL):
        actual = f"found {', '.join(batch)}" if labels is None else f"found {labels.dtype}"
        raise DataError(
            f"data.factory: train.task={task.name} expects rows with integer `labels`, {actual}.\n"
            "  Use that name in the dataset, or your own task: train.task=module:function.\n"
            "  For numbers use a transformers classifier with problem_type: regression or multi_label_classification."
        )
    ids = batch.get("input_ids")
    if task.name == CAUSAL_LM.name and ids is not None and ids.shape == labels.shape:
        counted = labels != IGNORED
        if counted.any() and bool((ids == labels)[counted].all()):
            raise DataError(
                "data.factory: expected labels[t] to be the token after input_ids[t], found labels that equal "
                "input_ids.\n  Shift them: input_ids=tokens[:-1], labels=tokens[1:]."
            )


def _require_values(labels: Tensor, outputs: int, problem: str, place: Callable[[int], str]) -> None:
    values, has_shape = labels.reshape(len(labels), -1), True
    if problem == SINGLE_LABEL:
        is_right = ((values >= 0) & (values < outputs)) | (values == IGNORED)
        expected = f"expected labels from 0 to {outputs - 1} (the model's classes), or {IGNORED} (ignored)"
        fix = "Give the model more classes, or correct the labels."
    else:
        is_right = (values >= 0) & (values <= 1) if problem == MULTI_LABEL else values.isfinite()
        numbers = "numbers from 0 to 1" if problem == MULTI_LABEL else "finite numbers"
        expected = f"{problem} expects {outputs} {numbers} per row as labels, one for each output of the model "
        expected += "(num_labels)"
        fix, has_shape = "Correct the labels, or num_labels and problem_type.", values.shape[1] == outputs
    if has_shape and is_right.all():
        return
    row, actual = 0, f"labels of shape {list(labels.shape[1:])}"
    if has_shape:
        row = int((~is_right).any(dim=1).nonzero()[0])
        value = values[row][~is_right[row]][0].item()
        actual = f"{value:g}" if isinstance(value, float) else f"{value}"
    raise DataError(f"data.factory: {expected}, found {actual} in {place(row)}.\n  {fix}")
