"""Products of 8 bits: the curve stays by that of bfloat16, checkpoints hold float32 masters, refusals name a way out.

On CPUs torchao emulates float8 products in bfloat16, of numbers that are rounded to float8. XLA computes int8 ones.
"""

import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jobs
import pytest
import torch
from cases import ONE_LAYER, Case, CaseRows, assemble, assert_equal_states
from jobs import device_count, open_case, running
from torch import nn
from workers import GetWorkers, Group, JobFailed, Run, marked

from portable_fsdp.backends.contract import ShardPolicy
from portable_fsdp.backends.native.units import use_float8
from portable_fsdp.backends.torch_xla.spmd.sums import int8_product
from portable_fsdp.backends.weight_uses import eight_bit_layers
from portable_fsdp.runtime.errors import ConfigError

TWO, FOUR, XLA = Group("native", 2), Group("native", 4), Group("xla", 4)

BAND = 3e-3
"""Relative, between 20 losses with products of 8 bits and of bfloat16."""

# 16 divides them, by 3 devices uneven.
SIZES = ONE_LAYER["model.architecture"] | {"hidden_size": 96, "intermediate_size": 160}
CASE = Case(compute="bfloat16", settings={"model.architecture": SIZES})


RECOMPUTED = {"memory.gradient_checkpointing": "full"}
SCANNED = {"compile.scan_layers": True, **RECOMPUTED, "model.architecture": SIZES | {"num_hidden_layers": 2}}
IN_FLOAT32 = {"precision.reduce": "float32", "precision.modules": {"*norm*": "float32"}}


def of(products: str, **settings: Any) -> Case:
    return replace(CASE, settings={**CASE.settings, "precision.products": products, **settings})


def losses(answer: dict[str, Any]) -> list[float]:
    return [metrics["loss"] for metrics in answer["metrics"]]


def greatest_difference(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    ("group", "products", "settings"),
    [
        marked(TWO, "float8", {}, in_suite=True),
        marked(TWO, "float8_rowwise", {}),
        marked(TWO, "float8", {"compile.enabled": True, "compile.backend": "aot_eager"}),
        marked(XLA, "int8", {}, in_suite=True),
        marked(Group("native", 1), "float8", {}),
        marked(TWO, "float8", {"sharding.strategy": "NO_SHARD", **RECOMPUTED}),
        marked(TWO, "float8", {"precision.modules": {"*norm*": "float32"}, "train.micro_batch": 1}),
        marked(TWO, "float8_rowwise", {"memory.cpu_offload": True}),
        marked(FOUR, "float8", {"sharding.strategy": "HYBRID_SHARD", "sharding.replicas": 2, **RECOMPUTED}),
        marked(XLA, "int8", IN_FLOAT32, in_suite=False),
        marked(XLA, "int8", {**RECOMPUTED, "train.micro_batch": 1}, in_suite=False),
        marked(XLA, "int8", SCANNED, in_suite=False),
    ],
)
def test_curves_stay_by_those_of_bfloat16(group: Group, products: str, settings: dict[str, Any], run: Run) -> None:
    eight, *others = run(group, of(products, **settings))
    plain = run(group, of("auto", **settings))[0]
    difference = greatest_difference(losses(eight), losses(plain))
    assert 1e-5 < difference < BAND
    assert all(losses(other) == losses(eight) for other in others)


@pytest.mark.proof
@pytest.mark.xla
def test_a_resume_is_bit_for_bit_and_a_checkpoint_travels_with_its_masters(workers: GetWorkers, tmp_path: Path) -> None:
    """From float8 on two devices to bfloat16 on one and on two of another engine, and to rows on four."""
    case = replace(of("float8"), steps=8)
    answers = workers(TWO).run(jobs.write, case=case, folder=str(tmp_path), at=4)
    saved = assemble([answer["state"] for answer in answers])
    assert {tensor.dtype for key, tensor in saved.items() if key.endswith("weight")} == {torch.float32}
    again = workers(TWO).run(jobs.read, case=case, folders={"it": str(tmp_path)}, at=4)
    assert repr(again[0]["it"]["metrics"]) == repr(answers[0]["metrics"])
    for group, products in (
        (Group("native", 1), "auto"),
        (XLA, "auto"),
        (FOUR, "float8_rowwise"),
    ):
        reader, key = replace(of(products), steps=8), ("precision.products",)
        read = workers(group).run(jobs.read, case=reader, folders={"it": str(tmp_path)}, at=4, allow=key)
        assert_equal_states(assemble([answer["it"]["state"] for answer in read]), saved)
        assert greatest_difference(losses(read[0]["it"]), losses(answers[0])) < BAND


@pytest.mark.proof
def test_a_load_into_a_run_under_way_scales_the_loaded_weights(workers: GetWorkers, tmp_path: Path) -> None:
    """`read` loads one checkpoint after the other into one model."""
    folders = {name: str(tmp_path / name) for name in ("first", "second")}
    cases = {name: replace(of("float8"), steps=6, seed=seed) for seed, name in enumerate(folders)}
    for name, folder in folders.items():
        workers(TWO).run(jobs.write, case=cases[name], folder=folder, at=4)
    together = workers(TWO).run(jobs.read, case=cases["second"], folders=folders, at=4, allow=("run.seed",))[0]
    alone = workers(TWO).run(jobs.read, case=cases["second"], folders={"it": folders["second"]}, at=4)[0]
    assert repr(together["second"]["metrics"]) == repr(alone["it"]["metrics"])


