"""Worker processes of tests/backends, for the tests of this folder."""

from collections.abc import Callable, Iterator

import pytest
from workers import Group, Workers


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
