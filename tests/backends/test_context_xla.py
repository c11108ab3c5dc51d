"""The axis `context` on XLA: the tokens of a row split over devices."""

from typing import Any

import jobs
import pytest
from cases import Case
from test_curves import assert_equal_curves
from workers import GetWorkers, Group, marked


def case_of(model: str, **settings: Any) -> Case:
    return Case(model, settings={key.replace("__", "."): value for key, value in settings.items()})


CURVES = {
    "llama, context 2": (2, Case("llama", settings={"sharding.context": 2})),
}
for _m in ("llama", "qwen3", "gemma2", "gpt2", "mixtral"):
    CURVES[_m + ", context 4, documents"] = (4, Case(_m, settings={"sharding.context": 4, "data.packing": "documents"}))


@pytest.mark.parametrize(
    ("group", "name"), [marked(Group("xla", devices), name, in_suite=True) for name, (devices, _) in CURVES.items()]
)
def test_the_curve_is_that_of_a_plain_loop(group: Group, name: str, workers: GetWorkers) -> None:
    case = CURVES[name][1]
    assert_equal_curves(workers(group).run(jobs.train, case=case), case)
