"""For the checkpoint tests that open an export in transformers."""

import pytest


@pytest.fixture(autouse=True)
def transformers_loads_in_this_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """`from_pretrained` doesn't wait for the threads that it loads with, and a test must leave none behind."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
