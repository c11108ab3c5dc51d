"""Worker processes of tests/backends, for the tests of a file."""

from collections.abc import Callable, Iterator

import pytest
from workers import Group, Workers, started_on_demand


@pytest.fixture(scope="module")
def workers() -> Iterator[Callable[[Group], Workers]]:
    yield from started_on_demand()
