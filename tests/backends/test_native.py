"""FSDP2 honours the whole policy: bytes at rest, collectives, what is recomputed, when units are gathered."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cases import ARCHITECTURES, Case
from reference import reference
from test_contract import assert_evaluation_changes_nothing, evaluated_case
from test_curves import BF16_20_STEPS, assert_equal_curves
from workers import Group, Workers

from portable_fsdp.backends.contract import Traffic

GetWorkers = Callable[[Group], Workers]
Run = Callable[[Group, Case], list[dict[str, Any]]]
Settings = dict[str, Any]

FOUR = Group("native", 4)
GIB = 2**30


class Strategy(NamedTuple):
    """In words of the textbook (ZeRO, arXiv 1910.02054, section 5; hybrid: PyTorch FSDP, arXiv 2304.11277, 3.2.2)."""

    settings: Settings
    shards: int  # of 4 devices
    gathers: int  # of a layer, in a micro batch
    reduces_replicas: bool


STRATEGIES = {
    "FULL_SHARD": Strategy({"sharding.strategy": "FULL_SHARD"}, 4, 2, False),
    "SHARD_GRAD_OP": Strategy({"sharding.strategy": "SHARD_GRAD_OP"}, 4, 1, False),
    "NO_SHARD": Strategy({"sharding.strategy": "NO_SHARD"}, 1, 0, True),
    "HYBRID_SHARD": Strategy({"sharding.strategy": "HYBRID_SHARD", "sharding.replicas": 2}, 2, 2, True),
    "HYBRID_SHARD_ZERO2": Strategy({"sharding.strategy": "HYBRID_SHARD_ZERO2", "sharding.replicas": 2}, 2, 1, True),
}


def _size(shape: tuple[int, ...], shards: int = 1) -> int:
    """Elements of a tensor, its rows padded to a multiple of `shards`."""
    elements = -(-shape[0] // shards) * shards
    for length in shape[1:]:
        elements *= length
    return elements


# ---------------------------------------------------------------------------------------------------- bytes at rest


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_device_rests_its_share(name: str, workers: GetWorkers) -> None:
    strategy = STRATEGIES[name]
    answers = workers(FOUR).run("resting", case=Case(steps=1, settings=strategy.settings))
    for kind in ("parameters", "gradients", "state"):
        for key, first in answers[0][kind].items():
            sizes = [answer[kind][key]["bytes"] for answer in answers]
            # Each replica holds each row once.
            assert sum(sizes) == 4 * _size(first["shape"]) * 4 // strategy.shards, f"{kind} {key}"
            assert max(sizes) <= 4 * _size(first["shape"], strategy.shards) // strategy.shards, f"{kind} {key}"
    assert answers[0]["parameters"].keys() == answers[0]["gradients"].keys()
    assert {key.split("/")[1] for key in answers[0]["state"]} == answers[0]["parameters"].keys()


def test_frozen_weights_have_neither_gradient_nor_state(workers: GetWorkers, run: Run) -> None:
    frozen = ("model.embed_tokens.", "model.layers.0.")
    case = Case(steps=2, settings={"model.freeze": ["model.embed_tokens", "model.layers.0"]})
    for answer in workers(FOUR).run("resting", case=case):
        assert any(fqn.startswith(frozen) for fqn in answer["parameters"])
        trained = {fqn for fqn in answer["parameters"] if not fqn.startswith(frozen)}
        assert answer["gradients"].keys() == trained
        assert {key.split("/")[1] for key in answer["state"]} == trained
    reduced = workers(FOUR).run("collectives", case=case)[0]["backend"]["reduce_scatter"].calls
    everything = workers(FOUR).run("collectives", case=Case(steps=2))[0]["backend"]["reduce_scatter"].calls
    assert reduced == everything - 2  # the embedding's and the layer's


def test_offloaded_tensors_rest_on_the_host(workers: GetWorkers) -> None:
    """On CPU the host is the device: this shows that the logic runs, not where bytes lie. A GPU must show that."""
    (answer,) = workers(Group("native", 1)).run("resting", case=Case(steps=1, settings={"memory.cpu_offload": True}))
    for kind in ("parameters", "gradients", "state", "counts"):
        assert {value["device"] for value in answer[kind].values()} == {"cpu"}


# ------------------------------------------------------------------------------------------------------ collectives


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("name", STRATEGIES)
def test_collectives_are_the_textbooks(name: str, micro_batches: int, workers: GetWorkers) -> None:
    strategy = STRATEGIES[name]
    case = Case(steps=2, micro_batch=3 // micro_batches, settings=strategy.settings)
    answer = workers(FOUR).run("collectives", case=case)[0]
    shapes = {fqn: tuple(weight.shape) for fqn, weight in reference(Case(steps=1)).initial.items()}
    weights = 4 * sum(_size(shape, strategy.shards) for shape in shapes.values())
    groups = 5  # the embedding, two layers, the head, the root
    sums = groups if strategy.shards > 1 else 1  # without shards in buckets, which all weights fill but a part of
    counted = answer["backend"]
    gathered = [name for name in shapes if name.startswith("model.layers.")]  # in backward too; the others once
    again = 4 * sum(_size(shapes[name], strategy.shards) for name in gathered) * (strategy.gathers - 1)
    gathers = groups + 2 * (strategy.gathers - 1) if strategy.gathers else 0
    sharded, replicas = strategy.shards > 1, strategy.reduces_replicas
    norm = sharded and replicas  # its parts are gathered, so that replicas add them up in one order
    assert answer["before"] is None
    assert counted.get("all_gather", (0, 0)) == (
        micro_batches * gathers + norm,
        micro_batches * (weights + again if strategy.gathers else 0) + 4 * strategy.shards * norm,
    )
    assert counted.get("reduce_scatter", (0, 0)) == (
        (micro_batches * groups, micro_batches * weights) if sharded else (0, 0)
    )
    # Without shards a bucket also says how many replicas have each gradient.
    # Numbers: in each micro batch the count, stop, and two of each process; the gradient norm, where shards have parts
    # of it; loss, and what was counted.
    norms = sharded and not replicas
    numbers, bytes_of_numbers = micro_batches + norms + 1, 4 * (micro_batches * (2 + 2 * FOUR.devices) + norms + 2)
    assert counted["all_reduce"] == (
        numbers + sums * replicas,  # replicas are reduced once a step, in the last micro batch
        bytes_of_numbers + weights // strategy.shards * replicas + 4 * len(shapes) * (not sharded),
    )
    if sharded and micro_batches == 1:  # torch's own count knows groups of one process too
        for step in answer["steps"]:
            assert step["torch"] == {
                "c10d._allgather_base_": counted["all_gather"].calls,
                "c10d._reduce_scatter_base_": counted["reduce_scatter"].calls,
                "c10d.allreduce_": counted["all_reduce"].calls,
            }


@pytest.mark.parametrize("name", ["FULL_SHARD", "HYBRID_SHARD_ZERO2"])
def test_gradients_synced_once_a_step_are_reduced_once(name: str, workers: GetWorkers) -> None:
    """Of three micro batches; the curve is test_options.py's."""

    def reduced(**settings: bool) -> Traffic:
        strategy = STRATEGIES[name].settings | {f"sharding.{key}": value for key, value in settings.items()}
        case = Case(steps=2, micro_batch=1, settings=strategy)
        return workers(FOUR).run("collectives", case=case)[0]["backend"]["reduce_scatter"]

    once, each = reduced(sync_each_micro_batch=False), reduced()
    assert (3 * once.calls, 3 * once.bytes) == tuple(each)


