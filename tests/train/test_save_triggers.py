"""When a run saves besides every n steps."""

import os
from pathlib import Path

import pytest

from portable_fsdp.train.save_triggers import SaveTriggers


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_minutes_are_counted_from_the_last_save(tmp_path: Path) -> None:
    clock = Clock()
    clock.seconds = 1e6
    requests = SaveTriggers(tmp_path, 1.5, clock)
    assert not requests.due
    clock.seconds += 89.0
    assert not requests.due
    clock.seconds += 1.0
    assert requests.due
    assert requests.due  # until it is answered
    requests.began(1)
    assert not requests.due
    clock.seconds += 90.0
    assert requests.due


def test_a_file_asks_for_one_save_and_goes_when_that_is_committed(tmp_path: Path) -> None:
    file, requests = tmp_path / "SAVE", SaveTriggers(tmp_path, None)
    assert not requests.due
    file.touch()
    assert requests.due
    requests.committed([4])  # began before it was asked for
    assert requests.due
    requests.began(5)
    assert not requests.due
    requests.committed([])
    requests.committed([4])
    assert file.exists()
    assert not requests.due
    requests.committed([5])
    assert not file.exists()
    assert not requests.due


def test_a_request_that_was_never_answered_stays_for_the_next_run(tmp_path: Path) -> None:
    (tmp_path / "SAVE").touch()
    SaveTriggers(tmp_path, None).began(5)
    assert SaveTriggers(tmp_path, None).due


def test_who_asks_again_while_it_is_written_is_answered_too(tmp_path: Path) -> None:
    file, requests = tmp_path / "SAVE", SaveTriggers(tmp_path, None)
    file.touch()
    requests.began(5)
    os.utime(file, ns=(1, 1))  # as `touch` does, to another time
    assert requests.due
    requests.committed([5])
    assert file.exists()
    assert requests.due
    requests.began(6)
    requests.committed([6])
    assert not file.exists()


def test_who_takes_the_request_back_may_ask_again(tmp_path: Path) -> None:
    file, requests = tmp_path / "SAVE", SaveTriggers(tmp_path, None)
    file.touch()
    requests.began(5)
    file.unlink()
    requests.committed([5])
    file.touch()
    assert requests.due


def test_a_folder_in_its_place_is_ignored_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "SAVE").mkdir()
    requests = SaveTriggers(tmp_path, None)
    for step in (1, 2):
        assert not requests.due
        requests.began(step)
        requests.committed([step])
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
    requests = SaveTriggers(tmp_path, None)
    requests.began(1)
    requests.committed([1])
    assert not requests.due
    assert "the file can't be deleted: Operation not permitted" in caplog.text
    monkeypatch.undo()


def test_a_folder_that_is_not_there_yet_asks_for_nothing(tmp_path: Path) -> None:
    requests = SaveTriggers(tmp_path / "run", None)
    assert not requests.due
    requests.began(1)
    requests.committed([1])
