"""The third engine, beyond the contract: its own options, its layouts, and its checkpoints on the other engines."""

import re
from typing import Any, cast

import pytest
import torch
from cases import Case, CaseRows, assemble, assert_equal_states
from jobs import running
from reference import reference
from test_curves import BF16_20_STEPS, assert_equal_curves
from workers import GetWorkers, Group, Run

from portable_fsdp.backends.open import local_processes
from portable_fsdp.backends.state import parameter_slots
from portable_fsdp.backends.torch_xla.fsdp1.shards import boxes, check_rows
from portable_fsdp.backends.torch_xla.runtime import require_devices
from portable_fsdp.runtime.errors import BackendError

pytestmark = pytest.mark.xla


ONE, TWO, FOUR = (Group("xla_fsdp1", devices) for devices in (1, 2, 4))
NO_DECAY = {"name": "adamw", "lr": 1e-3, "weight_decay": 0.0}
FLAT = {"xla_fsdp1.flatten_parameters": True}
FROZEN = {"model.freeze": ["model.embed_tokens", "*norm*"]}
LORA = {"model.lora": {"r": 5, "alpha": 160.0}}


REPLICAS = {"sharding.replicas": 2}
IN_SUITE: dict[str, tuple[Group, Case]] = {
    "frozen, recomputed": (TWO, Case(settings=FROZEN, checkpointing="full", micro_batch=3)),
}
PROOFS: dict[str, tuple[Group, Case]] = {
    "four devices": (FOUR, Case("llama_tied")),
    "cut flat": (TWO, Case(settings={"xla_fsdp1.shard_param_on_dim_0": False}, strategy="SHARD_GRAD_OP")),
    "bfloat16": (TWO, Case(compute="bfloat16", reduce="float32", checkpointing="full")),
    "one device": (ONE, Case("llama_tied")),
    "replicas": (FOUR, Case(strategy="HYBRID_SHARD", settings=REPLICAS)),
    "replicas, kept gathered": (FOUR, Case(strategy="HYBRID_SHARD_ZERO2", settings=REPLICAS)),
    "joined": (TWO, Case("llama_tied", optim=NO_DECAY, settings=FLAT)),
    "joined adapters": (TWO, Case(optim=NO_DECAY, settings=LORA | FLAT, micro_batch=3)),
    "recomputed units in units": (
        TWO,
        Case(settings={"sharding.wrap_modules": ["model.layers.*.mlp"]}, checkpointing="full"),
    ),
}


@pytest.mark.parametrize("name", [*IN_SUITE, *(pytest.param(name, marks=pytest.mark.proof) for name in PROOFS)])
def test_no_option_changes_the_curve(name: str, run: Run) -> None:
    """The curve of a plain loop, one program a kind, initial weights of (seed, name), and states that tile."""
    group, case = (IN_SUITE | PROOFS)[name]
    answers = run(group, case)
    assert_equal_curves(answers, case, BF16_20_STEPS if case.compute == "bfloat16" else None)
    initial, final = (assemble([answer[at] for answer in answers]) for at in ("initial", "final"))
    if "model.lora" not in case.settings:
        assert_equal_states({key: value for key, value in initial.items() if "/" not in key}, reference(case).initial)
    for answer in answers:
        # Fewer where an earlier job of the worker compiled the same program.
        assert answer["compilations"] <= answer["expected_compilations"]
        if name in ("one device", "four devices", "frozen, recomputed"):
            assert (answer["names"], answer["ties"]) == (answer["unwrapped_names"], answer["unwrapped_ties"])
    if case.settings == FROZEN:
        frozen = [key for key in final if "norm" in key or "embed" in key]
        assert frozen
        assert_equal_states({key: final[key] for key in frozen}, {key: initial[key] for key in frozen})
        assert not [key for key in frozen if "/" in key]
    if case.strategy.startswith("HYBRID"):
        held = [[data.shape[0] for _, data in answer["final"]["lm_head.weight"][2]] for answer in answers]
        assert held == [[505], [504], [], []]  # of 1009 rows: one replica writes, and it has them all


# ------------------------------------------------------------------------- each option is seen in the step's program


def fsdp1_program(case: Case) -> dict[str, Any]:
    """What forward and backward of a step would run, read from the traced program; nothing of it runs."""
    import torch_xla

    with running(case) as run:
        rows = run.backend.place(CaseRows().rows(torch.arange(2).numpy()))
        parameters = [p for group in run.optimizer.param_groups for p in group["params"]]
        before = {parameter: parameter.detach().cpu() for parameter in parameters}
        run.model(rows["input_ids"], rows["labels"])[0].backward()
        text: str = cast(Any, torch_xla)._XLAC._get_xla_tensors_hlo([p.grad for p in parameters])
        for parameter in parameters:  # barriers made them results of what shall not run
            parameter.grad = None
            parameter.data = run.backend.place({"as before": before[parameter]})["as before"]
        out: dict[str, Any] = {
            name: len(re.findall(rf" {name}\(", text)) for name in ("all-gather", "reduce-scatter", "all-reduce", "dot")
        }
        out["reduced"] = set(re.findall(r"= \(?(\w+)\[[^=]* reduce-scatter\(", text))
        out["gathered"] = set(re.findall(r"= \(?(\w+)\[[^=]* all-gather\(", text))
        out["pinned"] = text.count("constrain_layout=true")
        out["shards"] = {name: tuple(p.shape) for name, p in run.model.named_parameters()}
        return out


