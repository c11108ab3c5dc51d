"""Loops written for accelerate, on both engines, against the same loops in plain torch."""

from typing import Any

import pytest
from patterns import MORE_PROGRAMS, PATTERNS, accelerated_run, plain_run
from workers import GetWorkers, Group, marked

SUITE = (Group("gloo", 2), Group("xla", 4))
PROOFS = (Group("gloo", 1), Group("gloo", 3), Group("xla", 1))
PLACES = [marked(group, in_suite=group in SUITE) for group in (*SUITE, *PROOFS)]


@pytest.mark.parametrize("group", PLACES)
@pytest.mark.parametrize("name", PATTERNS)
def test_the_losses_are_those_of_plain_torch(name: str, group: Group, workers: GetWorkers) -> None:
    expected: list[dict[str, Any]] = plain_run(name)
    for steps, late in workers(group).run(accelerated_run, name=name):
        for step, (actual, plain) in enumerate(zip(steps, expected, strict=True)):
            assert actual == pytest.approx(plain, rel=1e-5), f"step {step}"
        assert late == MORE_PROGRAMS.get(name, 0) * group.engine.compiles
