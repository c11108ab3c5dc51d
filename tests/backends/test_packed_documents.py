"""Documents that share a row train on every engine as each does in a padded row of its own, in a plain loop."""

from collections.abc import Callable
from typing import Any

import pytest
from cases import Case
from reference import losses_of_documents
from test_curves import SGD, assert_equal_curves
from workers import Group, JobFailed, Workers

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


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.proof] * (name not in IN_SUITE)) for name in CASES]
)
def test_each_document_has_its_own_loss_and_the_run_its_curve(
    group: Group, name: str, workers: Callable[[Group], Workers]
) -> None:
    case = CASES[name]
    if any(workers(group).run("is_refused", case=case)):
        return
    expected = losses_of_documents(case)
    assert len(expected) == 36
    for answer in workers(group).run("losses_of_documents", case=case):
        assert answer["documents"] == pytest.approx(expected, rel=BOUND)
        assert_equal_curves([answer], case)
        assert answer["compilations"] == answer["expected_compilations"]


def test_a_model_that_lets_documents_see_each_other_is_refused(
    group: Group, workers: Callable[[Group], Workers]
) -> None:
    with pytest.raises(JobFailed, match="Mamba2ForCausalLM: logits differ") as failure:
        workers(group).run("losses_of_documents", case=packed("mamba2"))
    assert failure.value.kind == "ConfigError"
