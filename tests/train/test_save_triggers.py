"""When a run saves besides every n steps."""

import os
from pathlib import Path

import pytest

from portable_fsdp.train.control import SaveTriggers


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_minutes_are_counted_from_the_last_save(tmp_path: Path) -> None:
    clock = Clock()
    clock.seconds = 1e6
    triggers = SaveTriggers(tmp_path, 1.5, clock)
    assert not triggers.due
    clock.seconds += 89.0
    assert not triggers.due
    clock.seconds += 1.0
    assert triggers.due
    assert triggers.due  # until it is answered
    triggers.began(1)
    assert not triggers.due
    clock.seconds += 90.0
    assert triggers.due


def test_a_file_asks_for_one_save_and_goes_when_that_is_committed(tmp_path: Path) -> None:
    file, triggers = tmp_path / "SAVE", SaveTriggers(tmp_path, None)
    absent = SaveTriggers(tmp_path / "absent", None)
    absent.began(1)
    absent.committed([1])
    assert not triggers.due | absent.due
    file.touch()
    assert triggers.due
    triggers.committed([4])  # began before it was made
    assert triggers.due
    triggers.began(5)
    assert not triggers.due
    triggers.committed([])
    triggers.committed([4])
    assert file.exists()
    assert not triggers.due
    assert SaveTriggers(tmp_path, None).due  # of the next run, where this one ends before the commit
    triggers.committed([5])
    assert not file.exists()
    assert not triggers.due


def test_a_request_that_is_made_again_is_answered_too(tmp_path: Path) -> None:
    """Touched while it is answered; or taken back, and made again after the commit."""
    file, triggers = tmp_path / "SAVE", SaveTriggers(tmp_path, None)
    file.touch()
    triggers.began(5)
    os.utime(file, ns=(1, 1))  # as `touch` does, to another time
    assert triggers.due
    triggers.committed([5])
    assert file.exists()
    assert triggers.due
    triggers.began(6)
    file.unlink()
    triggers.committed([6])
    file.touch()
    assert triggers.due


def test_a_folder_in_its_place_is_ignored_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "SAVE").mkdir()
    triggers = SaveTriggers(tmp_path, None)
    for step in (1, 2):
        assert not triggers.due
        triggers.began(step)
        triggers.committed([step])
    assert (tmp_path / "SAVE").is_dir()
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path / 'SAVE'}: expected a plain file, which requests a save; ignoring what is there"
    ]


def test_a_file_that_can_not_be_deleted_makes_one_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unlink(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "unlink", unlink)
    (tmp_path / "SAVE").touch()
    triggers = SaveTriggers(tmp_path, None)
    triggers.began(1)
    triggers.committed([1])
    assert not triggers.due
    assert "the file can't be deleted: Operation not permitted" in caplog.text
    monkeypatch.undo()
