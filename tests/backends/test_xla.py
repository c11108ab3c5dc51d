"""XLA SPMD: what each option does to the curve, to the bytes of a device, and to the program that XLA compiled.

One run of each case answers all three. Its program is read after partitioning, as a worker writes it whose XLA_FLAGS
say so.
"""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from assemble import assemble, assert_equal_states
from cases import ARCHITECTURES, GLOBAL_BATCH, Case
from test_contract import evaluated_case
from test_curves import BF16_20_STEPS, assert_equal_curves
from workers import Group, JobFailed, Workers

pytestmark = pytest.mark.xla

LAYERS, DEVICES, STEPS = 2, 4, 10
SCAN = {"compile.scan_layers": True}
DEEPER = {"model.architecture": {**ARCHITECTURES["llama"], "num_hidden_layers": 4}}
FROZEN = {"model.freeze": ["model.embed_tokens", "model.layers.0"]}
FLOAT32_SUMS = {"precision.reduce": "float32", "precision.modules": {"*norm*": "float32"}}
NORMS = {"precision.modules": {"*norm*": "float32", "lm_head": "float32"}}


def case(
    strategy: str = "FULL_SHARD", checkpointing: str = "none", micro_batch: int | None = None, **more: Any
) -> Case:
    settings = {"sharding.replicas": 2} if strategy.startswith("HYBRID") else {}
    settings |= more.pop("settings", {})
    return Case(
        steps=STEPS, strategy=strategy, checkpointing=checkpointing, micro_batch=micro_batch, settings=settings, **more
    )


CASES = {
    # First, in a process that has traced nothing: autograd has numbered few of the operations that run again.
    "grad_op, micro batches": case("SHARD_GRAD_OP", "full", 1),
    "full": case(),
    "full, recompute": case(checkpointing="full"),
    "full, every second": case(checkpointing="selective", settings={"memory.every": 2}),
    "full, frozen, recompute": case(checkpointing="full", settings=FROZEN),
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
    "norms in float32": case(compute="bfloat16", settings=NORMS),
    "float32 sums": case(compute="bfloat16", settings=FLOAT32_SUMS),
    "float32 sums, recompute, frozen": case("HYBRID_SHARD", "full", compute="bfloat16", settings=FLOAT32_SUMS | FROZEN),
    "float32 sums, grad_op, micro batches": case("SHARD_GRAD_OP", "full", 1, compute="bfloat16", settings=FLOAT32_SUMS),
}
FOR_PROOFS = {
    "hybrid_zero2",
    "full, frozen, recompute",
    "norms in float32",
    "float32 sums",
    "float32 sums, grad_op, micro batches",
}
"""Combinations that test_options.py has too."""
NAMES = [pytest.param(name, marks=pytest.mark.proof) if name in FOR_PROOFS else name for name in CASES]

Answer = dict[str, Any]
GetAnswer = Callable[[str], Answer]


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GetAnswer]:
    """What the run of a case says, run once."""
    folder = tmp_path_factory.mktemp("programs")
    flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=train_step|micro_batch"
    workers = Workers(Group("xla", DEVICES), xla_flags=flags)

    @cache
    def get(name: str) -> Answer:
        return workers.run("xla_run", case=CASES[name], folder=str(folder))[0]

    yield get
    workers.close()


@pytest.mark.parametrize("name", NAMES)
def test_the_curve_is_that_of_a_plain_loop_in_known_programs(answer: GetAnswer, name: str) -> None:
    """And the state tiles once (C4): the first replica alone writes copies."""
    assert_equal_curves([answer(name)], CASES[name], BF16_20_STEPS if CASES[name].compute == "bfloat16" else None)
    expected = 2 if CASES[name].micro_batch else 1
    assert (answer(name)["compilations"], answer(name)["expected_compilations"]) == (expected, expected)
    assemble([answer(name)["final"]])


def test_the_curve_on_a_number_of_devices_that_divides_nothing(workers: Callable[[Group], Workers]) -> None:
    odd = case("SHARD_GRAD_OP", "full", settings={"sharding.wrap": "SIZE_BASED_WRAP", "sharding.min_num_params": 10000})
    assert_equal_curves(workers(Group("xla", 3)).run("train", case=odd), odd)


