"""Promise 3: a checkpoint written on any engine at any size opens on any other, bit for bit, and the run goes on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from assemble import assemble, assert_equal_states
from cases import GLOBAL_BATCH, Case
from reference import reference
from workers import Group, Workers

CASE = Case(model="llama_tied", steps=12)
AT = 6
WRITERS = [Group("native", 1), Group("native", 2), Group("native", 3), Group("xla", 1), Group("xla", 4)]
PROOFS = (Group("native", 1), Group("xla", 1))
READERS = [
    pytest.param(
        group,
        id=str(group),
        marks=[pytest.mark.xla] * (group.backend != "native") + [pytest.mark.proof] * (group in PROOFS),
    )
    for group in WRITERS
]


@pytest.fixture(scope="module")
def written(
    workers: Callable[[Group], Workers], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, tuple[Path, list[dict[str, Any]]]]:
    """Writer -> its checkpoints, and what its processes said. Without the xla tests, native writers only."""
    native_only = "not xla" in str(request.config.getoption("-m"))
    out: dict[str, tuple[Path, list[dict[str, Any]]]] = {}
    for group in WRITERS:
        if native_only and group.backend != "native":
            continue
        folder = tmp_path_factory.mktemp(str(group))
        out[str(group)] = (folder, workers(group).run("write", case=CASE, folder=str(folder), at=AT))
    return out


@pytest.mark.parametrize("reader", READERS)
def test_any_reader_opens_any_writer_bit_for_bit(
    reader: Group, workers: Callable[[Group], Workers], written: dict[str, tuple[Path, list[dict[str, Any]]]]
) -> None:
    folders = {name: str(folder) for name, (folder, _) in written.items()}
    answers = workers(reader).run("read", case=CASE, folders=folders, at=AT)
    for name, (_, said) in written.items():
        saved = assemble([answer["state"] for answer in said])
        assert any(key.startswith("exp_avg_sq/") for key in saved)
        assert_equal_states(assemble([answer[name]["state"] for answer in answers]), saved)
        for answer in answers:
            assert answer[name]["position"] == (0, AT * GLOBAL_BATCH)
            losses = [metrics["loss"] for metrics in answer[name]["metrics"]]
            uninterrupted = [metrics["loss"] for metrics in said[0]["metrics"]]
            assert losses == pytest.approx(uninterrupted, rel=1e-5)
            assert losses == pytest.approx(reference(CASE).losses[AT:], rel=1e-5)
    if reader.backend != "native":
        assert answers[0]["compilations"] <= 1, "loading made the step another program"


def test_same_engine_goes_on_bit_for_bit(
    workers: Callable[[Group], Workers], written: dict[str, tuple[Path, list[dict[str, Any]]]]
) -> None:
    group = Group("native", 2)
    folder, said = written[str(group)]
    answers = workers(group).run("read", case=CASE, folders={str(group): str(folder)}, at=AT)
    assert answers[0][str(group)]["metrics"] == said[0]["metrics"]
