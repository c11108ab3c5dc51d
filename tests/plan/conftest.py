"""One process for the plans of all tests here: each new one takes seconds to import torch and transformers."""

from collections.abc import Iterator

import pytest

from portable_fsdp.runtime.child import Worker


@pytest.fixture(scope="session")
def worker() -> Iterator[Worker]:
    with Worker() as worker:
        worker(abs, -1)  # starts it before the test, which would seem to leave it behind
        yield worker
