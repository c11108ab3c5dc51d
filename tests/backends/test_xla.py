"""XLA SPMD: what each option does to the curve, to the bytes of a device, and to the program that XLA compiled.

One run of each case answers all three. Its program is read after partitioning, as XLA writes it for a worker.
"""

import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import jobs
import pytest
import torch
from cases import ARCHITECTURES, GLOBAL_BATCH, Case, assemble, assert_equal_states
from jobs import device_count, open_case, running
from test_contract import evaluated, evaluated_case
from test_curves import BF16_20_STEPS, assert_equal_curves
from torch import Tensor, nn
from workers import GetWorkers, Group, JobFailed, Workers

from portable_fsdp.plan.hlo import collectives_by_dtype
from portable_fsdp.train.build import shard

pytestmark = pytest.mark.xla

LAYERS, DEVICES, STEPS = 2, 4, 10
SCAN = {"compile.scan_layers": True}
# No other test has this vocabulary, and so this program: XLA dumps a program only when it compiles it.
LLAMA = ARCHITECTURES["llama"] | {"vocab_size": 1010}
DEEPER = {"model.architecture": LLAMA | {"num_hidden_layers": 4}}
FROZEN = {"model.freeze": ["model.embed_tokens", "model.layers.0"]}
FLOAT32_SUMS = {"precision.reduce": "float32", "precision.modules": {"*norm*": "float32"}}


def case(
    strategy: str = "FULL_SHARD", checkpointing: str = "none", micro_batch: int | None = None, **more: Any
) -> Case:
    settings: dict[str, Any] = {} if "model" in more else {"model.architecture": LLAMA}
    settings |= {"sharding.replicas": 2} if strategy.startswith("HYBRID") else {}
    settings |= more.pop("settings", {})
    return Case(
        steps=STEPS, strategy=strategy, checkpointing=checkpointing, micro_batch=micro_batch, settings=settings, **more
    )


CASES = {
    "grad_op, micro batches": case("SHARD_GRAD_OP", "full", 1),
    "full": case(),
    "full, recompute": case(checkpointing="full"),
    "full, every second": case(checkpointing="selective", settings={"memory.every": 2}),
    "grad_op": case("SHARD_GRAD_OP"),
    "grad_op, recompute": case("SHARD_GRAD_OP", "full"),
    "no_shard": case("NO_SHARD"),
    "hybrid": case("HYBRID_SHARD"),
    "hybrid_zero2": case("HYBRID_SHARD_ZERO2", "full"),
    "scan": case(settings=SCAN),
    "scan, recompute": case(checkpointing="full", settings=SCAN),
    "scan, grad_op, four layers": case("SHARD_GRAD_OP", settings=SCAN | DEEPER),
    "small units, some inside others": case(
        checkpointing="full",
        settings={"sharding.wrap": "NO_WRAP", "sharding.wrap_modules": ["model.layers.0", "*.mlp", "*.mlp.up_proj"]},
    ),
    "float32 sums, recompute, frozen": case("HYBRID_SHARD", "full", compute="bfloat16", settings=FLOAT32_SUMS | FROZEN),
}

FRESH = "grad_op, micro batches"
"""In a process that has traced nothing: autograd has numbered few of the operations that run again."""

GetAnswer = Callable[[str], dict[str, Any]]


def xla_run(case: Case) -> dict[str, Any]:
    """A whole run: its metrics, what each device holds after it, and the programs that XLA wrote."""
    with running(case) as run:
        backend = run.backend
        metrics = run.train(1, case.steps)
        held = {fqn: _on_devices(parameter) for fqn, parameter in run.model.named_parameters()}
        for fqn, parameter in run.model.named_parameters():
            for name, value in run.optimizer.state.get(parameter, {}).items():
                held[f"{name}/{fqn}"] = _on_devices(value)
        return {
            "metrics": metrics,
            "held": held,
            "final": run.state(),
            "programs": _programs(backend.devices),
            "compilations": backend.compilations,
            "expected_compilations": backend.expected_compilations,
        }


