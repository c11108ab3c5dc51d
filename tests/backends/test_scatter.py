"""Gradients reduce-scattered along each axis of a torus: equal curves to those of the compiler's own sums.

CPU devices say that they are chips of a torus; what the TPU compiler makes of it is in tests/plan/test_tpu.py.
"""

from dataclasses import replace
from itertools import product
from math import prod
from typing import Any
from unittest.mock import patch

import jobs
import pytest
import torch
from cases import ARCHITECTURES, Case
from jobs import device_count
from test_xla import xla_run
from workers import GetWorkers, Group

from portable_fsdp.backends.torch_xla.spmd import sums
from portable_fsdp.backends.torch_xla.spmd.sums import Scatter, scatter_over
from portable_fsdp.models.loss import LossInput

STEPS = 6
LLAMA = {"model.architecture": ARCHITECTURES["llama"] | {"vocab_size": 1024}}
"""4 and 8 devices divide its embedding and its hidden size, and not its MLP's 150 rows."""
GPT2 = {"model.architecture": ARCHITECTURES["gpt2"] | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)}
LORA = {"model.lora": {"r": 8, "alpha": 16.0}, "precision.frozen": "bfloat16"}
FLOAT32_SUMS = {"precision.reduce": "float32", "precision.modules": {"*norm*": "float32"}}
HEAD = {"precision.modules": {"lm_head": "float32"}}
SCAN = {"compile.scan_layers": True}
FROZEN = {"model.freeze": ["model.embed_tokens", "model.layers.0.self_attn"]}


def case(settings: dict[str, Any], model: str = "llama", strategy: str = "FULL_SHARD", **more: Any) -> Case:
    replicas = {"sharding.replicas": 2} if strategy.startswith("HYBRID") else {}
    return Case(model, STEPS, strategy=strategy, settings={**settings, **replicas}, **more)


def proof(name: str, torus: tuple[int, ...], of: Case) -> Any:
    return pytest.param(torus, of, id=name, marks=pytest.mark.proof)


CASES = [
    pytest.param((1, 2, 2), case(LLAMA, strategy="SHARD_GRAD_OP"), id="grad_op"),
    proof("two slices, grad_op", (2, 2, 2), case(LLAMA, strategy="SHARD_GRAD_OP")),
    proof("bfloat16, scan", (1, 2, 2), case(LLAMA | SCAN, compute="bfloat16", checkpointing="full")),
    # What a module takes and gives is cast around the layer whose gradient is summed here.
    proof("head in float32", (1, 2, 2), case(LLAMA | HEAD, compute="bfloat16")),
    proof("gpt2, replicas, micro batches", (1, 2, 2), case(GPT2, "gpt2", "HYBRID_SHARD", micro_batch=1)),
    proof("float32 sums", (1, 2, 2), case(LLAMA | FLOAT32_SUMS, compute="bfloat16", checkpointing="full")),
    proof("frozen", (1, 2, 2), case(LLAMA | FROZEN, checkpointing="full")),
    proof("scan, grad_op", (1, 2, 2), case(LLAMA | SCAN, strategy="SHARD_GRAD_OP")),
    proof("tied", (1, 2, 2), case({}, "llama_tied")),
    proof("adapters", (1, 2, 2), case(LLAMA | LORA, compute="bfloat16")),
    proof("eight", (1, 2, 4), case(LLAMA)),
    proof("eight, replicas in slices", (2, 2, 2), case(LLAMA, strategy="HYBRID_SHARD", compute="bfloat16")),
]