@pytest.mark.parametrize(("number", "in_backward"), [(None, 4), (2, 2)])
def test_units_resharded_over_a_number_of_devices_are_gathered_from_those_in_backward(
    number: int | None, in_backward: int, workers: GetWorkers
) -> None:
    """Two layers, again in backward; the embedding, the head and the root in forward only."""
    case = Case(steps=2, settings={"sharding.reshard_after_forward": number})
    for answer in workers(FOUR).run("collectives", case=case):
        for step in answer["steps"]:
            over = [devices for kind, _, _, devices in step["wire"] if kind == "c10d::_allgather_base_"]
            assert over == [4] * 5 + [in_backward] * 2


def test_recomputation_gathers_no_unit_again(workers: GetWorkers) -> None:
    plain, recomputed = (
        workers(FOUR).run("collectives", case=Case(steps=2, checkpointing=checkpointing))[0]["backend"]
        for checkpointing in ("none", "full")
    )
    assert plain == recomputed


DTYPES = {
    "bf16": ({"precision.compute": "bfloat16"}, {"bfloat16"}, {"float32"}),
    "bf16 reduced in bf16": (
        {"precision.compute": "bfloat16", "precision.reduce": "bfloat16"},
        {"bfloat16"},
        {"bfloat16"},
    ),
    "bf16 masters": ({"precision.compute": "bfloat16", "precision.master": "bfloat16"}, {"bfloat16"}, {"float32"}),
    "norms in fp32": (
        {"precision.compute": "bfloat16", "precision.modules": {"*norm*": "float32"}},
        {"bfloat16", "float32"},
        {"float32"},
    ),
}


