"""`observe.trackers`: a run's metrics arrive, and a tracker that fails or hangs leaves the run as it was."""

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from portable_fsdp.config.schema import Config
from portable_fsdp.metrics.sinks import read_jsonl
from portable_fsdp.train.callbacks import Callback, RunStart
from portable_fsdp.train.loop import train

pytestmark = pytest.mark.slow

ARCHITECTURE = {
    **{"model_type": "llama", "vocab_size": 256, "hidden_size": 16, "intermediate_size": 32},
    **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1},
}


def config(folder: Path, **observe: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": str(folder)},
            "model": {"architecture": ARCHITECTURE},
            "data": {"source": "python_docs", "seq_len": 32},
            "train": {"steps": 12, "global_batch": 2, "log_every": 2},
            "optim": {"lr": 0.003, "warmup_steps": 2},
            "observe": observe,
        }
    )


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_jsonl(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("plain")
    assert train(config(folder), device="cpu") == 0
    return losses(folder)


def test_every_step_arrives(tmp_path: Path, undisturbed: list[float]) -> None:
    assert train(config(tmp_path, trackers=["tensorboard"]), device="cpu") == 0
    events = EventAccumulator(str(tmp_path / "trackers/tensorboard"))
    events.Reload()
    curve = [(scalar.step, pytest.approx(scalar.value)) for scalar in events.Scalars("train/loss")]
    assert curve == [*enumerate(undisturbed, start=1)]


class Hang(Callback):
    """Stops the tracker before it has sent anything."""

    def on_start(self, start: RunStart) -> None:
        [tracker] = [child for child in psutil.Process().children() if "--track=tensorboard" in child.cmdline()]
        os.kill(tracker.pid, signal.SIGSTOP)


def test_a_tracker_that_hangs_is_left_behind(
    tmp_path: Path, undisturbed: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("portable_fsdp.train.trackers.END_S", 0.5)
    assert train(config(tmp_path, trackers=["tensorboard"]), device="cpu", callbacks=[Hang()]) == 0
    assert losses(tmp_path) == undisturbed
    later = f"python -m portable_fsdp.report {tmp_path} --track=tensorboard sends what is missing"
    assert f"tracker tensorboard: not done after 0 s; {later}" in capsys.readouterr().err


def test_a_tracker_that_fails_is_dropped(
    tmp_path: Path, undisturbed: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers/tensorboard").write_text("a file where it wants a folder")
    assert train(config(tmp_path, trackers=["tensorboard"]), device="cpu") == 0
    assert losses(tmp_path) == undisturbed
    assert "tracker tensorboard dropped: tracker tensorboard: FileExistsError: " in capsys.readouterr().err
