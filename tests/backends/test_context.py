"""Context parallelism: devices split the tokens of each row, and attention gathers keys and values."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jobs
import pytest
import torch
from cases import ARCHITECTURES, GLOBAL_BATCH, SEQ_LEN, VOCABULARY, Case, assemble, assert_equal_states
from test_contract import assert_evaluation_changes_nothing, evaluated, evaluated_case
from test_curves import BF16_20_STEPS, assert_equal_curves
from test_experts import EVEN
from test_tensor import GPT2
from workers import GetWorkers, Group, marked, marked_meshes

from portable_fsdp.backends.native.groups import split_tokens
from portable_fsdp.layout import RowParts
from portable_fsdp.models.build import build_model
from portable_fsdp.runtime.errors import ConfigError, DataError
from portable_fsdp.train.build import shard

TWO, FOUR, PACKED = {"sharding.context": 2}, {"sharding.context": 4}, {"data.packing": "documents"}
BESIDE_TENSOR = TWO | {"sharding.tensor": 2}


def case_of(model: str, settings: dict[str, Any], **more: Any) -> Case:
    return Case(model, settings={"model.architecture": EVEN.get(model, ARCHITECTURES[model])} | settings, **more)


MODELS = ("llama", "qwen3", "gemma2", "gpt2", "mixtral", "gpt_oss", "deepseek_v3")
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "context 2": (2, TWO),
    "context 4, packed": (4, FOUR | PACKED),
    "shard 2 x context 2": (4, TWO),
    "context 2 x tensor 2": (4, BESIDE_TENSOR),
}
FAMILIES_IN_SUITE = [
    ("native", "gpt_oss", "shard 2 x context 2"),
    ("xla", "llama", "context 4, packed"),
]


@pytest.mark.parametrize(
    ("group", "model", "mesh"),
    marked_meshes(MODELS, MESHES, FAMILIES_IN_SUITE),
)
def test_every_family_has_the_curve_of_a_plain_loop(group: Group, model: str, mesh: str, workers: GetWorkers) -> None:
    settings = MESHES[mesh][1]
    if model == "gpt2" and "sharding.tensor" in settings:
        settings = settings | {"sharding.plan": GPT2}
    case = case_of(model, settings, micro_batch=6 if settings.get("sharding.context") == 4 else None)
    answers = workers(group).run(jobs.train, case=case)
    assert_equal_curves(answers, case)
    # Fewer: a program of an earlier job, such as the update of the same shards.
    assert group.engine.compiles <= answers[0]["compilations"] <= answers[0]["expected_compilations"]


CURVES: dict[str, tuple[int, Case]] = {
    "windows, packed, recompute": (4, case_of("gemma2", FOUR | PACKED, checkpointing="full", micro_batch=6)),
    "packed, selective": (
        2,
        case_of("llama", TWO | PACKED | {"memory.save_ops": ["attention"]}, checkpointing="selective"),
    ),
    "shards, tensor": (8, case_of("llama", BESIDE_TENSOR)),
    "replicas": (8, case_of("llama", TWO | {"sharding.replicas": 2}, strategy="HYBRID_SHARD")),
    "adapters": (2, case_of("llama", TWO | {"model.lora": {"r": 4}}, optim={"name": "adamw", "lr": 1e-2})),
    "compiled": (2, case_of("llama", TWO | {"compile.enabled": True, "compile.backend": "aot_eager"})),
    "compiled, packed": (
        2,
        case_of(
            "gemma2", TWO | PACKED | {"compile.enabled": True, "compile.backend": "aot_eager"}, checkpointing="full"
        ),
    ),
    "modules inside layers": (
        2,
        case_of("llama", TWO | {"memory.classes": ["LlamaAttention"]}, checkpointing="full", strategy="SHARD_GRAD_OP"),
    ),
    "offloads": (
        2,
        case_of("llama", TWO | {"memory.offload": "activations", "memory.cpu_offload": True}, checkpointing="full"),
    ),
}


@pytest.mark.parametrize(
    ("group", "name"),
    [marked(Group("native", CURVES[name][0]), name, in_suite=False) for name in CURVES],
)
def test_the_curve_is_that_of_a_plain_loop(group: Group, name: str, workers: GetWorkers) -> None:
    case = CURVES[name][1]
    assert_equal_curves(workers(group).run(jobs.train, case=case), case)


@pytest.mark.proof
@pytest.mark.parametrize("model", ["llama", "gpt_oss"])
def test_bfloat16_and_float16_equal_float32_within_rounding(model: str, workers: GetWorkers) -> None:
    for compute in ("bfloat16", "float16"):
        case = case_of(model, TWO | {"precision.loss_scale": 1024} if compute == "float16" else TWO, compute=compute)
        assert_equal_curves(workers(Group("native", 2)).run(jobs.train, case=case), case, BF16_20_STEPS)


def test_a_layer_gathers_keys_and_values_once(workers: GetWorkers) -> None:
    """And reduces their gradients once; all else is FSDP's, over as many devices."""
    sent: list[dict[str, Any]] = []
    for size in (1, 2):
        case = Case(steps=2, micro_batch=6 * size, settings={"sharding.context": size})
        sent.append(workers(Group("native", 2)).run(jobs.collectives, case=case)[0]["backend"])
    layers, heads, width = 2, 2, 12
    more = (layers, layers * GLOBAL_BATCH * SEQ_LEN * 2 * heads * width * 4)
    for kind in ("all_gather", "reduce_scatter"):
        assert (sent[1][kind].calls - sent[0][kind].calls, sent[1][kind].bytes - sent[0][kind].bytes) == more


