"""Addresses, and names that stay."""

import os
from pathlib import Path

import pytest

from portable_fsdp.checkpoint import storage
from portable_fsdp.runtime.errors import CheckpointError


@pytest.mark.parametrize("address", ["/tmp/a/run", "file:///tmp/a/run", "local:///tmp/a/run"])
def test_a_local_folder_by_any_name(address: str) -> None:
    path = storage.locate(address)
    assert path == Path("/tmp/a/run")
    assert not storage.is_object_store(path)


@pytest.mark.parametrize("address", ["memory://runs/exp[12]", "s3://bucket/run*", "gs://bucket/what?/x"])
def test_an_url_that_would_be_a_pattern_is_refused(address: str) -> None:
    """fsspec deletes all that match."""
    with pytest.raises(CheckpointError, match=r"expected an URL without \* \? \[ \]"):
        storage.locate(address)


def test_folders_made_on_the_way_have_durable_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    storage.make_folder(tmp_path / "a" / "b" / "c")
    assert set(synced) == {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")}
    storage.make_folder(tmp_path / "a" / "b" / "c")
    assert len(synced) == 3
