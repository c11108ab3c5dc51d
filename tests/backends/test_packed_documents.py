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


def _on(backend: str, devices: int, case: Case, *, proof: bool = False) -> Any:
    marks = [pytest.mark.xla] * (backend != "native") + [pytest.mark.proof] * proof
    options = [case.model, case.checkpointing, case.strategy, f"scan={case.settings['compile.scan_layers']}"]
    return pytest.param(Group(backend, devices), case, marks=marks, id="-".join([backend, str(devices), *options]))


WHERE = [
    _on("xla", 3, packed()),
    _on("native", 3, packed("gemma2", checkpointing="full")),
    _on("xla", 3, packed(checkpointing="full", scan=True)),
    *(_on("native", devices, packed(), proof=True) for devices in (1, 2, 3)),
    *(_on("xla", devices, packed(), proof=True) for devices in (1, 4)),
    _on("xla", 3, packed("gemma2", checkpointing="full"), proof=True),
    *(_on(backend, 3, packed("gpt2", strategy="SHARD_GRAD_OP"), proof=True) for backend in ("native", "xla")),
    _on("xla", 4, packed(scan=True), proof=True),
    _on("xla_fsdp1", 2, packed(), proof=True),
    _on("xla_fsdp1", 2, packed("gemma2", checkpointing="full"), proof=True),
]


@pytest.mark.parametrize(("where", "case"), WHERE)
def test_each_document_has_its_own_loss_and_the_run_its_curve(
    where: Group, case: Case, workers: Callable[[Group], Workers]
) -> None:
    expected = losses_of_documents(case)
    assert len(expected) == 36
    for answer in workers(where).run("losses_of_documents", case=case):
        assert answer["documents"] == pytest.approx(expected, rel=BOUND)
        assert_equal_curves([answer], case)
        assert answer["compilations"] == answer["expected_compilations"]


@pytest.mark.parametrize("where", [Group("native", 1), pytest.param(Group("xla", 1), marks=pytest.mark.xla)], ids=str)
def test_a_model_that_lets_documents_see_each_other_is_refused(
    where: Group, workers: Callable[[Group], Workers]
) -> None:
    with pytest.raises(JobFailed, match="Mamba2ForCausalLM: logits differ") as failure:
        workers(where).run("losses_of_documents", case=packed("mamba2"))
    assert failure.value.kind == "ConfigError"
