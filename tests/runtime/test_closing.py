"""What is closed at the end of a `with` block: an error of the block is the one that people see."""

import logging

import pytest

from portable_fsdp.runtime.errors import Closing


class BrokenClose(Closing):
    def close(self) -> None:
        raise RuntimeError("Check failed: tensor_data\n*** Begin stack trace ***")


def test_closing_never_hides_the_first_error(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "portable_fsdp"), pytest.raises(KeyError), BrokenClose():
        raise KeyError("first")
    assert [record.getMessage() for record in caplog.records] == [
        "after the error below, closing failed too: Check failed: tensor_data"
    ]
    with pytest.raises(RuntimeError, match="tensor_data"), BrokenClose():
        pass
