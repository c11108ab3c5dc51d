"""AdamW on every engine: step counts as all engines save them, bias corrections that are no part of a program."""

from collections.abc import Callable
from typing import Any

import pytest
from assemble import assemble
from cases import Case
from reference import reference
from workers import Group

Run = Callable[[Group, Case], list[dict[str, Any]]]

STEPS = 12
# 1 - 0.1^t is 1 in float32 from the eighth step on: XLA folds the numbers 0 and 1 into a program.
QUICK = Case(steps=STEPS, optim={"name": "adamw", "lr": 1e-3, "betas": [0.1, 0.1], "weight_decay": 0.1})


def test_bias_corrections_of_exactly_1_are_no_new_program(group: Group, run: Run) -> None:
    for answer in run(group, QUICK):
        assert answer["compilations"] == answer["expected_compilations"]
        losses = [metrics["loss"] for metrics in answer["metrics"]]
        assert losses == pytest.approx(reference(QUICK).losses, rel=1e-5)


def test_step_counts_are_saved_alike(group: Group, run: Run) -> None:
    saved = assemble([answer["final"] for answer in run(group, QUICK)])
    counts = {key: value for key, value in saved.items() if key.startswith("step/")}
    assert {key.removeprefix("step/") for key in counts} == {key for key in saved if "/" not in key}
    assert {(str(count.dtype), tuple(count.shape), count.item()) for count in counts.values()} == {
        ("torch.float32", (), float(STEPS))
    }
