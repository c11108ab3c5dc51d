"""Tasks (`train.task`): the computation of the loss from a batch.

A task is a function of the model and a placed batch. It returns the sum of the losses, their count, and in evaluation
perhaps sums of metrics. The step divides by the count over the global batch, so the numbers of devices and of micro
batches don't change the curve.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from portable_fsdp.config.schema import TASKS
from portable_fsdp.models.loss import cross_entropy_sum
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.factory import described, load_factory

TaskBatch = dict[str, Tensor]

Scores = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Mapping[str, Tensor]]
"""0-dim tensors: the sum of the losses, their number, and sums of metrics; an evaluation reports their means over that
number."""

TaskFunction = Callable[[nn.Module, TaskBatch], Scores]

SINGLE_LABEL, MULTI_LABEL, REGRESSION = "single_label_classification", "multi_label_classification", "regression"


@dataclass(frozen=True)
class Task:
    name: str
    function: TaskFunction
    counts_labels: bool = True
    """True: the count is that of labels other than -100, known before the forward. False: the function returns it, and
    gradients are divided by it after the backward."""
    problem: str = SINGLE_LABEL
    """Result of `problem_of`. Except for SINGLE_LABEL labels are numbers, and NaN isn't counted."""

    def scores(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Mapping[str, Tensor]]:
        """Return (loss_sum, count, sums of metrics) of a placed batch. Raises ConfigError for any other result, and for
        a count with a gradient."""
        scores = self.function(model, dict(batch))
        _require_scores(self.name, scores)  # the user's own function
        return (*scores, {}) if len(scores) == 2 else scores


def causal_lm(model: nn.Module, batch: TaskBatch) -> Scores:
    """Run the model's forward, which returns the loss, see `loss.attach_loss`."""
    return model(batch["input_ids"], batch["labels"], **_documents(batch))


def run_layers(model: nn.Module, batch: TaskBatch) -> None:
    """Run the layers of a causal language model on a batch, and its head on the last position alone."""
    model(batch["input_ids"], None, **_documents(batch), logits_to_keep=1)


def _documents(batch: TaskBatch) -> TaskBatch:
    return {name: batch[name] for name in ("positions", "segments") if name in batch}


def of_labels(model: nn.Module, batch: TaskBatch, chunked: bool = True) -> Scores:
    """Sum the cross entropy of logits `[rows, ..., classes]` and int64 labels `[rows, ...]`; in evaluation accuracy.

    The other tensors of the batch are the arguments of the model's forward, which returns logits or a transformers
    output with `logits`. `chunked`: see `cross_entropy_sum`.
    """
    labels, logits = batch["labels"], _logits(model, batch)
    rows = len(labels)
    scores = cross_entropy_sum(logits.view(rows, -1, logits.shape[-1]), labels.view(rows, -1), chunked)
    if torch.is_grad_enabled():
        return scores
    return (*scores, {"accuracy": (logits.argmax(dim=-1).view(rows, -1) == labels.view(rows, -1)).sum().float()})


def of_rows(model: nn.Module, batch: TaskBatch, chunked: bool = True) -> Scores:
    """Compute transformers' loss of classes or numbers of a row (ForSequenceClassificationLoss), in float32.

    A row has one class, int64 `[rows]`; or one number per output of the model: `[rows, outputs]`, for one output also
    `[rows]`. Evaluations report the accuracy (for several labels over each label), or the mean absolute error. Raises
    ValueError for another number of labels.
    """
    labels, problem = batch["labels"], problem_of(model, batch["labels"])
    if problem == SINGLE_LABEL:
        return of_labels(model, batch, chunked)
    logits = _logits(model, batch).float()
    if labels.numel() != logits.numel():
        expected, actual = list(logits.shape), list(labels.shape)
        raise ValueError(f"{problem} needs one label per output (num_labels): expected {expected}, found {actual}")
    counted = ~labels.float().view(logits.shape).isnan()
    labels = torch.where(counted, labels.float().view(logits.shape), 0.0)
    if problem == REGRESSION:
        losses = (logits - labels).square()
        metrics = {"mean_absolute_error": (logits - labels).abs()}
    else:
        losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        metrics = {"accuracy": ((logits > 0) == (labels > 0.5)).float()}
    scores = (losses * counted).sum(), counted.sum().float()
    if torch.is_grad_enabled():
        return scores
    return (*scores, {name: (value * counted).sum() for name, value in metrics.items()})


def problem_of(model: nn.Module, labels: Tensor) -> str:
    """Return `problem_type` of a transformers model, else derive it from labels and `num_labels`. Raises ConfigError
    for an unknown one."""
    config: Any = getattr(model, "config", None)
    if (outputs := getattr(config, "num_labels", None)) is None:
        return SINGLE_LABEL
    if (own := getattr(config, "problem_type", None)) is not None:
        known = SINGLE_LABEL, MULTI_LABEL, REGRESSION
        if own not in known:
            near = get_close_matches(str(own).lower(), known, n=1, cutoff=0)[0]
            raise ConfigError(f"problem_type: expected {', '.join(known)} or null, found {own!r}.\n  nearest: {near}.")
        return own
    if outputs == 1:
        return REGRESSION
    return SINGLE_LABEL if labels.dtype in (torch.int64, torch.int32) else MULTI_LABEL


