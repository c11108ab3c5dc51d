import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from portable_fsdp.observe.run_files import EventsFile, MetricsFile, last_save, read_jsonl
from portable_fsdp.runtime.errors import UsageError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def steps(path: Path) -> list[int]:
    return [row["step"] for row in read_jsonl(path)]


def test_one_row_a_line_readable_at_once_whose_nan_and_infinities_are_null(path: Path) -> None:
    metrics = MetricsFile(path)
    metrics.write({"step": 1, "loss": 2.5})
    assert path.read_text() == '{"step": 1, "loss": 2.5}\n'
    metrics.write({"step": 2, "loss": 0.1 + 0.2})
    assert read_jsonl(path) == [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 0.1 + 0.2}], "bit for bit"
    path.unlink()
    nan, infinity = float("nan"), float("inf")
    MetricsFile(path).write({"loss": nan, "grad_norm": [infinity, -infinity, 1.0], "inner": {"x": nan}})
    strict = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert strict == {"loss": None, "grad_norm": [None, None, 1.0], "inner": {"x": None}}


def test_resume_replaces_the_steps_it_repeats(path: Path) -> None:
    metrics = MetricsFile(path)
    metrics.truncate_after(3)
    assert not path.exists()
    with pytest.raises(FileNotFoundError):
        read_jsonl(path)
    for step in (1, 2, 3, 4):
        metrics.write({"step": step})
    metrics.truncate_after(2)
    metrics.write({"step": 3, "again": True})
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]
    metrics.truncate_after(0)
    assert path.read_text() == ""


TORN = {  # what a file holds -> the steps that a writer leaves there
    '{"step": 1}\n{"step": 2}\n{"step": 3, "lo': [1, 2],
    '{"step": 1}\n{"step": 2}\n{': [1, 2],
    '{"step": 1}\n{"step": 2}\n3': [1, 2],
    '{"step": 1}\n{"step": 2}\n\0\0\0': [1, 2],
    '{"step": 1}\n{"step": 2}': [1, 2],  # whole, without its newline
    '{"st': [],
}


@pytest.mark.parametrize("text", TORN)
def test_a_torn_last_line_is_dropped(path: Path, text: str) -> None:
    path.write_text(text)
    assert steps(path) == TORN[text]
    metrics = MetricsFile(path)
    metrics.truncate_after(2)
    metrics.write({"step": 3})
    assert steps(path) == [*TORN[text], 3]


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        *((line, r"metrics\.jsonl:2: expected one JSON object per line") for line in ('{"step": 2, "l', "[2]", "")),
        ('{"event": "save"}', "row 2: expected an integer `step`, found None"),
    ],
)
def test_a_broken_line_elsewhere_is_an_error(path: Path, broken: str, problem: str) -> None:
    path.write_text(f'{{"step": 1}}\n{broken}\n{{"step": 3}}\n')
    with pytest.raises(UsageError, match=problem):
        MetricsFile(path).truncate_after(2)
    assert path.read_text().endswith('{"step": 3}\n')


def test_events_carry_their_time_and_no_password(tmp_path: Path, path: Path) -> None:
    path.write_text('{"time": "x", "event": "sta')  # a run that was killed while writing
    EventsFile(path).write("save", step=5, path=tmp_path, name=None)
    (event,) = read_jsonl(path)
    time = datetime.fromisoformat(event.pop("time"))
    assert time.utcoffset() == timedelta(0)
    assert abs(datetime.now(UTC) - time) < timedelta(minutes=1)
    assert event == {"event": "save", "step": 5, "path": str(tmp_path), "name": None}
    EventsFile(path).write("save", path="s3://user:secret@bucket/run?token=abc&part=1", reason="http://one two@three")
    event = read_jsonl(path)[-1]
    assert event["path"] == "s3://(hidden)@bucket/run?token=(hidden)&part=1"
    assert event["reason"] == "http://one two@three"


Events = tuple[tuple[str, int | None], ...]
HISTORIES: dict[Events, int | None] = {  # events as (kind, step) -> the last save that counts
    (): None,
    (("start", 0), ("save", 2), ("save", 4)): 4,
    (("start", 0), ("save", 2), ("start", 0)): None,  # it began anew
    (("start", 0), ("save", 2), ("save", 4), ("start", 2)): 2,  # the newer one was gone or damaged
    (("start", 0), ("save", 2), ("save", 4), ("start", 2), ("save", 3), ("start", 3)): 3,
    (("start", 500), ("save", 502), ("start", None), ("save", True)): 502,  # another program's lines
}


@pytest.mark.parametrize("history", HISTORIES)
def test_the_last_save_is_that_of_the_history_that_the_run_continues(path: Path, history: Events) -> None:
    events = EventsFile(path)
    for kind, step in history:
        events.write(kind, step=step, path=Path(f"/saves/{step}"))
    with path.open("ab") as file:
        file.write(b'[1]\n\xff\n{"event": "save", "step": 7')  # damaged lines, the last one torn
    save = last_save(path)
    assert (save and save.step) == HISTORIES[history]
    assert save is None or save.path == f"/saves/{save.step}"


def test_a_folder_is_no_file_and_of_a_huge_file_the_end_is_read(path: Path) -> None:
    """A file of 1 TiB fills no memory."""
    path.mkdir()
    for reads in (last_save, EventsFile):
        with pytest.raises(UsageError, match="Is a directory"):
            reads(path)
    path.rmdir()
    with path.open("wb") as file:
        file.truncate(1 << 40)
        file.seek(0, 2)
        file.write(b'\n{"event": "save", "step": 7, "path": "/saves/7"}\n')
    assert (save := last_save(path)) is not None
    assert save.step == 7
    EventsFile(path).write("finish", step=8)
    assert path.stat().st_size > 1 << 40
