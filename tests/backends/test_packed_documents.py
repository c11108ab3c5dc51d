"""Documents that share a row train on every engine as each does in a padded row of its own, in a plain loop."""

from typing import Any

import jobs
import numpy as np
import pytest
import torch
from cases import GLOBAL_BATCH, Case, PackedCaseRows
from jobs import numbers, running
from reference import losses_of_documents
from test_curves import SGD, assert_equal_curves
from workers import GetWorkers, Group, JobFailed

BOUND = 1e-5  # relative, of each document's loss


def packed(model: str = "llama", checkpointing: str = "none", scan: bool = False, **options: Any) -> Case:
    """SGD keeps no state: steps with a learning rate of 0, which give the documents' losses, leave no trace."""
    settings = {"data.packing": "documents", "compile.scan_layers": scan}
    return Case(model, optim=SGD, max_grad_norm=None, checkpointing=checkpointing, settings=settings, **options)


CASES = {
    "plain": packed(),
    "scanned, recomputed": packed(checkpointing="full", scan=True),
    "windows, recomputed": packed("gemma2", checkpointing="full"),
    "scanned": packed(scan=True),
    "kept gathered": packed("gpt2", strategy="SHARD_GRAD_OP"),
}
IN_SUITE = ("plain", "scanned")


def losses_of_documents(case: Case) -> dict[str, Any]:
    """The loss of each document of a global batch with the initial weights, by steps that change nothing, as each
    row's documents come; then a whole run."""
    with running(case) as run:
        backend = run.backend
        count, rows = backend.data_shard.count, GLOBAL_BATCH // backend.data_shard.count
        before = backend.compilations
        losses: list[float] = []
        batch = PackedCaseRows().rows(np.arange(GLOBAL_BATCH))
        own = slice(backend.data_shard.index * rows, (backend.data_shard.index + 1) * rows)
        for row in range(GLOBAL_BATCH):
            for number in range(1, int(batch["segments"][row].max()) + 1):
                labels = torch.full_like(batch["labels"], -100)
                is_its = batch["segments"][row] == number
                labels[row, is_its] = batch["labels"][row, is_its]
                shard = {name: tensor[own] for name, tensor in {**batch, "labels": labels}.items()}
                control = run.control(float((shard["labels"] != -100).sum()))
                losses.append(numbers(backend.fetch(run.step([backend.place(shard)], 0.0, control)))["loss"])
        return {
            "documents": losses,
            "metrics": run.train(1, case.steps),
            "compilations": backend.compilations - before,
            "expected_compilations": backend.expected_compilations,
            "shards": count,
        }


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.proof] * (name not in IN_SUITE)) for name in CASES]
)
def test_each_document_has_its_own_loss_and_the_run_its_curve(group: Group, name: str, workers: GetWorkers) -> None:
    case = CASES[name]
    if any(workers(group).run(jobs.is_refused, case=case)):
        return
    expected = losses_of_documents(case)
    assert len(expected) == 36
    for answer in workers(group).run(losses_of_documents, case=case):
        assert answer["documents"] == pytest.approx(expected, rel=BOUND)
        assert_equal_curves([answer], case)
        assert answer["compilations"] == answer["expected_compilations"]


def test_a_model_that_lets_documents_see_each_other_is_refused(group: Group, workers: GetWorkers) -> None:
    with pytest.raises(JobFailed, match="Mamba2ForCausalLM: logits differ") as failure:
        workers(group).run(losses_of_documents, case=packed("mamba2"))
    assert failure.value.kind == "ConfigError"
