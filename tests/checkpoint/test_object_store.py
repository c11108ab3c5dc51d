"""Checkpoints behind URLs: a real S3 server, and `memory://`."""

import json
import re
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from in_stores import OURS, at, expect_loaded, opened, save
from plain_backend import PlainBackend, checkpoints, in_processes, load, refused, small_model, what_is_written
from s3_server import BUCKET, Fault, Faults, s3_server
from s3fs import S3FileSystem

from portable_fsdp.backends.base import Rank
from portable_fsdp.checkpoint import commit, storage
from portable_fsdp.checkpoint.__main__ import main
from portable_fsdp.runtime.errors import CheckpointError

pytestmark = pytest.mark.slow

ANOTHERS = {"run": {"name": "another"}}


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[Faults]:
    with s3_server() as faults:
        yield faults


@pytest.fixture(params=["s3", "memory"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    root = f"{request.param}://{uuid.uuid4().hex}"
    if request.param == "s3":
        root = root.replace("://", f"://{BUCKET}/")
    yield f"{root}/run"
    storage.remove(storage.locate(root))


@pytest.mark.parametrize("writers", [pytest.param(1, marks=pytest.mark.proof), 2])
def test_what_is_saved_is_found_and_loaded(url: str, writers: int) -> None:
    assert opened(url, PlainBackend()).find("auto") is None
    path = save(url, 5, writers)
    files = [file.name for file in path.rglob("*") if file.is_file()]
    assert len({name.rsplit("-", 1)[1] for name in files if name.startswith("shard")}) == 1  # of one attempt
    assert len(files) == 1 + 4 * writers
    for readers in (1, 2):
        expect_loaded(url, 5, readers)
    assert storage.names(path.parent) == ["step-00000005"]  # no probe is left


def test_a_damaged_one_is_passed_over_and_set_aside(url: str) -> None:
    save(url, 5)
    shard = next(iter((save(url, 10) / "model").iterdir()))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    storage.write(shard, [bytes(content)])
    ours = opened(url, PlainBackend())
    model, optimizer = small_model(seed=9)
    resumed = load(ours, model, optimizer)
    assert (resumed.step, len(resumed.passed_over)) == (5, 1)
    assert "expected content with xxh3_128" in resumed.passed_over[0]
    ours.save(10, *small_model(seed=10), (0, 10))
    expect_loaded(url, 10)
    assert storage.names(at(url)) == ["step-00000005", "step-00000010", "step-00000010.damaged-1"]


def test_retention_deletes_what_this_run_wrote(url: str) -> None:
    save(url, 1, config=ANOTHERS)
    ours = opened(url, PlainBackend(), keep=2, keep_every=4)
    for step in (2, 3, 4, 5, 6):
        ours.save(step, *small_model(seed=step), (0, step))
    assert storage.names(at(url)) == [f"step-0000000{step}" for step in (1, 4, 5, 6)]
    assert [one.removed for one in ours.finished()] == [(), (), (2,), (3,), ()]


def test_a_kill_leaves_debris_that_the_same_run_removes(url: str) -> None:
    save(url, 5, 2)
    for step, config in ((6, OURS), (7, ANOTHERS)):
        killed = save(url, step, config=config)
        storage.write(killed / commit.MARK, [json.dumps({**config["run"], "run": config["run"]["name"]}).encode()])
        storage.remove(killed / "manifest.json")
    expect_loaded(url, 5)
    assert storage.names(at(url)) == [f"step-0000000{step}" for step in (5, 6, 7)]  # a load changes nothing
    save(url, 8, 2)
    assert storage.names(at(url)) == [f"step-0000000{step}" for step in (5, 7, 8)]
    with pytest.raises(CheckpointError, match="expected no other run at work"):
        opened(url, PlainBackend()).save(7, *small_model(seed=7), (0, 7))


def test_a_straggler_of_an_earlier_attempt_does_no_harm(url: str) -> None:
    """Process 1 of a killed attempt goes on while the next one saves the same step, and after its commit."""
    straggler = PlainBackend(Rank(1, 2))
    final = at(url) / "step-00000005"
    old = opened(url, straggler)
    attempt = commit.begin(final, "ours")
    state = straggler.state(*small_model(seed=4))
    part = what_is_written(state)

    def work(backend: PlainBackend) -> None:
        ours = opened(url, backend)
        if backend.process.index == 1:
            old._write_part(final, attempt, *part)
        ours.save(5, *small_model(seed=5), (0, 5))

    assert in_processes(2, work) == [None, None]
    expect_loaded(url, 5, 2)
    old._write_part(final, attempt, *part)
    expect_loaded(url, 5, 2)


def test_commands_take_urls(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (5, 6):
        save(f"{url}/checkpoints", step)
    for command in (["list"], ["show"], ["verify", "--all"]):
        assert main([*command, url, "--json"]) == 0
        out = capsys.readouterr().out
        assert f"{url}/checkpoints/step-00000006" in out
        json.loads(out)
        assert main([*command, f"{url}/nothing"]) == 2
        assert f"{url}/nothing" in capsys.readouterr().err
    assert main(["prune", url, "--keep", "1"]) == 0
    assert storage.names(at(url) / "checkpoints") == ["step-00000006"]
    assert "deleted 1 of 2 checkpoints" in capsys.readouterr().out


def test_an_unknown_protocol_and_a_missing_package_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    for url, found in (("gopher://bucket/run", "gopher"), ("dropbox://bucket/run", "ropbox")):
        with pytest.raises(CheckpointError, match=rf"{url}: expected an URL that fsspec can open, found: .*{found}"):
            storage.locate(url)
        assert main(["list", url]) == 2
        assert "expected an URL that fsspec can open" in capsys.readouterr().err


def test_a_missing_bucket_or_credentials_end_the_run_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    message = refused(2, lambda backend: opened("s3://no-such-bucket/run", backend).find("auto"))
    assert re.search(r"s3://no-such-bucket/run(.|\n)*bucket", message)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    S3FileSystem.clear_instance_cache()
    with pytest.raises(CheckpointError, match=r"(?i)s3://nobodys/run: .*credentials"):
        checkpoints(storage.locate("s3://nobodys/run"), PlainBackend()).find("auto")
    S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize("status", [500, *(pytest.param(n, marks=pytest.mark.proof) for n in (403, 503))])
def test_a_store_that_does_not_answer_is_no_empty_folder(server: Faults, status: int) -> None:
    """Else a run would begin with fresh weights, or overwrite what it can't see."""
    url = f"s3://{BUCKET}/{uuid.uuid4().hex}"
    save(url, 5)
    for method, part in (("HEAD", "manifest.json"), ("GET", "list-type"), ("GET", "manifest.json")):
        server.rules = [Fault(method, part, status)]
        try:
            with pytest.raises(CheckpointError):
                opened(url, PlainBackend()).find("auto")
            with pytest.raises(CheckpointError):
                opened(url, PlainBackend()).save(5, *small_model(seed=6), (0, 6))
        finally:
            server.rules = []
        expect_loaded(url, 5)