@pytest.mark.parametrize("name", DTYPES)
def test_the_wire_carries_the_dtypes_asked_for(name: str, workers: GetWorkers) -> None:
    settings, gathered, reduced = DTYPES[name]
    wire = workers(Group("native", 2)).run("collectives", case=Case(steps=2, settings=settings))[0]["steps"][0]["wire"]

    def dtypes(op: str) -> set[str]:
        return {dtype for kind, dtype, *_ in wire if kind == op}

    assert (dtypes("c10d::_allgather_base_"), dtypes("c10d::_reduce_scatter_base_")) == (gathered, reduced)
    if name == "norms in fp32":
        gathers = [(dtype, size) for kind, dtype, size, _ in wire if kind == "c10d::_allgather_base_"]
        norms = sum(size for dtype, size in gathers if dtype == "float32")
        assert norms == 4 * 72 * (2 * 2 * 2 + 1)  # two norms a layer, gathered twice, and the root's


# ------------------------------------------------------------------------------------------------- what is recomputed

# As many heads for keys as for queries: only then SDPA has a kernel on CPU, which is what "attention" names.
DEEP = {"model.architecture": {**ARCHITECTURES["llama"], "num_hidden_layers": 12, "num_key_value_heads": 6}}
SELECTIVE = {**DEEP, "memory.gradient_checkpointing": "selective"}
FULL = {**DEEP, "memory.gradient_checkpointing": "full"}


def test_recomputation_keeps_less_and_computes_more(workers: GetWorkers) -> None:
    def kept(settings: Settings) -> dict[str, int]:
        return workers(Group("native", 1)).run("kept_for_backward", case=Case(settings=settings))[0]

    none, full = kept(DEEP), kept(FULL)
    assert full["bytes"] <= 0.3 * none["bytes"]
    every = [kept({**SELECTIVE, "memory.every": number}) for number in (2, 3, 4)]
    by_bytes = [full["bytes"], *(run["bytes"] for run in every), none["bytes"]]
    assert by_bytes == sorted(set(by_bytes))
    by_flops = [none["flops"], *(run["flops"] for run in reversed(every)), full["flops"]]
    assert by_flops == sorted(set(by_flops))
    matmul, attention, both = (kept({**SELECTIVE, "memory.save_ops": ops}) for ops in SAVED)
    assert full["bytes"] < attention["bytes"] < matmul["bytes"] < both["bytes"] < none["bytes"]
    assert matmul["flops"] == both["flops"] == none["flops"] < attention["flops"] == full["flops"]
    assert none["attentions"] == attention["attentions"] == both["attentions"] == 12
    assert matmul["attentions"] == full["attentions"] == 24
    parts, both_parts, all_at_once = (
        kept({**FULL, "memory.classes": classes})
        for classes in (["LlamaMLP"], ["LlamaMLP", "LlamaAttention"], ["LlamaModel"])
    )
    assert full["bytes"] < both_parts["bytes"] < parts["bytes"] < none["bytes"]
    assert all_at_once["bytes"] < full["bytes"]
    assert none["flops"] < parts["flops"] < both_parts["flops"] < full["flops"]
    assert (parts["attentions"], both_parts["attentions"]) == (12, 24)


