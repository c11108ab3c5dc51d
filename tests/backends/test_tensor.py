"""Tensor parallelism: the plan of a model, its parts, and the native engine's forwards."""

import logging
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args
from unittest.mock import patch

import jobs
import pytest
import torch
import torch.distributed as dist
from cases import ARCHITECTURES, GLOBAL_BATCH, SEQ_LEN, VOCABULARY, Case
from test_curves import assert_equal_curves
from test_engine_checkpoints import assert_travels
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from workers import GetWorkers, Group, marked

from portable_fsdp.backends.native.groups import Group as TensorGroup
from portable_fsdp.backends.native.tensor import run_parts, split_model, sum_gradients
from portable_fsdp.backends.state import parameter_slots, put_parameter
from portable_fsdp.config.schema import TensorWord
from portable_fsdp.models.build import build_model, make_model
from portable_fsdp.models.parallel import tensor_plan
from portable_fsdp.models.trials import require_plan
from portable_fsdp.models.weights import BuiltModel
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.tensor_plan import WORDS

GPT2 = {"*.attn.c_attn": "packed_colwise", "*.c_proj": "rowwise", "*.mlp.c_fc": "colwise"}


def built(model: str, **settings: Any) -> tuple[BuiltModel, Any]:
    config = Case(model=model, settings=settings).config(1)
    made = build_model(config.model, config.precision, seed=7, seq_len=SEQ_LEN, vocabulary=VOCABULARY)
    return made, config


def values_of(made: BuiltModel) -> dict[str, Tensor]:
    """Not in threads: a fill draws from torch's one random state."""
    values: dict[str, Tensor] = {}
    for fqn, weight in made.model.named_parameters():
        value = made.fill(fqn, tuple(slice(0, size) for size in weight.shape))
        values[fqn] = value + 0.02 * torch.randn(value.shape, generator=torch.Generator().manual_seed(len(values)))
    return values  # of biases and adapters too, which are 0 at first


def materialise(model: nn.Module, values: dict[str, Tensor]) -> nn.Module:
    for fqn, slots in parameter_slots(model).items():
        weight = model.get_parameter(fqn)
        assert values[fqn].shape == weight.shape, fqn
        put_parameter(slots, values[fqn].clone(), weight.requires_grad)
    return model


def gradients_of(model: nn.Module, ids: Tensor) -> tuple[float, dict[str, Tensor]]:
    labels = ids.roll(-1, 1).clone()
    labels[0, -3:] = -100
    total, count = model(ids, labels, torch.arange(SEQ_LEN).expand(len(ids), -1))
    (total / count).backward()
    return float((total / count).detach()), {fqn: w.grad for fqn, w in model.named_parameters() if w.grad is not None}


def compare_with_the_whole(model: str, settings: dict[str, Any], rows: bool) -> None:
    """On each process: the loss and the gradients of its parts are those of the whole model."""
    group = TensorGroup(cast(dist.ProcessGroup, dist.group.WORLD))
    ids = torch.randint(0, VOCABULARY, (2, SEQ_LEN), generator=torch.Generator().manual_seed(3))
    whole, _ = built(model, **settings)
    values = values_of(whole)
    loss, expected = gradients_of(materialise(whole.model, values), ids)
    made, config = built(model, **settings, **settings_of(group.count, rows))
    plan = tensor_plan(made.model, config)
    split_model(made.model, plan, group)
    parts = materialise(made.model, {fqn: plan.part_of(fqn, v, group.index) for fqn, v in values.items()})
    own_loss, gradients = gradients_of(parts, ids)
    sum_gradients(made.model, plan, group)
    assert own_loss == pytest.approx(loss, rel=2e-6)
    assert gradients.keys() == expected.keys()
    for fqn, gradient in gradients.items():
        atol = 2e-5 * float(expected[fqn].abs().max())
        of_all = plan.part_of(fqn, expected[fqn], group.index)
        torch.testing.assert_close(gradient, of_all, rtol=1e-4, atol=atol, msg=lambda m, fqn=fqn: f"{fqn}: {m}")


FEW_HEADS = ARCHITECTURES["llama"] | {
    "num_attention_heads": 4,
    "intermediate_size": 148,
}  # of 4 processes, two have the same key-value head


