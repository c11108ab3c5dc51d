"""Optimizers that an engine refuses before the first step, and 8-bit state across devices."""

from pathlib import Path

import jobs
import pytest
from cases import ARCHITECTURES, Case, assemble, assert_equal_states
from reference import reference
from workers import GetWorkers, Group, JobFailed, marked

NATIVE, XLA = Group("native", 3), Group("xla", 3)


def of_own(name: str) -> Case:
    return Case(steps=1, optim={"factory": f"own_optimizers:{name}", "lr": 1e-3, "weight_decay": 0.0})


@pytest.mark.parametrize("group", [marked(NATIVE), marked(XLA)])
def test_an_optimizer_that_reads_the_device_is_refused_before_the_first_step(group: Group, workers: GetWorkers) -> None:
    with pytest.raises(JobFailed) as failure:
        workers(group).run(jobs.opened, case=of_own("Scaled"), build=True)
    assert failure.value.kind == "BackendError"
    for text in ("found Scaled, which can't step without values", "own_optimizers.py:", ".norm().item()"):
        assert text in failure.value.message


@pytest.mark.xla
def test_a_rate_that_is_read_is_refused_where_it_is_a_tensor(workers: GetWorkers) -> None:
    workers(NATIVE).run(jobs.opened, case=of_own("torchs_sgd"), build=True)
    with pytest.raises(JobFailed) as failure:
        workers(XLA).run(jobs.opened, case=of_own("torchs_sgd"), build=True)
    assert failure.value.kind == "BackendError"
    assert "found SGD, which can't step without values" in failure.value.message
    assert "torch/optim/" in failure.value.message


@pytest.mark.proof
def test_eight_bit_states_travel_and_learn(workers: GetWorkers, tmp_path: Path) -> None:
    """On gloo processes, by bitsandbytes' kernel for CPUs."""
    sizes = ARCHITECTURES["llama"] | {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    case = Case(steps=12, optim={"name": "adamw8bit", "lr": 1e-3}, settings={"model.architecture": sizes})
    answers = workers(NATIVE).run(jobs.write, case=case, folder=str(tmp_path), at=6)
    saved = assemble([answer["state"] for answer in answers])
    scales = {key for key in saved if key.startswith("exp_avg_scale/")}
    assert "exp_avg_scale/model.layers.0.mlp.down_proj.weight" in scales
    assert "exp_avg_scale/model.norm.weight" not in scales
    losses = [row["loss"] for row in answers[0]["metrics"]]
    full = reference(Case(steps=12, optim={"name": "adamw", "lr": 1e-3}, settings=case.settings))
    assert losses == pytest.approx(full.losses[6:], rel=5e-3)
    for group in (Group("native", 1), Group("native", 2)):
        [answer, *_] = answers = workers(group).run(jobs.read, case=case, folders={"it": str(tmp_path)}, at=6)
        assert_equal_states(assemble([answer["it"]["state"] for answer in answers]), saved)
        assert [row["loss"] for row in answer["it"]["metrics"]] == pytest.approx(losses, rel=1e-4)
