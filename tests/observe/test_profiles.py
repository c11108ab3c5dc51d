"""`observe.profile` and the file PROFILE: which steps are profiled, and that no profile changes or stops a run."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from test_trackers import config, losses

from portable_fsdp.backends.contract import Operation
from portable_fsdp.backends.native.engine import NativeBackend
from portable_fsdp.config.schema import Config
from portable_fsdp.observe.callbacks import Callback, StepEnd
from portable_fsdp.observe.profile_summary import summarize, summary_text
from portable_fsdp.observe.run_files import read_jsonl
from portable_fsdp.report.read import markdown, read_run
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.train.loop import train

pytestmark = pytest.mark.slow


def profiles(folder: Path) -> list[tuple[int, int]]:
    """First and last step of each."""
    events = read_jsonl(folder / "events.jsonl")
    return [(event["first_step"], event["step"]) for event in events if event["event"] == "profile"]


def changed(folder: Path, train: dict[str, Any], **observe: Any) -> Config:
    values = config(folder, **observe).model_dump()
    return Config.model_validate(values | {"train": values["train"] | train})


class After(Callback):
    """Does something after a step, while the next one runs."""

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        self._step, self._act = step, act

    def on_step(self, step: StepEnd) -> None:
        if step.step == self._step:
            self._act()


def test_a_window_and_a_file(tmp_path: Path) -> None:
    """The steps of the config, and those that follow a file, which then goes; a report shows both. A file that a kill
    left behind counts for nothing, and no profile covers the save after its last step."""
    file = tmp_path / "run/PROFILE"
    file.parent.mkdir()
    file.touch()
    touch = [After(step, file.touch) for step in (5, 10)]
    windowed = changed(tmp_path / "run", {}, profile={"steps": [2, 3]})
    assert train(windowed, device="cpu", callbacks=touch) == 0
    assert train(config(tmp_path / "plain"), device="cpu") == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")
    assert profiles(tmp_path / "run") == [(2, 3), (7, 9), (12, 12)]
    events = read_jsonl(tmp_path / "run/events.jsonl")
    assert [event["event"] for event in events[-3:]] == ["profile", "save", "finish"]
    accounts = read_run(tmp_path / "run").goodput
    assert accounts is not None
    assert accounts.parts["profile"] == sum(event["seconds"] for event in events if event["event"] == "profile") > 0
    assert not (tmp_path / "run/PROFILE").exists()
    files = {str(path.relative_to(tmp_path / "run/profile")) for path in tmp_path.glob("run/profile/*/*")}
    kept = ("memory.csv", "summary.txt", "trace.json.gz")
    assert files == {f"{folder}/{name}" for folder in ("step-2-3", "step-7-9", "step-12-12") for name in kept}
    report = markdown([read_run(tmp_path / "run")])
    assert "    steps 2 to 3: " in report
    assert "    aten::mm" in report


def test_a_resumed_run_keeps_its_window_and_refuses_a_new_one_that_is_over(tmp_path: Path) -> None:
    """The command that stopped at step 4 resumes after its window; another window would never come."""
    window: dict[str, Any] = {"profile": {"steps": [1, 2]}}
    assert train(changed(tmp_path, {"stop_at": 4}, **window), device="cpu") == 0
    assert train(changed(tmp_path, {"stop_at": 5}, **window), device="cpu") == 0
    before = (tmp_path / "events.jsonl").read_text()
    with pytest.raises(ConfigError, match=r"observe.profile.steps: expected steps from 6 to 12, found \[5, 6\]"):
        train(config(tmp_path, profile={"steps": [5, 6]}), device="cpu")
    with pytest.raises(ConfigError, match=r"expected steps from 6 to 12, found \[7, 13\]"):
        train(config(tmp_path, profile={"steps": [7, 13]}), device="cpu")
    with pytest.raises(ValidationError, match=r"expected at most 20 steps, found \[1, 21\]"):
        config(tmp_path, profile={"steps": [1, 21]})
    assert (tmp_path / "events.jsonl").read_text() == before
    assert profiles(tmp_path) == [(1, 2)]


def test_a_stop_request_drops_the_profile_under_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """To read it may take longer than the seconds that a launcher gives to a stopped run."""
    stop = After(4, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert train(config(tmp_path, profile={"steps": [2, 7]}), device="cpu", callbacks=[stop]) == 143
    assert "dropped the profile of steps 2 to 7: the run ends" in capsys.readouterr().err
    assert [event["event"] for event in read_jsonl(tmp_path / "events.jsonl")][-2:] == ["save", "stop"]
    assert (profiles(tmp_path), [*tmp_path.glob("profile/*")]) == ([], [])


@pytest.mark.parametrize("fails_at", ["start", "end"])
def test_a_profile_that_fails_is_dropped(
    fails_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> Any:
        raise RuntimeError("another profiler is active")

    def start_trace(engine: NativeBackend, folder: Path) -> Callable[[], Any]:
        return fail() if fails_at == "start" else fail

    monkeypatch.setattr(NativeBackend, "start_trace", start_trace)
    assert train(config(tmp_path, profile={"steps": [2, 3]}), device="cpu") == 0
    assert len(losses(tmp_path)) == 12
    assert capsys.readouterr().err.count("no more profiles in this run: RuntimeError: another profiler is active") == 1
    assert profiles(tmp_path) == []


OPERATIONS = [
    Operation("matmul", "compute", 1.0, 4.0, "main", module="layers.0"),  # 1 to 5, of which the copy takes 2 to 3
    Operation("copy_", "compute", 2.0, 1.0, "main", module="layers.0"),
    Operation("matmul", "compute", 6.0, 1.0, "main", module="layers.1"),
    Operation("all_gather", "communication", 4.0, 4.0, "network", bytes=2_000_000_000),  # alone from 5 to 6 and 7 to 8
    Operation("memcpy", "copy", 9.5, 0.5, "main"),
]


def test_shares_of_one_device_count_time_inside_an_operation_once_and_the_text_says_them() -> None:
    summary = summarize(OPERATIONS, 12.0)
    times = (summary.busy, summary.compute, summary.communication, summary.exposed, summary.longest_gap)
    assert times == pytest.approx((7.5, 5.0, 4.0, 2.0, 1.5))
    seconds = {name: (calls, seconds) for name, calls, seconds, _ in summary.operations}
    assert seconds == {"all_gather": (1, 4.0), "matmul": (2, 4.0), "copy_": (1, 1.0), "memcpy": (1, 0.5)}
    assert [(total.name, total.seconds) for total in summary.modules] == [("layers.0", 4.0), ("layers.1", 1.0)]
    lines = summary_text(summary, "steps 1 to 2").splitlines()
    assert lines[0] == "steps 1 to 2"
    assert "host gaps             4.5000 s   37.5%  the longest 1500.00 ms" in lines
    assert lines[-1].split() == ["all_gather", "1", "4.0000", "2000.000", "0.500"]


def test_several_devices_are_averaged_pauses_are_of_one_and_an_empty_trace_is_no_error() -> None:
    first = Operation("dot", "compute", 0.0, 2.0, "ops", "tpu:0")
    others = [first._replace(device="tpu:1", start=start) for start in (0.0, 5.0)]
    summary = summarize([first, *others], 10.0)
    assert (summary.busy, summary.longest_gap) == (3.0, 3.0)
    summary = summarize([], 1.0)
    assert (summary.busy, summary.longest_gap, summary.operations) == (0.0, 0.0, [])
    assert "host gaps             1.0000 s  100.0%" in summary_text(summary, "nothing")
