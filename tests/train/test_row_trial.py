"""The trial of rows in buckets before the first step, and the check of those that follow."""

import pickle
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from portable_fsdp.backends.contract import ShardPolicy
from portable_fsdp.backends.refusals import Deployment, require_supported
from portable_fsdp.config.schema import Config
from portable_fsdp.models.build import build_model
from portable_fsdp.models.flops import RowCost
from portable_fsdp.models.tasks import MULTI_LABEL, Task, find_task, with_problem
from portable_fsdp.runtime.errors import BackendError, ConfigError, DataError
from portable_fsdp.train.row_trial import require_rows_first, try_rows

TASK = find_task("token_classification")


class Positions(nn.Module):
    """Classes of up to 8 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x[..., None] * self.table[: x.shape[1]]


PLACES = ["row 7", "row 8"].__getitem__
SIZES: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


def batch(size: int, count: int = 2) -> dict[str, Tensor]:
    return {"x": torch.zeros(count, size), "labels": torch.zeros(count, size, dtype=torch.int64)}


def test_each_bucket_is_a_shape_and_no_other_is_taken() -> None:
    trial = try_rows([batch(4), batch(8)], Positions(), TASK, has_fixed_shapes=True)
    check = pickle.loads(pickle.dumps(trial.check))
    for size in (4, 8):
        check(batch(size), PLACES)
    with pytest.raises(
        DataError, match=r"found x \[.* from row 7 on\.\n  List x in data\.buckets, which pads rows to a few sizes"
    ):
        check(batch(6), PLACES)
    assert trial.cost == RowCost(1, None)  # of no row in particular
    free = try_rows([batch(4), batch(8)], Positions(), TASK, has_fixed_shapes=False)
    free.check(batch(6), PLACES)


@pytest.mark.parametrize("query", [torch.float32, torch.bfloat16])
def test_dtypes_that_a_run_casts_are_not_refused(query: torch.dtype) -> None:
    """Rows in float16 beside float32 weights, and a cast that fits only the dtypes of a run."""

    def loss(model: Any, rows: Any) -> tuple[Tensor, Tensor]:
        x = model(rows["x"])
        losses = nn.functional.scaled_dot_product_attention(x.to(query), x, x).sum(dim=(1, 2))
        return losses.sum(), torch.ones_like(losses).sum()

    rows = {"x": torch.zeros(2, 5, 8, dtype=torch.float16)}
    task = Task("mine:loss", loss, counts_labels=False)
    assert try_rows([rows], nn.Linear(8, 8, bias=False), task, has_fixed_shapes=False).cost.flops


def test_a_bucket_that_the_model_cannot_take_is_refused() -> None:
    for sizes in ((4, 9), (9,)):
        with pytest.raises(ConfigError, match=r"failed on Positions and a batch of x \[2, 9\]"):
            try_rows([batch(size) for size in sizes], Positions(), TASK, has_fixed_shapes=False)
    # Beyond a model's positions the message names the key.
    model = {"model_type": "bert", **SIZES, "vocab_size": 9, "max_position_embeddings": 8}
    config = config_of({"input_ids": [4, 9]}, architecture=model)
    with pytest.raises(ConfigError, match=r"data\.buckets: expected at most 8 \(positions of the model\), found 9"):
        build_model(config.model, seed=0, seq_len=9, vocabulary=0, task=TASK, seq_len_key="data.buckets")


def config_of(buckets: Mapping[str, object], **model: object) -> Config:
    return Config.model_validate(
        {
            "model": model or {"factory": "a:b"},
            "data": {"factory": "a:b", "buckets": buckets},
            "train": {"task": "token_classification", "steps": 3, "global_batch": 8},
        }
    )


def classifier(outputs: int, problem: str | None) -> Any:
    torch.manual_seed(0)
    more: dict[str, Any] = {"vocab_size": 9, "num_labels": outputs, "problem_type": problem}
    return BertForSequenceClassification(BertConfig(**SIZES, **more)).eval()


IDS = torch.arange(12).view(4, 3) % 9
FLOATS, COLUMN = torch.tensor([0.5, -100.0, 2.0, 0.25]), torch.tensor([[0.5], [1.0], [2.0], [0.0]])
TAGS, NUMBERS = torch.tensor([[1.0, 0.0, 1.0]] * 3 + [[0.0, 0.5, 1.0]]), torch.arange(12.0).view(4, 3)
CLASSES = torch.tensor([0, 2, 1, -100])
NOT_FINITE = r"regression expects 1 finite numbers per row as labels, .*, found inf in the first rows"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("outputs", "problem", "labels"),
    [
        (1, None, FLOATS),
        (1, "regression", COLUMN),
        (1, None, torch.tensor([0, 1, 1, 0])),
        (3, "regression", NUMBERS),
        (3, None, TAGS),
        (3, "multi_label_classification", TAGS),
        (3, None, CLASSES),
        (3, "single_label_classification", CLASSES[:, None]),
    ],
)
def test_numbers_and_labels_of_rows_have_the_loss_of_transformers(
    outputs: int, problem: str | None, labels: Tensor, dtype: torch.dtype
) -> None:
    """Its value and its gradient, from parts of the rows; what an evaluation fills a batch up with counts nothing."""
    model, task = classifier(outputs, problem).to(dtype), find_task("sequence_classification")
    are_classes = labels.dtype == torch.int64 and outputs > 1
    values = labels if are_classes else labels.float()
    filled = torch.cat([values, torch.full_like(values[:2], -100 if are_classes else torch.nan)])
    parts = [task.scores(model, {"input_ids": IDS[:3], "labels": labels[:3]})]
    parts.append(task.scores(model, {"input_ids": IDS[[3, 0, 1]], "labels": filled[3:]}))
    mean = (parts[0][0] + parts[1][0]) / (parts[0][1] + parts[1][1])
    mean.backward()
    actual = model.classifier.weight.grad
    model.zero_grad()
    targets = labels if are_classes else labels.to(dtype)
    expected = model(input_ids=IDS, labels=targets).loss
    expected.backward()
    torch.testing.assert_close(mean, expected.float(), rtol=1e-6 if dtype == torch.float32 else 1e-2, atol=0)
    bound = 1e-6 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual, model.classifier.weight.grad, rtol=bound, atol=bound * 20)
    with torch.no_grad():
        metrics = task.scores(model, {"input_ids": IDS, "labels": labels})[2]
    assert metrics.keys() == ({"mean_absolute_error"} if problem == "regression" or outputs == 1 else {"accuracy"})


@pytest.mark.parametrize(
    ("outputs", "problem", "labels", "expected"),
    [
        (3, "single_label_classification", TAGS, r"integer `labels`, found torch\.float32"),
        (3, "regression", FLOATS, r"regression needs one label per output \(num_.*: expected \[4, 3\], found \[4\]"),
        (3, None, FLOATS, r"multi_label_classification needs one label per output"),
        (3, None, NUMBERS, r"3 numbers from 0 to 1 per row as labels, .*, found 2 in the first rows \(0\)"),
        (1, None, FLOATS / 0, NOT_FINITE),
        (3, None, CLASSES + 1, r"expected labels from 0 to 2"),
    ],
)
def test_labels_that_do_not_fit_the_problem_are_refused(
    outputs: int, problem: str | None, labels: Tensor, expected: str
) -> None:
    rows, model = {"input_ids": IDS, "labels": labels}, classifier(outputs, problem)
    task = with_problem(find_task("sequence_classification"), model, rows)
    with pytest.raises((ConfigError, DataError), match=expected):
        try_rows([rows], model, task, has_fixed_shapes=True)


@pytest.mark.parametrize(
    ("word", "nearest"),
    [("Regression", "regression"), ("regresion", "regression"), ("multi_label", MULTI_LABEL), ("", "")],
)
def test_an_unknown_problem_is_refused(word: str, nearest: str) -> None:
    """Protects from a loss that nobody chose: transformers takes any word; other tasks don't read it."""
    model, rows = classifier(3, word), {"input_ids": IDS, "labels": NUMBERS}
    with pytest.raises(ConfigError, match=rf"problem_type: expected .*, found '{word}'\.\n  nearest: {nearest}"):
        with_problem(find_task("sequence_classification"), model, rows)
    assert with_problem(TASK, model, rows) is TASK