def _program(workers: GetWorkers, case: Case) -> dict[str, Any]:
    return workers(TWO).run(fsdp1_program, case=case)[0]


@pytest.mark.proof
def test_shard_grad_op_gathers_each_layer_once(workers: GetWorkers) -> None:
    full, once = (_program(workers, Case(strategy=strategy)) for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"))
    # All but the last norm, the root's own, which stays until backward in any case: two layers, embedding, head.
    assert full["all-gather"] - once["all-gather"] == 2 * 9 + 2
    assert full["reduce-scatter"] == once["reduce-scatter"] == once["all-gather"]


@pytest.mark.proof
@pytest.mark.parametrize(
    "settings", [{}, FROZEN, {"sharding.wrap": "NO_WRAP"}], ids=["units", "after_frozen", "layers_that_are_no_units"]
)
def test_gradient_checkpointing_computes_again(settings: dict[str, Any], workers: GetWorkers) -> None:
    """Where the first layer's input wants no gradient too, and where a layer is no unit."""
    none, full = (_program(workers, Case(checkpointing=kind, settings=settings)) for kind in ("none", "full"))
    assert full["dot"] >= none["dot"] + 2 * 7  # seven weights in each of two layers


@pytest.mark.proof
def test_gradients_are_reduced_in_the_dtype_asked_for(workers: GetWorkers) -> None:
    for reduce, dtype in (("auto", "f32"), ("float32", "f32"), ("bfloat16", "bf16")):
        program = _program(workers, Case(compute="bfloat16", reduce=reduce))
        assert program["reduced"] == {dtype}
        assert program["gathered"] == {"bf16"}


@pytest.mark.proof
def test_how_a_unit_is_sharded_and_how_its_collectives_are_laid_out(workers: GetWorkers) -> None:
    joined = _program(workers, Case(optim=NO_DECAY, settings=FLAT))
    assert joined["reduce-scatter"] == 5  # two layers, embedding, head, and the root
    options = ("shard_param_on_dim_0", True), ("shard_param_on_dim_0", False), ("pin_layout_in_collective_ops", True)
    rows, flat, pinned = (_program(workers, Case(settings={f"xla_fsdp1.{key}": value})) for key, value in options)
    assert rows["shards"]["lm_head.weight"] == (505, 72)  # of 1009 rows
    assert flat["shards"]["lm_head.weight"] == (36352,)  # of 1009 * 72 elements: half of the next multiple of 256
    assert rows["all-gather"] > 0 == pinned["all-gather"]  # there is no pinned all-gather: an all-reduce stands for it
    assert rows["pinned"] == 0 < pinned["pinned"]  # on CPUs layouts are not pinned by default


# ------------------------------------------------------------------------------------------------------ layouts


def test_a_parameter_of_no_dimensions_is_refused_where_it_would_be_cut_by_rows() -> None:
    model = torch.nn.Module()
    model.weight, model.scale = torch.nn.Parameter(torch.ones(3, 2)), torch.nn.Parameter(torch.ones(()))
    places = parameter_slots(model)
    with pytest.raises(BackendError, match=r"can't shard scale by rows(.|\n)*shard_param_on_dim_0=false"):
        check_rows(places)
    del places["scale"]
    check_rows(places)
    assert boxes((), 0, 1) == [()]  # cut flat, the first device holds it
    assert boxes((), 128, 1) == []


def test_boxes_tile_a_range_in_order() -> None:
    assert boxes((3, 4), 2, 9) == [
        (slice(0, 1), slice(2, 4)),
        (slice(1, 2), slice(0, 4)),
        (slice(2, 3), slice(0, 1)),
    ]
    for shape in ((7,), (3, 4), (2, 3, 4)):
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        for start in range(whole.numel() + 1):
            for stop in range(start, whole.numel() + 1):
                pieces = [whole[box].flatten() for box in boxes(shape, start, stop)]
                assert torch.cat([torch.empty(0, dtype=torch.int64), *pieces]).tolist() == list(range(start, stop))


def test_it_starts_one_process_on_cpu() -> None:
    assert local_processes("cpu", "xla_fsdp1", None) == 1


@pytest.mark.parametrize(("device", "way"), [("cpu", "start another one"), ("tpu", "Leave --num_devices")])
def test_a_wrong_number_of_devices_says_what_to_do_on_this_device(device: str, way: str) -> None:
    require_devices("xla", device, 1, 1, on_cpu="start another one")
    with pytest.raises(BackendError, match=rf"on {device}: expected --num_devices=2 devices, found 1\.\n.*{way}"):
        require_devices("xla", device, 2, 1, on_cpu="start another one")
