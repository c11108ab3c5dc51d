"""The groups of worker processes, started when first asked for and shared by all tests of this folder.

Each process takes 0.7 GiB and more, which the tests of other folders need for processes of their own. So the groups
end with the last test of the folder, and before that where memory gets scarce.
"""

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

import jobs
import psutil
import pytest
from workers import GROUPS, Group, Workers, marked

collect_ignore = [] if os.environ.get("TEST_TORCHTPU") else ["test_torchtpu.py", "test_torchtpu_start.py"]

ROOM = 8 * 2**30
"""Bytes. With less of the machine's memory left, groups that wait are ended before another begins."""

STARTED: dict[Group, Workers] = {}
"""The one used last is the last."""


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("proof_on"):
            if cast(Any, item).callspec.params["group"].backend in mark.args:
                item.add_marker(pytest.mark.proof)


@pytest.fixture(scope="session")
def workers() -> Iterator[Callable[[Group], Workers]]:
    def get(group: Group) -> Workers:
        host = group._replace(devices=0) if group.engine.any_size else group
        if host not in STARTED:
            while len(STARTED) > 2 and psutil.virtual_memory().available < ROOM:  # a test may hold two
                STARTED.pop(next(iter(STARTED))).close()
            STARTED[host] = Workers(host)
        STARTED[host] = STARTED.pop(host)
        return STARTED[host].on(group)

    yield get
    _close_all()  # a rotation of proofs leaves the folder and comes back
    left = [child for of_python in psutil.Process().children() for child in of_python.children()]  # of the fork server
    assert not left, f"worker processes left behind: {left}"


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    # The item is of this folder: its conftest's hooks are called for its tests alone.
    if nextitem is None or (Path(__file__).parent not in nextitem.path.parents and not item.config.option.proofs_of):
        _close_all()


def _close_all() -> None:
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
        return once(group.for_case(case), repr(case))

    return get


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "group" in metafunc.fixturenames and not any("group" in name for name in names):
        metafunc.parametrize("group", [marked(group) for group in GROUPS])