def _on_devices(tensor: Tensor) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The shape of a global tensor, and that of the piece on each device, padding included."""
    import torch_xla

    bridge: Any = cast(Any, torch_xla)._XLAC
    devices = device_count()
    if tensor.device.type == "cpu" or "devices=" not in bridge._get_xla_sharding_spec(tensor):
        return tuple(tensor.shape), [tuple(tensor.shape)] * devices
    (shards,) = bridge._get_local_shards([tensor])
    return tuple(tensor.shape), [tuple(shard.shape) for shard, _ in shards]


def _programs(devices: int) -> dict[str, Any]:
    """Name -> what stands in the program after partitioning."""
    programs: dict[str, Any] = {}
    for path in Path(os.environ["XLA_PROGRAMS"]).iterdir():
        if path.name.endswith("cpu_after_optimizations.txt"):
            text = path.read_text(errors="ignore")
            gathers = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)
            programs[path.name.split(".")[1]] = {
                "collectives": collectives_by_dtype(text, devices),
                "gathered": [tuple(int(size) for size in shape.split(",")) for shape in gathers],
                "dots": text.count(" dot("),
                "loops": text.count(" while("),
                "copied": re.findall(r" copy\((%param[.\d]*)\)", text),
            }
    return programs


@pytest.fixture(scope="module")
def answer(workers: GetWorkers) -> GetAnswer:
    """What the run of a case says, run once."""

    @cache
    def get(name: str) -> dict[str, Any]:
        group = Group("xla", DEVICES)
        if name != FRESH:
            return workers(group).run(xla_run, case=CASES[name])[0]
        alone = Workers(group)
        try:
            return alone.run(xla_run, case=CASES[name])[0]
        finally:
            alone.close()

    return get


OF_PROOF = (
    "hybrid",
    "grad_op, recompute",
    "scan, recompute",
    "full, every second",
    "small units, some inside others",
    "float32 sums, recompute, frozen",
    "scan, grad_op, four layers",
)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.proof] * (name in OF_PROOF)) for name in CASES])
def test_the_curve_is_that_of_a_plain_loop_in_known_programs(answer: GetAnswer, name: str) -> None:
    """And the state tiles once (C4): the first replica alone writes copies."""
    assert_equal_curves([answer(name)], CASES[name], BF16_20_STEPS if CASES[name].compute == "bfloat16" else None)
    expected = 2 if CASES[name].micro_batch else 1
    assert (answer(name)["compilations"], answer(name)["expected_compilations"]) == (expected, expected)
    assemble([answer(name)["final"]])


@pytest.mark.parametrize(
    ("name", "shards"),
    [("full", 4), ("grad_op", 4), ("no_shard", 1), ("hybrid_zero2", 2), ("scan", 4)],
)
def test_each_device_holds_its_rows_and_no_more(answer: GetAnswer, name: str, shards: int) -> None:
    """After the last step: weights and moments, ceil(rows / shards) rows of each; the last ones are padding."""
    held = answer(name)["held"]
    assert {"lm_head.weight", "exp_avg/lm_head.weight", "exp_avg_sq/model.layers.1.mlp.up_proj.weight"} <= held.keys()
    for key, (shape, on_devices) in held.items():
        rows, rest = (shape[0], shape[1:]) if shape else (1, ())
        expected = (-(-rows // shards) if shape else 1, *rest)
        assert on_devices == [expected if shape else ()] * DEVICES, key


@pytest.mark.parametrize("name", ["full", "grad_op", "no_shard", "hybrid_zero2", "scan"])
def test_weights_and_moments_are_written_over_their_old_values(answer: GetAnswer, name: str) -> None:
    """XLA copies an input whose memory it gave to another's new value: by torch_xla's own order, nearly all."""
    assert answer(name)["programs"]["train_step"]["copied"] == []


@pytest.mark.parametrize(
    ("name", "times"),
    [
        ("full", 2),  # in forward and in backward
        ("full, recompute", 2),  # in forward, and once for the second run and backward
        ("grad_op", 1),
        pytest.param("grad_op, recompute", 1, marks=pytest.mark.proof),
        pytest.param("hybrid", 2, marks=pytest.mark.proof),
        ("hybrid_zero2", 1),
    ],
)
def test_how_often_a_weight_is_gathered(answer: GetAnswer, name: str, times: int) -> None:
    """By the shapes of what is gathered: those of the MLPs' three weights, padded to the shards, or transposed."""
    shards = 2 if name.startswith("hybrid") else DEVICES
    gathered = [tuple(sorted(shape)) for shape in answer(name)["programs"]["train_step"]["gathered"]]
    padded = -(-150 // shards) * shards  # rows of gate and up; the columns of down are whole
    of_mlps = [shape for shape in gathered if shape in {(72, padded), (72, 150)}]
    assert len(of_mlps) == 3 * LAYERS * times


def test_replicas_gather_nothing(answer: GetAnswer) -> None:
    program = answer("no_shard")["programs"]["train_step"]
    assert program["gathered"] == []
    assert program["collectives"]["all_reduce f32"].calls >= 21  # a gradient each


def test_kept_copies_are_gathered_once_in_all(answer: GetAnswer) -> None:
    """Each of the 21 weights; besides them, the gradient of what the embedding gave."""
    gathered = answer("grad_op")["programs"]["train_step"]["gathered"]
    assert len(gathered) == 22
    assert gathered.count((GLOBAL_BATCH * 24, 72)) == 1


@pytest.mark.proof
def test_kept_copies_of_scanned_layers_are_gathered_at_once(answer: GetAnswer) -> None:
    scanned = answer("scan, grad_op, four layers")["programs"]["train_step"]
    gathers = [moved.calls for kind, moved in scanned["collectives"].items() if kind.startswith("all_gather ")]
    assert sum(gathers) == 14  # of all layers at once


def test_recomputed_products_are_in_the_program(answer: GetAnswer) -> None:
    """All of a layer's nine products (four by weights of attention, two for its scores, three in the MLP) but one."""
    dots = {name: answer(name)["programs"]["train_step"]["dots"] for name in ("full", "full, recompute")}
    assert dots["full, recompute"] - dots["full"] == 8 * LAYERS
    micro = answer("grad_op, micro batches")["programs"]
    assert micro.keys() == {"micro_batch"}
    assert micro["micro_batch"]["dots"] > answer("grad_op")["programs"]["train_step"]["dots"]


@pytest.mark.proof
def test_every_second_layer_is_recomputed(answer: GetAnswer) -> None:
    plain, every_second = (answer(name)["programs"]["train_step"]["dots"] for name in ("full", "full, every second"))
    assert every_second - plain == 8


@pytest.mark.proof
def test_a_scanned_program_does_not_grow_with_the_layers(answer: GetAnswer) -> None:
    two, four = (answer(name)["programs"]["train_step"] for name in ("scan", "scan, grad_op, four layers"))
    assert two["loops"] == four["loops"] == 2  # forward and backward
    assert two["dots"] == four["dots"] < answer("full")["programs"]["train_step"]["dots"]


@pytest.mark.proof
def test_a_recomputed_loop_has_the_products_of_one_layer_again(answer: GetAnswer) -> None:
    plain, again = (answer(name)["programs"]["train_step"] for name in ("scan", "scan, recompute"))
    assert again["dots"] == plain["dots"] + 8


class _Products(nn.Module):
    """An embedding, a linear layer and GPT-2's, each with an output gradient of its own; no dimension divides by 4."""

    def __init__(self) -> None:
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        self.table, self.linear, self.conv1d = nn.Embedding(11, 6), nn.Linear(6, 7), Conv1D(5, 6)

    def get_output_embeddings(self) -> None:
        return None

    def forward(self, ids: Tensor, x: Tensor, table: Tensor, linear: Tensor, conv1d: Tensor) -> Tensor:
        return (self.table(ids) * table).sum() + (self.linear(x) * linear).sum() + (self.conv1d(x) * conv1d).sum()


def xla_gradients(reduce: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Name -> the gradient of a bfloat16 weight, and the same in float64."""
    draw = torch.Generator().manual_seed(3)
    x, *outer = (torch.randn(GLOBAL_BATCH, 40, size, generator=draw).bfloat16() for size in (6, 6, 7, 5))
    batch = {"ids": torch.randint(11, x.shape[:2], generator=draw), "x": x}
    batch |= dict(zip(("table", "linear", "conv1d"), outer, strict=True))
    backend, config = open_case(Case(compute="bfloat16", reduce=reduce))
    with backend:
        model, _ = shard(_Products, config, backend)

        def gradients(batch: dict[str, Tensor]) -> dict[str, Tensor]:
            model(**batch).backward()
            return {fqn: cast(Tensor, weight.grad) for fqn, weight in model.named_parameters()}

        actual = backend.fetch(backend.compile(gradients, "gradients")(backend.place(batch))).result()
    exact = _Products().double()
    exact(**{name: value.double() if value.is_floating_point() else value for name, value in batch.items()}).backward()
    return {fqn: (actual[fqn], cast(Tensor, weight.grad)) for fqn, weight in exact.named_parameters()}


def test_gradients_are_summed_in_float32_where_asked_for(workers: GetWorkers) -> None:
    """Of bfloat16 factors: the products are exact in float64, as is their sum, near enough."""
    group = workers(Group("xla", DEVICES))
    summed, plain = (group.run(xla_gradients, reduce=reduce)[0] for reduce in ("float32", "auto"))
    assert len(summed) == 5
    for name, (gradient, exact) in summed.items():
        assert gradient.dtype == torch.float32
        assert float((gradient - exact).norm() / exact.norm()) < 1e-6, name
        assert float((plain[name][0] - exact).norm() / exact.norm()) > 1e-4, name


def _one_layer_in_float32(layer: int) -> Case:
    return case(compute="bfloat16", settings=SCAN | {"precision.modules": {f"model.layers.{layer}.mlp": "float32"}})


def _with_units(*classes: str) -> Case:
    return case(settings=SCAN | {"sharding.wrap_classes": list(classes)})


REFUSED = {
    "norms are no products": case(compute="bfloat16", reduce="float32"),
    "layers differ": case(model="gemma2", settings=SCAN),
    "not in a list": _with_units("LlamaMLP"),
    "one layer": _with_units("LlamaModel"),
    "a unit in a layer": _with_units("LlamaDecoderLayer", "LlamaMLP"),
    "the first layer in float32": _one_layer_in_float32(0),
    "the second layer in float32": _one_layer_in_float32(1),
}


def test_what_a_model_cannot_have_is_refused_when_it_is_laid_out(
    workers: GetWorkers, assert_golden: Callable[[Path, str], None]
) -> None:
    messages: list[str] = []
    for name, refused in REFUSED.items():
        with pytest.raises(JobFailed) as failure:
            workers(Group("xla", DEVICES)).run(jobs.opened, case=refused, build=True)
        messages.append(f"{name}: {failure.value.kind}\n{failure.value.message}\n")
    assert_golden(Path(__file__).parent / "goldens/refused_on_xla.txt", "\n".join(messages))


@pytest.mark.proof
def test_scanned_layers_learn_after_an_evaluation_that_came_first(workers: GetWorkers) -> None:
    """What the loop's body was traced to without gradients is no program for a step."""
    (answer,) = workers(Group("xla", DEVICES)).run(evaluated, case=evaluated_case(SCAN), rows=53, early=True)
    assert answer["untrained"].loss > answer["evaluation"].loss
    assert answer["metrics"] == answer["plain"]["metrics"]
    assert_equal_states(assemble([answer["final"]]), assemble([answer["plain"]["final"]]))


@pytest.mark.proof
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("model", ["llama_tied", "qwen3", "gpt2", "opt"])
def test_models_that_can_be_scanned(workers: GetWorkers, model: str, checkpointing: str) -> None:
    scanned = case(model=model, checkpointing=checkpointing, settings=SCAN)
    assert_equal_curves(workers(Group("xla", DEVICES)).run(jobs.train, case=scanned), scanned)
