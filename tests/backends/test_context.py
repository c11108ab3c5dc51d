"""Context parallelism: devices split the tokens of each row, and attention gathers keys and values."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jobs
import pytest
import torch
from cases import ARCHITECTURES, GLOBAL_BATCH, SEQ_LEN, VOCABULARY, Case
from test_contract import assert_evaluation_changes_nothing, evaluated, evaluated_case
from test_curves import BF16_20_STEPS, assert_equal_curves
from test_engine_checkpoints import assert_travels
from test_experts import COMPILED, EVEN
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


CURVES: dict[str, tuple[str, int, Case]] = {
    "windows, packed, recompute": ("native", 4, case_of("gemma2", FOUR | PACKED, checkpointing="full", micro_batch=6)),
    "packed, selective": (
        "native",
        2,
        case_of("llama", TWO | PACKED | {"memory.save_ops": ["attention"]}, checkpointing="selective"),
    ),
    "shards, tensor": ("native", 8, case_of("llama", BESIDE_TENSOR)),
    "replicas": ("native", 8, case_of("llama", TWO | {"sharding.replicas": 2}, strategy="HYBRID_SHARD")),
    "adapters": ("native", 2, case_of("llama", TWO | {"model.lora": {"r": 4}}, optim={"name": "adamw", "lr": 1e-2})),
    "compiled": ("native", 2, case_of("llama", TWO | COMPILED)),
    "compiled, packed": ("native", 2, case_of("gemma2", TWO | PACKED | COMPILED, checkpointing="full")),
    "modules inside layers": (
        "native",
        2,
        case_of("llama", TWO | {"memory.classes": ["LlamaAttention"]}, checkpointing="full", strategy="SHARD_GRAD_OP"),
    ),
    "offloads": (
        "native",
        2,
        case_of("llama", TWO | {"memory.offload": "activations", "memory.cpu_offload": True}, checkpointing="full"),
    ),
    "recompute, grad_op": ("xla", 4, case_of("gemma2", TWO, strategy="SHARD_GRAD_OP", checkpointing="full")),
    "scan": ("xla", 4, case_of("llama", TWO | {"compile.scan_layers": True})),
    **{
        f"{model} in {compute}": ("native", 2, case_of(model, TWO | scale, compute=compute))
        for model in ("llama", "gpt_oss")
        for compute, scale in (("bfloat16", {}), ("float16", {"precision.loss_scale": 1024}))
    },
}


@pytest.mark.parametrize(
    ("group", "name"),
    [marked(Group(engine, devices), name, in_suite=False) for name, (engine, devices, _) in CURVES.items()],
)
def test_the_curve_is_that_of_a_plain_loop(group: Group, name: str, workers: GetWorkers) -> None:
    case = CURVES[name][2]
    answers = workers(group.for_case(case)).run(jobs.train, case=case)
    assert_equal_curves(answers, case, None if case.compute == "float32" else BF16_20_STEPS)
    assert group.engine.compiles <= answers[0]["compilations"] <= answers[0]["expected_compilations"]


def test_a_layer_gathers_keys_and_values_once(workers: GetWorkers) -> None:
    """And reduces their gradients once; all else is FSDP's, over as many devices."""
    sent: list[dict[str, Any]] = []
    for size in (1, 2):
        case = Case(steps=2, micro_batch=6 * size, settings={"sharding.context": size})
        sent.append(workers(Group("gloo", 2)).run(jobs.collectives, case=case)[0]["backend"])
    layers, heads, width = 2, 2, 12
    more = (layers, layers * GLOBAL_BATCH * SEQ_LEN * 2 * heads * width * 4)
    for kind in ("all_gather", "reduce_scatter"):
        assert (sent[1][kind].calls - sent[0][kind].calls, sent[1][kind].bytes - sent[0][kind].bytes) == more


@pytest.mark.parametrize("group", [marked(Group("gloo", size), in_suite=False) for size in (2, 4)])
def test_evaluations_and_samples_are_those_of_whole_rows(group: Group, workers: GetWorkers) -> None:
    """On four devices a row's last token is on any of two."""
    answers = workers(group).run(evaluated, case=evaluated_case(TWO), rows=53, early=True)
    assert_evaluation_changes_nothing(answers)


@pytest.mark.parametrize(
    ("group", "writes", "reads"),
    [
        marked(Group("native", 4), TWO, [{}, {"sharding.tensor": 2}], in_suite=False),
        *(marked(Group("xla", 4), *layouts, in_suite=False) for layouts in ((TWO, [{}]), ({}, [TWO]), (FOUR, [TWO]))),
    ],
)
def test_a_checkpoint_opens_at_another_layout_bit_for_bit(
    group: Group, writes: dict[str, int], reads: list[dict[str, int]], workers: GetWorkers, tmp_path: Path
) -> None:
    case = Case(steps=8, settings=writes, micro_batch=3)
    assert_travels(workers, group, case, [(group, replace(case, settings=its)) for its in reads], tmp_path)


def placed_by_one_of_several(case: Case) -> None:
    """A process of several places the same tensor as one alone, if it has all devices."""
    backend, _ = jobs.open_case(case)
    with backend:
        batch = {"input_ids": torch.arange(GLOBAL_BATCH * SEQ_LEN).view(GLOBAL_BATCH, SEQ_LEN)}
        batch["is_row"] = torch.eye(GLOBAL_BATCH, dtype=torch.int64)
        alone = backend.place(batch)
        cast(Any, backend)._tensors._processes = 2
        for name, tensor in backend.place(batch).items():
            get = cast(Any, backend)._bridge._get_xla_sharding_spec
            assert get(tensor) == get(alone[name])
            assert torch.equal(tensor.cpu(), batch[name])


@pytest.mark.xla
@pytest.mark.proof
def test_a_process_of_several_places_its_rows(workers: GetWorkers) -> None:
    workers(Group("xla", 4)).run(placed_by_one_of_several, case=Case(settings=TWO))


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