def _logits(model: nn.Module, batch: TaskBatch) -> Tensor:
    arguments = {name: value for name, value in batch.items() if name != "labels"}
    if "attention_mask" in arguments and is_decoder_only(model):  # no position sees the padding after a row
        del arguments["attention_mask"]
    output = model(**arguments)
    return output if isinstance(output, Tensor) else output.logits


def seq2seq_lm(model: nn.Module, batch: TaskBatch, chunked: bool = True) -> Scores:
    """Compute `of_labels`, with the labels shifted by one for the decoder, by the method of the model's class."""
    shifted = cast(Any, model).prepare_decoder_input_ids_from_labels(labels=batch["labels"])
    return of_labels(model, {**batch, "decoder_input_ids": shifted}, chunked)


def is_decoder_only(model: nn.Module) -> bool:
    """Whether each position of a row sees only earlier ones."""
    has_encoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
    return not has_encoder and any(getattr(module, "is_causal", False) is True for module in model.modules())


CAUSAL_LM = Task("causal_lm", causal_lm)

_FUNCTIONS: dict[str, Callable[..., Scores]] = {
    "seq2seq_lm": seq2seq_lm,
    "sequence_classification": of_rows,
    "image_classification": of_rows,
}


def with_problem(task: Task, model: nn.Module, batch: Mapping[str, Tensor]) -> Task:
    """Return the task with the problem of this model and the first rows."""
    is_of_rows = _FUNCTIONS.get(task.name) is of_rows and "labels" in batch
    return replace(task, problem=problem_of(model, batch["labels"])) if is_of_rows else task


def find_task(name: str, *, eager: bool = True) -> Task:
    """Return `train.task`. `eager`: operations run one by one. Raises ConfigError if a function can't be imported."""
    if name == CAUSAL_LM.name:
        return CAUSAL_LM
    if name in TASKS.split("|"):
        return Task(name, partial(_FUNCTIONS.get(name, of_labels), chunked=eager))
    return Task(name, load_factory("train.task", name), counts_labels=False)


def check_scores(task: Task, model: nn.Module, batch: Mapping[str, Tensor]) -> None:
    """Run a batch through a model, both on meta, to find errors before the first step.

    If the task reads a value on the host, or dtypes don't fit, the check ends without an error. Raises ConfigError for
    other errors of the function, with the line, and for a wrong result.
    """
    try:
        scores = cast(object, task.function(model, dict(batch)))
    except Exception as error:
        if _is_of_the_trial(error):
            return
        shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in batch.items())
        raise ConfigError(
            f"train.task: {task.name} failed on {type(model).__name__} and a batch of {shapes}:\n  {described(error)}"
        ) from error
    _require_scores(task.name, scores)


def _require_scores(name: str, scores: object) -> None:
    """Raise ConfigError unless a task's result is (loss_sum, count[, sums of metrics]), the count without gradient."""
    if type(scores) is tuple:
        match cast("tuple[object, ...]", scores):
            case (Tensor(ndim=0), Tensor(ndim=0) as count) | (Tensor(ndim=0), Tensor(ndim=0) as count, Mapping()):
                if not count.requires_grad:
                    return
                raise ConfigError(  # the step divides gradients by the count after the backward
                    f"train.task: the count that {name} returns depends on the weights, and the step would leave out "
                    "its gradient.\n  Return count.detach(). For a mean of each micro batch return "
                    "loss_sum / count * rows, and the number of rows as a tensor."
                )
            case _:
                pass
    parts = cast("tuple[object, ...]", scores) if isinstance(scores, tuple) else (scores,)
    actual = ", ".join(f"tensor {list(p.shape)}" if isinstance(p, Tensor) else type(p).__name__ for p in parts)
    raise ConfigError(
        f"train.task: expected {name} to return (loss_sum, count), two 0-dim tensors, and perhaps a dict of sums of "
        f"metrics, found {actual}.\n  Sum the losses of all rows, and count them: return losses.sum(), "
        "torch.ones_like(losses).sum()."
    )


def count_classes(task: Task, model: nn.Module, batch: Mapping[str, Tensor]) -> int | None:
    """Return the number of classes of the task's logits, from a batch and a model on meta; None if unknown."""
    if not task.counts_labels:
        return None
    try:
        if task.name == "seq2seq_lm":
            batch = {**batch, "decoder_input_ids": batch["labels"]}
        return _logits(model, dict(batch)).shape[-1]
    except Exception as error:
        if _is_of_the_trial(error):
            return None
        raise


def _is_of_the_trial(error: Exception) -> bool:
    """Whether the error is a read of a meta tensor's value, which has none, or about dtypes, which differ in a run."""
    text = str(error)
    return isinstance(error, NotImplementedError) or any(
        words in text for words in ("meta tensors", "data-dependent", "dtype")
    )
