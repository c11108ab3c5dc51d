"""Checkpoints in object stores that are programs of their own: saved, damaged, deleted, killed and resumed there.

`tests/checkpoint/test_storage.py` has the rest, `test_faults.py` has faults in front of a server.
"""

import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from cli import PYTHON, SAVES, committed_in, events, launch, require_curve, started
from in_stores import at, expect_loaded, opened, save
from plain_backend import PlainBackend, load, small_model, what_is_written
from servers import fake_gcs, seaweedfs
from torch import nn
from torch.optim import SGD

from portable_fsdp.backends.contract import Partition
from portable_fsdp.checkpoint import commit
from portable_fsdp.checkpoint.__main__ import main
from portable_fsdp.checkpoint.storage import ObjectStore, store_of

pytestmark = pytest.mark.proof

STEPS = 20
SERVERS = {"seaweedfs": seaweedfs, "fake_gcs": fake_gcs}


@pytest.fixture(scope="module", params=SERVERS)
def bucket(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with SERVERS[request.param](tmp_path_factory.mktemp(request.param)) as bucket:
        yield bucket


@pytest.fixture
def url(bucket: str) -> str:
    return f"{bucket}/{uuid.uuid4().hex}/run"


def folders(url: str) -> list[str]:
    """Those that hold objects: SeaweedFS goes on listing a folder for minutes after its last object was deleted."""
    folder = at(url)
    return sorted({file.relative_to(folder).parts[0] for file in folder.rglob("*") if file.is_file()})


def test_two_processes_save_and_remove_what_an_unfinished_attempt_left(url: str) -> None:
    save(url, 1, count=2)
    unfinished, second = at(url) / "step-00000002", PlainBackend(Partition(1, 2))
    attempt = commit.begin(unfinished, "ours")
    state = second.state(*small_model(seed=2))
    part = what_is_written(state)
    opened(url, second)._write_part(unfinished, attempt, part)
    assert len(list(unfinished.rglob("*-*"))) == 3
    for readers in (1, 2):
        expect_loaded(url, 1, readers)
    save(url, 3, count=2, keep=1)
    assert folders(url) == ["step-00000003"]
    for readers in (1, 2):
        expect_loaded(url, 3, readers)
    assert folders(url) == ["step-00000003"]  # no probe is left


def test_commands_and_a_damaged_object_that_is_noticed_and_saved_anew(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (3, 4, 5):
        save(url, step, count=2)
    assert main(["list", url]) == 0
    assert re.findall(r"step-0000000\d", capsys.readouterr().out) == [f"step-0000000{step}" for step in (5, 4, 3)]
    assert main(["verify", "--all", url]) == 0
    expect_loaded(url, 5)

    shard = next(iter((save(url, 10) / "model").iterdir()))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    store_of(shard).write(shard, [bytes(content)])
    assert main(["verify", "--all", url]) == 2
    assert "expected content with xxh3_128" in capsys.readouterr().err
    ours = opened(url, PlainBackend())
    resumed = load(ours, *small_model(seed=9))
    assert (resumed.step, len(resumed.passed_over)) == (5, 1)
    ours.save(10, *small_model(seed=10), (0, 10))
    expect_loaded(url, 10)
    assert folders(url) == [*(f"step-0000000{step}" for step in (3, 4, 5)), "step-00000010", "step-00000010.damaged-1"]


def test_a_tensor_larger_than_a_part_of_an_upload(url: str) -> None:
    saved, fresh = nn.Linear(1200, 4000), nn.Linear(1200, 4000)
    assert saved.weight.nbytes > ObjectStore.chunk_bytes
    opened(url, PlainBackend()).save(1, saved, SGD(saved.parameters()), (0, 1))
    load(opened(url, PlainBackend()), fresh, SGD(fresh.parameters()))
    assert torch.equal(fresh.weight, saved.weight)


def test_a_killed_run_goes_on(url: str, folder: Path) -> None:
    """Two processes save every step in the background, and get a SIGKILL after the first commit."""
    settings = ["--device=cpu", "--config=tiny.yaml", f"train.steps={STEPS}", *SAVES]
    with started([*PYTHON, "--num_devices=2", *settings, f"checkpoint.dir={url}"], folder) as process:
        process.wait_until(lambda: bool(committed_in(at(url))))
        time.sleep(0.1)  # into a later save
        process.kill()
    last = max(committed_in(at(url)))
    assert last < STEPS
    assert launch(*settings, f"checkpoint.dir={url}") == 0
    assert [event["step"] for event in events(folder / "run", "start")] == [0, last]
    require_curve(folder, *settings)
    assert folders(url) == [f"step-{step:08d}" for step in (STEPS - 1, STEPS)]
    assert main(["verify", "--all", url]) == 0
