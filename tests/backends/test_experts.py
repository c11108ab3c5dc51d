"""Experts: products by groups on one device, and divided over the axis `expert`."""

from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

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


OF_SUITE = {"native": ["qwen3_moe"], "xla": ["gpt_oss"]}


@pytest.mark.parametrize(
    ("group", "name"),
    [marked(Group(e, 4), name, in_suite=name in OF_SUITE[e]) for e in ("native", "xla") for name in CURVES],
)
def test_the_curve_is_that_of_a_plain_loop(group: Group, name: str, workers: GetWorkers) -> None:
    assert_equal_curves(workers(group).run(jobs.train, case=CURVES[name]), CURVES[name])


def kernel_run(case: Case, interpreted: bool) -> list[dict[str, Any]]:
    """A step with the TPU's kernel in an interpreter, or with the dense formula."""
    if not interpreted:
        return jobs.train(case)["metrics"]
    from portable_fsdp.backends.torch_xla.spmd import engine

    groups = partial(engine.MeshExperts, interpret=True)

    def with_kernel(*args: Any, **kwargs: Any) -> Any:
        return groups(*args, **{**kwargs, "has_kernel": True})

    with patch.object(engine, "MeshExperts", with_kernel):
        return jobs.train(case)["metrics"]


@pytest.mark.xla
@pytest.mark.parametrize("model", ["gpt_oss", pytest.param("qwen3_moe", marks=pytest.mark.proof)])
def test_the_kernel_gives_what_the_dense_formula_gives(model: str, workers: GetWorkers) -> None:
    """Under the axis, where padding follows the groups: a kernel leaves its rows unwritten."""
    case = replace(case_of(model, **{"sharding.expert": 2}), steps=1)
    kernel, dense = (
        workers(Group("xla", 2)).run(kernel_run, case=case, interpreted=value)[0] for value in (True, False)
    )
    for own, expected in zip(kernel, dense, strict=True):
        assert own["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert own["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