def xla_run_on_chips(case: Case, torus: tuple[int, ...], global_batch: int) -> dict[str, Any]:
    """As `xla_run`, on CPU devices that say where on a torus they are: slices, y, x. Empty: nowhere, as they are.

    Besides `head_chunks`: how often the head's gradient was computed for some of the positions, and in which dtypes.
    """
    places = list(product(*map(range, torus))) if torus else []
    chips = [{"name": f"TPU:{i}", "slice_index": at, "coords": [x, y, 0]} for i, (at, y, x) in enumerate(places)]
    rows = {"train.global_batch": global_batch, "train.micro_batch": case.micro_batch or global_batch // device_count()}
    with (
        _chips(chips or [{"name": "CPU:0"}]),
        patch.object(sums, "LARGEST_OF_COMPILER", 1),
        patch.object(sums, "POSITIONS", 16),
        patch.object(LossInput, "gradient", autospec=True, side_effect=LossInput.gradient) as chunks,
        patch.object(jobs, "GLOBAL_BATCH", global_batch),
    ):
        run = xla_run(replace(case, settings=case.settings | rows))
    dtypes = {str(call.args[1].dtype).removeprefix("torch.") for call in chunks.call_args_list}
    return {**run, "head_chunks": chunks.call_count, "head_dtypes": dtypes}


def torus_of_chips(chips: list[dict[str, Any]]) -> tuple[int, ...]:
    with _chips(chips):
        return sums.torus_of_run()


def _chips(attributes: list[dict[str, Any]]) -> Any:
    import torch_xla.runtime

    return patch.object(torch_xla.runtime, "global_runtime_device_attributes", lambda: attributes)


@pytest.mark.xla
@pytest.mark.proof
@pytest.mark.parametrize(("torus", "of"), CASES)
def test_the_curve_is_that_of_the_compilers_sums(
    torus: tuple[int, ...], of: Case, workers: GetWorkers, request: pytest.FixtureRequest
) -> None:
    group = workers(Group("xla", prod(torus)))
    # The head of a llama of 1,024 words; no device holds a part of 1,009, nor of what is frozen.
    has_head = of.settings.get("model.architecture", {}).get("vocab_size") == 1024
    has_head = has_head and "adapters" not in request.node.callspec.id
    # In bfloat16 all logits at once round the loss's scale, and so every gradient, by up to 2e-3. Chunks don't.
    exact = replace(of, compute="float32") if has_head else of
    by_axis, plain = (
        group.run(xla_run_on_chips, torus=on, case=ran, global_batch=24)[0] for on, ran in ((torus, of), ((), exact))
    )
    bound = 1e-5 if of.compute == "float32" else 2e-3
    for key in ("loss", "grad_norm"):
        curves = [torch.tensor([step[key] for step in run["metrics"]]) for run in (by_axis, plain)]
        torch.testing.assert_close(*curves, rtol=bound, atol=0.0)
    scatters = [
        [kind for program in run["programs"].values() for kind in program["collectives"] if "scatter" in kind]
        for run in (by_axis, plain)
    ]
    assert scatters == [["reduce_scatter f32"], []]  # XLA on the CPU sums nothing in bfloat16
    assert (by_axis["head_chunks"] > STEPS, plain["head_chunks"]) == (has_head, 0)
    in_float32 = "lm_head" in of.settings.get("precision.modules", {})
    assert by_axis["head_dtypes"] == ({"float32" if in_float32 else of.compute} if has_head else set())
    assert by_axis["compilations"] == by_axis["expected_compilations"]


@pytest.mark.parametrize(
    ("torus", "axes", "expected"),
    [
        ((1, 4, 4), (1, 16), Scatter(1, 1, (4, 4))),
        ((1, 4, 2, 2), (1, 16), Scatter(1, 1, (4, 2, 2))),
        ((1, 2, 2, 2), (1, 8), Scatter(1, 1, (2, 2, 2))),
        ((2, 4, 4), (1, 32), Scatter(1, 2, (4, 4))),
        ((2, 4, 4), (2, 16), Scatter(2, 1, (4, 4))),
        ((1, 4, 4), (2, 8), Scatter(2, 1, (2, 4))),
        ((1, 4, 4), (8, 2), Scatter(8, 1, (2,))),
        ((1, 4, 4), (16, 1), None),  # NO_SHARD
        ((1, 2, 4), (1, 8), None),  # libtpu's own
        ((1, 2, 2, 1), (1, 4), None),
        ((), (1, 8), None),
        ((1, 4, 4), (1, 8), None),  # not this mesh's chips
        ((1, 3, 4), (2, 6), None),  # 6 shards are no part of rows of 4
        # Groups of replicate x shard devices would leave the other devices without a part of the sum.
        ((1, 4, 4), (1, 8, 2), None),
        ((2, 4, 4), (1, 16, 2), None),
        ((1, 4, 2, 2), (1, 4, 4), None),
        ((1, 4, 4), (1, 16, 1), Scatter(1, 1, (4, 4))),
    ],
)
def test_the_axes_of_a_mesh(torus: tuple[int, ...], axes: tuple[int, ...], expected: Scatter | None) -> None:
    """Replicas, shards, and perhaps devices of another axis."""
    assert scatter_over(torus, dict(zip(("replicate", "shard", "tensor"), axes, strict=False))) == expected


@pytest.mark.xla
def test_a_run_reads_its_torus_from_its_chips(workers: GetWorkers) -> None:
    chips = [{"name": f"TPU:{i}", "coords": [i % 4, i // 4, 0]} for i in range(8)]
    group = workers(Group("xla", 4))
    assert group.run(torus_of_chips, chips=chips[::-1])[0] == (1, 1, 2, 4)
    two = [{**chip, "name": f"TPU:{i + 8 * at}", "slice_index": at} for at in (0, 1) for i, chip in enumerate(chips)]
    assert group.run(torus_of_chips, chips=two)[0] == (2, 1, 2, 4)
    snake = [{**chip, "coords": chips[i]["coords"]} for chip, i in zip(chips, (0, 1, 2, 3, 7, 6, 5, 4), strict=True)]
    cores = [{"name": f"TPU:{i}", "coords": [i // 2, 0, 0], "core_on_chip": i % 2} for i in range(8)]
    for others in (snake, cores, [{"name": "CPU:0"}]):
        assert group.run(torus_of_chips, chips=others)[0] == ()
