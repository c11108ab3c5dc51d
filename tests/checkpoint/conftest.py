"""No test here cuts the power, and a real fsync takes most of the time of a save."""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from portable_fsdp.checkpoint.storage import locate


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(params=["folder", "store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """The folder of a run's checkpoints, on disk or in memory."""
    yield tmp_path / "run" if request.param == "folder" else locate(f"memory://{uuid.uuid4().hex}/run")
    MemoryFileSystem.store.clear()


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    """`Faults` before a server of S3."""
    from s3_server import s3_server  # takes half a second

    with s3_server() as faults:
        yield faults
