"""Plans of the native engine, against real runs on CPU, against formulas, and against edits of what is planned."""

import os
import resource
from typing import Any, cast
from unittest.mock import patch

import pytest
from live_storages import measure
from programs import LLAMA_8B
from steps import LLAMA, MIXTRAL, ROWS, SEQ_LEN, T5, VIT, gpus, plans, step, step_of_rows
from torch.nn import functional as F
from workers import Group, Workers

from portable_fsdp.config.schema import Config
from portable_fsdp.plan.fake_step import COMMUNICATOR_BYTES, plan_memory
from portable_fsdp.plan.planner import make_plan
from portable_fsdp.plan.result import DeviceMemory, Work
from portable_fsdp.plan.target import parse_target
from portable_fsdp.runtime.child import Worker
from portable_fsdp.runtime.errors import BackendError, ConfigError

Plans = dict[str, tuple[DeviceMemory, Work]]
DEVICES, PER_HOST = 8, 4
GIB = 2**30
GPUS = gpus(DEVICES, hosts=2)
LAYERS = 2
SHALLOW = {**LLAMA, "num_hidden_layers": LAYERS}
EIGHT: dict[str, Any] = {"devices": DEVICES, "model": SHALLOW, "precision__compute": "bfloat16"}
TIED: dict[str, Any] = EIGHT | {"model": {**SHALLOW, "tie_word_embeddings": True}}
EXPERTS: dict[str, Any] = EIGHT | {"model": {**MIXTRAL, "num_hidden_layers": 1}}
ONE_EACH = {**MIXTRAL, "num_hidden_layers": 1, "num_local_experts": DEVICES}
EXCHANGED: dict[str, Any] = EIGHT | {"model": ONE_EACH, "sharding__expert": DEVICES}
PLANNED = {
    "plain": step(**EIGHT),
    "zero2": step(**EIGHT, sharding__strategy="SHARD_GRAD_OP"),
    "whole": step(**EIGHT, sharding__strategy="NO_SHARD"),
    "hybrid": step(**EIGHT, sharding__strategy="HYBRID_SHARD"),
    "recomputed": step(**EIGHT, memory__gradient_checkpointing="full"),
    "five": step(**EIGHT, accumulation=5),
    "tied, offloaded": step(**TIED, memory__cpu_offload=True, accumulation=2),
    "documents": step(**EIGHT, data__packing="documents"),
}
MORE_PLANNED = {
    "inputs on the host": step(**EIGHT, memory__gradient_checkpointing="full", memory__offload="activations"),
    "every second": step(**EIGHT, memory__gradient_checkpointing="selective", memory__every=2),
    "products kept": step(**EIGHT, memory__gradient_checkpointing="selective", memory__save_ops=("matmul",)),
    "documents, flex": step(**EIGHT, data__packing="documents", model__attention="flex"),
    "frozen": step(**EIGHT, model__freeze=("model.layers",)),
    "compiled": step(**EIGHT, compile__enabled=True, memory__gradient_checkpointing="budget", memory__budget=0.3),
    "float32": step(devices=DEVICES, model=SHALLOW, precision__matmul="high"),
    "experts": step(**EXPERTS, model__experts="dense"),
    "grouped": step(**EXPERTS, model__experts="grouped_mm"),
    "exchanged": step(**EXCHANGED),
}
REAL = {"two micro batches, recomputed": step(accumulation=2, memory__gradient_checkpointing="full")}
FULL: dict[str, Any] = {"memory__gradient_checkpointing": "full"}
KEPT: dict[str, Any] = {"memory__gradient_checkpointing": "selective"}
BFLOAT16: dict[str, Any] = {"precision__compute": "bfloat16"}
TWO_AHEAD: dict[str, Any] = {"sharding__forward_prefetch": 2, "sharding__backward_prefetch_units": 2}
MORE_REAL = {
    "bfloat16, zero2, tied": step(
        model={**LLAMA, "tie_word_embeddings": True}, sharding__strategy="SHARD_GRAD_OP", **BFLOAT16
    ),
    "documents": step(data__packing="documents", **BFLOAT16),
    "offloaded, every second, two ahead": step(memory__cpu_offload=True, memory__every=2, **KEPT, **TWO_AHEAD),
    "plain": step(),
    "whole": step(sharding__strategy="NO_SHARD"),
    "recomputed": step(**FULL),
    "four micro batches": step(accumulation=4),
    "kept": step(memory__save_ops=("matmul", "attention"), **KEPT),
    "offloaded": step(memory__cpu_offload=True),
    "norms in float32": step(precision__modules={"*norm*": "float32"}, **FULL, **BFLOAT16),
    "frozen": step(model__freeze=("model.embed_tokens", "model.layers.0")),
    "gathered after": step(sharding__backward_prefetch="BACKWARD_POST", **FULL),
    "experts": step(model=MIXTRAL),
    "sgd": step(optim__name="sgd", optim__momentum=0.9),
    "one unit": step(sharding__wrap="NO_WRAP"),
    "factory": step_of_rows("images", "image_classification", {"factory": "planned_rows:model"}, 64),
    "vit": step_of_rows("images", "image_classification", {"architecture": VIT}),
    "t5": step_of_rows("pairs", "seq2seq_lm", {"architecture": T5}, 8),
}
PARAMETERS = LAYERS * (512 * (512 + 256) * 2 + 3 * 512 * 1408 + 2 * 512) + 2 * 4096 * 512 + 512


