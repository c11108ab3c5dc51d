"""Worker processes of tests/backends, for the tests of this folder."""

import os
from collections.abc import Callable, Iterator

import pytest
from workers import Group, Workers

collect_ignore = [] if os.environ.get("TEST_TRL") else ["test_sft.py"]  # make proof-latest installs trl


@pytest.fixture(scope="package")
def workers() -> Iterator[Callable[[Group], Workers]]:
    started: dict[Group, Workers] = {}

    def get(group: Group) -> Workers:
        if group not in started:
            started[group] = Workers(group)
        return started[group]

    yield get
    for each in started.values():
        each.close()