@pytest.mark.parametrize(
    "rows", [pytest.param(False, id="whole rows", marks=pytest.mark.proof), pytest.param(True, id="split rows")]
)
@pytest.mark.parametrize(
    ("model", "size", "settings"),
    [
        ("llama", 4, {"model.architecture": FEW_HEADS}),
        ("llama_tied", 3, {}),
        *((model, 2, {}) for model in ("llama", "gemma2", "phi3", "qwen3_moe", "deepseek_v3")),
        *(
            pytest.param(model, 2, {}, marks=pytest.mark.proof)
            for model in ("qwen3", "gpt_neox", "mixtral", "olmo2", "starcoder2", "granite", "gemma3_text")
        ),
        ("gpt2", 2, {"sharding.plan": GPT2}),
        ("llama", 2, {"model.lora": {"r": 4}}),
    ],
    ids=lambda value: str(value) if isinstance(value, str | int) else "",
)
def test_losses_and_gradients_are_those_of_the_whole_model(
    model: str, size: int, settings: dict[str, Any], rows: bool, workers: GetWorkers
) -> None:
    workers(Group("native", size)).run(compare_with_the_whole, model=model, settings=settings, rows=rows)


TWO = {"sharding.tensor": 2}
TIED = {"model.architecture": ARCHITECTURES["llama_tied"] | {"num_key_value_heads": 2}}
CURVES = {
    "llama, split rows": Case("llama", settings=TWO),
    "tied, whole rows": Case("llama_tied", settings=TWO | TIED | {"sharding.sequence_parallel": False}),
    "replicas": Case("qwen3", strategy="NO_SHARD", settings=TWO),
    "adapters": Case("llama", settings=TWO | {"model.lora": {"r": 4}}, optim={"name": "adamw", "lr": 1e-2}),
    "grad_op, recompute": Case("gemma2", strategy="SHARD_GRAD_OP", checkpointing="full", settings=TWO),
    "packed, fused": Case("gpt2", settings=TWO | {"sharding.plan": GPT2, "data.packing": "documents"}),
    "phi3": Case("phi3", settings=TWO),
    "experts": Case("mixtral", settings=TWO),
}


OF_SUITE = {"native": ["llama, split rows"], "xla": []}  # on xla a resume has the curve of native, below


@pytest.mark.parametrize(
    ("group", "name"),
    [marked(Group(e, 4), name, in_suite=name in OF_SUITE[e]) for e in ("native", "xla") for name in CURVES],
)
def test_the_curve_is_that_of_a_plain_loop(group: Group, name: str, workers: GetWorkers) -> None:
    assert_equal_curves(workers(group).run(jobs.train, case=CURVES[name]), CURVES[name])


FAMILIES = ["llama", "llama_tied", "qwen3", "gemma2", "gpt2", "phi3", "gpt_neox", "qwen3_moe", "mixtral", "deepseek_v3"]
MESHES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "tensor 6": (6, "FULL_SHARD", {"sharding.tensor": 6}),
    "shard 3 x tensor 2": (6, "FULL_SHARD", TWO),
    "replicate 2 x tensor 2": (4, "NO_SHARD", TWO),
    "replicate 2 x shard 2 x tensor 2": (8, "HYBRID_SHARD", TWO | {"sharding.replicas": 2}),
}
NOT_BY_SIX = ["phi3", "qwen3_moe", "mixtral", "deepseek_v3"]  # packed heads, widths of experts: refused by name


@pytest.mark.proof
@pytest.mark.parametrize("engine", ["native", pytest.param("xla", marks=pytest.mark.xla)])
@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        (model, mesh)
        for model in FAMILIES
        for mesh in MESHES
        if (model, mesh) not in [(m, "tensor 6") for m in NOT_BY_SIX]
    ],
)
def test_every_family_has_the_curve_of_a_plain_loop(engine: str, mesh: str, model: str, workers: GetWorkers) -> None:
    """Half of the cases with sequence parallelism, the other half without."""
    devices, strategy, sizes = MESHES[mesh]
    rows = (FAMILIES.index(model) + list(MESHES).index(mesh)) % 2 == 0
    own: dict[str, dict[str, Any]] = {"gpt2": {"sharding.plan": GPT2}, "llama_tied": TIED}
    case = Case(model, strategy=strategy, settings=sizes | own.get(model, {}) | {"sharding.sequence_parallel": rows})
    assert_equal_curves(workers(Group(engine, devices)).run(jobs.train, case=case), case)


def settings_of(size: int, rows: bool | str = "auto") -> dict[str, Any]:
    return {"sharding.tensor": size, **({"sharding.sequence_parallel": rows} if size > 1 else {})}


NATIVE, XLA = Group("native", 4), Group("xla", 4)
LAYOUTS = {
    "native, shard 4": (NATIVE, settings_of(1)),
    "native, shard 2 x tensor 2": (NATIVE, settings_of(2)),
    "xla, shard 4": (XLA, settings_of(1)),
    "xla, shard 2 x tensor 2": (XLA, settings_of(2, rows=False)),
}
IN_SUITE = [("xla, shard 2 x tensor 2", "native, shard 2 x tensor 2")]
PAIRS = [
    pytest.param(writer, reader, marks=[] if (writer, reader) in IN_SUITE else [pytest.mark.proof])
    for writer in LAYOUTS
    for reader in LAYOUTS
]


