"""FSDP2 honours the whole policy: bytes at rest, collectives on the wire, what is recomputed, when units are gathered."""

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
from test_curves import BF16_20_STEPS, assert_equal_curves
from workers import Group, Workers

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
    for kind, copies in (("parameters", 1), ("gradients", 1), ("state", 1)):
        for key, first in answers[0][kind].items():
            found = [answer[kind][key]["bytes"] for answer in answers]
            whole = 4 * _size(first["shape"]) * copies
            assert sum(found) == whole * 4 // strategy.shards, f"{kind} {key}"  # nothing twice in a replica, nothing missing
            assert max(found) <= 4 * _size(first["shape"], strategy.shards) // strategy.shards, f"{kind} {key}"
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
    root = 4 * _size(shapes["model.norm.weight"], strategy.shards)  # stays gathered until backward
    groups = 5  # the embedding, two layers, the head, the root
    counted = answer["backend"]
    gathers = strategy.gathers * (groups - 1) + 1 if strategy.gathers else 0
    assert answer["before"] is None
    assert counted.get("all_gather", (0, 0)) == (
        micro_batches * gathers,
        micro_batches * (strategy.gathers * (weights - root) + root if strategy.gathers else 0),
    )
    sharded = strategy.shards > 1
    assert counted.get("reduce_scatter", (0, 0)) == (
        (micro_batches * groups, micro_batches * weights) if sharded else (0, 0)
    )
    # Numbers: tokens in each micro batch; the gradient norm, where shards have parts of it; loss and stop.
    numbers, bytes_of_numbers = micro_batches + sharded + 1, 4 * micro_batches + 4 * sharded + 8
    replicas = strategy.reduces_replicas
    assert counted["all_reduce"] == (
        numbers + groups * replicas,  # replicas are reduced once a step, in the last micro batch
        bytes_of_numbers + weights // strategy.shards * replicas,
    )
    if sharded:  # torch's own count knows groups of one process too
        for step in answer["steps"]:
            assert step["torch"] == {
                "c10d._allgather_base_": counted["all_gather"].calls,
                "c10d._reduce_scatter_base_": counted["reduce_scatter"].calls,
                "c10d.allreduce_": counted["all_reduce"].calls,
            }


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
    "bf16 masters in fp32": ({"precision.master": "bfloat16"}, {"float32"}, {"float32"}),
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
        return {dtype.removeprefix("torch.") for kind, dtype, _ in wire if kind == op}

    assert (dtypes("c10d::_allgather_base_"), dtypes("c10d::_reduce_scatter_base_")) == (gathered, reduced)
    if name == "norms in fp32":
        norms = sum(size for kind, dtype, size in wire if kind == "c10d::_allgather_base_" and dtype == "torch.float32")
        assert norms == 4 * 72 * (2 * 2 * 2 + 1)  # two norms a layer, gathered twice, and the root's


# ------------------------------------------------------------------------------------------------- what is recomputed

DEEP = {"model.architecture": {**ARCHITECTURES["llama"], "num_hidden_layers": 24}}
SELECTIVE = {**DEEP, "memory.gradient_checkpointing": "selective"}
FULL = {**DEEP, "memory.gradient_checkpointing": "full"}


def test_recomputation_keeps_less_and_computes_more(workers: GetWorkers) -> None:
    def kept(settings: Settings) -> dict[str, int]:
        return workers(Group("native", 1)).run("kept_for_backward", case=Case(settings=settings))[0]

    none, full = kept(DEEP), kept(FULL)
    assert full["bytes"] <= 0.3 * none["bytes"]
    every = [kept({**SELECTIVE, "memory.every": number}) for number in (2, 3, 4)]
    by_bytes = [full["bytes"], *(one["bytes"] for one in every), none["bytes"]]
    assert by_bytes == sorted(set(by_bytes))
    by_flops = [none["flops"], *(one["flops"] for one in reversed(every)), full["flops"]]
    assert by_flops == sorted(set(by_flops))
    matmul, attention, both = (kept({**SELECTIVE, "memory.save_ops": ops}) for ops in SAVED)
    assert full["bytes"] < attention["bytes"] < matmul["bytes"] < both["bytes"] < none["bytes"]
    assert matmul["flops"] == both["flops"] == none["flops"] < attention["flops"] == full["flops"]
    assert none["attentions"] == attention["attentions"] == both["attentions"] == 24
    assert matmul["attentions"] == full["attentions"] == 48


SAVED: tuple[list[str], ...] = (["matmul"], ["attention"], ["matmul", "attention"])


# ---------------------------------------------------------------------------------------------------------- prefetch

FORWARD = {
    # units ahead -> order, for a model whose layers run from 3 down to 0; the last one is gathered again in backward
    0: "c3 g3 c2 g2 c1 g1 c0 g0",
    1: "g3 c3 g2 c2 g1 c1 g0 c0",
    2: "g3 g2 c3 g1 c2 g0 c1 c0",
}
BACKWARD = {
    ("BACKWARD_PRE", 1): "g0 g1 b r0 g2 b r1 g3 b r2 b r3 rroot",
    ("BACKWARD_PRE", 2): "g0 g1 g2 b r0 g3 b r1 b r2 b r3 rroot",
    ("BACKWARD_POST", 1): "g0 b g1 r0 b g2 r1 b g3 r2 b r3 rroot",
    ("BACKWARD_POST", 2): "g0 b g1 g2 r0 b g3 r1 b r2 b r3 rroot",
    ("NO_PREFETCH", 1): "g0 b r0 g1 b r1 g2 b r2 g3 b r3 rroot",
}


def _short(order: list[str]) -> str:
    """`gather layers.3` -> g3."""
    return " ".join(word[0] + word[1:].partition(" ")[2].replace("layers.", "") for word in order)
