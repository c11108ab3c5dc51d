"""Addresses, names that stay, and checkpoints in an object store: `memory://`, and S3's refusals as proofs."""

import asyncio
import json
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from fsspec.config import conf
from fsspec.implementations.memory import MemoryFileSystem
from in_stores import at, expect_loaded, opened, save
from plain_backend import Capture, Patch, PlainBackend, checkpoints, refused, small_model
from s3fs import S3FileSystem

from portable_fsdp.checkpoint import commit
from portable_fsdp.checkpoint.__main__ import main
from portable_fsdp.checkpoint.storage import locate, store_of
from portable_fsdp.runtime.errors import CheckpointError

ANOTHERS = {"run": {"name": "another"}}


def test_a_local_folder_by_any_name() -> None:
    for address in ("/tmp/a/run", "file:///tmp/a/run", "local:///tmp/a/run"):
        assert locate(address) == Path("/tmp/a/run")
        assert store_of(locate(address)).is_local


@pytest.mark.parametrize(
    ("url", "found"),
    [
        *(
            (url, r"expected a URL without \* \? \[ \]")
            for url in ("memory://runs/exp[12]", "s3://b/run*", "gs://b/?/x")
        ),
        ("gopher://bucket/run", "fsspec can't open this URL: .*gopher"),
        ("dropbox://bucket/run", "fsspec can't open this URL: .*ropbox"),  # a package is missing
        ("ftp://localhost:1/run", r"fsspec can't open this URL: .*refused\n  Check the server's name, and the network"),
        *((url, "names no bucket or server") for url in ("ftp://", "ftp:///run", "s3://", "gs://", "http://")),
    ],
)
def test_an_url_that_would_be_a_pattern_or_that_nothing_opens(url: str, found: str, capsys: Capture) -> None:
    """fsspec deletes all that match a pattern."""
    with pytest.raises(CheckpointError, match=re.escape(url) + f": {found}"):
        locate(url)
    assert main(["list", url]) == 2
    assert re.search(re.escape(url) + f": {found}", capsys.readouterr().err)


def test_googles_storage_without_a_network_is_one_sentence_after_seconds(monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://localhost:1")
    monkeypatch.setitem(conf, "gs", {"token": "anon"})
    monkeypatch.setattr(asyncio, "sleep", Mock(side_effect=AssertionError("gcsfs alone would pause for 31 s")))
    assert main(["list", "gs://bucket/run"]) == 2
    lines = capsys.readouterr().err
    assert re.fullmatch(r"gs://bucket: no answer: Cannot connect .*\n  Check the network, .*\n", lines)


def test_folders_made_on_the_way_have_durable_names(tmp_path: Path, monkeypatch: Patch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}")))
    for _ in range(2):
        store_of(tmp_path).make_folder(tmp_path / "a" / "b" / "c")
    assert sorted(synced) == [str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")]


# ------------------------------------------------------------------------------------------------------- object stores


@pytest.fixture
def url() -> Iterator[str]:
    """tests/launch/test_stores.py has servers of their own."""
    yield f"memory://{uuid.uuid4().hex}/run"
    MemoryFileSystem.store.clear()


def test_a_step_that_another_run_saves_is_refused(url: str) -> None:
    """tests/checkpoint/test_faults.py removes a run's own debris."""
    save(url, 5)
    killed = save(url, 7, config=ANOTHERS)
    store_of(killed).write(killed / commit.MARK, [json.dumps({"run": "another"}).encode()])
    store_of(killed).remove(killed / "manifest.json")
    expect_loaded(url, 5)
    with pytest.raises(CheckpointError, match="another run may be saving there"):
        opened(url, PlainBackend()).save(7, *small_model(seed=7), (0, 7))
    assert store_of(at(url)).names(at(url)) == ["step-00000005", "step-00000007"]


def test_commands_take_urls(url: str, capsys: Capture) -> None:
    for step in (5, 6):
        save(f"{url}/checkpoints", step)
    for command in (["list"], ["show"], ["verify", "--all"]):
        assert main([*command, url, "--json"]) == 0
        out = capsys.readouterr().out
        assert f"{url}/checkpoints/step-00000006" in out
        json.loads(out)
        assert main([*command, f"{url}/nothing"]) == 2
        assert f"{url}/nothing" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------------- S3


@pytest.mark.proof
@pytest.mark.usefixtures("server")
def test_a_missing_bucket_or_credentials_end_the_run_before_the_first_step(monkeypatch: Patch, tmp_path: Path) -> None:
    message = refused(2, lambda backend: opened("s3://no-such-bucket/run", backend).find("auto"))
    assert re.search(r"s3://no-such-bucket/run(.|\n)*bucket", message)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    S3FileSystem.clear_instance_cache()
    with pytest.raises(CheckpointError, match=r"(?i)s3://nobodys/run: .*credentials"):
        checkpoints(locate("s3://nobodys/run"), PlainBackend()).find("auto")
    S3FileSystem.clear_instance_cache()
