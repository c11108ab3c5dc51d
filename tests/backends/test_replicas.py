"""Replicas of the real engines: equal bit for bit after steps, and a save that compares them.

tests/checkpoint/test_replica_digests.py has what doesn't need an engine.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from cases import Case
from workers import Group, Workers

from portable_fsdp.checkpoint.format import committed_steps

KEY = "model.layers.1.mlp.up_proj.weight"
NO_SHARD = Case(strategy="NO_SHARD", steps=3)
HYBRID = Case(strategy="HYBRID_SHARD", steps=3, settings={"sharding.replicas": 2})
ZERO2 = Case(strategy="HYBRID_SHARD_ZERO2", steps=3, max_grad_norm=0.01, settings={"sharding.replicas": 2})
ASYNC = {"async_save": True}

proof, xla = pytest.mark.proof, pytest.mark.xla


@pytest.mark.parametrize(
    ("devices", "case", "settings", "equal"),
    [
        pytest.param(Group("native", 2), NO_SHARD, {}, "process 0 | process 1", id="native", marks=proof),
        pytest.param(Group("native", 3), NO_SHARD, ASYNC, "process 0, process 1 | process 2", id="native_async"),
        pytest.param(Group("native", 4), HYBRID, {}, "process 1 | process 3", id="native_hybrid"),
        pytest.param(Group("native", 4), ZERO2, ASYNC, "process 1 | process 3", id="native_zero2_async", marks=proof),
        pytest.param(
            Group("xla", 3),
            NO_SHARD,
            ASYNC,
            "process 0 replica 0, process 0 replica 1 | process 0 replica 2",
            id="xla_async",
            marks=xla,
        ),
        pytest.param(
            Group("xla", 4),
            HYBRID,
            {},
            "process 0 replica 0 | process 0 replica 1",
            id="xla_hybrid",
            marks=[xla, proof],
        ),
        pytest.param(Group("xla_fsdp1", 2), NO_SHARD, {}, "process 0 | process 1", id="fsdp1", marks=[xla, proof]),
        pytest.param(Group("xla_fsdp1", 4), HYBRID, {}, "process 1 | process 3", id="fsdp1_hybrid", marks=xla),
    ],
)
def test_a_save_refuses_replicas_that_differ_and_no_others(
    devices: Group,
    case: Case,
    settings: dict[str, bool],
    equal: str,
    workers: Callable[[Group], Workers],
    tmp_path: Path,
) -> None:
    answers = workers(devices).run("save_unequal_replicas", case=case, folder=str(tmp_path), key=KEY, settings=settings)
    [message] = {answer["message"] for answer in answers}
    assert "checkpoint step-00000002: expected equal values in all replicas, found 1 that differ" in message
    assert re.search(rf"\n    {re.escape(KEY)}.*  {re.escape(equal)}\n", message), message
    assert "resumes from step-00000001" in message
    assert answers[0]["left"] == ["step-00000001"]
    assert {answer["found"] for answer in answers} == {"step-00000001"}
    assert [path.name for path in committed_steps(tmp_path)] == ["step-00000003", "step-00000001"]