@pytest.fixture(scope="module")
def planned(worker: Worker) -> Plans:
    return dict(zip(PLANNED, worker(plans, list(PLANNED.values()), GPUS), strict=True))


@pytest.fixture(scope="module")
def more_planned(planned: Plans, worker: Worker) -> Plans:
    """The same and others."""
    return planned | dict(zip(MORE_PLANNED, worker(plans, list(MORE_PLANNED.values()), GPUS), strict=True))


PROOF = [pytest.mark.proof, pytest.mark.timeout(900)]


@pytest.mark.parametrize("configs", [pytest.param(REAL, id="some"), pytest.param(MORE_REAL, id="all", marks=PROOF)])
def test_a_cpu_plan_is_what_two_processes_hold(configs: dict[str, Config], worker: Worker) -> None:
    """A plan for two CPUs against two processes: memory within 5 %, collectives to the byte."""
    planned = worker(plans, list(configs.values()), parse_target("cpu:2"))
    workers = Workers(Group("gloo", 2))
    try:
        for (name, config), (memory, work) in zip(configs.items(), planned, strict=True):
            measured = workers.run(measure, config=config)
            most = max(process.peak_bytes for process in measured)
            assert most > 100 * 2**20
            assert memory.peak_bytes == pytest.approx(most, rel=0.05), name
            assert _moved(work) == measured[0].collectives, name
    finally:
        workers.close()


def _moved(work: Work) -> dict[str, tuple[int, int]]:
    """Kind -> calls and bytes."""
    moved: dict[str, tuple[int, int]] = {}
    for key, traffic in work.collectives.items():
        kind = key.partition(" ")[0]
        calls, bytes_ = moved.get(kind, (0, 0))
        moved[kind] = calls + traffic.calls, bytes_ + traffic.bytes
    return moved


