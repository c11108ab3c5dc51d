"""Plans of FSDP2's step on TPUs: a lower bound of its memory."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
from steps import LLAMA, gpus, plans, step

from portable_fsdp.plan.planner import make_plan
from portable_fsdp.plan.result import DeviceMemory
from portable_fsdp.plan.target import parse_target
from portable_fsdp.runtime.child import Worker
from portable_fsdp.runtime.errors import BackendError

DEVICES = 8
SETTINGS: dict[str, Any] = {"devices": DEVICES, "model": {**LLAMA, "num_hidden_layers": 2}}


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    with Worker() as worker:
        worker(plans, [], gpus(DEVICES))  # starts it
        yield worker


def test_a_tpu_holds_at_least_what_a_gpus_operations_hold(worker: Worker) -> None:
    configs = [step(**SETTINGS, precision__compute="bfloat16")]
    ((tpu, tpu_work),) = worker(plans, configs, parse_target("tpu7x:2x2x1"))
    ((gpu, gpu_work),) = worker(plans, configs, gpus(DEVICES))
    for part in ("weights", "gradients", "optimizer", "gathered weights", "activations"):
        assert gpu.parts[part] <= tpu.parts[part] <= 1.01 * gpu.parts[part], part  # tiles
    assert not tpu.parts.keys() & {"allocator", "communication buffers"}
    assert (tpu.verdict, gpu.verdict) == ("unknown", "fits")
    assert tpu_work.matmul_flops == gpu_work.matmul_flops
    assert tpu_work.collectives == gpu_work.collectives


def test_attention_holds_no_scores_and_the_optimizer_one_weight_at_a_time(worker: Worker) -> None:
    heads: dict[str, Any] = {**SETTINGS, "model": {**LLAMA, "num_hidden_layers": 1, "vocab_size": 256}}
    short, long, whole = [
        step(**heads, data__seq_len=512),  # float32, for which a GPU's kernel takes no grouped heads
        step(**heads, data__seq_len=1024),
        step(**SETTINGS, data__seq_len=8, sharding__strategy="NO_SHARD"),
    ]
    memory = [memory for memory, _ in worker(plans, [short, long, whole], parse_target("v6e-8"))]
    assert memory[1].parts["activations"] < 2.1 * memory[0].parts["activations"]
    assert memory[2].at == "optimizer"
    largest = 4 * 4096 * 512  # the embedding in float32
    # It and its two moments, kept in case that nothing counts in the step, and what the update computes.
    assert memory[2].parts["temporaries"] == pytest.approx(6 * largest, rel=0.1)


def test_a_lower_bound_over_the_limit_does_not_fit() -> None:
    assert DeviceMemory(parts={"weights": 2}, limit_bytes=1, is_least=True).verdict == "does not fit"
    assert DeviceMemory(parts={"weights": 1}, limit_bytes=2, is_least=True).verdict == "unknown"


@pytest.mark.parametrize(
    ("on", "backend", "settings", "message"),
    [
        ("2*v6e-4", "native", {}, "trains on one slice only"),
        ("v6e-8", "native", {"compile__enabled": True}, "Plan with compile.enabled=false"),
        ("v6e-8", "native", {"memory__cpu_offload": True}, "memory.cpu_offload=true"),
        ("v6e-8", "xla_fsdp1", {}, "expected --backend=xla or native, found xla_fsdp1"),
        ("h100:8", "xla", {}, "expected --backend=native, found xla"),
    ],
)
def test_what_has_no_plan_is_refused(on: str, backend: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BackendError) as raised:
        make_plan(step(devices=DEVICES, **settings), parse_target(on), cast(Worker, None), backend=backend)
    assert message in str(raised.value)
