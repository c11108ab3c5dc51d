"""The groups of worker processes, started when first asked for and shared by all tests of this folder.

Each process takes 0.7 GiB and more, together 8 GiB, which the tests of other folders need for processes of their own.
Hence one process of the suite runs all tests on torch_xla, and one all others (tests/conftest.py). The groups end with
the last test of the folder, and before that where memory gets scarce.
"""

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jobs
import psutil
import pytest
from workers import GROUPS, Group, Workers, marked

collect_ignore = [] if os.environ.get("TEST_TORCHTPU") else ["test_torchtpu.py", "test_torchtpu_start.py"]

PROOFS_ON_TORCHTPU = ("known_from_the_config[torchtpu-1-1]", "[torchtpu-1-SHARD_GRAD_OP in micro batches]")
"""Second cases, each half a minute of compiling operation by operation."""

PROOFS = (
    "known_from_the_config[native-3-1]",
    "an_evaluation_changes_nothing[native-3-SHARD_GRAD_OP in micro batches]",
    "c6_buffers_and_dtypes_survive[xla-3]",
    "c6_buffers_take_the_dtype_of_precision_buffers[xla-3]",
    "c7_bias_corrections_of_exactly_1_are_no_new_program[native-3]",
    "fp32_equals_a_plain_loop[native-3-micro batches of 1]",
    "fp32_equals_a_plain_loop[native-3-rows of padding]",
    "fp32_equals_a_plain_loop[native-3-muon]",
    "fp32_equals_a_plain_loop[xla-3-adafactor]",
    "all_in_bfloat16_learns_and_stays_bfloat16[xla-3]",
)
"""Tests that run per commit on another engine; on this engine they are proofs, and other tests check the same."""

ROOM = 8 * 2**30
"""Bytes. With less of the machine's memory left, groups that wait are ended before another begins."""

STARTED: dict[Group, Workers] = {}
"""The one used last is the last."""


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.name.endswith((*PROOFS_ON_TORCHTPU, *PROOFS)):
            item.add_marker(pytest.mark.proof)


@pytest.fixture(scope="session")
def workers() -> Iterator[Callable[[Group], Workers]]:
    def get(group: Group) -> Workers:
        if group not in STARTED:
            while len(STARTED) > 2 and psutil.virtual_memory().available < ROOM:  # a test may hold two
                STARTED.pop(next(iter(STARTED))).close()
            STARTED[group] = Workers(group)
        STARTED[group] = STARTED.pop(group)
        return STARTED[group]

    yield get
    left = [child.cmdline() for child in psutil.Process().children() if "resource_tracker" not in str(child.cmdline())]
    assert not left, f"worker processes left behind: {left}"


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    del item  # of this folder: its conftest's hooks are called for its tests alone
    if nextitem is None or Path(__file__).parent not in nextitem.path.parents:
        while STARTED:
            STARTED.popitem()[1].close()


@pytest.fixture
def leaves_nothing_behind() -> None:
    """The workers start in whichever test asks first and stay; `workers` looks for leaks at its end."""


@pytest.fixture(scope="session")
def run(workers: Callable[[Group], Workers]) -> Callable[..., list[dict[str, Any]]]:
    """`run(group, case)`: what each process of a group says of a whole run; run once, asserted on by many tests."""

    @cache
    def once(group: Group, key: str) -> list[dict[str, Any]]:
        return workers(group).run(jobs.train, case=cases[key])

    cases: dict[str, Any] = {}

    def get(group: Group, case: Any) -> list[dict[str, Any]]:
        cases[repr(case)] = case
        return once(group, repr(case))

    return get


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "group" in metafunc.fixturenames and not any("group" in name for name in names):
        metafunc.parametrize("group", [marked(group) for group in GROUPS])
