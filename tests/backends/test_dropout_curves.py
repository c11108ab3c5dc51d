"""Dropout has one curve: that of a plain loop which drops by the definition of the masks."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs
import pytest
from cases import Case
from reference import reference
from test_curves import assert_equal_curves
from test_engine_checkpoints import assert_travels
from test_tensor import GPT2
from workers import GetWorkers, Group, marked

RATE: dict[str, Any] = {"model.dropout": 0.1}
RECOMPUTED: dict[str, Any] = {"checkpointing": "full", "micro_batch": 2}
SOON: dict[str, Any] = {"steps": 8, "optim": {"name": "adamw", "lr": 1e-2}}
CASES = {
    "gpt2, few steps": Case("gpt2", settings=RATE, **RECOMPUTED, **SOON),
    "gpt2": Case("gpt2", settings=RATE),
    "gpt2, recomputed": Case("gpt2", settings=RATE, **RECOMPUTED),
    "gpt2, scanned": Case("gpt2", settings=RATE | {"compile.scan_layers": True}, **RECOMPUTED, **SOON),
    "gpt2, compiled": Case(
        "gpt2", settings=RATE | {"compile.enabled": True, "compile.backend": "aot_eager"}, **RECOMPUTED
    ),
    "opt, static": Case("opt", settings=RATE | {"model.attention": "static"}, **RECOMPUTED),
}


STATIC: dict[str, Any] = RATE | {"model.attention": "static"}
TWO: dict[str, Any] = STATIC | {"sharding.tensor": 2}
ON_AXES = {
    "gpt2, tensor": Case("gpt2", settings=TWO | {"sharding.plan": GPT2}, checkpointing="full"),
    "starcoder2, whole rows": Case("starcoder2", settings=TWO | {"sharding.sequence_parallel": False}),
    "starcoder2, tensor": Case("starcoder2", settings=TWO),
    "gpt_neox, tensor": Case("gpt_neox", settings=TWO),
    "starcoder2, context": Case("starcoder2", settings=STATIC | {"sharding.context": 2}, checkpointing="full"),
    "gemma2, context": Case("gemma2", settings=STATIC | {"sharding.context": 2}),
}


OF_SUITE = [("native-2", "gpt2, few steps"), ("xla-4", "gpt2, few steps")]
ENGINES = [("native", 1), ("native", 2), ("native", 3), ("xla", 1), ("xla", 4), ("xla_fsdp1", 2)]


@pytest.mark.parametrize(
    ("group", "name"),
    [
        marked(group := Group(*engine), name, in_suite=(str(group), name) in OF_SUITE)
        for engines, cases in ((ENGINES, CASES), ([("native", 4), ("xla", 4)], ON_AXES))
        for engine in engines
        for name in cases
    ],
)
def test_the_curve_is_that_of_a_plain_loop(group: Group, name: str, workers: GetWorkers) -> None:
    case = (CASES | ON_AXES)[name]
    if any(workers(group).run(jobs.is_refused, case=case)):  # scan on xla_fsdp1, torch.compile on xla
        return
    answers = workers(group.for_case(case)).run(jobs.train, case=case)
    assert_equal_curves(answers, case)
    for answer in answers:  # keys are inputs of a program: no step compiles another
        assert answer["compilations"] <= answer["expected_compilations"]  # fewer: an earlier case had these programs


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        pytest.param(Group("native", 3), Group("native", 2), marks=pytest.mark.proof),
        pytest.param(Group("native", 3), Group("xla", 4), marks=[pytest.mark.xla, pytest.mark.proof]),
        pytest.param(Group("xla", 4), Group("native", 1), marks=[pytest.mark.xla, pytest.mark.proof]),
    ],
)
def test_a_resume_draws_the_same(writer: Group, reader: Group, workers: GetWorkers, tmp_path: Path) -> None:
    case = replace(CASES["gpt2, recomputed"], steps=6)
    _, losses = assert_travels(workers, writer, case, [(reader, case)], tmp_path, at=3)
    assert losses == pytest.approx(reference(case).losses[3:], rel=1e-5)


@pytest.mark.parametrize(
    ("group", "checkpointing"),
    [
        marked(Group(engine, 3), way, in_suite=(engine, way) == ("native", "full"))
        for engine in ("native", "xla")
        for way in ("none", "full")
    ],
)
def test_adapters_drop_their_inputs(group: Group, checkpointing: str, workers: GetWorkers) -> None:
    settings = {"model.lora": {"r": 4, "dropout": 0.2}}
    case = Case(steps=4, checkpointing=checkpointing, settings=settings, optim={"name": "adamw", "lr": 1e-2})
    expected = reference(case).losses
    assert expected != reference(replace(case, settings={"model.lora": {"r": 4}})).losses
    for answer in workers(group).run(jobs.train, case=case):
        assert [metrics["loss"] for metrics in answer["metrics"]] == pytest.approx(expected, rel=1e-5)
