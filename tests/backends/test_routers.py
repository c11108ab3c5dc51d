"""Routers of a mixture of experts: their loss, biases and loads are those of a plain loop over the global batch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs
import pytest
from cases import ARCHITECTURES, Case, assemble, assert_equal_states
from reference import reference
from test_curves import assert_equal_curves
from workers import GetWorkers, Group, marked

# A coefficient at which a wrong gradient shows in the curve.
LOSS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


def with_loss(model: str, **more: Any) -> Case:
    settings = {key: more.pop(key) for key in [*more] if "." in key}
    return Case(model, settings={"model.architecture": ARCHITECTURES[model] | LOSS} | settings, **more)


def with_bias(**more: Any) -> Case:
    return Case("deepseek_v3", settings={"model.router_bias_rate": 0.01}, **more)


LOSSES = {
    "qwen3_moe": with_loss("qwen3_moe"),
    "mixtral": with_loss("mixtral"),
    "gpt_oss": with_loss("gpt_oss"),
    "micro batches": with_loss("qwen3_moe", micro_batch=1, checkpointing="full"),
    "micro batches of 3": with_loss("mixtral", micro_batch=1, strategy="SHARD_GRAD_OP"),
}


@pytest.mark.parametrize(
    ("group", "name"),
    [
        marked(Group(engine, devices), name, in_suite=(engine, devices, name) in [("native", 3, "micro batches")])
        for engine, devices in (("native", 1), ("native", 2), ("native", 3), ("xla", 1), ("xla", 3), ("xla_fsdp1", 2))
        for name in LOSSES
    ],
)
def test_the_loss_is_that_of_the_global_batch(group: Group, name: str, workers: GetWorkers) -> None:
    case = LOSSES[name]
    answers = workers(group).run(jobs.train, case=case)
    assert_equal_curves(answers, case)
    truth = reference(case)
    plain = reference(replace(case, settings={"model.architecture": ARCHITECTURES[case.model]}))
    assert truth.losses != pytest.approx(plain.losses, rel=1e-4), "the loss changes nothing"
    for answer in answers:
        rows = answer["metrics"]
        assert [row["router_loss"] for row in rows] == pytest.approx(truth.router_losses, rel=1e-5)
        assert answer["compilations"] <= answer["expected_compilations"]
