"""FSDP2 honours the whole policy: bytes at rest, collectives, when units are gathered, and equal curves."""

import math
import re
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import jobs
import pytest
import torch
from cases import Case, CaseRows, size_of
from jobs import running
from reference import reference
from test_contract import assert_evaluation_changes_nothing, evaluated, evaluated_case
from test_curves import BF16_20_STEPS, assert_equal_curves
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from workers import GetWorkers, Group, Run

from portable_fsdp.backends.contract import ShardPolicy, Traffic
from portable_fsdp.backends.native import groups
from portable_fsdp.backends.native.units import ComputeTime, local_part
from portable_fsdp.config.load import make_config
from portable_fsdp.layout import weight_spec
from portable_fsdp.runtime.errors import BackendError
from portable_fsdp.train.build import shard

Settings = dict[str, Any]

TWO, FOUR = Group("native", 2), Group("native", 4)
WIRE = Group("gloo", 4)  # threads send nothing through torch's dispatcher
PROCESSES = Group("gloo", 3)  # for what a process has once: a patched constant, a profile
NORMS = {"precision.modules": {"*norm*": "float32"}}


class Strategy(NamedTuple):
    """In words of the textbook (ZeRO, arXiv 1910.02054, section 5; hybrid: PyTorch FSDP, arXiv 2304.11277, 3.2.2)."""

    settings: Settings
    shards: int  # of 4 devices
    gathers: int  # of a layer, in a micro batch
    reduces_replicas: bool


STATES = ("step", "exp_avg", "exp_avg_sq")
STRATEGIES = {
    "FULL_SHARD": Strategy({"sharding.strategy": "FULL_SHARD"}, 4, 2, False),
    "SHARD_GRAD_OP": Strategy({"sharding.strategy": "SHARD_GRAD_OP"}, 4, 1, False),
    "NO_SHARD": Strategy({"sharding.strategy": "NO_SHARD"}, 1, 0, True),
    "HYBRID_SHARD": Strategy({"sharding.strategy": "HYBRID_SHARD", "sharding.replicas": 2}, 2, 2, True),
    "HYBRID_SHARD_ZERO2": Strategy({"sharding.strategy": "HYBRID_SHARD_ZERO2", "sharding.replicas": 2}, 2, 1, True),
}


# ---------------------------------------------------------------------------------------------------- bytes at rest


def resting(case: Case) -> dict[str, Any]:
    """Parameters, gradients and optimizer state of this process after a backward: FQN -> bytes, shape and device."""

    def measure(tensor: Tensor) -> tuple[int, tuple[int, ...], str]:
        return local_part(tensor).nbytes, tuple(tensor.shape), str(local_part(tensor).device)

    with running(case) as run:
        run.train(1, 1)
        rows = CaseRows().rows(torch.arange(2).numpy())
        with run.backend.accumulate(True):
            run.model(rows["input_ids"], rows["labels"])[0].backward()
        named = dict(run.model.named_parameters())
        states = {fqn: run.optimizer.state[weight] for fqn, weight in named.items() if weight in run.optimizer.state}
        return {
            "parameters": {fqn: measure(p) for fqn, p in named.items()},
            "gradients": {fqn: measure(p.grad) for fqn, p in named.items() if p.grad is not None},
            **{name: {fqn: measure(state[name]) for fqn, state in states.items()} for name in STATES},
        }


@pytest.mark.parametrize("name", STRATEGIES)
def test_each_device_rests_its_share(name: str, workers: GetWorkers) -> None:
    shards = STRATEGIES[name].shards
    answers = workers(FOUR).run(resting, case=Case(steps=1, settings=STRATEGIES[name].settings))
    for kind in ("parameters", "gradients", "exp_avg", "exp_avg_sq"):
        assert answers[0][kind].keys() == answers[0]["parameters"].keys()
        for fqn, (_, shape, _) in answers[0][kind].items():
            sizes = [answer[kind][fqn][0] for answer in answers]
            # Each replica holds each row once.
            assert sum(sizes) == 4 * size_of(shape) * 4 // shards, f"{kind} {fqn}"
            assert max(sizes) <= 4 * size_of(shape, shards) // shards, f"{kind} {fqn}"