def test_on_one_device_no_copy_of_a_weight_is_kept_for_backward(workers: GetWorkers) -> None:
    """But with SHARD_GRAD_OP, which keeps what FULL_SHARD makes again; also under recomputation."""

    def kept(**settings: str) -> int:
        case = Case(settings=DEEP | {"precision.compute": "bfloat16"} | settings)
        return workers(Group("native", 1)).run("kept_for_backward", case=case)[0]["bytes"]

    shapes = {fqn: tuple(weight.shape) for fqn, weight in reference(Case(steps=1, settings=DEEP)).initial.items()}
    copies = 2 * sum(_size(shape) for shape in shapes.values() if len(shape) > 1)  # the products', in bfloat16
    # The embedding's backward needs none, and the head has its gradient in forward.
    copies -= 2 * (_size(shapes["model.embed_tokens.weight"]) + _size(shapes["lm_head.weight"]))
    again, stays = kept(), kept(**{"sharding.strategy": "SHARD_GRAD_OP"})
    assert again + copies <= stays <= again + 1.1 * copies
    recomputed = kept(**{"memory.gradient_checkpointing": "full"})
    assert recomputed <= 0.3 * again


def test_replicas_sum_gradients_of_weights_that_only_some_use(workers: GetWorkers) -> None:
    """Each replica's rows take another branch: all get the sums, and no gradient of what none uses."""
    for answer in workers(Group("native", 2)).run("gradients_of_branches"):
        assert answer["buckets"] > 1
        assert answer["sums"] == answer["expected"] == answer["later"]
        assert answer["before"] != answer["expected"]  # an earlier micro batch stays a process's own


SAVED: tuple[list[str], ...] = (["matmul"], ["attention"], ["matmul", "attention"])


# ---------------------------------------------------------------------------------------------------------- prefetch

# The order in which a step gathers, computes forward and backward, and reduces a model whose layers run from 3 down to
# 0: "g3 c3" is gather and compute of layer 3. The layer that ran last is gathered again in backward.
FORWARD = [
    "c3 g3 c2 g2 c1 g1 c0 g0",  # by units ahead
    "g3 c3 g2 c2 g1 c1 g0 c0",
    "g3 g2 c3 g1 c2 g0 c1 c0",
]
ORDER_PRE, ORDER_PRE_2 = "g0 g1 b r0 g2 b r1 g3 b r2 b r3 rroot", "g0 g1 g2 b r0 g3 b r1 b r2 b r3 rroot"
ORDER_POST, ORDER_POST_2 = "g0 b g1 r0 b g2 r1 b g3 r2 b r3 rroot", "g0 b g1 g2 r0 b g3 r1 b r2 b r3 rroot"
ORDER_NONE = "g0 b r0 g1 b r1 g2 b r2 g3 b r3 rroot"
ORDERS: list[tuple[str, int, str, int, str]] = [  # ..., forward_prefetch, backward_prefetch, its units, order
    ("plain", 0, "BACKWARD_PRE", 1, ORDER_PRE),
    ("one ahead", 1, "BACKWARD_PRE", 1, ORDER_PRE),
    ("two ahead", 2, "BACKWARD_PRE", 1, ORDER_PRE),
    ("two ahead in backward", 0, "BACKWARD_PRE", 2, ORDER_PRE_2),
    ("post", 0, "BACKWARD_POST", 1, ORDER_POST),
    ("post, two", 0, "BACKWARD_POST", 2, ORDER_POST_2),
    ("none", 0, "NO_PREFETCH", 1, ORDER_NONE),
    ("recomputed", 1, "BACKWARD_PRE", 2, ORDER_PRE_2),
]


@pytest.mark.parametrize(("name", "forward", "when", "units", "backward"), ORDERS, ids=[name for name, *_ in ORDERS])
def test_units_are_gathered_ahead_in_the_order_in_which_they_run(
    name: str, forward: int, when: str, units: int, backward: str, workers: GetWorkers
) -> None:
    recompute = ("layers.2", "layers.0") if name == "recomputed" else ()
    prefetch = {"forward_prefetch": forward, "backward_prefetch": when, "backward_prefetch_units": units}
    for order in workers(Group("native", 2)).run("order_of_gathers", policy={**prefetch, "recompute": recompute}):
        short = (word[0] + word[1:].partition(" ")[2].replace("layers.", "") for word in order)  # gather layers.3 -> g3
        assert " ".join(short) == f"groot {FORWARD[forward]} {backward}"


# ----------------------------------------------------------------------------------------------- compilation, matmul

TWELVE = {"model.architecture": {**ARCHITECTURES["llama"], "num_hidden_layers": 12}}
COMPILED = {"compile.enabled": True, "compile.backend": "aot_eager"}
RECOMPUTED = {"memory.gradient_checkpointing": "full"}
OFFLOADED = RECOMPUTED | {"memory.offload": "activations"}


