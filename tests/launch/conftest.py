"""Fixtures for tests of whole runs."""

from pathlib import Path

import pytest
from cli import tiny_config


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that commands run in, with the config `tiny.yaml`."""
    tiny_config(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
