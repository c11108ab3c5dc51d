"""The axis `context` on XLA: the tokens of a row split over devices."""

# A process's own placement is called where it is defined.
# pyright: reportPrivateUsage=false

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jobs
import pytest
import torch
from cases import GLOBAL_BATCH, SEQ_LEN, Case, assemble, assert_equal_states
from test_curves import assert_equal_curves
from workers import GetWorkers, Group, marked

CURVES = {
    "recompute, grad_op": Case(
        "gemma2", strategy="SHARD_GRAD_OP", checkpointing="full", settings={"sharding.context": 2}
    ),
    "scan": Case("llama", settings={"sharding.context": 2, "compile.scan_layers": True}),
}


@pytest.mark.parametrize(("group", "name"), [marked(Group("xla", 4), name, in_suite=False) for name in CURVES])
def test_the_curve_is_that_of_a_plain_loop(group: Group, name: str, workers: GetWorkers) -> None:
    """That of each family: test_context.py."""
    case = CURVES[name]
    answers = workers(group).run(jobs.train, case=case)
    assert_equal_curves(answers, case)
    assert 0 < answers[0]["compilations"] <= answers[0]["expected_compilations"]


@pytest.mark.xla
@pytest.mark.proof
@pytest.mark.parametrize(("writer", "reader"), [(2, 1), (1, 2), (4, 2)])
def test_a_checkpoint_opens_with_and_without_the_axis(
    writer: int, reader: int, workers: GetWorkers, tmp_path: Path
) -> None:
    case = Case(steps=8, settings={"sharding.context": writer}, micro_batch=3)
    saved_by = workers(Group("xla", 4)).run(jobs.write, case=case, folder=str(tmp_path), at=6)
    other = replace(case, settings={"sharding.context": reader})
    [answer] = workers(Group("xla", 4)).run(jobs.read, case=other, folders={"w": str(tmp_path)}, at=6)
    assert_equal_states(assemble([answer["w"]["state"]]), assemble([saved_by[0]["state"]]))
    losses = [metrics["loss"] for metrics in answer["w"]["metrics"]]
    assert losses == pytest.approx([metrics["loss"] for metrics in saved_by[0]["metrics"]], rel=1e-5)


def placed_by_one_of_several(case: Case) -> None:
    """A process of several places the same tensor as one alone, if it has all devices."""
    backend, _ = jobs.open_case(case)
    with backend:
        batch = {"input_ids": torch.arange(GLOBAL_BATCH * SEQ_LEN).view(GLOBAL_BATCH, SEQ_LEN)}
        batch["is_row"] = torch.eye(GLOBAL_BATCH, dtype=torch.int64)
        alone = backend.place(batch)
        cast(Any, backend)._tensors._processes = 2
        for name, tensor in backend.place(batch).items():
            get = cast(Any, backend)._bridge._get_xla_sharding_spec
            assert get(tensor) == get(alone[name])
            assert torch.equal(tensor.cpu(), batch[name])


@pytest.mark.xla
@pytest.mark.proof
def test_a_process_of_several_places_its_rows(workers: GetWorkers) -> None:
    workers(Group("xla", 4)).run(placed_by_one_of_several, case=Case(settings={"sharding.context": 2}))