@pytest.mark.proof
def test_options_together_are_planned(worker: Worker) -> None:
    """A stand-in for a GPU is another device than the host: what mixes the two ends a plan, and no test on CPUs."""
    import test_options as options  # which takes seconds to find its rows

    configs = [options.case_of(options.taken_by("native", row)).config(options.DEVICES) for row in options.ROWS]
    target = gpus(options.DEVICES, hosts=options.DEVICES // 2)
    for config, (memory, _) in zip(configs, worker(plans, configs, target), strict=True):
        assert memory.parts["activations"] > 0
        assert (memory.host_bytes > 0) == config.memory.cpu_offload


def _part(planned: Plans, name: str, part: str) -> int:
    return planned[name][0].parts[part]


def test_what_rests_is_the_shards(planned: Plans) -> None:
    for name, shards in {"plain": 8, "zero2": 8, "whole": 1, "hybrid": 4, "recomputed": 8}.items():
        assert _part(planned, name, "weights") == pytest.approx(4 * PARAMETERS / shards, rel=1e-3), name
        assert _part(planned, name, "optimizer") == pytest.approx(8 * PARAMETERS / shards, rel=1e-3), name
    assert _part(planned, "tied, offloaded", "weights") < 1024  # buffers
    assert _part(planned, "tied, offloaded", "optimizer") == planned["plain"][0].host_bytes == 0
    tied = PARAMETERS - 4096 * 512
    assert planned["tied, offloaded"][0].host_bytes == pytest.approx(16 * tied / 8, rel=1e-3)


def test_strategies_and_checkpointing_move_what_they_say(planned: Plans) -> None:
    assert _part(planned, "recomputed", "activations") < _part(planned, "plain", "activations") / 2
    gathered = {name: _part(planned, name, "gathered weights") for name in planned}
    # At the peak, in the loss, SHARD_GRAD_OP holds what FULL_SHARD has freed.
    # And both the buffer of the last gather, which FSDP2 keeps until the next one.
    assert gathered["zero2"] == pytest.approx(2 * (PARAMETERS + 4096 * 512), rel=0.01)
    assert gathered["plain"] < gathered["zero2"] / 2
    assert _part(planned, "five", "gradients") >= 4 * PARAMETERS / 8 * 0.99  # of the micro batches before


@pytest.mark.proof
def test_offloaded_activations_leave_the_device(more_planned: Plans) -> None:
    on_host = more_planned["inputs on the host"][0].host_bytes
    assert on_host == (LAYERS - 1) * ROWS * SEQ_LEN * LLAMA["hidden_size"] * 2  # the last layer keeps its input
    on_device = [_part(more_planned, name, "activations") for name in ("recomputed", "inputs on the host")]
    assert on_device[0] - on_device[1] == on_host


@pytest.mark.proof
def test_other_options_move_what_they_say(more_planned: Plans) -> None:
    kept = {name: _part(more_planned, name, "activations") for name in more_planned}
    for some in ("every second", "products kept"):
        assert kept["recomputed"] < kept[some] < kept["plain"]
    assert _part(more_planned, "frozen", "optimizer") == pytest.approx(8 * (2 * 4096 * 512 + 512) / 8, rel=1e-3)
    eager, compiled = more_planned["plain"][0], more_planned["compiled"][0]
    assert (compiled.at, compiled.parts) == (eager.at, eager.parts)
    flops = {name: work.matmul_flops for name, (_, work) in more_planned.items()}
    assert flops["float32"].keys() == {"tf32"}
    assert flops["grouped"]["bfloat16"] < flops["experts"]["bfloat16"]  # two of four experts
    exchanged = more_planned["exchanged"][1]
    sent = sum(moved.bytes for kind, moved in exchanged.collectives.items() if kind.startswith("all_to_all"))
    assert sent > 0
    # Blocks of flex attention need no mask: the batch's positions and segments come on top, and rotary tables (cosines
    # and sines, 64 wide) for each row; of the blocks themselves some numbers.
    known = 2 * 8 * ROWS * SEQ_LEN + 2 * 2 * (ROWS - 1) * SEQ_LEN * 64
    assert known <= kept["documents, flex"] - kept["plain"] <= known + 1024
    assert flops["documents, flex"] == flops["plain"]


def test_a_mask_of_documents_is_planned_once_and_its_attention_whole(planned: Plans) -> None:
    """The mask: 2 bytes for each pair of positions. Keys and values of all heads are kept, not of half of them."""
    mask = 2 * ROWS * SEQ_LEN * SEQ_LEN
    heads = LAYERS * 2 * 2 * ROWS * SEQ_LEN * 512 // 2
    more = _part(planned, "documents", "activations") - _part(planned, "plain", "activations")
    assert mask + heads <= more <= 2 * mask + 1.2 * heads
    documents, plain = (planned[name][1].matmul_flops["bfloat16"] for name in ("documents", "plain"))
    half = (2 + 5) * 2 * ROWS * SEQ_LEN * SEQ_LEN * 512 / 2 * LAYERS  # scores and values; backward's five products
    assert documents - plain == pytest.approx(half, rel=0.01)


def test_the_allocator_and_nccl_come_on_top(planned: Plans) -> None:
    for name, (memory, _) in planned.items():
        live = sum(size for part, size in memory.parts.items() if part not in ("allocator", "communication buffers"))
        assert 0 < memory.parts["allocator"] < live, name
        assert (live + memory.parts["allocator"]) % (2 * 2**20) == 0, name  # segments
        assert memory.parts["communication buffers"] % COMMUNICATOR_BYTES == 0

    # All ranks, and the shards': since torch 2.13 a mesh's dimension over all ranks is the default group.
    assert _part(planned, "plain", "communication buffers") in (COMMUNICATOR_BYTES, 2 * COMMUNICATOR_BYTES)
    assert _part(planned, "hybrid", "communication buffers") == 3 * COMMUNICATOR_BYTES


def test_no_logits_of_all_tokens_are_planned(worker: Worker) -> None:
    """Llama 3 8B's head at 8192 tokens: 3.9 GiB of float32 logits."""
    model = {"model_type": "llama", "max_position_embeddings": 8192, **LLAMA_8B, "num_hidden_layers": 1}
    config = step(devices=8, model=model, data__seq_len=8192, train__micro_batch=1, train__global_batch=8, **BFLOAT16)
    ((memory, _),) = worker(plans, [config], gpus(8))
    assert memory.at == "forward of lm_head"
    assert 0.5 * GIB < memory.parts["loss and logits"] < 0.7 * GIB
    assert memory.parts["gradients"] == 2 * 128_256 * 4096  # of the head, taken there


def test_the_peak_has_a_moment_a_module_and_its_largest_tensors(planned: Plans) -> None:
    memory, _ = planned["plain"]
    assert memory.at == "forward of lm_head"
    assert [buffer.bytes for buffer in memory.biggest] == sorted((b.bytes for b in memory.biggest), reverse=True)
    rows = 4 * ROWS * SEQ_LEN * 4096
    assert ("aten::_softmax", rows, "forward of lm_head") in [(b.name, b.bytes, b.where) for b in memory.biggest]
    assert planned["recomputed"][0].at.startswith("backward of model.layers.")
    whole, _ = planned["whole"]
    assert "exp_avg/model.embed_tokens.weight" in [buffer.name for buffer in whole.biggest]


def test_products_are_those_of_the_model_and_collectives_those_of_the_strategy(planned: Plans) -> None:
    tokens, hidden, width = ROWS * SEQ_LEN, 512, 64
    weights = PARAMETERS - 4096 * hidden - (2 * LAYERS + 1) * hidden
    attention = 2 * ROWS * 8 * SEQ_LEN * SEQ_LEN * width / 2  # a product, of what is not masked
    flops = {name: work.matmul_flops for name, (_, work) in planned.items()}
    assert flops["plain"] == {"bfloat16": 6 * tokens * weights + LAYERS * attention * (2 + 5)}
    # Layers run again up to the last tensor that backward needs: without the last product of each.
    again = 2 * tokens * (weights - 4096 * hidden - LAYERS * hidden * 1408) + LAYERS * attention * 2
    assert flops["recomputed"]["bfloat16"] - flops["plain"]["bfloat16"] == again
    assert flops["five"]["bfloat16"] == 5 * flops["plain"]["bfloat16"]

    def bytes_of(name: str, kind: str) -> float:
        return planned[name][1].collectives[kind].bytes / PARAMETERS

    once = (2 * 4096 * 512 + 512) / PARAMETERS  # embedding, head, norm; layers in forward and backward
    assert bytes_of("plain", "all_gather bfloat16") == pytest.approx(2 * (2 - once), rel=0.01)
    assert bytes_of("zero2", "all_gather bfloat16") == pytest.approx(2, rel=0.01)
    assert bytes_of("plain", "reduce_scatter float32") == pytest.approx(4, rel=0.01)
    assert bytes_of("five", "reduce_scatter float32") == pytest.approx(20, rel=0.01)
    assert bytes_of("hybrid", "all_reduce float32") == pytest.approx(4 / 4, rel=0.01)  # of a replica's shard
    assert bytes_of("whole", "all_reduce float32") == pytest.approx(4, rel=0.01)
    assert "all_gather bfloat16" not in planned["whole"][1].collectives
    # Links carry the least bytes.
    sent = planned["plain"][1].sent_bytes
    full = sum(moved.bytes for moved in planned["plain"][1].collectives.values())
    assert sent["nvlink"] == pytest.approx(full * 3 / 4, rel=1e-3)
    assert sent["network"] == pytest.approx(full / 2 / PER_HOST, rel=1e-3)  # half of all, divided over a host's devices
    hybrid = planned["hybrid"][1]
    assert hybrid.sent_bytes["network"] == pytest.approx(hybrid.collectives["all_reduce float32"].sent_bytes, rel=1e-3)


def _twice(config: Config) -> tuple[bool, bool]:
    """For a child inside a launched process: whether a second plan is the same, and the process as it was."""
    launch = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    with patch.dict(os.environ, dict.fromkeys(launch, "7")):  # a plan has ranks of its own
        first, before = plans([config], GPUS), (dict(os.environ), F.scaled_dot_product_attention)
        return plans([config], GPUS) == first, (dict(os.environ), F.scaled_dot_product_attention) == before


def test_a_plan_leaves_nothing_behind(worker: Worker) -> None:
    shallow: dict[str, Any] = EIGHT | {"model": {**LLAMA, "num_hidden_layers": 1}}
    assert worker(_twice, step(**shallow, sharding__strategy="HYBRID_SHARD")) == (True, True)


def test_what_the_trainer_refuses_a_plan_refuses(worker: Worker) -> None:
    with pytest.raises(ConfigError, match="expected at most"):
        make_plan(PLANNED["plain"], gpus(2 * DEVICES), worker)
    with pytest.raises(BackendError, match="HYBRID_SHARD"):
        make_plan(PLANNED["hybrid"], gpus(DEVICES), worker)  # one host: one replica


def _with_peak(config: Config, devices: int) -> tuple[DeviceMemory, float]:
    """For a child: a plan with a limit, and the process's own peak in GiB."""
    plan = plan_memory(config, gpus(devices, devices // 8))
    return plan.memory, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


@pytest.mark.proof
def test_a_thousand_ranks_in_little_memory() -> None:
    model = {"model_type": "llama", "max_position_embeddings": 8192, **LLAMA_8B, "num_hidden_layers": 2}
    config = step(devices=1024, model=model, data__seq_len=8192, precision__compute="bfloat16")
    with Worker() as fresh:
        memory, gibibytes = fresh(_with_peak, config, 1024)
    parameters = 2 * (4096 * (4096 + 1024) * 2 + 3 * 4096 * 14336 + 2 * 4096) + 2 * 128256 * 4096 + 4096
    assert memory.parts["weights"] == pytest.approx(4 * parameters / 1024, rel=0.01)
    assert memory.verdict == "fits"
    assert gibibytes < 3


@pytest.mark.proof
def test_the_state_of_each_optimizer_is_planned(worker: Worker) -> None:
    """Bytes a parameter: two moments, one, row and column means, and one of matrices but two of the rest."""
    names = {"adamw": 8.0, "adam": 8.0, "lion": 4.0, "adafactor": 0.0125, "muon": 4 + 4 * 2 * 4096 * 512 / PARAMETERS}
    momentum = {"muon": 0.95}
    configs = [step(**EIGHT, optim__name=name, optim__momentum=momentum.get(name, 0.0)) for name in names]
    for (name, bytes_each), (memory, _) in zip(names.items(), worker(plans, configs, GPUS), strict=True):
        assert memory.parts["optimizer"] * DEVICES / PARAMETERS == pytest.approx(bytes_each, rel=5e-3), name


FLAT: dict[str, Any] = {"devices": DEVICES, "model": {**LLAMA, "num_hidden_layers": 2}}


def test_a_tpu_holds_at_least_what_a_gpus_operations_hold(worker: Worker) -> None:
    configs = [step(**FLAT, precision__compute="bfloat16")]
    ((tpu, tpu_work),) = worker(plans, configs, parse_target("tpu7x:2x2x1"))
    ((gpu, gpu_work),) = worker(plans, configs, gpus(DEVICES))
    for part in ("weights", "gradients", "optimizer", "gathered weights", "activations"):
        assert gpu.parts[part] <= tpu.parts[part] <= 1.01 * gpu.parts[part], part  # tiles
    assert not tpu.parts.keys() & {"allocator", "communication buffers"}
    assert (tpu.verdict, gpu.verdict) == ("unknown", "fits")
    assert DeviceMemory(parts={"weights": 2}, limit_bytes=1, is_least=True).verdict == "does not fit"
    assert DeviceMemory(parts={"weights": 1}, limit_bytes=2, is_least=True).verdict == "unknown"
    assert tpu_work.matmul_flops == gpu_work.matmul_flops
    assert tpu_work.collectives == gpu_work.collectives


def test_attention_holds_no_scores_and_the_optimizer_one_weight_at_a_time(worker: Worker) -> None:
    heads: dict[str, Any] = {**FLAT, "model": {**LLAMA, "num_hidden_layers": 1, "vocab_size": 256}}
    short, long, whole = [
        step(**heads, data__seq_len=512),  # float32, for which a GPU's kernel takes no grouped heads
        step(**heads, data__seq_len=1024),
        step(**FLAT, data__seq_len=8, sharding__strategy="NO_SHARD"),
    ]
    memory = [memory for memory, _ in worker(plans, [short, long, whole], parse_target("v6e-8"))]
    assert memory[1].parts["activations"] < 2.1 * memory[0].parts["activations"]
    assert memory[2].at == "optimizer"
    largest = 4 * 4096 * 512  # the embedding in float32
    # The gradient without what isn't finite, both new moments, and three values that the update computes.
    assert memory[2].parts["temporaries"] == pytest.approx(6 * largest, rel=0.1)


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