def test_one_class_is_refused() -> None:
    one = Positions()
    one.table = nn.Parameter(torch.zeros(8, 1))
    with pytest.raises(ConfigError, match=r"token_classification: the model has one class, whose cross entropy is alw"):
        try_rows([batch(4)], one, TASK, has_fixed_shapes=False)


@pytest.mark.parametrize(("engine", "devices", "hosts"), [("xla", 8, 2), ("xla_fsdp1", 2, 1)])
def test_processes_that_would_choose_other_programs_are_refused(engine: str, devices: int, hosts: int) -> None:
    place = Deployment(engine, "tpu", devices, hosts)
    require_supported(config_of({"x": [8]}), place)
    with pytest.raises(BackendError, match=r"would choose a different program") as error:
        require_supported(config_of({"x": [4, 8]}), place)
    assert "Set data.buckets={x: [8]}" in str(error.value)


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (torch.sum, r"the count that mine returns depends on the weights.*\n  Return count\.detach\(\)"),
        (len, r"two 0-dim tensors.*, found tensor \[\], int\.\n  Sum the losses"),
        (lambda energy: torch.ones_like(energy).sum(), None),
    ],
)
def test_a_gradient_may_be_in_the_loss_but_not_in_the_count(count: Any, message: str | None) -> None:
    """In the trial, and in a step of a loop without one, or of a task whose count changes later."""

    def forces(model: Any, rows: Any) -> Any:
        x = rows["x"].requires_grad_()
        energy = model(x)
        (force,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
        return force.square().sum(), count(energy)

    task, model, rows = Task("mine", forces, counts_labels=False), nn.Linear(4, 1), {"x": torch.zeros(2, 4)}
    if message is None:
        assert try_rows([rows], model, task, has_fixed_shapes=False).cost.flops
        return
    with pytest.raises(ConfigError, match=message):
        try_rows([rows], model, task, has_fixed_shapes=False)
    with pytest.raises(ConfigError, match=message):
        task.scores(model, rows)


def squares(model: Any, rows: Any) -> tuple[Tensor, Tensor]:
    losses = model(rows["x"]).square().mean(dim=-1)
    return losses.sum(), torch.ones_like(losses).sum()


SQUARES = Task("mine:squares", squares, counts_labels=False)


@pytest.mark.parametrize("batch_first", [True, False])
def test_dropout_of_tensors_without_rows_in_front_is_refused(batch_first: bool) -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=batch_first)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x if batch_first else x.transpose(0, 1)).mean(dim=(1 if batch_first else 0))

    with torch.device("meta"):
        model = Encoder()
    message = r"found dropout of a tensor \[5, rows, 16\]\n  in .*test_row_trial.py:\d+: "
    with nullcontext() if batch_first else pytest.raises(ConfigError, match=message):
        require_rows_first(model, SQUARES, {"x": ((5, 16), torch.float32)}, ShardPolicy(()))


@pytest.mark.parametrize(("rate", "drops"), [(0.5, True), (0.0, False)])
def test_dropout_is_found_whatever_its_rate_is_called(rate: float, drops: bool) -> None:
    class Zoneout(nn.Linear):
        zoneout = rate

        def forward(self, input: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(input), self.zoneout, self.training)

    with torch.device("meta"):
        model = Zoneout(16, 4)
    row = {"x": ((16,), torch.float32)}
    assert require_rows_first(model, SQUARES, row, ShardPolicy(())) == drops
