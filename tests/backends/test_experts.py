"""Experts: products by groups on one device, and divided over the axis `expert`."""

from typing import Any

import jobs
import pytest
from cases import ARCHITECTURES, Case
from test_curves import assert_equal_curves
from workers import GetWorkers, Group, marked

EVEN = {
    "qwen3_moe": ARCHITECTURES["qwen3_moe"] | {"num_experts": 8},
    "gpt_oss": ARCHITECTURES["gpt_oss"] | {"intermediate_size": 48},
}
"""Numbers of experts that devices divide, and rows of 16 bytes."""


def case_of(model: str, **settings: Any) -> Case:
    return Case(model, settings={"model.architecture": EVEN.get(model, ARCHITECTURES[model])} | settings)


CURVES = {
    "qwen3_moe": case_of("qwen3_moe", **{"sharding.expert": 2}),
    "mixtral": case_of("mixtral", **{"sharding.expert": 4}),
    "gpt_oss": case_of("gpt_oss", **{"sharding.expert": 2}),
    "deepseek_v3": case_of("deepseek_v3", **{"sharding.expert": 2}),
}


@pytest.mark.parametrize(
    ("group", "name"),
    [marked(Group("native", 4), name, in_suite=name in ("qwen3_moe",)) for name in CURVES],
)
def test_the_curve_is_that_of_a_plain_loop(group: Group, name: str, workers: GetWorkers) -> None:
    assert_equal_curves(workers(group).run(jobs.train, case=CURVES[name]), CURVES[name])


@pytest.mark.parametrize(
    ("group", "name"),
    [marked(Group("xla", 4), name, in_suite=name in ("mixtral",)) for name in CURVES],
)
def test_xla(group: Group, name: str, workers: GetWorkers) -> None:
    assert_equal_curves(workers(group).run(jobs.train, case=CURVES[name]), CURVES[name])
