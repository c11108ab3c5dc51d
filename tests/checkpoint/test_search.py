"""The checkpoint that a run resumes from: its own, or the one that it was started from, never another history."""

import itertools
import json
import logging
import os
import uuid
from pathlib import Path
from typing import Any

import pytest
from plain_backend import (
    PlainBackend,
    checkpoints,
    flip_last_byte,
    in_processes,
    load,
    names,
    refused,
    save_once,
    small_model,
)

from portable_fsdp.checkpoint.manager import Checkpoints, Resumed
from portable_fsdp.checkpoint.resume import ResumePoint
from portable_fsdp.checkpoint.storage import locate, store_of
from portable_fsdp.runtime.errors import CheckpointError


def opened(folder: Path, name: str | None = None, **settings: Any) -> Checkpoints:
    config = {"run": {"name": name}, "optim": {"lr": 0.1}, "checkpoint": settings}
    return checkpoints(folder, PlainBackend(), settings, config=json.loads(json.dumps(config)))


def save(folder: Path, *steps: int, name: str | None = None, **settings: Any) -> list[Path]:
    ours = opened(folder, name, **settings)
    return [ours.save(step, *small_model(seed=step), (0, step)) for step in steps]


def resume(folder: Path, name: str | None = None, **settings: Any) -> Resumed:
    return load(opened(folder, name, **settings), *small_model(seed=99), settings.get("resume", "auto"))


