"""Loops of one's own, with several models and optimizers of torch, against the same loop in plain torch."""

from typing import Any

import pytest
from own_loops import MORE_PROGRAMS, PATTERNS, engine_run, plain_run
from workers import GetWorkers, Group, marked

SHARDED: dict[str, Any] = {}
WHOLE: dict[str, Any] = {"sharding": {"strategy": "NO_SHARD"}}
PLACES = [
    marked(Group("native", 2), SHARDED, in_suite=True),
    marked(Group("xla", 4), SHARDED, in_suite=True),
    pytest.param(Group("native", 2), WHOLE, marks=pytest.mark.proof, id="native-2-NO_SHARD"),
    *(marked(group, SHARDED, in_suite=False) for group in (Group("native", 1), Group("native", 3), Group("xla", 1))),
]


@pytest.mark.parametrize(("group", "settings"), PLACES)
@pytest.mark.parametrize("name", PATTERNS)
def test_the_losses_are_those_of_plain_torch(
    name: str, group: Group, settings: dict[str, Any], workers: GetWorkers
) -> None:
    expected = plain_run(name)
    for losses, late in workers(group).run(engine_run, name=name, settings=settings):
        for step, (actual, plain) in enumerate(zip(losses, expected, strict=True)):
            assert actual == pytest.approx(plain, rel=1e-5), f"step {step}"
        assert late == MORE_PROGRAMS.get(name, 0) * group.engine.compiles
