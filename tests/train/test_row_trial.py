"""The trial of rows in buckets before the first step, and the check of those that follow."""

import pickle
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from portable_fsdp.backends.base import ShardPolicy
from portable_fsdp.backends.support import require_supported
from portable_fsdp.config.rules import Deployment
from portable_fsdp.config.schema import Config
from portable_fsdp.models.build import build_model
from portable_fsdp.models.tasks import find_task
from portable_fsdp.runtime.errors import BackendError, ConfigError, DataError
from portable_fsdp.train.row_trial import RowCost, try_rows

TASK = find_task("token_classification")


class Positions(nn.Module):
    """Classes of up to 8 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x[..., None] * self.table[: x.shape[1]]


class Blurs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kernel", torch.full((3, 1, 3), 0.5))
        self.classes = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.classes(nn.functional.conv1d(x[:, None], self.get_buffer("kernel"), padding=1).mT)


@pytest.mark.parametrize(
    ("compute", "words"),
    [("bfloat16", "Set precision.buffers=bfloat16, or cast them in"), ("float16", r"\n  Cast them in its forward")],
)
def test_a_buffer_of_another_dtype_than_compute_is_refused_with_the_key(compute: str, words: str) -> None:
    """On meta nothing refuses a product of two dtypes; on a device torch does, in the first step."""
    policy = ShardPolicy((), compute=getattr(torch, compute))
    with pytest.raises(ConfigError, match=rf"(?s)precision\.buffers: Blurs .*: kernel \(float32, computes in.*{words}"):
        try_rows([batch(4)], Blurs(), TASK, has_fixed_shapes=False, policy=policy)
    try_rows([batch(4)], Blurs().to(getattr(torch, compute)), TASK, has_fixed_shapes=False, policy=policy)
    try_rows([batch(4)], Blurs(), TASK, has_fixed_shapes=True, policy=policy)  # XLA multiplies tensors of two dtypes
    try_rows([batch(4)], Blurs(), TASK, has_fixed_shapes=False)


PLACES = ["row 7", "row 8"].__getitem__


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


@pytest.mark.parametrize("sizes", [(4, 9), (9,)])
def test_a_bucket_that_the_model_cannot_take_is_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"failed on Positions and a batch of x \[2, 9\]"):
        try_rows([batch(size) for size in sizes], Positions(), TASK, has_fixed_shapes=False)


def test_a_bucket_beyond_a_models_positions_names_the_key() -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    model = {"model_type": "bert", **sizes, "vocab_size": 9, "max_position_embeddings": 8}
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


@pytest.mark.parametrize(("engine", "devices", "hosts"), [("xla", 8, 2), ("xla_fsdp1", 2, 1)])
def test_processes_that_would_choose_other_programs_are_refused(engine: str, devices: int, hosts: int) -> None:
    place = Deployment(engine, "tpu", devices, hosts)
    require_supported(config_of({"x": [8]}), place)
    with pytest.raises(BackendError, match=r"would choose another program than the rest") as error:
        require_supported(config_of({"x": [4, 8]}), place)
    assert "Set data.buckets={x: [8]}" in str(error.value)
