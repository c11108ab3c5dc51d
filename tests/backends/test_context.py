"""Context parallelism: devices split the tokens of each row, and attention gathers keys and values."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs
import pytest
from cases import ARCHITECTURES, SEQ_LEN, VOCABULARY, Case, assemble, assert_equal_states
from test_curves import assert_equal_curves
from test_experts import EVEN
from workers import GetWorkers, Group, marked

from portable_fsdp.models.build import build_model
from portable_fsdp.runtime.errors import ConfigError

TWO, FOUR, PACKED = {"sharding.context": 2}, {"sharding.context": 4}, {"data.packing": "documents"}
BESIDE_TENSOR = TWO | {"sharding.tensor": 2}
GPT2 = {"sharding.plan": {"*.attn.c_attn": "packed_colwise", "*.c_proj": "rowwise", "*.mlp.c_fc": "colwise"}}


def case_of(model: str, settings: dict[str, Any], **more: Any) -> Case:
    return Case(model, settings={"model.architecture": EVEN.get(model, ARCHITECTURES[model])} | settings, **more)


CURVES: dict[str, tuple[int, Case]] = {
    "llama": (2, case_of("llama", TWO, micro_batch=3)),
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
        case_of("gemma2", TWO | PACKED | {"compile.enabled": True, "compile.backend": "aot_eager"}, checkpointing="full"),
    ),
    "modules inside layers": (
        2,
        case_of("llama", TWO | {"memory.classes": ["LlamaAttention"]}, checkpointing="full", strategy="SHARD_GRAD_OP"),
    ),
    "expert": (4, case_of("qwen3_moe", TWO | {"sharding.expert": 2})),
}
for _model in ("llama", "qwen3", "gemma2", "gpt2", "mixtral", "gpt_oss", "deepseek_v3"):
    CURVES[f"{_model}, context 4, packed"] = (4, case_of(_model, FOUR | PACKED, micro_batch=6))
    CURVES[f"{_model}, shard 2 x context 2"] = (4, case_of(_model, TWO))
    if _model != "gpt_oss":  # its experts can't be split over `tensor`
        plan = GPT2 if _model == "gpt2" else {}
        CURVES[f"{_model}, context 2 x tensor 2"] = (4, case_of(_model, BESIDE_TENSOR | plan))
IN_SUITE = ("windows, packed, recompute", "gpt_oss, shard 2 x context 2", "llama, context 2 x tensor 2")


@pytest.mark.parametrize(
    ("group", "name"), [marked(Group("native", CURVES[name][0]), name, in_suite=name in IN_SUITE) for name in CURVES]
)
def test_the_curve_is_that_of_a_plain_loop(group: Group, name: str, workers: GetWorkers) -> None:
    case = CURVES[name][1]
    assert_equal_curves(workers(group).run(jobs.train, case=case), case)
