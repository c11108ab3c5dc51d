"""Kinds of adapters: each engine has the curve of peft in a plain loop on one device."""

from dataclasses import replace
from typing import Any

import jobs
import pytest
from cases import ARCHITECTURES, Case
from test_curves import assert_equal_curves
from workers import GetWorkers, Group, marked

ADAMW = {"name": "adamw", "lr": 1e-2, "weight_decay": 0.1}


NATIVE, XLA = Group("native", 2), Group("xla", 2)
TENSOR = {"sharding.tensor": 2, "model.architecture": ARCHITECTURES["llama_tied"] | {"num_key_value_heads": 2}}


def case_of(
    model: str = "llama",
    optim: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
    checkpointing: str = "none",
    **lora: Any,
) -> Case:
    settings = {**(more or {}), "model.lora": {"r": 4, "alpha": 8.0, **lora}}
    return Case(model, 20, ADAMW | (optim or {}), checkpointing=checkpointing, settings=settings)


PATTERNS: dict[str, Any] = {
    "rank_pattern": {r"layers\.1\..*": 6, "q_proj": 2},
    "alpha_pattern": {"(up|down)_proj": 24.0},
}
CASES = {
    "all": case_of(dora=True, rslora=True, **PATTERNS, train_whole=["model.norm", "embed_tokens"]),
    "dora": case_of(dora=True),
    "rslora": case_of(rslora=True, targets=r"model.layers.[\d]+.(mlp|self_attn).\w+_proj", **PATTERNS),
    "tied": case_of("llama_tied", train_whole=["lm_head"]),
    "whole": case_of(train_whole=["embed_tokens", "lm_head"]),
    "experts": case_of("qwen3_moe", targets=["q_proj", "experts.gate_up_proj", "experts.down_proj"]),
    "transposed experts": case_of("gpt_oss", targets=["experts.gate_up_proj", "experts.down_proj"], rslora=True),
    # LoRA+, arXiv 2402.12354: B learns faster than A.
    "lora_plus": case_of(optim={"lr": 1e-3, "groups": [{"match": "*.lora_B.*", "lr": 1.6e-2}]}),
}
EXPERTS = ["q_proj", "experts.gate_up_proj", "experts.down_proj"]
ALL_LAYERS = {"compile.enabled": True, "compile.backend": "aot_eager"}
OPTIONS: dict[str, tuple[Group, Case]] = {
    "dora, compiled": (NATIVE, case_of(more=ALL_LAYERS, checkpointing="full", dora=True)),
    "dora, scanned": (XLA, case_of(more={"compile.scan_layers": True}, checkpointing="full", dora=True)),
    "dora, flat shards": (Group("xla_fsdp1", 2), case_of(dora=True)),
    "experts, compiled": (NATIVE, case_of("qwen3_moe", more=ALL_LAYERS, checkpointing="full", targets=EXPERTS)),
    "dora, over bfloat16": (NATIVE, case_of(more={"precision.frozen": "bfloat16"}, dora=True)),
    "experts, over bfloat16": (XLA, case_of("qwen3_moe", more={"precision.frozen": "bfloat16"}, targets=EXPERTS)),
    "experts, scanned": (XLA, case_of("qwen3_moe", more={"compile.scan_layers": True}, targets=EXPERTS)),
    "experts, flat shards": (Group("xla_fsdp1", 2), case_of("qwen3_moe", targets=EXPERTS)),
    "whole, split over the vocabulary": (NATIVE, case_of(more={"sharding.tensor": 2}, train_whole=["embed_tokens"])),
    "tied, split over the vocabulary": (XLA, case_of("llama_tied", more=TENSOR, train_whole=["lm_head", "model.norm"])),
}


GROUPS = [Group("native", 1), Group("native", 2), Group("native", 3), Group("xla", 2), Group("xla", 3)]
IN_SUITE = replace(CASES["all"], steps=8)  # on xla test_quantised_base.py trains adapters in the suite
EACH = [
    marked(Group("native", 3), "all", IN_SUITE, in_suite=True),
    *(
        marked(group, name, case, in_suite=False)
        for group in GROUPS
        for name, case in CASES.items()
        if (str(group), name) != ("native-3", "all")
    ),
    *(marked(group, name, case, in_suite=False) for name, (group, case) in OPTIONS.items()),
]


@pytest.mark.parametrize(("group", "name", "case"), EACH)
def test_the_curve_is_pefts(group: Group, name: str, case: Case, workers: GetWorkers) -> None:
    assert_equal_curves(workers(group.for_case(case)).run(jobs.train, case=case), case)
