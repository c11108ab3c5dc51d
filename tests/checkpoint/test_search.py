"""The checkpoint that a run resumes from: its own, or the one that it was started from, never another history."""

import errno
import json
import os
import uuid
from pathlib import Path
from typing import Any

import pytest
from plain_backend import PlainBackend, checkpoints, load, refused, save_once, small_model

from portable_fsdp.checkpoint import commit, storage
from portable_fsdp.checkpoint.manager import Checkpoints, Resumed
from portable_fsdp.checkpoint.search import ResumePoint
from portable_fsdp.runtime.errors import CheckpointError


def opened(folder: Path, name: str | None = None, **settings: Any) -> Checkpoints:
    config = {"run": {"name": name}, "optim": {"lr": 0.1}, "checkpoint": settings}
    return checkpoints(folder, PlainBackend(), settings, config=json.loads(json.dumps(config)))


def save(folder: Path, *steps: int, name: str | None = None, **settings: Any) -> list[Path]:
    ours = opened(folder, name, **settings)
    return [ours.save(step, *small_model(seed=step), (0, step)) for step in steps]


def resume(folder: Path, name: str | None = None, **settings: Any) -> Resumed:
    return load(opened(folder, name, **settings), *small_model(seed=99), settings.get("resume", "auto"))


def test_the_checkpoints_of_a_run_of_another_name_are_refused_unless_allowed_or_named(tmp_path: Path) -> None:
    [path] = save(tmp_path / "one", 5, name="one")
    with pytest.raises(CheckpointError, match=r'run\.name  "one"  "two"\n.*checkpoint\.allow=\'\[run\.name\]\''):
        resume(tmp_path / "one", "two")
    assert resume(tmp_path / "one", "two", allow=("run.name",)).step == 5
    assert resume(tmp_path / "two", "two", resume=str(path)).step == 5


@pytest.mark.parametrize("how", ["all", "weights_only"])
@pytest.mark.parametrize("place", ["folder", "store"])
def test_the_same_command_resumes_from_the_runs_own(tmp_path: Path, how: str, place: str) -> None:
    origin = tmp_path if place == "folder" else storage.locate(f"memory://{uuid.uuid4().hex}")
    [path] = save(origin / "one", 5)
    settings = {"resume": str(path), "load": how}
    first = resume(tmp_path / "two", **settings)
    assert (first.step, first.weights_only) == ((0, True) if how == "weights_only" else (5, False))
    save(tmp_path / "two", 7, **settings)
    again = resume(tmp_path / "two", **settings)
    assert (again.path, again.step, again.weights_only) == (tmp_path / "two" / "step-00000007", 7, False)


@pytest.mark.parametrize("how", ["all", "weights_only"])
@pytest.mark.parametrize("step", [5, 10, 20])
def test_a_named_checkpoint_never_brings_a_second_history_into_the_folder(tmp_path: Path, how: str, step: int) -> None:
    [path] = save(tmp_path / "one", step)
    save(tmp_path / "two", 5, 10)
    with pytest.raises(CheckpointError, match=r"already\n  holds step-00000010 of another history"):
        resume(tmp_path / "two", resume=str(path), load=how)


def test_of_its_own_only_the_newest_may_be_named(tmp_path: Path) -> None:
    older, newest = save(tmp_path, 5, 10)
    assert resume(tmp_path, resume=str(newest)).step == 10
    for path, how in ((older, "all"), (older, "weights_only"), (newest, "weights_only")):
        with pytest.raises(CheckpointError, match="holds step-00000010 of another history"):
            resume(tmp_path, resume=str(path), load=how)


def test_weights_that_lie_in_the_runs_own_folder_as_step_0(tmp_path: Path) -> None:
    [path] = save(tmp_path, 0)
    settings = {"resume": str(path), "load": "weights_only"}
    assert resume(tmp_path, **settings).weights_only
    save(tmp_path, 5, **settings)
    again = resume(tmp_path, **settings)
    assert (again.step, again.weights_only) == (5, False)


def test_the_folder_of_a_run_is_no_checkpoint_and_its_newest_is_named(tmp_path: Path) -> None:
    save(tmp_path / "one" / "checkpoints", 5, 6)
    for folder in (tmp_path / "one", tmp_path / "one" / "checkpoints"):
        with pytest.raises(CheckpointError, match=r"checkpoint\.resume=.*one/checkpoints/step-00000006\."):
            resume(tmp_path / "two", resume=str(folder))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_file_in_the_place_of_the_folder_is_refused_at_the_start(tmp_path: Path, processes: int) -> None:
    (tmp_path / "run").touch()
    message = refused(processes, lambda backend: checkpoints(tmp_path / "run" / "ck", backend).find("auto"))
    assert "expected a folder that can be written to" in message
    assert os.listdir(tmp_path) == ["run"]


@pytest.fixture
def two_steps(tmp_path: Path) -> Path:
    """The newer of two checkpoints."""
    save_once(tmp_path, step=5)
    return save_once(tmp_path, step=6)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ESTALE, errno.EACCES])
def test_what_says_nothing_of_the_content_is_no_damage(
    two_steps: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Else the run would go on from an older step, and overwrite the newer one's place."""
    real = os.open

    def fails(path: Any, *arguments: Any, **named: Any) -> int:
        if str(path).startswith(str(two_steps)):
            raise OSError(number, os.strerror(number))
        return real(path, *arguments, **named)

    ours = checkpoints(two_steps.parent, PlainBackend())
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", fails)
        with pytest.raises(CheckpointError, match=f"{os.strerror(number)}.*\n  It may be whole: start again"):
            ours.find("auto")
    assert ours.find("auto") == ResumePoint(two_steps, (), is_own=True)


def test_a_disk_that_gives_errors_is_damage(two_steps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def fails(descriptor: int, *arguments: Any) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(two_steps)):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, *arguments)

    monkeypatch.setattr(os, "preadv", fails)
    point = checkpoints(two_steps.parent, PlainBackend()).find("auto")
    assert point is not None
    assert point.path.name == "step-00000005"
    assert "Input/output error" in point.passed_over[0]


def test_one_place_by_two_names(tmp_path: Path) -> None:
    [path] = save(tmp_path / "run", 5)
    (tmp_path / "link").symlink_to(tmp_path / "run")
    (tmp_path / "run" / ".portable_fsdp-0a1b2c3d").touch()  # a killed start's probe
    for spelled in (tmp_path / "link" / path.name, tmp_path / "run" / ".." / "run" / path.name):
        assert resume(tmp_path / "run", resume=str(spelled)).step == 5
    assert os.listdir(tmp_path / "run") == [path.name]


def test_a_store_that_doesnt_answer_is_no_missing_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    store = storage.locate(f"memory://{uuid.uuid4().hex}")
    ours = opened(store / "two")

    def forbidden(path: str, *_: object, **__: object) -> list[object]:
        raise PermissionError(errno.EACCES, "403 Forbidden", path)

    monkeypatch.setattr(type(store.fs), "ls", forbidden)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(CheckpointError, match="403 Forbidden"):
        ours._search._named(store / "one" / "step-00000005", [])


def test_an_attempt_of_another_run_in_a_store_is_told_before_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    store = storage.locate(f"memory://{uuid.uuid4().hex}")
    commit.begin(store / "step-00000007", "another")
    assert opened(store, "ours").find("auto") is None
    assert "found step-00000007 of run 'another'" in caplog.text
    assert "A save of that step will be refused" in caplog.text
