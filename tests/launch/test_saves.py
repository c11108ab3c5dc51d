"""When a run saves, and what it goes on from: whole runs, in this process."""

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from cli import committed, contents, events, launch, losses

from portable_fsdp.checkpoint.manager import Checkpoints
from portable_fsdp.checkpoint.manifests import Manifest
from portable_fsdp.observe.callbacks import StepEnd
from portable_fsdp.runtime.errors import TrainingError
from portable_fsdp.train.control import Votes
from portable_fsdp.train.measures import InFlight, Measures

FLAGS = ("--device=cpu", "--config=tiny.yaml", "checkpoint.every=null")


def test_what_is_no_file_asks_for_no_save(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind, run in (("folder", folder / "run"), ("link", folder / "other")):
        run.mkdir()
        (run / "SAVE").mkdir() if kind == "folder" else (run / "SAVE").symlink_to(folder)
        assert launch(*FLAGS, f"run.dir={run}") == 0
        assert (committed(run), (run / "SAVE").exists()) == ([6], True), kind
        assert capsys.readouterr().err.count("SAVE: not a regular file") == 1, kind


@pytest.mark.parametrize("fails", [False, True])
def test_a_file_asks_for_a_save_now_and_goes_when_it_is_committed_in_the_background(
    fails: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commit is held until two further steps have run. One that fails ends the run at the next step."""
    commit, existed = Checkpoints._commit, list[bool]()

    def late(self: Checkpoints, final: Path, attempt: str, manifest: Manifest) -> None:
        if manifest.step == 2:
            while len(losses(folder / "run")) < 4:
                time.sleep(0.01)
            existed.append((folder / "run" / "SAVE").exists())
            if fails:
                final.touch()  # a file in the folder's place: the commit can't rename to it
        commit(self, final, attempt, manifest)

    monkeypatch.setattr(Checkpoints, "_commit", late)
    (folder / "run").mkdir()
    (folder / "run" / "SAVE").touch()
    steps = 400 if fails else 6
    assert launch(*FLAGS, "checkpoint.async_save=true", f"train.steps={steps}") == (1 if fails else 0)
    assert existed == [True]
    assert (folder / "run" / "SAVE").exists() == fails
    assert committed(folder / "run") == ([] if fails else [2, 6])  # asked with step 1, known in step 2; saved once
    assert (len(losses(folder / "run")) < steps) == fails
    message = capsys.readouterr().err
    assert ("checkpoint step-00000002" in message) == fails
    assert "Traceback" not in message


def test_minutes_ask_for_saves(folder: Path) -> None:
    """In the background, to another place."""
    here = ["checkpoint.every_minutes=1e-9", "checkpoint.async_save=true", "checkpoint.keep=1"]
    assert launch(*FLAGS, *here, "checkpoint.dir=elsewhere/deep") == 0
    assert [path.name for path in (folder / "elsewhere/deep").iterdir()] == ["step-00000006"]
    assert not (folder / "run/checkpoints").exists()
    saves = events(folder / "run", "save")
    assert [(event["step"], event["removed"]) for event in saves] == [(2, []), (4, [2]), (6, [4])]


def test_a_background_save_without_a_thread_waits(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no more threads are allowed; the message names the cause."""
    start = threading.Thread.start

    def refuses(thread: threading.Thread) -> None:
        if thread.name == "portable_fsdp save":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuses)
    assert launch(*FLAGS, "checkpoint.every=4", "checkpoint.async_save=true") == 0
    message = capsys.readouterr().err
    assert message.count("can't start new thread (ulimit -u, or the container's limit of pids): saving while") == 2
    assert committed(folder / "run") == [4, 6]


@pytest.mark.parametrize("ends_by", ["the next save", "a loss that is not finite"])
def test_a_commit_has_its_event_also_where_the_run_then_fails(
    ends_by: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit of step 2 is held until the loop has no more occasion to ask for it."""
    commit, begin, close, measure = Checkpoints._commit, Checkpoints._begin, Checkpoints.close, Measures.read
    may_commit = threading.Event()

    def fail(message: str) -> Any:
        raise TrainingError(message)

    def late_commit(self: Checkpoints, final: Path, attempt: str, manifest: Manifest) -> None:
        assert may_commit.wait(60)
        commit(self, final, attempt, manifest)

    def no_second_begin(self: Checkpoints, final: Path) -> str:
        return begin(self, final) if final.name != "step-00000004" else fail("no such save today")

    def closed(self: Checkpoints) -> None:
        may_commit.set()
        close(self)

    def measured(self: Measures, late: InFlight, until: float | None = None) -> tuple[StepEnd, Votes]:
        if late.step == 4:
            may_commit.set() if ends_by == "the next save" else fail("not finite")
        return measure(self, late, until)

    monkeypatch.setattr(Checkpoints, "_commit", late_commit)
    monkeypatch.setattr(Checkpoints, "_begin", no_second_begin)
    monkeypatch.setattr(Checkpoints, "close", closed)
    monkeypatch.setattr(Measures, "read", measured)
    assert launch(*FLAGS, "checkpoint.every=2", "checkpoint.async_save=true") == 1
    assert committed(folder / "run") == [2]
    assert [event["step"] for event in events(folder / "run", "save")] == [2]


def test_a_run_that_lost_its_checkpoints_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its events name a save: another start would drop its metrics. The message names the save and the way out."""
    words, run = (*FLAGS, f"run.dir={folder / 'run'}", "checkpoint.dir=saves"), folder / "run"
    assert launch(*words, "train.stop_at=3") == 0
    with (run / "events.jsonl").open("a") as file:
        file.write('{"time": "2026-01-01T00:00:00.000+00:00", "event": "sa')  # as a kill leaves it
    before = contents(run)
    (folder / "elsewhere").mkdir()
    os.chdir("elsewhere")
    capsys.readouterr()
    for more in ((), ("checkpoint.async_save=true",)):
        assert launch("--device=cpu", f"--config={folder / 'tiny.yaml'}", *words[2:], *more) == 2
    message = capsys.readouterr().err
    assert f"the last save that {run / 'events.jsonl'} names is {folder / 'saves/step-00000003'},\n" in message
    assert "set checkpoint.dir to the one\n  that holds it. To start over, without the steps so far: " in message
    assert contents(run) == before
    assert not list((folder / "elsewhere").iterdir())
    os.chdir(folder)
    assert launch(*words) == 0  # where it is found again
    assert len(losses(run)) == 6
    shutil.rmtree("saves")
    assert launch(*words, "checkpoint.resume=none", "train.stop_at=1") == 0
    assert len(losses(run)) == 1
    shutil.rmtree("saves/step-00000001")
    assert launch(*words) == 2  # the saves before the new beginning don't count
    assert "saves/step-00000001," in capsys.readouterr().err


def test_the_newest_checkpoint_may_be_older_than_the_newest_save_and_events_say_what_a_resume_changed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(*FLAGS, "checkpoint.every=2", "train.stop_at=4") == 0
    shutil.rmtree("run/checkpoints/step-00000004")
    changed = [*FLAGS, "run.dir=changed", "optim.lr=0.002", "train.micro_batch=2"]
    assert launch(*FLAGS, "run.dir=changed", "train.stop_at=3") == 0
    assert (launch(*changed), launch(*changed, "checkpoint.allow=[optim.lr]")) == (2, 0)
    [event] = events(folder / "changed", "resume")
    assert (event["step"], event["load"], event["passed_over"]) == (3, "all", [])
    changes = {"optim.lr": {"saved": 0.003, "now": 0.002}, "train.micro_batch": {"saved": 1, "now": 2}}
    assert event["changes"] == changes
    capsys.readouterr()
    for said in (1, 0):  # once: the steps after it are those of this start
        assert launch(*FLAGS, "train.stop_at=3") == 0
        shutil.rmtree("run/checkpoints/step-00000003", ignore_errors=True)
        message = capsys.readouterr().err
        assert message.count("newest checkpoint is of step 2, but run/events.jsonl names a save of") == 1
        assert message.count("step 4: ") == said


def test_weights_only_is_a_new_run_from_other_weights_which_does_not_begin_there_twice(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(*FLAGS, "run.dir=base") == 0
    new = (*FLAGS, "optim.lr=0.001")
    words = (*new, "checkpoint.resume=base/checkpoints/step-00000006", "checkpoint.load=weights_only")
    assert launch(*words, "train.stop_at=1") == 0
    shutil.move("run/checkpoints", "moved")
    assert launch(*words) == 2
    assert "To start over, without the steps so far: another run.dir." in capsys.readouterr().err
    shutil.move("moved", "run/checkpoints")
    assert launch(*words, "train.stop_at=3") == 0  # resumes from its own checkpoint
    # As the message about a full disk says: resume from its own checkpoint, and save to another folder.
    assert launch(*new, "checkpoint.dir=another", "checkpoint.resume=run/checkpoints/step-00000003") == 0
    assert [event["load"] for event in events(folder / "run", "resume")] == ["weights_only", "all", "all"]
    tuned = losses(folder / "run")
    assert len(tuned) == 6
    assert tuned[0] < losses(folder / "base")[0] - 0.05  # from trained weights
