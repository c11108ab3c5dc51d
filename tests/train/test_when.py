"""When a run saves besides every n steps."""

from pathlib import Path

from portable_fsdp.train.when import SaveRequests


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_minutes_are_counted_from_the_last_save(tmp_path: Path) -> None:
    clock = Clock()
    clock.seconds = 1e6
    requests = SaveRequests(tmp_path, 1.5, clock)
    assert not requests.due
    clock.seconds += 89.0
    assert not requests.due
    clock.seconds += 1.0
    assert requests.due
    assert requests.due  # until it is answered
    requests.saved()
    assert not requests.due
    clock.seconds += 90.0
    assert requests.due


def test_a_file_asks_for_a_save_and_goes_with_it(tmp_path: Path) -> None:
    requests = SaveRequests(tmp_path, None)
    assert not requests.due
    (tmp_path / "SAVE").touch()
    assert requests.due
    requests.saved()
    assert not requests.due
    assert not (tmp_path / "SAVE").exists()


def test_a_folder_that_is_not_there_yet_asks_for_nothing(tmp_path: Path) -> None:
    requests = SaveRequests(tmp_path / "run", None)
    assert not requests.due
    requests.saved()
