"""Dynamic loss scaling against torch's own, across restarts, and with an overflow that one process alone sees."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from cases import Case, assert_equal_states
from reference import reference, train_by_grad_scaler
from test_curves import BF16_20_STEPS, FP32_20_STEPS
from torch import nn
from workers import GetWorkers, Group, JobFailed, Run, marked

from portable_fsdp.backends.native.units import local_part
from portable_fsdp.train.build import shard
from portable_fsdp.train.step import train_step

TWO = Group("native", 2)
PLANTED = {"precision.loss_scale": 2.0**24, "precision.loss_scale_window": 4}
"""The first steps overflow, and then the scale grows until a step does, again and again."""
CASE = Case(steps=40, compute="float16", settings=PLANTED)


def numbers(answer: dict[str, Any], name: str) -> list[float]:
    return [metrics[name] for metrics in answer["metrics"]]


def skipped_steps(answer: dict[str, Any]) -> tuple[int, ...]:
    return tuple(step for step, norm in enumerate(numbers(answer, "grad_norm"), 1) if not math.isfinite(norm))


def test_scales_and_skipped_steps_are_those_of_grad_scaler(run: Run) -> None:
    answer, other = run(TWO, CASE)
    plain = train_by_grad_scaler(CASE, parts=2)
    assert numbers(answer, "loss_scale") == plain.scales
    assert skipped_steps(answer) == plain.skipped
    counts = [sum(step <= number for step in plain.skipped) for number in range(1, CASE.steps + 1)]
    assert numbers(answer, "skipped_steps") == counts
    assert repr(other["metrics"]) == repr(answer["metrics"])
    assert 1 in plain.skipped
    assert sum(step > 20 for step in plain.skipped) >= 3

    losses = numbers(answer, "loss")
    truth = reference(CASE, plain.skipped)
    assert losses == pytest.approx(plain.losses, rel=BF16_20_STEPS)
    assert losses == pytest.approx(truth.losses, rel=BF16_20_STEPS)
    assert max(abs(a - b) / b for a, b in zip(losses, truth.losses, strict=True)) > FP32_20_STEPS
    norms = zip(numbers(answer, "grad_norm"), truth.grad_norms, strict=True)
    assert all(norm == pytest.approx(expected, rel=2e-2) for norm, expected in norms if math.isfinite(norm))
    assert losses[-1] < losses[0] - 0.05


SGD, LION = (
    {"name": "sgd", "lr": 0.5, "momentum": 0.9, "weight_decay": 0.0},
    {"name": "lion", "lr": 3e-4, "weight_decay": 0.0},
)
HYBRID = {"sharding.strategy": "HYBRID_SHARD", "sharding.replicas": 2, "model.freeze": ["model.embed_tokens"]}
LIKE_PLAIN: list[tuple[int, Case]] = [  # optimizers without a fused step, and other layouts
    (2, replace(CASE, steps=20, optim=SGD, micro_batch=2)),
    (2, replace(CASE, steps=20, optim=LION)),
    (2, replace(CASE, steps=12, checkpointing="full", settings=PLANTED | {"memory.cpu_offload": True})),
    (4, replace(CASE, steps=12, settings=PLANTED | HYBRID)),
]


@pytest.mark.parametrize(
    ("devices", "case"),
    [
        pytest.param(devices, case, id=name, marks=[pytest.mark.proof] * (name != "replicas"))
        for name, (devices, case) in zip(("sgd", "lion", "offloaded", "replicas"), LIKE_PLAIN, strict=True)
    ],
)
def test_other_optimizers_and_layouts_skip_the_same_steps(run: Run, devices: int, case: Case) -> None:
    answer, *others = run(Group("native", devices), case)
    plain = train_by_grad_scaler(case, parts=12 // (case.micro_batch or 12 // devices))
    assert numbers(answer, "loss_scale") == plain.scales
    assert numbers(answer, "loss") == pytest.approx(plain.losses, rel=BF16_20_STEPS)
    assert skipped_steps(answer) == plain.skipped != ()
    assert all(repr(other["metrics"]) == repr(answer["metrics"]) for other in others)


def test_a_resume_is_bit_for_bit(workers: GetWorkers, tmp_path: Path) -> None:
    """Saved after skipped steps, in the middle of a window."""
    case = replace(CASE, steps=20)
    written = workers(TWO).run(jobs.write, case=case, folder=str(tmp_path), at=10)
    skipped, scale = (written[0]["before"][-1][name] for name in ("skipped_steps", "loss_scale"))
    assert skipped >= 2
    assert scale < PLANTED["precision.loss_scale"]
    read = workers(TWO).run(jobs.read, case=case, folders={"it": str(tmp_path)}, at=10)
    assert repr(read[0]["it"]["metrics"]) == repr(written[0]["metrics"])
    assert any(not math.isfinite(metrics["grad_norm"]) for metrics in written[0]["metrics"])
    other, keys = replace(case, settings=PLANTED | {"precision.loss_scale": 64.0}), ("precision.loss_scale",)
    read = workers(TWO).run(jobs.read, case=other, folders={"it": str(tmp_path)}, at=10, allow=keys)
    metrics = read[0]["it"]["metrics"]
    assert [metrics[0]["loss_scale"], *(step["loss_scale"] for step in metrics[3:5])] == [64, 64, 128]


@pytest.mark.parametrize("group", [marked(TWO, in_suite=True), marked(Group("xla", 2))])
def test_a_checkpoint_travels_between_dtypes(workers: GetWorkers, tmp_path: Path, group: Group) -> None:
    scaled, plain = (replace(CASE, steps=9, settings=settings) for settings in (PLANTED, {}))
    plain, keys = replace(plain, compute="float32"), ("precision.compute", *PLANTED)
    workers(TWO).run(jobs.write, case=scaled, folder=str(tmp_path / "float16"), at=8)
    read = workers(group).run(jobs.read, case=plain, folders={"it": str(tmp_path / "float16")}, at=8, allow=keys)
    assert "loss_scale" not in read[0]["it"]["metrics"][0]
    workers(group).run(jobs.write, case=plain, folder=str(tmp_path / "float32"), at=8)
    read = workers(TWO).run(jobs.read, case=scaled, folders={"it": str(tmp_path / "float32")}, at=8, allow=keys)
    assert read[0]["it"]["metrics"][0]["loss_scale"] == PLANTED["precision.loss_scale"]


def weighted(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    outputs = model(batch["inputs"]) * batch["weights"]
    return outputs.float().sum(), torch.tensor(float(len(outputs)))


def overflow_in_one_shard(case: Case) -> None:
    """Three steps of one weight of four rows. In the second a row of process 0 makes the gradient of the last row of
    the weight overflow, which the last process holds."""
    backend, config = jobs.open_case(case)
    with backend:
        model, optimizer = shard(lambda: nn.Linear(3, 4, bias=False), config, backend)
        step = train_step(backend, model, optimizer, accumulation=1, max_grad_norm=1.0, task=weighted)
        [weight] = model.parameters()
        states, metrics = list[dict[str, torch.Tensor]](), list[dict[str, Any]]()
        for number in (1, 2, 3):
            weights = torch.ones(1, 4)
            weights[0, 3] = 8.0 if number == 2 and backend.process.index == 0 else 1.0
            batch = backend.place({"inputs": torch.ones(1, 3), "weights": weights})
            metrics.append(jobs.numbers(backend.fetch(step([batch], 1e-2))))
            state = {"weight": weight, **optimizer.state[weight]}
            states.append({name: local_part(value).clone() for name, value in state.items()})
    assert [row["loss_scale"] for row in metrics] == [65536, 65536, 32768]
    assert [row["skipped_steps"] for row in metrics] == [0, 1, 1]
    first, second, third = states
    assert_equal_states(second, first)
    assert not torch.equal(third["weight"], first["weight"])
    assert third.get("step", 2) == 2


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("name", ["adamw", "sgd", "lion"])
def test_an_overflow_in_one_shard_skips_the_step_on_all_processes(
    workers: GetWorkers, name: str, strategy: str
) -> None:
    optim = {"name": name, "lr": 1e-2, **({"momentum": 0.9} if name == "sgd" else {})}
    workers(TWO).run(overflow_in_one_shard, case=Case(compute="float16", optim=optim, strategy=strategy))


def test_c2_a_step_reads_nothing_of_the_device_and_sends_no_more(workers: GetWorkers) -> None:
    workers(TWO).run(jobs.reads_nothing_on_the_host, case=replace(CASE, optim=SGD))
    sent = [
        [(kind, size, world) for kind, _, size, world in answer["sent"][1]]
        for dtype in ("bfloat16", "float16")
        for answer in workers(Group("gloo", 2)).run(jobs.collectives, case=Case(compute=dtype))[:1]
    ]
    assert sent[0] == sent[1]


def test_an_optimizer_that_cannot_skip_is_refused(workers: GetWorkers) -> None:
    """The config's own ones by a rule; what a factory makes once it is there."""
    case = replace(CASE, optim={"factory": "own_optimizers:torchs_sgd", "lr": 1e-3, "weight_decay": 0.0})
    with pytest.raises(JobFailed, match="skips a step on the device, and SGD can't") as failure:
        workers(TWO).run(jobs.opened, case=case, build=True)
    assert failure.value.kind == "ConfigError"
    workers(TWO).run(jobs.opened, case=replace(case, optim=case.optim | {"factory": "own_optimizers:lion"}), build=True)
