"""Experts: products by groups on one device, and divided over the axis `expert`."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jobs
import pytest
from cases import ARCHITECTURES, SEQ_LEN, VOCABULARY, Case
from reference import reference
from test_curves import assert_equal_curves
from test_engine_checkpoints import assert_travels
from test_routers import LOSS, assert_equal_routers
from workers import GetWorkers, Group, JobFailed, marked, marked_meshes

from portable_fsdp.models.build import build_model
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.train.build import shard_policy

EVEN = {
    "qwen3_moe": ARCHITECTURES["qwen3_moe"] | {"num_experts": 8},
    "gpt_oss": ARCHITECTURES["gpt_oss"] | {"intermediate_size": 48},
}
"""Numbers of experts that devices divide, and rows of 16 bytes."""


BIASED = "deepseek_v3"
COMPILED = {"compile.enabled": True, "compile.backend": "aot_eager"}


def case_of(model: str, **settings: Any) -> Case:
    return Case(model, settings={"model.architecture": EVEN.get(model, ARCHITECTURES[model])} | settings)


def balanced(model: str, **settings: Any) -> Case:
    """A case that balances experts: by the model's router loss, or by biases in DeepSeek-V3, which has no such loss."""
    case = case_of(model, **settings)
    of_model = {"model.architecture": case.settings["model.architecture"] | LOSS}
    return replace(case, settings=case.settings | ({"model.router_bias_rate": 0.01} if model == BIASED else of_model))


MODELS = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss")
TWO = {"sharding.expert": 2}
MESHES: dict[str, tuple[int, dict[str, int]]] = {
    "grouped": (2, {}),
    "expert 2": (2, TWO),
    "expert 4": (4, {"sharding.expert": 4}),
    "shard 2 x expert 2": (4, TWO),
    "shard 3 x expert 2": (6, TWO),
    "expert 2 x context 2": (4, TWO | {"sharding.context": 2}),
    "expert 2 x tensor 2": (4, TWO | {"sharding.tensor": 2}),
}
IN_SUITE = [("native", "qwen3_moe", "shard 2 x expert 2"), ("xla", "gpt_oss", "shard 2 x expert 2")]
NOT_BY_THREE = ("qwen3_moe", "mixtral", "deepseek_v3")  # widths of experts: refused on native


@pytest.mark.parametrize(
    ("group", "model", "mesh"),
    marked_meshes(MODELS, MESHES, IN_SUITE),
)
def test_every_family_has_the_curve_of_a_plain_loop(group: Group, model: str, mesh: str, workers: GetWorkers) -> None:
    case = balanced(model, **MESHES[mesh][1])
    if (group.backend, mesh) == ("native", "shard 3 x expert 2") and model in NOT_BY_THREE:
        with pytest.raises(JobFailed, match=r"gate_up_proj .*over 3 devices, which don't divide"):
            workers(group).run(jobs.opened, case=case, build=True)
        return
    answers, truth = workers(group).run(jobs.train, case=case), reference(case)
    assert_equal_curves(answers, case)
    assert_equal_routers(answers, truth)
    assert all(answer["compilations"] <= answer["expected_compilations"] for answer in answers)


CURVES = {
    "compiled": case_of("qwen3_moe", **COMPILED, **{"sharding.expert": 2}),
    "capacity for all": case_of("mixtral", **{"sharding.expert": 2, "sharding.expert_capacity": 2.0}),
    "scanned": case_of("qwen3_moe", **{"sharding.expert": 2, "compile.scan_layers": True}),
    "rows that torch's grouped products refuse": Case("gpt_oss", settings=TWO),
}


@pytest.mark.parametrize(
    ("group", "name"),
    [marked(Group("native", 2), name, in_suite="rows" in name) for name in CURVES if name != "scanned"]
    + [marked(Group("xla", 4), name, in_suite=False) for name in ("capacity for all", "scanned")],
)
def test_the_curve_is_that_of_a_plain_loop(group: Group, name: str, workers: GetWorkers) -> None:
    case = CURVES[name]
    answers = workers(group.for_case(case)).run(jobs.train, case=case)
    assert_equal_curves(answers, case)
    dropped = [row.get("experts_dropped") for answer in answers for row in answer["metrics"]]
    assert {*dropped} == {0.0 if "capacity" in name else None}


@pytest.mark.xla
@pytest.mark.proof
def test_xla_drops_the_rows_that_native_drops(workers: GetWorkers) -> None:
    case = replace(balanced("mixtral", **{"sharding.expert": 2, "sharding.expert_capacity": 1.0}), steps=4)
    native, xla = (workers(Group(engine, 4)).run(jobs.train, case=case)[0]["metrics"] for engine in ("native", "xla"))
    for own, other in zip(native, xla, strict=True):
        assert 0 < own["experts_dropped"] < 0.5  # all rows would fit if they came evenly
        for name in ("experts_dropped", "loss", "router_loss"):
            assert other[name] == pytest.approx(own[name], rel=1e-5)
        assert other["grad_norm"] == pytest.approx(own["grad_norm"], rel=2e-3)


@pytest.mark.xla
@pytest.mark.proof
@pytest.mark.parametrize(("writer", "size"), [("native", 2), ("xla", 4)])
def test_a_checkpoint_opens_at_any_layout_bit_for_bit(
    writer: str, size: int, workers: GetWorkers, tmp_path: Path
) -> None:
    """The optimizer state of experts too."""
    case = replace(case_of("qwen3_moe", **{"sharding.expert": size}), steps=8)
    readers = [
        (Group(reader, 4), replace(case_of("qwen3_moe", **{"sharding.expert": other}), steps=8))
        for reader, other in (("native", 1), ("xla", 2))
    ]
    assert_travels(workers, Group(writer, 4), case, readers, tmp_path)


MISTAKES: dict[str, tuple[str, dict[str, Any], str]] = {
    "dense model": ("llama", {"sharding.expert": 2}, "has no experts whose implementation can be set"),
    "number": ("mixtral", {"sharding.expert": 3}, "Set sharding.expert=1 or 2 or 4"),
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
    case = replace(case_of(model, **{"sharding.expert": 2, "compile.scan_layers": model == "qwen3_moe"}), steps=1)
    if model == "gpt_oss":  # the interpreter is slow
        one_layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
        case.settings["model.architecture"] = case.settings["model.architecture"] | one_layer
    kernel, dense = (
        workers(Group("xla", 4)).run(kernel_run, case=case, interpreted=value)[0] for value in (True, False)
    )
    for own, expected in zip(kernel, dense, strict=True):
        assert own["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert own["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