@pytest.mark.parametrize(
    ("name", "shards"),
    [("full", 4), ("grad_op", 4), ("no_shard", 1), ("hybrid", 2), ("hybrid_zero2", 2), ("scan", 4)],
)
def test_each_device_holds_its_rows_and_no_more(answer: GetAnswer, name: str, shards: int) -> None:
    """After the last step: weights and moments, ceil(rows / shards) rows of each; the last ones are padding."""
    held = answer(name)["held"]
    assert {"lm_head.weight", "exp_avg/lm_head.weight", "exp_avg_sq/model.layers.1.mlp.up_proj.weight"} <= held.keys()
    for key, (shape, on_devices) in held.items():
        rows, rest = (shape[0], shape[1:]) if shape else (1, ())
        expected = (-(-rows // shards) if shape else 1, *rest)
        assert on_devices == [expected if shape else ()] * DEVICES, key


@pytest.mark.parametrize(
    ("name", "times"),
    [
        ("full", 2),  # in forward and in backward
        ("full, recompute", 2),  # in forward, and once for the second run and backward
        ("grad_op", 1),
        ("grad_op, recompute", 1),
        ("hybrid", 2),
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
    scanned = answer("scan, grad_op, four layers")["programs"]["train_step"]
    gathers = [moved.calls for kind, moved in scanned["collectives"].items() if kind.startswith("all_gather ")]
    assert sum(gathers) == 14  # of all layers at once


def test_recomputed_products_are_in_the_program(answer: GetAnswer) -> None:
    """All of a layer's nine products (four by weights of attention, two for its scores, three in the MLP) but one."""
    names = ("full", "full, recompute", "full, every second")
    dots = {name: answer(name)["programs"]["train_step"]["dots"] for name in names}
    assert dots["full, recompute"] - dots["full"] == 8 * LAYERS
    assert dots["full, every second"] - dots["full"] == 8
    micro = answer("grad_op, micro batches")["programs"]
    assert micro.keys() == {"micro_batch"}
    assert micro["micro_batch"]["dots"] > answer("grad_op")["programs"]["train_step"]["dots"]


def test_a_scanned_program_does_not_grow_with_the_layers(answer: GetAnswer) -> None:
    two, four = (answer(name)["programs"]["train_step"] for name in ("scan", "scan, grad_op, four layers"))
    assert two["loops"] == four["loops"] == 2  # forward and backward
    assert two["dots"] == four["dots"] < answer("full")["programs"]["train_step"]["dots"]
    assert answer("scan, recompute")["programs"]["train_step"]["dots"] == two["dots"] + 8


def test_gradients_are_summed_in_float32_where_asked_for(workers: Callable[[Group], Workers]) -> None:
    """Of bfloat16 factors: the products are exact in float64, as is their sum, near enough."""
    group = workers(Group("xla", DEVICES))
    summed, plain = (group.run("xla_gradients", reduce=reduce)[0] for reduce in ("float32", "auto"))
    assert summed.keys() == {"table", "linear", "bias", "conv1d", "conv1d_bias"}
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
    workers: Callable[[Group], Workers], assert_golden: Callable[[Path, str], None]
) -> None:
    messages: list[str] = []
    for name, refused in REFUSED.items():
        with pytest.raises(JobFailed) as failure:
            workers(Group("xla", 1)).run("opened", case=refused, build=True)
        messages.append(f"{name}: {failure.value.kind}\n{failure.value.message}\n")
    assert_golden(Path(__file__).parent / "goldens/refused_on_xla.txt", "\n".join(messages))


def test_scanned_layers_learn_after_an_evaluation_that_came_first(workers: Callable[[Group], Workers]) -> None:
    """What the loop's body was traced to without gradients is no program for a step."""
    (answer,) = workers(Group("xla", DEVICES)).run("evaluated", case=evaluated_case(SCAN), rows=53, early=True)
    assert answer["untrained"].loss > answer["evaluation"].loss
    assert answer["metrics"] == answer["plain"]["metrics"]
    assert_equal_states(assemble([answer["final"]]), assemble([answer["plain"]["final"]]))


HOST = "would run on the host"


@pytest.mark.parametrize(
    ("how", "devices", "problem"),
    [
        ("value", 3, rf"aten::_local_scalar_dense {HOST} in\n.*rows\.sum\(\)\.item"),
        ("operation", 1, rf"aten::_linalg_solve_ex\S* {HOST} in\n.*linalg\.solve"),
        ("operation on an input", 1, rf"aten::_unique2 {HOST} in\n.*torch\.unique"),
        ("gradient", 1, rf"aten::masked_select {HOST} in the backward of\n.*masked_scatter"),
        ("gradient", 3, rf"aten::masked_select {HOST} in the backward of\n.*masked_scatter"),
        ("value of a gradient", 3, rf"aten::_local_scalar_dense {HOST} in\n.*outer\[0\]\.sum\(\) < 0"),
        ("copy of a gradient", 1, r"a value is read on the host in\n.*outer\[0\]\.cpu"),
        ("broken gradient", 1, r"torch_xla fails in the backward of\n.*slogdet"),
        # torch_xla compiles it for one device.
        ("evaluation", 3, r"torch_xla fails in\n.*\.masked_scatter.*\n  aten\.masked_scatter\S*: "),
    ],
)
def test_what_is_no_program_is_refused_by_its_operation_and_line(
    workers: Callable[[Group], Workers], how: str, devices: int, problem: str
) -> None:
    """In forward, in backward and when it is compiled, whatever the number of devices; closing hides nothing."""
    with pytest.raises(JobFailed) as failure:
        workers(Group("xla", devices)).run("no_program", case=case(), how=how)
    assert failure.value.kind == "BackendError"
    assert re.search(rf"'asks': XLA can't compile it: {problem}", failure.value.message)
    assert re.search(r"xla_jobs\.py:\d+: ", failure.value.message)
    assert not re.search("Traceback|stack trace", failure.value.message)


def test_a_backward_before_the_first_device_is_refused_in_one_sentence() -> None:
    """torch counts the devices at a process's first backward: its own words are an assertion and `report a bug`."""
    program = (
        "import torch\n"
        "torch.ones(1, requires_grad=True).sum().backward()\n"
        "from portable_fsdp.backends.torch_xla.runtime import set_environment\n"
        "from portable_fsdp.backends.torch_xla.program import run_program\n"
        "set_environment('cpu')\n"
        "import torch_xla\n"
        "rows = torch.ones(1, device='xla', requires_grad=True)\n"
        "run_program(lambda: rows.sum().backward(), 'backend xla', 'step')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "BackendError: backend xla: expected that no backward runs in a process before" in done.stderr


def test_an_error_of_the_models_own_stays_as_it_is(workers: Callable[[Group], Workers]) -> None:
    with pytest.raises(JobFailed) as failure:
        workers(Group("xla", 1)).run("no_program", case=case(), how="own mistake")
    assert failure.value.kind == "KeyError"


def test_a_program_that_is_compiled_again_is_named_with_the_cause(workers: Callable[[Group], Workers]) -> None:
    """The learning rate changes at each step, and is never the cause."""
    by_change = workers(Group("xla", 1)).run("compiled_again", case=case())[0]
    causes = {
        how: [text.partition("Cause: ")[2] for text in texts if "Cause: " in text] for how, texts in by_change.items()
    }
    before = f"[{GLOBAL_BATCH}, 2] torch.float32"
    assert causes.pop("nothing") == []
    assert causes.pop("shape") == [f"rows changed from {before} to [{GLOBAL_BATCH}, 3, 2] torch.float32."]
    lost = [f"the gradient of second.{name} changed from present to absent" for name in ("weight", "bias")]
    assert causes.pop("gradient") == ["; ".join(lost) + "."]
    assert causes.pop("number") == ["betas of optimizer group 0 changed from (0.5, 0.9) to (0.0, 0.9)."]
    assert [cause[:40] for cause in causes.pop("branch")] == ["no input, gradient or number of the opti"]


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")  # torch's own, on the host
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("LSTM", {"num_layers": 2, "bidirectional": True}),
        ("LSTM", {"proj_size": 2, "bias": False}),
        ("GRU", {"num_layers": 2}),
        ("RNN", {"bidirectional": True, "bias": False, "nonlinearity": "relu"}),
    ],
)
def test_recurrent_layers_are_loops_with_the_values_of_torch(
    workers: Callable[[Group], Workers], kind: str, options: dict[str, Any]
) -> None:
    """Unrolled they would compile for minutes; torch_xla's GRU loses gradients after an evaluation."""
    data = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(1))
    answer = workers(Group("xla", 1)).run("recurrent", case=case(), kind=kind, options=options, data=data)[0]
    torch.manual_seed(0)
    layer: Any = getattr(torch.nn, kind)(3, 3, batch_first=True, **options)
    embedded = data.clone().requires_grad_()
    output, last = layer(embedded)
    states = last if isinstance(last, tuple) else (last,)
    (output.square().sum() + layer(data)[0].cos().sum() + sum(state.sin().sum() for state in states)).backward()
    assert answer.pop("loops") == options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
    expected = {"output": output, "input": embedded.grad, **{name: w.grad for name, w in layer.named_parameters()}}
    torch.testing.assert_close(answer, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("precision", ["highest", "default"])
def test_matmul_precision_holds_while_the_backend_is_open(workers: Callable[[Group], Workers], precision: str) -> None:
    chosen = case(settings={"precision.matmul": precision})
    (before, during, after), product = workers(Group("xla", 1)).run("xla_matmul_precision", case=chosen)[0]
    assert (before, during, after) == ("default", precision, "default")
    assert ("operand_precision={highest,highest}" in product) == (precision == "highest")


@pytest.mark.proof
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("model", ["llama_tied", "qwen3", "gpt2", "opt"])
def test_models_that_can_be_scanned(workers: Callable[[Group], Workers], model: str, checkpointing: str) -> None:
    scanned = case(model=model, checkpointing=checkpointing, settings=SCAN)
    assert_equal_curves(workers(Group("xla", DEVICES)).run("train", case=scanned), scanned)
