"""Each family of models trains on every engine as transformers' own does in a plain loop, in the promised programs."""

from collections.abc import Callable
from typing import Any

import pytest
from cases import ARCHITECTURES, Case
from test_curves import assert_equal_curves
from workers import Group

Run = Callable[[Group, Case], list[dict[str, Any]]]


def assert_it_trains(where: Group, run: Run, model: str) -> None:
    case = Case(model=model)
    answers = run(where, case)
    assert_equal_curves(answers, case)
    for answer in answers:
        assert answer["compilations"] == answer["expected_compilations"]


@pytest.mark.parametrize("where", [Group("native", 2), pytest.param(Group("xla", 4), marks=pytest.mark.xla)], ids=str)
@pytest.mark.parametrize("model", ["qwen3_moe", "gpt_oss"])
def test_experts_train_as_in_a_plain_loop(where: Group, run: Run, model: str) -> None:
    assert_it_trains(where, run, model)


# qwen3_next's linear attention solves a triangular system, which torch_xla can't lower (it would run on the host).
ON_XLA = [model for model in ARCHITECTURES if model != "qwen3_next"]
EVERY = [
    *((Group("native", 3), model) for model in ARCHITECTURES),
    *((Group("xla", 4), model) for model in ON_XLA),
]


@pytest.mark.proof
@pytest.mark.xla
@pytest.mark.parametrize(("where", "model"), EVERY, ids=str)
def test_every_family_trains_as_in_a_plain_loop(where: Group, run: Run, model: str) -> None:
    assert_it_trains(where, run, model)