CAST = {"precision.compute": "bfloat16", "precision.modules": {"*norm*": "float32"}}


@pytest.mark.parametrize(
    ("devices", "settings", "tolerance"),
    [(2, {}, 1e-5), pytest.param(2, OFFLOADED, 1e-5, marks=pytest.mark.proof), (1, CAST | OFFLOADED, 1e-3)],
    ids=["plain", "offloaded", "one device, offloaded, of two dtypes"],
)
def test_equal_layers_are_one_program_without_breaks(
    devices: int, settings: Settings, tolerance: float, workers: GetWorkers
) -> None:
    plain = workers(Group("native", devices)).run("programs", case=Case(settings=TWELVE | settings))[0]
    answer = workers(Group("native", devices)).run("programs", case=Case(settings=TWELVE | COMPILED | settings))[0]
    assert (plain["programs"], answer["programs"]) == (0, 2)  # all layers, and the loss
    assert answer["breaks"] == {}
    assert answer["losses"] == pytest.approx(plain["losses"], rel=tolerance)


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.proof)])
def test_a_budget_bounds_what_compiled_layers_keep_and_leaves_the_curve(devices: int, workers: GetWorkers) -> None:
    def run(**settings: Any) -> dict[str, Any]:
        return workers(Group("native", devices)).run("programs", case=Case(settings=settings))[0]

    def within(budget: float) -> dict[str, Any]:
        return run(**COMPILED, **{"memory.gradient_checkpointing": "budget", "memory.budget": budget})

    plain, half, least = run(**COMPILED), within(0.5), within(0.0)
    assert 0.95 * plain["kept"] > half["kept"] > least["kept"]
    for answer in (half, least):
        assert (answer["programs"], answer["breaks"]) == (2, {})
        assert answer["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert 0.95 * run(**COMPILED)["kept"] > half["kept"]  # the setting ends with its backend


@pytest.mark.proof  # it needs a C++ compiler
@pytest.mark.timeout(300)
def test_inductor_compiles_units_over_shards(workers: GetWorkers, tmp_path: Path) -> None:
    """torch's default compiler, which builds kernels for GPUs, here builds C++; a start with it on CPU is refused."""
    two_layers = Case(settings=COMPILED)
    eager = workers(Group("native", 2)).run("programs", case=Case())[0]
    answer = workers(Group("native", 2)).run("programs", case=two_layers, inductor=str(tmp_path))[0]
    assert (answer["programs"], answer["breaks"]) == (2, {})
    assert answer["kernels"] >= 2  # forward and backward
    assert answer["losses"] == pytest.approx(eager["losses"], rel=1e-5)
    again = workers(Group("native", 2)).run("programs", case=two_layers, inductor=str(tmp_path))[0]
    assert (answer["cached"], again["cached"]) == (0, 2)  # forward and backward


def test_matmul_precision_is_set_while_open(workers: GetWorkers) -> None:
    for precision, inside in (("highest", "highest"), ("high", "high"), ("default", "medium")):
        case = Case(settings={"precision.matmul": precision})
        assert workers(Group("native", 1)).run("matmul_precision", case=case) == [["highest", inside, "highest"]]


# ------------------------------------------------------------------------------------------------------- paper scale

LLAMA = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "405B": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
}
BILLIONS = {"8B": 8.03, "70B": 70.55, "405B": 405.85}  # Llama 3 (arXiv 2407.21783), untied


