"""The groups of worker processes, started when first asked for and shared by all tests of a session."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import psutil
import pytest
from workers import GROUPS, Group, Workers


@pytest.fixture(scope="session")
def workers() -> Iterator[Callable[[Group], Workers]]:
    started: dict[Group, Workers] = {}

    def get(group: Group) -> Workers:
        if group not in started:
            started[group] = Workers(group)
        return started[group]

    yield get
    for one in started.values():
        one.close()
    left = [child.cmdline() for child in psutil.Process().children() if "resource_tracker" not in str(child.cmdline())]
    assert not left, f"worker processes left behind: {left}"


@pytest.fixture
def leaves_nothing_behind() -> None:
    """The workers start in whichever test asks first and stay for the session; `workers` looks for leaks at its end."""


@pytest.fixture(scope="session")
def run(workers: Callable[[Group], Workers]) -> Callable[..., list[dict[str, Any]]]:
    """`run(group, case)`: what each process of a group says of a whole run; run once, asserted on by many tests."""

    @cache
    def once(group: Group, key: str) -> list[dict[str, Any]]:
        return workers(group).run("train", case=cases[key])

    cases: dict[str, Any] = {}

    def get(group: Group, case: Any) -> list[dict[str, Any]]:
        cases[repr(case)] = case
        return once(group, repr(case))

    return get


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "group" in metafunc.fixturenames:
        metafunc.parametrize("group", [pytest.param(group, id=str(group), marks=_marks(group)) for group in GROUPS])


def _marks(group: Group) -> list[pytest.MarkDecorator]:
    """xla_fsdp1 has a program for each case and no process of its own for a device: two minutes for the contract."""
    by_backend = {"native": [], "xla": [pytest.mark.xla], "xla_fsdp1": [pytest.mark.xla, pytest.mark.proof]}
    return by_backend[group.backend]
