"""`make proof`: the products that are too long for every commit."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from assemble import assemble, assert_equal_states
from cases import Case
from test_curves import assert_equal_curves
from workers import Group, Workers

pytestmark = pytest.mark.proof

ODD = [Group("native", 3), pytest.param(Group("xla", 3), marks=pytest.mark.xla)]
OPTIONS = list(product(["llama_tied", "gpt2", "qwen3"], ["FULL_SHARD", "NO_SHARD"], ["none", "full"], [None, 1]))


@pytest.mark.parametrize("odd", ODD, ids=str)
@pytest.mark.parametrize(("model", "strategy", "checkpointing", "micro_batch"), OPTIONS)
def test_all_options_together_keep_the_curve(
    odd: Group,
    workers: Callable[[Group], Workers],
    model: str,
    strategy: str,
    checkpointing: str,
    micro_batch: int | None,
) -> None:
    case = Case(model=model, strategy=strategy, checkpointing=checkpointing, micro_batch=micro_batch)
    assert_equal_curves(workers(odd).run("train", case=case), case)


MOMENTUM = {"name": "sgd", "lr": 0.2, "momentum": 0.9, "weight_decay": 0.0}
OTHERS = [
    Case(model="gpt2", steps=12, strategy="NO_SHARD"),
    Case(model="qwen3", steps=12, optim=MOMENTUM),
    Case(model="gemma2", steps=12, compute="bfloat16"),
]


@pytest.mark.xla
@pytest.mark.parametrize("case", OTHERS, ids=lambda case: case.model)
@pytest.mark.parametrize("writer", [Group("native", 2), Group("xla", 4)], ids=str)
def test_states_of_other_optimizers_strategies_and_dtypes_travel(
    case: Case, writer: Group, workers: Callable[[Group], Workers], tmp_path: Path
) -> None:
    said: list[dict[str, Any]] = workers(writer).run("write", case=case, folder=str(tmp_path), at=6)
    saved = assemble([answer["state"] for answer in said])
    for reader in (Group("native", 3), Group("xla", 3), Group("native", 1)):
        answers = workers(reader).run("read", case=case, folders={"it": str(tmp_path)}, at=6)
        assert_equal_states(assemble([answer["it"]["state"] for answer in answers]), saved)
        losses = [metrics["loss"] for metrics in answers[0]["it"]["metrics"]]
        bound = 1e-5 if case.compute == "float32" else 2e-3
        assert losses == pytest.approx([metrics["loss"] for metrics in said[0]["metrics"]], rel=bound)