def test_auto_takes_the_newest_or_starts_anew(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert [checkpoints(folder, PlainBackend()).find(resume) for resume in ("auto", "none")] == [None, None]
    assert not folder.exists()
    save_once(folder, step=5)
    newest = save_once(folder, step=10)
    (folder / "step-00000015.tmp").mkdir()
    points = in_processes(2, lambda backend: checkpoints(folder, backend).find("auto"))
    assert points == [ResumePoint(newest, (), is_own=True)] * 2
    assert [name for name in names(folder) if name.startswith(".")] == []  # the probe is gone


def test_auto_warns_of_a_damaged_one_and_takes_an_older(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    older, newest = save_once(place, step=5), save_once(place, step=10)
    [shard] = (newest / "model").glob("shard-00001-00*.safetensors")
    flip_last_byte(shard)
    damage = f"step-00000010: model/{shard.name}: expected content with xxh3_128"

    def work(backend: PlainBackend) -> tuple[Path, Path]:
        opened = checkpoints(place, backend)
        point = opened.find("auto")
        assert point is not None
        assert damage in point.passed_over[0]
        return point.path, opened.save(10, *small_model(seed=3), (0, 0))

    with caplog.at_level(logging.WARNING, logger="portable_fsdp"):
        results = in_processes(2, work)
    assert results == [(older, newest)] * 2
    assert damage in caplog.text
    assert "resuming from the older step-00000005" in caplog.text
    assert len(caplog.records) == 4  # two by each process; a run's log is that of process 0
    assert store_of(place).names(place) == ["step-00000005", "step-00000010", "step-00000010.damaged-1"]


def test_what_find_and_load_refuse_on_all_processes(tmp_path: Path) -> None:
    older, newest = save_once(tmp_path, step=5), save_once(tmp_path, step=10)

    def find(resume: Path | str, folder: Path = tmp_path, how: str = "all") -> str:
        return refused(2, lambda backend: checkpoints(folder, backend, {"load": how}).find(str(resume)))

    assert "already has step-00000010 and 1 older.\n  Use checkpoint.resume: auto" in find("none")
    assert "would begin at step 5, but " in find(older)
    others = [older, *(save_once(tmp_path / "one", step) for step in (5, 10, 20))]
    for path, how in (*itertools.product(others, ("all", "weights_only")), (newest, "weights_only")):
        assert " already\n  has step-00000010 of another history" in find(path, how=how)
    assert f"no such folder: {tmp_path / 'atuo'}" in find(tmp_path / "atuo", tmp_path / "other")
    work = lambda backend: load(checkpoints(tmp_path, backend), *small_model(seed=1, hidden=8))  # noqa: E731
    assert "    0.weight             float32 [8, 5]  float32 [7, 5]\n" in refused(2, work)
    for folder, is_own in ((tmp_path, True), (tmp_path / "other", False)):
        points = in_processes(2, lambda backend, folder=folder: checkpoints(folder, backend).find(str(newest)))
        assert points == [ResumePoint(newest, (), is_own)] * 2
    flip_last_byte(newest / "model" / "shard-00001-00.safetensors")  # the share of one of two
    assert "shard-00001-00.safetensors: expected content with xxh3_128" in find(newest, tmp_path / "other")
    (newest / "model" / "shard-00000-00.safetensors").unlink()
    assert "no such file" in find(newest, tmp_path / "other")
    (older / "manifest.json").unlink()
    assert ", 2 damaged:\n" in find("auto")  # never fresh weights


def test_how_much_verify_checks(tmp_path: Path) -> None:
    def are_refused() -> list[str]:
        refused: list[str] = []
        for verify in ("full", "size", "off"):
            try:
                assert checkpoints(tmp_path, PlainBackend(), {"verify": verify}).find("auto") is not None
            except CheckpointError:
                refused.append(verify)
        return refused

    file = save_once(tmp_path) / "model" / "shard-00000-00.safetensors"
    assert are_refused() == []
    flip_last_byte(file)
    assert are_refused() == ["full"]
    file.write_bytes(file.read_bytes()[:-1])
    assert are_refused() == ["full", "size"]


def test_a_folder_that_the_processes_do_not_share_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    for index in (0, 1):
        (tmp_path / f"host{index}").mkdir()
    results = in_processes(2, lambda b: checkpoints(tmp_path / f"host{b.process.index}" / "run", b).find("auto"))
    assert [type(result) for result in results] == [CheckpointError] * 2
    assert "process 1 can't see\n  a file that process 0 created there" in str(results[0])
    assert [names(tmp_path / f"host{index}") for index in (0, 1)] == [[], []]


def test_the_checkpoints_of_a_run_of_another_name_are_refused_unless_allowed_or_named(tmp_path: Path) -> None:
    [path] = save(tmp_path / "one", 5, name="one")
    with pytest.raises(CheckpointError, match=r'run\.name  "one"  "two"\n.*checkpoint\.allow=\'\[run\.name\]\''):
        resume(tmp_path / "one", "two")
    assert resume(tmp_path / "one", "two", allow=("run.name",)).step == 5
    assert resume(tmp_path / "two", "two", resume=str(path)).step == 5


@pytest.mark.parametrize(
    ("place", "step", "how"),
    [(place, 5, how) for place in ("one", "a store") for how in ("all", "weights_only")] + [("two", 0, "weights_only")],
)
def test_the_same_command_resumes_from_the_runs_own(tmp_path: Path, place: str, step: int, how: str) -> None:
    [path] = save(locate(f"memory://{uuid.uuid4().hex}") if place == "a store" else tmp_path / place, step)
    settings = {"resume": str(path), "load": how}
    first = resume(tmp_path / "two", **settings)
    assert (first.step, first.weights_only) == ((0, True) if how == "weights_only" else (5, False))
    save(tmp_path / "two", 7, **settings)
    again = resume(tmp_path / "two", **settings)
    assert (again.path, again.step, again.weights_only) == (tmp_path / "two" / "step-00000007", 7, False)


def test_the_folder_of_a_run_is_no_checkpoint_and_its_newest_is_named(tmp_path: Path) -> None:
    save(tmp_path / "one" / "checkpoints", 5, 6)
    for folder in (tmp_path / "one", tmp_path / "one" / "checkpoints"):
        with pytest.raises(CheckpointError, match=r"checkpoint\.resume=.*one/checkpoints/step-00000006\."):
            resume(tmp_path / "two", resume=str(folder))


def test_a_file_in_the_place_of_the_folder_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    for processes in (1, 2):
        message = refused(processes, lambda backend: checkpoints(tmp_path / "run" / "ck", backend).find("auto"))
        assert "can't write there" in message
        assert os.listdir(tmp_path) == ["run"]


def test_one_place_by_two_names(tmp_path: Path) -> None:
    [path] = save(tmp_path / "run", 5)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for spelled in (tmp_path / "link" / path.name, tmp_path / "run" / ".." / "run" / path.name):
        assert resume(tmp_path / "run", resume=str(spelled)).step == 5
    assert os.listdir(tmp_path / "run") == [path.name]