def test_frozen_weights_have_neither_gradient_nor_state(workers: GetWorkers) -> None:
    frozen = ("model.embed_tokens.", "model.layers.0.")
    case = Case(steps=2, settings={"model.freeze": ["model.embed_tokens", "model.layers.0"]})
    for answer in workers(FOUR).run(resting, case=case):
        trained = {fqn for fqn in answer["parameters"] if not fqn.startswith(frozen)}
        assert trained < answer["parameters"].keys()
        assert answer["gradients"].keys() == answer["exp_avg"].keys() == trained
    reduced, everything = (
        workers(WIRE).run(jobs.collectives, case=of)[0]["backend"]["reduce_scatter"].calls
        for of in (case, Case(steps=2))
    )
    assert reduced == everything - 2  # the embedding's and the layer's


def test_offloaded_tensors_rest_on_the_host(workers: GetWorkers) -> None:
    """On CPU the host is the device: this shows that the logic runs, not where bytes lie. A GPU must show that."""
    (answer,) = workers(Group("native", 1)).run(resting, case=Case(steps=1, settings={"memory.cpu_offload": True}))
    assert {device for kind in answer.values() for _, _, device in kind.values()} == {"cpu"}


# ------------------------------------------------------------------------------------------------------ collectives


IN_SUITE = [*((name, 1) for name in STRATEGIES), ("HYBRID_SHARD", 3)]
KINDS = {"allgather": "all_gather", "reducescatter": "reduce_scatter", "allreduce": "all_reduce"}


