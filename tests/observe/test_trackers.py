"""`observe.trackers`: a run's metrics arrive, and a tracker that fails or hangs leaves the run as it was."""

import json
import os
import sqlite3
import struct
from collections.abc import Callable
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from cases import TINY
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from portable_fsdp.config.schema import Config
from portable_fsdp.observe.callbacks import Callback, RunStart
from portable_fsdp.observe.run_files import read_jsonl
from portable_fsdp.train.loop import train

pytestmark = pytest.mark.slow


def config(folder: Path, **observe: Any) -> Config:
    train = {"steps": 12, "global_batch": 2, "log_every": 2}
    return Config.model_validate(TINY | {"run": {"dir": str(folder)}, "train": train, "observe": observe})


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_jsonl(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("plain")
    assert train(config(folder), device="cpu") == 0
    return losses(folder)


def optional(name: str) -> Any:
    reason = f"{name} isn't installed: pip install {name}"
    return pytest.param(name, marks=[pytest.mark.proof, pytest.mark.skipif(find_spec(name) is None, reason=reason)])


of_each_tracker = pytest.mark.parametrize("name", ["tensorboard", optional("wandb"), optional("mlflow")])


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")


def sent_to_tensorboard(run: Path) -> list[tuple[int, float]]:
    events = EventAccumulator(str(run / "trackers/tensorboard"))
    events.Reload()
    return [(scalar.step, scalar.value) for scalar in events.Scalars("train/loss")]


def sent_to_mlflow(run: Path) -> list[tuple[int, float]]:
    with closing(sqlite3.connect(run / "mlflow.db")) as database:
        return database.execute("select step, value from metrics where key = 'train/loss' order by step").fetchall()


def sent_to_wandb(run: Path) -> list[tuple[int, float]]:
    """From W&B's own file: a header of 7 bytes, then LevelDB's log format, of protobuf records."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportMissingImports]

    [path] = run.glob("trackers/wandb/offline-run-*/*.wandb")
    content, offset, payload, curve = path.read_bytes(), 7, b"", list[tuple[int, float]]()
    while offset + 7 <= len(content):
        if 32768 - offset % 32768 < 7:  # a block's end has no room for a header
            offset += 32768 - offset % 32768
        size, kind = struct.unpack_from("<HB", content, offset + 4)
        payload += content[offset + 7 : offset + 7 + size]
        offset += 7 + size
        if kind in (1, 4):  # whole, or the last part
            record, payload = Record.FromString(payload), b""
            values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            if "train/loss" in values:
                curve.append((values["_step"], values["train/loss"]))
    return curve


@of_each_tracker
def test_every_step_arrives(
    name: str, tmp_path: Path, undisturbed: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("portable_fsdp.observe.trackers.END_S", 120.0)  # mlflow makes its tables first
    assert train(config(tmp_path, trackers=[name]), device="cpu") == 0
    read = {"tensorboard": sent_to_tensorboard, "mlflow": sent_to_mlflow, "wandb": sent_to_wandb}[name]
    assert read(tmp_path) == [(step, pytest.approx(loss)) for step, loss in enumerate(undisturbed, start=1)]


class ToTheTracker(Callback):
    """Does something to the tracker's process before it has sent anything."""

    def __init__(self, act: Callable[[psutil.Process], object]) -> None:
        self._act = act

    def on_start(self, start: RunStart) -> None:
        # Not by its command line, which is empty for a moment after the start.
        [tracker] = [child for child in psutil.Process().children() if os.getsid(child.pid) == child.pid]
        self._act(tracker)


def test_trackers_that_cannot_start_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """RUN/logs can't be made: each has a line, and no traceback."""
    (tmp_path / "logs").write_text("a file")
    assert train(config(tmp_path, trackers=["tensorboard"]), device="cpu") == 0
    err = capsys.readouterr().err
    assert "tracker tensorboard can't start: [Errno " in err
    assert "Traceback" not in err


ACTS: dict[str, Callable[[psutil.Process], object]] = {
    "hangs": psutil.Process.suspend,
    "its disk is full": lambda tracker: tracker.rlimit(psutil.RLIMIT_FSIZE, (100, 100)),
}


@of_each_tracker
@pytest.mark.parametrize("trouble", ["hangs", "fails", "its disk is full"])
def test_a_tracker_in_trouble_is_dropped_and_leaves_the_run_as_it_was(
    name: str,
    trouble: str,
    tmp_path: Path,
    undisturbed: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("portable_fsdp.observe.trackers.END_S", 0.5 if trouble == "hangs" else 120.0)
    expected = f"tracker {name}"
    if trouble == "hangs":
        later = f"python -m portable_fsdp.report {tmp_path} --track={name} sends the missing rows"
        expected = f"tracker {name}: not done after 0 s; {later}"
    if trouble == "fails":
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setenv("WANDB_API_KEY", "too short")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "no-such-scheme://host")
        (tmp_path / "trackers").mkdir()
        (tmp_path / "trackers/tensorboard").write_text("a file where it wants a folder")
        errors = {"tensorboard": "tracker tensorboard: FileExistsError", "wandb": "tracker wandb: AuthenticationError"}
        expected = f"tracker {name} dropped: {errors.get(name, '')}"  # mlflow's has several lines
    callbacks = [ToTheTracker(ACTS[trouble])] if trouble in ACTS else []
    assert train(config(tmp_path, trackers=[name]), device="cpu", callbacks=callbacks) == 0
    assert losses(tmp_path) == undisturbed
    assert expected in capsys.readouterr().err