def test_shards_are_gathered_in_float8_and_a_step_reads_nothing_of_the_device(workers: GetWorkers) -> None:
    gathered = {
        products: sum(
            collective.bytes
            for collective in workers(Group("gloo", 2)).run(jobs.collectives, case=of(products))[0]["sent"][1]
            if "allgather" in collective.name
        )
        for products in ("auto", "float8", "float8_rowwise")
    }
    assert gathered["float8"] < 0.9 * gathered["auto"]  # embedding and head are not
    assert gathered["float8_rowwise"] == gathered["auto"]
    workers(TWO).run(jobs.reads_nothing_on_the_host, case=of("float8"))


def traced_products(case: Case) -> dict[str, int]:
    """The products in forward and backward of a step: `s8 s8 -> s32` -> how many; nothing of them runs."""
    import torch_xla

    with running(case) as run:
        rows = run.backend.place(CaseRows().rows(torch.arange(device_count()).numpy()))
        weights = list(run.model.parameters())
        loss = run.model(rows["input_ids"], rows["labels"])[0]
        gradients = torch.autograd.grad(loss, weights)
        text: str = cast(Any, torch_xla)._XLAC._get_xla_tensors_hlo(list(gradients))
        dots = re.findall(r"= (\w+)\[\S+ dot\((\w+)\[[^%]* %[^%]*?(\w+)\[", text)
        return Counter(f"{left} {right} -> {result}" for result, left, right in dots)


@pytest.mark.xla
def test_products_of_int8_have_operands_of_8_bits_and_a_result_of_32(workers: GetWorkers) -> None:
    """Seven layers in a block: forward and the gradient of activations; gradients of weights are in bfloat16."""
    dots = workers(XLA).run(traced_products, case=of("int8"))[0]
    plain = workers(XLA).run(traced_products, case=of("auto"))[0]
    assert dots["s8 s8 -> s32"] == 7 * 2
    assert set(plain) == set(dots) - {"s8 s8 -> s32"}
    assert sum(dots.values()) == sum(plain.values())


def int8_product_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    import torch_xla

    with open_case(Case())[0]:
        device = torch_xla.device()
        return int8_product(x.to(device), weight.to(device)).cpu()


@pytest.mark.xla
def test_a_product_of_int8_is_exact_for_whole_numbers_and_close_for_others(workers: GetWorkers) -> None:
    torch.manual_seed(0)
    whole = [torch.randint(-127, 128, (2, 3, 64)).float(), torch.randint(-127, 128, (5, 64)).float()]
    for tensor in whole:
        tensor[..., 0] = 127  # each row's scale is 1
    ours = workers(XLA).run(int8_product_of, x=whole[0], weight=whole[1])[0]
    assert torch.equal(ours, whole[0] @ whole[1].t())
    x, weight = (
        torch.randn(64, 512) * sizes[:, None] for sizes in (torch.logspace(3, -6, 64), torch.logspace(-6, 3, 64))
    )
    x[1] = 0
    exact, ours = x @ weight.t(), workers(XLA).run(int8_product_of, x=x, weight=weight)[0]
    # The greatest of 512 normal values is about 3.0, a 127th of that over the root of 12 is 0.007, for each factor.
    # So is the error of a product over the size of a typical one, the product of the norms over the root of 512.
    typical = x.norm(dim=1).clamp(min=1e-30)[:, None] * weight.norm(dim=1) / 512**0.5
    errors = (ours - exact) / typical
    assert not ours[1].any()
    for dimension in (0, 1):
        error = errors.square().mean(dimension).sqrt()
        assert error.max() < 0.02
        assert error.median() > 0.005


class Small(nn.Module):
    def __init__(self, odd: int = 40) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"a": nn.Linear(32, 48), "odd": nn.Linear(32, odd), "own": nn.Linear(16, 16)}) for _ in "12"
        )
        self.head = nn.Linear(32, 64)


LAYERS = ("layers.0", "layers.1")
SMALL = ShardPolicy(
    (), LAYERS, torch.bfloat16, modules={f"{name}.own": torch.float32 for name in LAYERS}, products="float8"
)


def test_only_fitting_layers_inside_of_the_models_layers_are_converted() -> None:
    assert eight_bit_layers(Small(), SMALL) == ["layers.0.a", "layers.1.a"]
    assert eight_bit_layers(Small(), replace(SMALL, products="auto")) == []


@pytest.mark.parametrize(
    ("group", "products"), [(TWO, "float8"), pytest.param(XLA, "int8", marks=pytest.mark.xla)], ids=str
)
def test_a_model_without_such_layers_is_refused_when_it_is_laid_out(
    group: Group, products: str, workers: GetWorkers
) -> None:
    with pytest.raises(JobFailed, match=r"layers of Llama\w+ have no linear layer whose sizes are multiples of 16"):
        workers(group).run(
            jobs.opened, case=Case(compute="bfloat16", settings={"precision.products": products}), build=True
        )


def test_without_torchao_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)  # as where Python finds none
    with pytest.raises(ConfigError, match=r"products=float8: can't import .* torchao.*\n  pip install torchao"):
        use_float8(Small(), SMALL, torch.device("cpu"), 1)