def _at_scale(name: str, devices: int) -> dict[str, Any]:
    sizes = {**LLAMA[name], "num_key_value_heads": 8}
    script = f"import json, native_jobs; print(json.dumps(native_jobs.at_scale({sizes}, {devices})))"
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(devices), "LOCAL_WORLD_SIZE": "8"}
    where = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "GROUP_BACKEND": "native",
        "GROUP_DEVICE": "cpu",
        "USE_TORCH_XLA": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parent,
        env={**os.environ, **launched, **where, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        pytest.param("8B", 8, marks=pytest.mark.proof),
        pytest.param("8B", 1024, marks=pytest.mark.proof),
        ("70B", 512),
        pytest.param("405B", 512, marks=pytest.mark.proof),
    ],
)
def test_a_model_of_paper_scale_is_sharded_without_its_memory(name: str, devices: int) -> None:
    answer = _at_scale(name, devices)
    shapes = [tuple(shape) for shape in answer["shapes"]]
    assert sum(map(_size, shapes)) == pytest.approx(BILLIONS[name] * 1e9, rel=1e-3)
    share = 4 * sum(_size(shape, devices) // devices for shape in shapes)
    assert answer["parameters"] == share
    assert answer["state"] == 2 * share
    assert answer["host_bytes"] < 4 * GIB


# ------------------------------------------------------------------------------------------------------ equal curves

TWO = Group("native", 2)
KEEP_ATTENTION = {"memory.gradient_checkpointing": "selective", "memory.save_ops": ["attention"]}
AHEAD = {"sharding.forward_prefetch": 2, "sharding.backward_prefetch_units": 2}
POST = {"sharding.forward_prefetch": 1, "sharding.backward_prefetch": "BACKWARD_POST"}
NORMS = {"precision.modules": {"*norm*": "float32"}}

# What the pairs of test_options.py don't hold.
CURVES: dict[str, tuple[Group, Case]] = {
    "HYBRID_SHARD_ZERO2, attention kept": (
        FOUR,
        Case(settings={**STRATEGIES["HYBRID_SHARD_ZERO2"].settings, **KEEP_ATTENTION}),
    ),
    "resharded over 2": (FOUR, Case(settings={"sharding.reshard_after_forward": 2, **RECOMPUTED})),
    "offload, accumulated": (TWO, Case(settings={"memory.cpu_offload": True}, micro_batch=3)),
    "frozen layer, two ahead": (
        TWO,
        Case(settings={"model.freeze": ["model.embed_tokens", "model.layers.0"], **AHEAD}),
    ),
    "units in units, post": (TWO, Case(settings={"sharding.wrap_modules": ["*mlp", "*q_proj"], **RECOMPUTED, **POST})),
    "norms in fp32, recomputed, post": (TWO, Case(compute="bfloat16", settings={**NORMS, **RECOMPUTED, **POST})),
    "head in fp32": (
        TWO,
        Case(compute="bfloat16", settings={"precision.modules": {"lm_head": "float32", "model.norm": "float32"}}),
    ),
    "tied head in fp32": (
        TWO,
        Case("llama_tied", compute="bfloat16", settings={"precision.modules": {"lm_head": "float32"}}),
    ),
    "a layer in fp32": (TWO, Case(compute="bfloat16", settings={"precision.modules": {"model.layers.0": "float32"}})),
}


@pytest.mark.parametrize("name", CURVES)
def test_no_option_changes_the_curve(name: str, run: Run) -> None:
    group, case = CURVES[name]
    assert_equal_curves(run(group, case), case, BF16_20_STEPS if case.compute == "bfloat16" else None)


def test_modules_of_another_dtype_are_computed_in_it(run: Run) -> None:
    """With norms in float32 the curve is neither that of bfloat16 nor that of float32."""
    half = Case(compute="bfloat16", steps=5)
    cases = (half, replace(half, settings=NORMS), Case(steps=5))
    losses = [tuple(metrics["loss"] for metrics in run(TWO, case)[0]["metrics"]) for case in cases]
    assert len(set(losses)) == 3


@pytest.mark.parametrize(
    "settings",
    [
        {"sharding.forward_prefetch": 2, "sharding.backward_prefetch_units": 2},
        {"sharding.backward_prefetch": "BACKWARD_POST", "memory.gradient_checkpointing": "full"},
        pytest.param(
            {"sharding.strategy": "HYBRID_SHARD_ZERO2", "sharding.replicas": 2, "sharding.forward_prefetch": 1},
            marks=pytest.mark.proof,
        ),
        pytest.param({"sharding.reshard_after_forward": 2}, marks=pytest.mark.proof),
    ],
    ids=["prefetch", "recomputed", "hybrid", "resharded over two"],
)
def test_an_evaluation_is_no_first_forward_and_leaves_shards(settings: Settings, workers: GetWorkers) -> None:
    """What is gathered ahead follows the first forward of training, and all rests as shards after an evaluation."""
    case = evaluated_case({"train.micro_batch": 3, **settings})
    assert_evaluation_changes_nothing(workers(FOUR).run("evaluated", case=case, rows=53, early=True))