@pytest.mark.parametrize("group", [marked(Group("native", size), in_suite=False) for size in (2, 4)])
def test_evaluations_and_samples_are_those_of_whole_rows(group: Group, workers: GetWorkers) -> None:
    """On four devices a row's last token is on any of two."""
    answers = workers(group).run(evaluated, case=evaluated_case(TWO), rows=53, early=True)
    assert_evaluation_changes_nothing(answers)


@pytest.mark.proof
def test_a_checkpoint_opens_at_another_layout_bit_for_bit(workers: GetWorkers, tmp_path: Path) -> None:
    case = Case("llama", steps=8, settings=TWO)
    saved_by = workers(Group("native", 4)).run(jobs.write, case=case, folder=str(tmp_path), at=6)
    saved = assemble([answer["state"] for answer in saved_by])
    for settings in ({}, {"sharding.tensor": 2}):
        its = replace(case, settings=settings)
        answers = workers(Group("native", 4)).run(jobs.read, case=its, folders={"w": str(tmp_path)}, at=6)
        assert_equal_states(assemble([answer["w"]["state"] for answer in answers]), saved)
        losses = [metrics["loss"] for metrics in answers[0]["w"]["metrics"]]
        assert losses == pytest.approx([metrics["loss"] for metrics in saved_by[0]["metrics"]], rel=1e-5)


LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
MISTAKES: dict[str, tuple[str, dict[str, Any], str]] = {
    "recurrent": ("qwen3_next", {}, "Qwen3NextForCausalLM: model.layers.0: tokens depend on others by more"),
    "no attention": ("mamba2", {}, "Mamba2ForCausalLM: backbone.layers.0: tokens depend on others by more"),
    "own attention": (
        "falcon_alibi",
        {},
        "FalconForCausalLM: it has its own attention.\n  Set sharding.context=1",
    ),
    "longrope": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16},
        "Phi3ForCausalLM: model.layers.0: tokens depend on others by more",
    ),
    "length": ("llama", {}, "5 devices can't split rows of 24 tokens"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_cannot_be_split_is_refused_by_name(name: str) -> None:
    model, architecture, message = MISTAKES[name]
    config = case_of(model, {"model.architecture": ARCHITECTURES[model] | architecture}).config(1)
    devices = 5 if name == "length" else 2
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_model(config.model, config.precision, seed=7, seq_len=SEQ_LEN, vocabulary=VOCABULARY, context=devices)


def test_ones_own_module_is_refused() -> None:
    config = Case(settings=TWO).config(1)
    with pytest.raises(ConfigError, match=r"shard: Identity: sharding\.context needs a transformers model"):
        shard(torch.nn.Identity, config, cast(Any, None))


def test_rows_of_any_other_length_are_refused() -> None:
    parts = RowParts(1, 2, lambda tokens: tokens)
    assert parts.positions(8) == [2, 3, 4, 5]
    with pytest.raises(DataError, match="expected rows whose tokens are a multiple of 4, found 6"):
        split_tokens({"input_ids": torch.zeros(2, 6, dtype=torch.int64)}, parts)
