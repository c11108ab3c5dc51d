"""Dropout has one curve: that of a plain loop which drops by the definition of the masks."""

from typing import Any

import jobs
import pytest
from cases import Case
from test_curves import assert_equal_curves
from workers import GetWorkers, Group, marked

RATE: dict[str, Any] = {"model.dropout": 0.1}
RECOMPUTED: dict[str, Any] = {"checkpointing": "full", "micro_batch": 2}
CASES = {
    "gpt2": Case("gpt2", settings=RATE),
    "gpt2, recomputed": Case("gpt2", settings=RATE, **RECOMPUTED),
    "gpt2, scanned": Case("gpt2", settings=RATE | {"compile.scan_layers": True}, **RECOMPUTED),
    "gpt2, compiled": Case(
        "gpt2", settings=RATE | {"compile.enabled": True, "compile.backend": "aot_eager"}, **RECOMPUTED
    ),
    "opt, static": Case("opt", settings=RATE | {"model.attention": "static"}, **RECOMPUTED),
}


@pytest.mark.parametrize(
    ("group", "name"),
    [
        marked(Group(engine, devices), name, in_suite=False)
        for engine, devices in (("native", 1), ("native", 2), ("native", 3), ("xla", 1), ("xla", 3))
        for name in CASES
    ],
)
def test_the_curve_is_that_of_a_plain_loop(group: Group, name: str, workers: GetWorkers) -> None:
    assert_equal_curves(workers(group).run(jobs.train, case=CASES[name]), CASES[name])
