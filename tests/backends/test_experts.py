"""Experts: products by groups on one device, and divided over the axis `expert`."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jobs
import pytest
from cases import ARCHITECTURES, SEQ_LEN, VOCABULARY, Case, assemble, assert_equal_states
from test_curves import assert_equal_curves
from workers import GetWorkers, Group, marked

from portable_fsdp.models.build import build_model
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.train.build import shard_policy

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


@pytest.mark.xla
@pytest.mark.parametrize(("writer", "size"), [("native", 2), pytest.param("xla", 4, marks=pytest.mark.proof)])
def test_a_checkpoint_opens_at_any_layout_bit_for_bit(
    writer: str, size: int, workers: GetWorkers, tmp_path: Path
) -> None:
    """The optimizer state of experts too."""
    case = replace(case_of("qwen3_moe", **{"sharding.expert": size}), steps=8)
    saved_by = workers(Group(writer, 4)).run(jobs.write, case=case, folder=str(tmp_path), at=6)
    saved = assemble([answer["state"] for answer in saved_by])
    for reader, other in (("native", 1), ("xla", 2)):
        its = case_of("qwen3_moe", **{"sharding.expert": other})
        answers = workers(Group(reader, 4)).run(
            jobs.read, case=replace(its, steps=8), folders={"w": str(tmp_path)}, at=6
        )
        assert_equal_states(assemble([answer["w"]["state"] for answer in answers]), saved)
        losses = [metrics["loss"] for metrics in answers[0]["w"]["metrics"]]
        assert losses == pytest.approx([metrics["loss"] for metrics in saved_by[0]["metrics"]], rel=1e-5)


MISTAKES: dict[str, tuple[str, dict[str, Any], str]] = {
    "dense model": ("llama", {"sharding.expert": 2}, "has no experts whose implementation can be set"),
    "number": ("mixtral", {"sharding.expert": 3}, "Set sharding.expert=1 or 2 or 4"),
    "rows": ("gpt_oss", {"model.architecture": ARCHITECTURES["gpt_oss"]}, "multiple of 16 bytes"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_cannot_be_divided_is_refused_by_name(name: str) -> None:
    model, settings, message = MISTAKES[name]
    config = case_of(model, **{"sharding.expert": 2, **settings}).config(1)
    made = build_model(config.model, config.precision, seed=7, seq_len=SEQ_LEN, vocabulary=VOCABULARY)
    with pytest.raises(ConfigError, match=message):
        shard_policy(config, made.model)


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
