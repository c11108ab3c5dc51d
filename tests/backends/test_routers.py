"""Routers of a mixture of experts: their loss, biases and loads are those of a plain loop over the global batch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from cases import ARCHITECTURES, Case, assemble, assert_equal_states
from reference import reference
from test_curves import assert_equal_curves
from workers import GetWorkers, Group, JobFailed, marked

# A coefficient at which a wrong gradient shows in the curve.
LOSS = {"output_router_logits": True, "router_aux_loss_coef": 0.5}


def with_loss(model: str, **more: Any) -> Case:
    settings = {key: more.pop(key) for key in [*more] if "." in key}
    return Case(model, settings={"model.architecture": ARCHITECTURES[model] | LOSS} | settings, **more)


def with_bias(**more: Any) -> Case:
    settings = {key: more.pop(key) for key in [*more] if "." in key}
    return Case("deepseek_v3", settings={"model.router_bias_rate": 0.01} | settings, **more)


ENGINES = [
    *(("native", devices) for devices in (1, 2, 3)),
    *(("xla", devices) for devices in (1, 3, 4)),
    ("xla_fsdp1", 2),
]
LOSSES = {
    "qwen3_moe": with_loss("qwen3_moe"),
    "mixtral": with_loss("mixtral"),
    "gpt_oss": with_loss("gpt_oss"),
    "micro batches": with_loss("qwen3_moe", micro_batch=1, checkpointing="full"),
    "micro batches of 3": with_loss("mixtral", micro_batch=1, strategy="SHARD_GRAD_OP"),
}


@pytest.mark.parametrize(
    ("group", "name"),
    [marked(Group(engine, devices), name, in_suite=False) for engine, devices in ENGINES for name in LOSSES],
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


BIASES = {"whole": with_bias(), "micro batches": with_bias(micro_batch=1, checkpointing="full")}


@pytest.mark.parametrize(
    ("group", "name"),
    [
        marked(
            Group(engine, devices),
            name,
            in_suite=(engine, devices, name) == ("xla", 4, "whole"),
        )
        for engine, devices in ENGINES
        for name in BIASES
    ],
)
def test_biases_and_loads_are_those_of_the_global_batch(
    group: Group, name: str, workers: GetWorkers, tmp_path: Path
) -> None:
    """Equal bit by bit, also after a resume: counts are whole numbers."""
    case = replace(BIASES[name], steps=8)
    truth = reference(case)
    written = workers(group).run(jobs.write, case=case, folder=str(tmp_path), at=5)
    answers = workers(group).run(jobs.read, case=case, folders={"it": str(tmp_path)}, at=5)
    saved = assemble([answer["state"] for answer in written])
    assert_equal_states(assemble([answer["it"]["state"] for answer in answers]), saved)
    names = [key for key in saved if key.endswith("e_score_correction_bias")]
    assert names == list(truth.biases)
    expected = reference(replace(case, steps=5)).biases
    for name in names:
        assert saved[name].any()
        torch.testing.assert_close(saved[name], expected[name])
    rows = [*written[0]["before"], *written[0]["metrics"]]
    assert [row["loss"] for row in rows] == pytest.approx(truth.losses, rel=1e-5)
    assert [row["loss"] for row in answers[0]["it"]["metrics"]] == [row["loss"] for row in rows[5:]]
    for row, loads in zip(rows, truth.loads, strict=True):
        assert row["expert_load"] == pytest.approx((loads.sum(dim=0) / loads.sum()).tolist())
        assert row["expert_load_max"] == pytest.approx(float((loads.amax(1) / loads.mean(1)).max()))
    assert written[0]["compilations"] <= written[0]["expected_compilations"]


TENSOR = {"sharding.tensor": 2}
MESHES = {
    "split rows": with_loss("qwen3_moe", **TENSOR),
    "whole rows": with_loss("mixtral", **TENSOR | {"sharding.sequence_parallel": False}),
    "split rows, biases": with_bias(**TENSOR),
}


@pytest.mark.parametrize(
    ("group", "name"),
    [marked(Group(engine, 4), name, in_suite=False) for engine in ("native", "xla") for name in MESHES],
)
def test_tokens_count_once_on_any_mesh(group: Group, name: str, workers: GetWorkers) -> None:
    case = MESHES[name]
    if any(workers(group).run(jobs.is_refused, case=case)):
        return
    answers, truth = workers(group).run(jobs.train, case=case), reference(case)
    assert_equal_curves(answers, case)
    assert_equal_routers(answers, truth)


def assert_equal_routers(answers: list[Any], truth: Any) -> None:
    """Router losses and loads are those of the plain loop, in all processes."""
    for answer in answers:
        for row, loss, loads in zip(answer["metrics"], truth.router_losses, truth.loads, strict=True):
            assert row.get("router_loss", 0.0) == pytest.approx(loss, rel=1e-5)
            # A tie of two experts may be broken by rounding, once in 20 steps.
            assert row["expert_load"] == pytest.approx((loads.sum(dim=0) / loads.sum()).tolist(), abs=5e-3)


# torch 2.9 compiles grouped products in bfloat16 alone.
COMPILED = {"compile.enabled": True, "compile.backend": "aot_eager", "model.experts": "dense"}


@pytest.mark.parametrize(
    ("group", "name"), [marked(Group("native", 2), name, in_suite=False) for name in ("none", "full")]
)
def test_loads_of_compiled_layers(group: Group, name: str, workers: GetWorkers) -> None:
    case = Case("mixtral", steps=4, checkpointing=name, settings=COMPILED)
    truth = reference(replace(case, settings={}))
    for answer in workers(group).run(jobs.train, case=case):
        for row, loads in zip(answer["metrics"], truth.loads, strict=True):
            assert row["expert_load"] == pytest.approx((loads.sum(dim=0) / loads.sum()).tolist())


BAD: dict[str, tuple[Case, str]] = {
    "compiled": (with_loss("mixtral", **COMPILED), "compile.enabled=false"),
    "no bias": (Case("mixtral", settings={"model.router_bias_rate": 0.01}), "MixtralForCausalLM has no buffer"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_balanced_is_refused_by_name(name: str, workers: GetWorkers) -> None:
    case, message = BAD[name]
    with pytest.raises(JobFailed) as failure:
        workers(Group("native", 3)).run(jobs.opened, case=case, build=True)
    assert failure.value.kind == "ConfigError"
    assert message in failure.value.message
