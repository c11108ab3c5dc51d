"""Plans that trace few of the layers that are equal, against plans that trace all."""

import json
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from steps import LLAMA, gpus, step

from portable_fsdp.config.describe import with_value
from portable_fsdp.config.schema import Config, Lora
from portable_fsdp.plan import fake_step
from portable_fsdp.plan.fake_step import plan_memory
from portable_fsdp.plan.planner import make_plan
from portable_fsdp.plan.result import EnginePlan
from portable_fsdp.runtime.child import Worker

DEVICES = 8
DEEP: dict[str, Any] = {**LLAMA, "num_hidden_layers": 8}
EIGHT: dict[str, Any] = {"devices": DEVICES, "model": DEEP, "precision__compute": "bfloat16"}
TIED: dict[str, Any] = EIGHT | {"model": {**DEEP, "tie_word_embeddings": True}}
GEMMA: dict[str, Any] = {**DEEP, "model_type": "gemma2", "head_dim": 64, "sliding_window": 128}
ALTERNATING: dict[str, Any] = EIGHT | {"model": GEMMA}
DEEPSEEK: dict[str, Any] = {
    **{**DEEP, "model_type": "deepseek_v3", "num_key_value_heads": 8, "first_k_dense_replace": 1, "n_group": 1},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "topk_group": 1, "moe_intermediate_size": 256},
    **{"n_shared_experts": 1, "kv_lora_rank": 64, "q_lora_rank": 128, "qk_rope_head_dim": 32},
    **{"qk_nope_head_dim": 64, "v_head_dim": 64},
}
DENSE_FIRST: dict[str, Any] = EIGHT | {"model": DEEPSEEK}
FULL: dict[str, Any] = {"memory__gradient_checkpointing": "full"}
SIX = EIGHT | {"model": {**LLAMA, "num_hidden_layers": 6}}
SOME = {"recomputed, three micro batches": (4, step(**SIX, **FULL, accumulation=3))}
MORE = {
    "plain": (4, step(**EIGHT)),
    "split over tensor": (6, step(**EIGHT, **FULL, sharding__tensor=2)),
    "whole rows": (6, step(**EIGHT, sharding__tensor=2, sharding__sequence_parallel=False)),
    "every second": (6, step(**EIGHT, memory__gradient_checkpointing="selective", memory__every=2)),
    "zero2": (4, step(**EIGHT, sharding__strategy="SHARD_GRAD_OP")),
    "hybrid": (4, step(**EIGHT, **FULL, sharding__strategy="HYBRID_SHARD")),
    "tied, offloaded": (4, step(**TIED, memory__cpu_offload=True)),
    "alternating": (6, step(**ALTERNATING)),
    "dense first": (8, step(**DENSE_FIRST)),  # all layers: the counts of experts are made outside of them
    "frozen first": (6, step(**EIGHT, model__freeze=("model.layers.0", "model.layers.1"))),
    "adapters over 4 bits": (4, step(**EIGHT, **FULL, model__lora=Lora(r=4, dropout=0.1), precision__frozen="nf4")),
    "compiled": (4, step(**EIGHT, **FULL, compile__enabled=True)),
    "buckets of gradients": (8, step(**EIGHT, sharding__strategy="NO_SHARD")),  # they end within layers
}


def _both(config: Config) -> tuple[EnginePlan, EnginePlan, list[int]]:
    """For a child: the plan, that of all layers, and the number of layers that each trace had."""
    torch.set_num_threads(1)
    record, counts = fake_step.record_layers, list[int]()

    def counted(*args: Any, whole: bool) -> Any:
        recorded = record(*args, whole=whole)
        counts.append(recorded.pattern.kept if recorded.pattern else DEEP["num_hidden_layers"])
        return recorded

    target = gpus(DEVICES, hosts=2)
    with patch.object(fake_step, "record_layers", counted):
        plan = plan_memory(config, target)
    with patch.object(fake_step, "find_pattern", lambda *_: None):
        return plan, plan_memory(config, target), counts


@pytest.mark.parametrize(
    "cases",
    [pytest.param(SOME, id="some"), pytest.param(MORE, id="all", marks=[pytest.mark.proof, pytest.mark.timeout(900)])],
)
def test_a_plan_of_few_layers_is_that_of_all(cases: dict[str, tuple[int, Config]], worker: Worker) -> None:
    """Every part of the peak, the allocator's share, sent bytes, products and times, to the byte."""
    for name, (layers, config) in cases.items():
        plan, whole, counts = worker(_both, config)
        assert plan == whole, name
        assert counts[-1] == layers, name


def test_an_equal_plan_is_taken_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: Worker) -> None:
    """The same config and target; a damaged entry is planned anew."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls: list[str] = []

    def counted(function: str, *arguments: Any) -> Any:
        calls.append(function)
        return worker(function, *arguments)

    def planned(config: Config) -> dict[str, Any]:
        return make_plan(config, gpus(DEVICES), cast(Worker, counted)).model_dump(exclude={"planned_in_s"})

    plain = step(DEVICES, model={**LLAMA, "num_hidden_layers": 1})
    first = planned(plain)
    assert (planned(plain), len(calls)) == (first, 1)
    assert planned(with_value(plain, "train.global_batch", 2 * plain.train.global_batch)) != first
    assert len(calls) == 2
    planned(with_value(plain, "optim.lr", 1e-5))
    planned(with_value(plain, "run.dir", "elsewhere"))
    assert len(calls) == 3  # a plan doesn't depend on the folder
    file = tmp_path / "config.json"  # a file may change
    file.write_text(json.dumps(plain.model.architecture))
    of_file = with_value(plain, "model.architecture", str(file))
    assert [planned(of_file), planned(of_file)] == [first, first]
    assert len(calls) == 5
    for entry in tmp_path.rglob("*.gz"):
        entry.write_bytes(entry.read_bytes()[:100])
    assert (planned(plain), len(calls)) == (first, 6)