@pytest.mark.xla
@pytest.mark.parametrize("model", ["phi3", pytest.param("llama", marks=pytest.mark.proof)])
@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_a_checkpoint_opens_at_any_layout_bit_for_bit(
    writer: str, reader: str, model: str, workers: GetWorkers, tmp_path: Path
) -> None:
    """Phi-3's fused weights are pieces in several places."""
    (group, settings), (other, its) = LAYOUTS[writer], LAYOUTS[reader]
    case = Case(model, steps=8, settings=settings, micro_batch=3)
    assert_travels(workers, group, case, [(other, replace(case, settings=its))], tmp_path)


P = "sharding.plan"
GATHERED = {"*.gate_proj": "colwise_gather_output", "*.up_proj": "colwise_gather_output"}
MISTAKES: dict[str, tuple[str, dict[str, Any], str]] = {
    "no plan": ("opt", {}, "OPTForCausalLM has no tensor-parallel plan"),
    "experts": ("gpt_oss", {P: {"*.mlp.experts": "moe_tp_experts"}}, "experts of this form"),
    "pattern": ("gpt2", {P: {"*.c_atn": "packed_colwise"}}, "matches nothing"),
    "heads": ("llama_tied", {}, "2 devices can't share 6 attention heads and 3 key-value heads"),
    "four": ("llama_tied", {"sharding.tensor": 4}, "Set sharding.tensor=1 or 3 or 6."),  # what works with these heads
    "sizes": ("llama", {"model.architecture": ARCHITECTURES["llama"] | {"intermediate_size": 151}}, "divide its 151"),
    "head": ("llama", {P: {"lm_head": "colwise_gather_output"}}, "split over the vocabulary anyway"),
    "embedding": ("llama", {P: {"*embed_tokens": "rowwise"}}, "split over the vocabulary anyway"),
    "packed": ("gpt2", {P: GPT2 | {"*.attn.c_attn": "colwise"}}, "packs several matrices.\n  Use packed_colwise"),
    "no rowwise": ("llama", {P: {"*.down_proj": "replicated"}}, "no layer that is split by its inputs after it"),
    "no colwise": ("llama", {P: {"*.[gu]*_proj": "replicated"}}, "no layer that is split by its outputs before it"),
    "gathered alone": ("llama", {P: GATHERED | {"*.down_proj": "replicated"}}, 'set "*.mlp.*": replicated'),
    "gathered, rowwise": ("llama", {P: GATHERED}, "colwise_gather_output, rowwise don't fit together"),
    "whole inside": ("llama", {P: {"*.up_proj": "replicated"}}, "mlp.up_proj: whole inside model.layers.0.mlp"),
    "norm of heads": ("qwen3", {P: {"*.q_norm": "replicated"}}, "q_norm: whole inside model.layers.0.self_attn"),
    "norm of layers": (
        "llama",
        {P: {"*layernorm": "replicated_with_grad_allreduce"}},
        "not inside attention or an MLP",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_cannot_be_split_is_refused_by_name(name: str) -> None:
    model, settings, message = MISTAKES[name]
    made, config = built(model, **{"sharding.tensor": 2, **settings})
    with pytest.raises(ConfigError, match=re.escape(message)):
        tensor_plan(made.model, config)


CODEGEN: dict[str, Any] = {
    "model_type": "codegen",
    "vocab_size": VOCABULARY,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
} | {
    "n_inner": 64,
    "n_positions": SEQ_LEN,
    "rotary_dim": 8,
}
NEOX_WORDS = {"*.attention.dense": "rowwise", "*.dense_h_to_4h": "colwise", "*.dense_4h_to_h": "rowwise"}
BY_HEADS: dict[str, tuple[dict[str, Any], str, dict[str, str]]] = {  # q, k and v alternate
    "gpt_neox": (ARCHITECTURES["gpt_neox"], "*.query_key_value", NEOX_WORDS),
    "codegen": (CODEGEN, "*.qkv_proj", {"*.out_proj": "rowwise", "*.fc_in": "colwise", "*.fc_out": "rowwise"}),
}


def try_plan(architecture: dict[str, Any], words: dict[str, str]) -> None:
    """Raises ConfigError for a plan by which a small copy of the model can't run in parts, or computes otherwise."""
    made, config = built("llama", **{"sharding.tensor": 2, "model.architecture": architecture, P: words})
    require_plan(made.model, config, tensor_plan(made.model, config), make_model, run_parts)


@pytest.mark.parametrize("name", BY_HEADS)
def test_words_that_fit_by_sizes_alone_are_refused(name: str) -> None:
    architecture, weight, words = BY_HEADS[name]
    with pytest.raises(ConfigError, match="where they alternate head by head, try colwise"):
        try_plan(architecture, words | {weight: "packed_colwise"})
    try_plan(architecture, words | {weight: "colwise"})


@pytest.mark.parametrize("layer", [0, 5])
def test_words_of_one_layer_are_tried(layer: int) -> None:
    """The trial's copy has four layers."""
    six = ARCHITECTURES["gpt_neox"] | {"num_hidden_layers": 6}
    words = NEOX_WORDS | {"*.query_key_value": "colwise"}
    try_plan(six, {f"gpt_neox.layers.{layer}.*": "replicated"} | words)
    with pytest.raises(ConfigError, match="computes something else"):
        try_plan(six, {f"gpt_neox.layers.{layer}.attention.query_key_value": "packed_colwise"} | words)


def test_what_a_model_cannot_run_in_parts_is_refused() -> None:
    """Bloom makes a bias of all heads outside attention."""
    bloom = {"model_type": "bloom", "vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    with pytest.raises(ConfigError, match="it fails \\(RuntimeError"):
        try_plan(bloom, {"*.query_key_value": "colwise", "*.self_attention.dense": "rowwise"})


def test_the_words_of_transformers_are_known() -> None:
    """A word that a newer transformers adds must be looked at: it would be refused by name."""
    words: set[str] = set()
    for config in CONFIG_MAPPING.values():
        words |= set((getattr(config, "base_model_tp_plan", None) or {}).values())
    assert set(WORDS) == set(get_args(TensorWord))  # those that sharding.plan takes
    assert words - set(WORDS) == {
        *("embedding_rowwise", "embedding_colwise", "mla_kv_a_proj", "local_params", "packed_rowwise", "replicate"),
        *("all_reduce", "moe_identity_expert"),
    }


def collectives_of_a_layer(workers: GetWorkers, rows: bool, **more: Any) -> dict[str, tuple[int, int]]:
    """Kind -> calls and bytes of full tensors of one layer in a step: what three layers have more than two."""
    found: list[dict[str, Any]] = []
    for layers in (2, 3):
        architecture = ARCHITECTURES["llama"] | {"num_hidden_layers": layers}
        case = Case("llama", steps=2, settings={"model.architecture": architecture, **settings_of(2, rows), **more})
        found.append(workers(Group("gloo", 2)).run(jobs.collectives, case=case)[0]["backend"])
    two, three = found
    return {
        kind: (three[kind].calls - two[kind].calls, three[kind].bytes - two[kind].bytes)
        for kind in three
        if three[kind].calls != two[kind].calls
    }


def test_collectives_are_the_textbooks(workers: GetWorkers) -> None:
    """Megatron-LM's: 4 all-reduces of the hidden states a layer, or 4 gathers and 4 reduce-scatters."""
    hidden = GLOBAL_BATCH // 2 * SEQ_LEN * ARCHITECTURES["llama"]["hidden_size"] * 4  # a micro batch of half the rows
    times = 2  # micro batches
    assert collectives_of_a_layer(workers, rows=False) == {"all_reduce": (4 * times, 4 * times * hidden)}
    both = (4 * times, 4 * times * hidden)
    assert collectives_of_a_layer(workers, rows=True) == {"all_gather": both, "reduce_scatter": both}


def warnings_of_opening(case: Case, devices_per_host: int) -> list[str]:
    launched = {"LOCAL_WORLD_SIZE": devices_per_host, "LOCAL_RANK": int(os.environ["RANK"]) % devices_per_host}
    environment = patch.dict(os.environ, {name: str(value) for name, value in launched.items()})
    log = logging.getLogger("portable_fsdp")
    with environment, patch.object(log, "warning") as warning, jobs.open_case(case)[0]:
        return [call.args[0] % call.args[1:] for call in warning.call_args_list]


def test_an_axis_across_hosts_is_said_once(workers: GetWorkers) -> None:
    case = Case(settings=settings_of(4))
    inside, across = (workers(Group("gloo", 4)).run(warnings_of_opening, case=case, devices_per_host=n) for n in (4, 2))
    assert inside == [[]] * 4
    assert across[1:] == [[]] * 3
    assert across[0][0].startswith("sharding.tensor: its 4 devices lie on several hosts.")
    assert across[0][0].endswith("set sharding.tensor=2")
