"""`report RUN --track=NAME`: what arrives at a tracker, once, in order; and a tracker that can't."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import pytest
from invented_run import write_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from portable_fsdp.config.schema import Tracker
from portable_fsdp.observe.trackers import PACKAGES
from portable_fsdp.report.__main__ import main
from portable_fsdp.report.track import Sent, arguments

pytestmark = pytest.mark.slow  # accelerate imports torch

FOLLOW = [sys.executable, "-m", "portable_fsdp.report", "--track=tensorboard", "--follow"]


def curve(run: Path, name: str) -> list[tuple[int, float]]:
    """(step, value) of all that TensorBoard shows of one metric."""
    events = EventAccumulator(str(run / "trackers/tensorboard"))
    events.Reload()
    return [(scalar.step, scalar.value) for scalar in events.Scalars(name)]


def rows(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def test_a_run_arrives_whole_and_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its samples as texts of their steps."""
    samples = [{"step": step, "prompt": "a", "text": f"a {number}"} for step in (5, 12) for number in (1, 2)]
    (run / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples), encoding="utf-8")
    assert main([str(run), "--track=tensorboard"]) == 0
    assert main([str(run), "--track=tensorboard"]) == 0  # nothing is sent twice
    assert capsys.readouterr().out == f"{run}: sent up to step 40\n" * 2
    assert curve(run, "train/loss") == [(row["step"], pytest.approx(row["loss"])) for row in rows(run)]
    assert [step for step, _ in curve(run, "eval/loss")] == [10, 20, 30, 40]
    assert [step for step, _ in curve(run, "processes/seconds_imbalance")] == [10, 20, 30, 40]
    events = EventAccumulator(str(run / "trackers/tensorboard"))
    events.Reload()
    for number in (1, 2):
        texts = events.Tensors(f"samples/{number}/text_summary")
        sent = [(text.step, text.tensor_proto.string_val) for text in texts]
        assert sent == [(step, [f"a {number}".encode()]) for step in (5, 12)]


def test_a_tracker_follows_a_run_that_is_killed_and_resumes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps 11 to 20 are repeated, as after a kill; the tracker ends with the run, whose end of the pipe closes."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:20]) + lines[20][:30], encoding="utf-8")
    with subprocess.Popen([*FOLLOW, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            state, deadline = run / "trackers/tensorboard.json", time.monotonic() + 60
            while not state.exists() or json.loads(state.read_text())["step"] != 20:
                assert time.monotonic() < deadline
                time.sleep(0.2)
            assert main([str(run), "--track=tensorboard"]) == 2  # else it would send all again
            assert "the run itself or another command is sending; wait for it" in capsys.readouterr().err
            (run / "metrics.jsonl").write_text("".join(lines[:10]), encoding="utf-8")
            time.sleep(1.5)  # it looks every second
            assert json.loads(state.read_text())["step"] == 20
            with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write("".join(lines[10:]))
            out, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, out) == (0, f"{run}: sent up to step 40\n")
    assert curve(run, "train/loss") == [(row["step"], pytest.approx(row["loss"])) for row in rows(run)]


def test_a_disk_without_room_ends_the_tracker_with_a_sentence(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=400)
    # In the child itself: a fork of this process, which may hold threads of JAX, is not safe.
    small_files = (
        "import os, resource, signal, sys; "
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "  # a write beyond the limit fails, as on a full disk
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000)); os.execv(sys.executable, sys.argv[1:])"
    )
    command = [sys.executable, "-c", small_files, *FOLLOW[:-1], str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert "tracker tensorboard: OSError: [Errno 27]" in done.stderr


def test_a_tracker_that_is_not_there(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, message in (
        ("tensorbord", "--track: expected one of aim, clearml, comet_ml, dvclive, mlflow, "),
        ("comet_ml", "--track: comet_ml: not installed: pip install comet-ml\n  or send to another tracker"),
        ("", "--track: expected one of aim, "),
    ):
        assert main([str(run), f"--track={name}"]) == 2
        assert message in capsys.readouterr().err


def test_names_are_those_of_accelerate() -> None:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    assert PACKAGES.keys() == LOGGER_TYPE_TO_CLASS.keys() == {*get_args(Tracker)}
    for name in PACKAGES:
        LOGGER_TYPE_TO_CLASS[name](**arguments(name, Path("run"), "a", Sent("id")))  # doesn't start it
