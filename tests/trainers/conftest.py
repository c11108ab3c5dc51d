"""Worker processes of tests/backends, for the tests of this folder."""

import os
from collections.abc import Callable, Iterator

import pytest
from workers import Group, Workers, started_on_demand

collect_ignore = [] if os.environ.get("TEST_TRL") else ["test_sft.py"]
"""`make test` leaves trl's out; the targets that set the variable fail where trl is missing."""


@pytest.fixture(scope="package")
def workers() -> Iterator[Callable[[Group], Workers]]:
    yield from started_on_demand()
