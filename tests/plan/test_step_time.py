"""The table of expected steps: what counts as a loss, and (`make proof`) that this code has none."""

import json
from copy import deepcopy
from typing import Any

import pytest
import step_time

WRITTEN: dict[str, dict[str, Any]] = json.loads(step_time.RESULTS.read_text())


def test_the_table_has_every_shape_and_its_page() -> None:
    assert list(WRITTEN) == [f"{case.name} on {case.on}" for case in step_time.CASES]
    assert step_time.RESULTS.with_suffix(".md").read_text() == step_time.page(WRITTEN)


def test_more_time_memory_or_traffic_is_a_loss_and_so_is_a_collective_that_newly_stops_compute() -> None:
    assert step_time.losses(WRITTEN, WRITTEN) == []
    for figure in step_time.FIGURES:
        now = deepcopy(WRITTEN)
        row = next(row for row in now.values() if row[figure])
        row[figure] *= 1.02
        assert step_time.losses(WRITTEN, now) == []
        row[figure] *= 1.02
        (found,) = step_time.losses(WRITTEN, now)
        assert figure in found
    now = deepcopy(WRITTEN)
    next(iter(now.values()))["waited_gib"]["all_to_all"] = 0.1
    (found,) = step_time.losses(WRITTEN, now)
    assert "all_to_all" in found


@pytest.mark.proof
@pytest.mark.xla
@pytest.mark.timeout(1800)
def test_no_shape_got_slower_or_larger_or_sends_more() -> None:
    assert step_time.losses(WRITTEN, step_time.plan_all()) == []