@pytest.mark.parametrize(
    ("name", "micro_batches"),
    [
        pytest.param(name, number, marks=[pytest.mark.proof] * ((name, number) not in IN_SUITE))
        for name in STRATEGIES
        for number in (1, 3)
    ],
)
def test_collectives_are_the_textbooks(name: str, micro_batches: int, workers: GetWorkers) -> None:
    strategy = STRATEGIES[name]
    case = Case(steps=2, micro_batch=3 // micro_batches, settings=strategy.settings)
    answer = workers(WIRE).run(jobs.collectives, case=case)[0]
    shapes = {fqn: tuple(weight.shape) for fqn, weight in reference(Case(steps=1)).initial.items()}
    weights = 4 * sum(size_of(shape, strategy.shards) for shape in shapes.values())
    groups = 5  # the embedding, two layers, the head, the root
    sums = groups if strategy.shards > 1 else 1  # without shards in buckets, which all weights fill but a part of
    counted = answer["backend"]
    gathered = [name for name in shapes if name.startswith("model.layers.")]  # in backward too; the others once
    again = 4 * sum(size_of(shapes[name], strategy.shards) for name in gathered) * (strategy.gathers - 1)
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
    for sent in answer["sent"]:
        calls = {kind: sum(kind in collective.name.replace("_", "") for collective in sent) for kind in KINDS}
        assert calls == {kind: counted.get(name, (0, 0))[0] for kind, name in KINDS.items()}


@pytest.mark.parametrize("name", ["FULL_SHARD", "HYBRID_SHARD_ZERO2"])
def test_gradients_synced_once_a_step_are_reduced_once(name: str, workers: GetWorkers) -> None:
    """Of three micro batches; the curve is test_options.py's."""

    def reduced(**settings: bool) -> Traffic:
        strategy = STRATEGIES[name].settings | {f"sharding.{key}": value for key, value in settings.items()}
        case = Case(steps=2, micro_batch=1, settings=strategy)
        return workers(WIRE).run(jobs.collectives, case=case)[0]["backend"]["reduce_scatter"]

    once, each = reduced(sync_each_micro_batch=False), reduced()
    assert (3 * once.calls, 3 * once.bytes) == tuple(each)


@pytest.mark.parametrize(("number", "in_backward"), [(None, 4), (2, 2)])
def test_units_resharded_over_a_number_of_devices_are_gathered_from_those_in_backward(
    number: int | None, in_backward: int, workers: GetWorkers
) -> None:
    """Two layers, again in backward; the embedding, the head and the root in forward only."""
    case = Case(steps=2, settings={"sharding.reshard_after_forward": number})
    for answer in workers(WIRE).run(jobs.collectives, case=case):
        for sent in answer["sent"]:
            over = [devices for kind, _, _, devices in sent if kind == "c10d::_allgather_base_"]
            assert over == [4] * 5 + [in_backward] * 2


def test_recomputation_gathers_no_unit_again(workers: GetWorkers) -> None:
    plain, recomputed = (
        workers(WIRE).run(jobs.collectives, case=Case(steps=2, checkpointing=checkpointing))[0]["backend"]
        for checkpointing in ("none", "full")
    )
    assert plain == recomputed


DTYPES: dict[str, tuple[Settings, set[str], set[str]]] = {  # gathered in, reduced in
    "bf16": ({}, {"bfloat16"}, {"float32"}),
    "bf16 reduced in bf16": ({"precision.reduce": "bfloat16"}, {"bfloat16"}, {"bfloat16"}),
    "bf16 masters": ({"precision.master": "bfloat16"}, {"bfloat16"}, {"float32"}),
    "norms in fp32": (NORMS, {"bfloat16", "float32"}, {"float32"}),
}


@pytest.mark.parametrize("name", DTYPES)
def test_the_wire_carries_the_dtypes_asked_for(name: str, workers: GetWorkers) -> None:
    settings, gathered, reduced = DTYPES[name]
    case = Case(steps=2, compute="bfloat16", settings=settings)
    wire = workers(WIRE).run(jobs.collectives, case=case)[0]["sent"][0]
    gathers, reductions = (
        [collective for collective in wire if collective.name == f"c10d::{op}_base_"]
        for op in ("_allgather", "_reduce_scatter")
    )
    assert {gather.dtype for gather in gathers} == gathered
    assert {reduction.dtype for reduction in reductions} == reduced
    if name == "norms in fp32":
        norms = sum(gather.bytes for gather in gathers if gather.dtype == "float32")
        assert norms == 4 * 72 * (2 * 2 * 2 + 1)  # two norms a layer, gathered twice, and the root's


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.last = nn.Linear(8, 1)

    def forward(self, inputs: Tensor, branch: int) -> Tensor:
        return self.last(torch.tanh(self.branches[branch](inputs))).sum()


def gradients_of_branches() -> None:
    """Each replica's rows take another branch: all get the sums, and no gradient of what none uses."""
    config = make_config(sharding={"strategy": "NO_SHARD"})
    with patch.object(groups, "BUCKET_BYTES", 300), jobs.open_group(config) as backend:
        model: Any = shard(Branches, config, backend)[0]
        plain = Branches()
        plain.load_state_dict(model.state_dict())
        rank, ranks = backend.process.index, backend.process.count
        rows = [[torch.full((1, 8), 0.1 * (1 + process + 2 * number)) for number in (0, 1)] for process in range(ranks)]

        def train() -> None:
            for last, row in enumerate(rows[rank]):
                with backend.accumulate(bool(last)):
                    model(row, rank).backward()

        def assert_sums(but: tuple[str, ...] = ()) -> None:
            for fqn, weight in plain.named_parameters():
                actual = model.get_parameter(fqn).grad
                if weight.grad is None or fqn in but:
                    assert actual is None, fqn
                else:
                    torch.testing.assert_close(actual, weight.grad)

        for process in range(ranks):
            for row in rows[process]:
                plain(row, process).backward()
        train()
        assert_sums()
        [of_model] = cast(Any, backend)._sums.values()
        assert len(of_model._buckets) > 1
        model.zero_grad()
        with backend.accumulate(True, model):
            model(rows[rank][0], rank).backward()
            with pytest.raises(BackendError, match="a weight got a second gradient"):
                model(rows[rank][0], rank).backward()
        model.zero_grad()
        for row in rows[rank]:  # a second context adds its sums to those of the first
            with backend.accumulate(True):
                for part in (0.25, 0.75):
                    (part * model(row, rank)).backward()
        assert_sums()
        model.zero_grad()
        model.last.requires_grad_(False)  # the hooks of an earlier step know it
        train()
        assert_sums(but=("last.weight", "last.bias"))


def test_replicas_sum_gradients_of_weights_that_only_some_use(workers: GetWorkers) -> None:
    workers(PROCESSES).run(gradients_of_branches)


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


class Backwards(nn.Module):
    """Runs its layers from the last to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))
        self.scale = nn.Parameter(torch.empty(64))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs * self.scale
        for number in (3, 2, 1, 0):
            with record_function(f"compute layers.{number}"):
                hidden = torch.tanh(self.layers[number](hidden))
        return hidden.sum()


def order_of_gathers(policy: dict[str, Any]) -> str:
    """What a step after the first does, in the words of `ORDERS`; "b" is a product in backward."""
    with torch.device("meta"):
        model = Backwards()
    units = tuple(f"layers.{number}" for number in range(4))
    layouts = {fqn: weight_spec(weight.dim()) for fqn, weight in model.named_parameters()}
    backend, _ = jobs.open_case(Case())
    with backend:
        backend.shard_model(
            model,
            ShardPolicy(units, layers=units, layouts=layouts, **policy),
            lambda _, part: torch.full([s.stop - s.start for s in part], 0.1),
        )

        def step() -> None:
            with backend.accumulate(True):
                model(torch.ones(2, 64)).backward()

        step()
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            step()
    events = sorted(trace.events() or [], key=lambda event: event.time_range.start)
    return " ".join(word for event in events if (word := _word(event.name)))


def _word(name: str) -> str:
    if name == "MmBackward0":
        return "b"
    match = re.fullmatch(r"(FSDP::all_gather|FSDP::post_backward_reduce|compute)(?: \(?(?:layers\.(\d)\)?))?", name)
    letters = {"FSDP::all_gather": "g", "FSDP::post_backward_reduce": "r", "compute": "c"}
    return "" if match is None else letters[match[1]] + (match[2] or "root")


@pytest.mark.parametrize(("name", "forward", "when", "units", "backward"), ORDERS, ids=[name for name, *_ in ORDERS])
def test_units_are_gathered_ahead_in_the_order_in_which_they_run(
    name: str, forward: int, when: str, units: int, backward: str, workers: GetWorkers
) -> None:
    policy = {"forward_prefetch": forward, "backward_prefetch": when, "backward_prefetch_units": units}
    policy |= {"recompute": ("layers.2", "layers.0") if name == "recomputed" else ()}
    for order in workers(PROCESSES).run(order_of_gathers, policy=policy):
        assert order == f"groot {FORWARD[forward]} {backward}"


# ------------------------------------------------------------------------------------------------------ equal curves

RECOMPUTED = {"memory.gradient_checkpointing": "full"}
POST = {"sharding.forward_prefetch": 1, "sharding.backward_prefetch": "BACKWARD_POST"}


def in_float32(module: str, model: str = "llama") -> tuple[Group, Case]:
    return TWO, Case(model, compute="bfloat16", settings={"precision.modules": {module: "float32"}})


# What the pairs of test_options.py don't hold.
CURVES: dict[str, tuple[Group, Case]] = {
    "resharded over 2": (FOUR, Case(settings={"sharding.reshard_after_forward": 2, **RECOMPUTED})),
    "attention kept": (FOUR, Case(checkpointing="selective", settings={"memory.save_ops": ["attention"]})),
    "units in units, post": (TWO, Case(settings={"sharding.wrap_modules": ["*mlp", "*q_proj"], **RECOMPUTED, **POST})),
    "head in fp32": in_float32("lm_head"),
    "tied head in fp32": in_float32("lm_head", "llama_tied"),
    "train only": (TWO, Case(settings={"model.train_only": ["model.layers.[1-9].mlp", "lm_head"], **RECOMPUTED})),
    "a layer in fp32": in_float32("model.layers.0"),
}
CURVES_IN_SUITE = ("resharded over 2", "units in units, post", "tied head in fp32", "train only")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.proof] * (name not in CURVES_IN_SUITE)) for name in CURVES]
)
def test_no_option_changes_the_curve(name: str, run: Run) -> None:
    group, case = CURVES[name]
    assert_equal_curves(run(group, case), case, BF16_20_STEPS if case.compute == "bfloat16" else None)


@pytest.mark.parametrize(
    "settings",
    [
        {"sharding.forward_prefetch": 2, "sharding.backward_prefetch_units": 2},
        pytest.param(RECOMPUTED | {"sharding.backward_prefetch": "BACKWARD_POST"}, marks=pytest.mark.proof),
        pytest.param({"sharding.reshard_after_forward": 2}, marks=pytest.mark.proof),
    ],
    ids=["prefetch", "recomputed", "resharded over two"],
)
def test_an_evaluation_is_no_first_forward_and_leaves_shards(settings: Settings, workers: GetWorkers) -> None:
    """What is gathered ahead follows the first forward of training, and all rests as shards after an evaluation."""
    case = evaluated_case({"train.micro_batch": 3, **settings})
    assert_evaluation_changes_nothing(workers(WIRE).run(evaluated, case=case, rows=53, early=True))


def test_a_loop_that_reads_no_times_of_forwards_keeps_none() -> None:
    model = nn.Linear(2, 2)
    times = ComputeTime(model, [], torch.device("cpu"))
    model(torch.ones(2))
    assert math.isnan(times.take())
    model(torch.ones(2))
    assert times.take() > 0
