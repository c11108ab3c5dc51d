"""Runs that save and stop before their host ends: SIGUSR1, and too short a grace."""

import json
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from cli import SAVES, STARTS, TORCHRUN, committed, events, launch, started, tiny_config

GRACE_S = 30  # of a spot VM


@pytest.mark.proof
def test_a_request_to_one_process_stops_all_and_torchrun_restarts_nothing(tmp_path: Path) -> None:
    words = ["--device=cpu", f"--config={tiny_config(tmp_path)}", *SAVES, "train.steps=100000"]
    command = [*TORCHRUN[:-2], "--max-restarts=3", *TORCHRUN[-2:], *words]
    with started(command, tmp_path) as run:
        run.wait_until(lambda: bool(committed(tmp_path / "run")))
        [second] = [each for each in psutil.Process(run.pid).children() if each.environ().get("RANK") == "1"]
        second.send_signal(signal.SIGUSR1)
        assert run.wait(GRACE_S) == 1, run.err  # torchrun's own
    assert len(events(tmp_path / "run", "start")) == 1
    end = json.loads((tmp_path / "run/STOPPED").read_text())
    assert (end["step"], end["reason"]) == (committed(tmp_path / "run")[-1], "SIGUSR1")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["native", pytest.param("xla", marks=[pytest.mark.proof, pytest.mark.xla])])
@pytest.mark.parametrize("to_all", [False, pytest.param(True, marks=pytest.mark.proof)], ids=["supervisor", "all"])
def test_sigusr1_requests_a_stop(engine: str, to_all: bool, tmp_path: Path) -> None:
    """To all processes: as Slurm does to those of a step. The SIGTERM that follows doesn't skip the save."""
    words = [f"--config={tiny_config(tmp_path)}", *SAVES, "train.steps=100000", "run.grace_s=0.001"]
    with started([*STARTS[engine], *words], tmp_path) as run:
        run.wait_until(lambda: len(committed(tmp_path / "run")) > 1)
        processes = [psutil.Process(run.pid)]
        processes += processes[0].children(recursive=True) if to_all else []
        for number in (signal.SIGUSR1, signal.SIGTERM):
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(number)
            time.sleep(0.05)
        assert run.wait(GRACE_S) == 143, run.err
        assert "stopped after step" in run.err, run.err
        assert run.err.count("0.0 s of run.grace_s are left. Newest checkpoint until then: step-") == 1, run.err
        assert "Restart" not in run.err
        assert "Traceback" not in run.err
    end = json.loads((tmp_path / "run/STOPPED").read_text())
    assert end["step"] == committed(tmp_path / "run")[-1]
    assert end["reason"] == "SIGUSR1"
    latest = [int(step) for step in re.findall(r"SIGUSR1: ending after step (\d+) at the latest and its save", run.err)]
    assert len(latest) == 1
    assert latest[0] - 3 < end["step"] <= latest[0]


@pytest.mark.slow
def test_too_short_a_grace_is_said_after_the_first_save_and_at_the_next_start(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["--device=cpu", "--config=tiny.yaml", "run.grace_s=0.001", "checkpoint.every=2"]
    said = "more than run.grace_s=0.001 s"
    assert launch(*words, "train.stop_at=4") == 0
    err = capfd.readouterr().err
    assert err.count(said) == 1
    assert err.index("saved ") < err.index(said) < err.index("step-00000004")
    config = folder / "tiny.yaml"
    config.write_text(config.read_text().replace("run:\n", "run:\n  preemption: auto\n"))  # of an earlier release
    assert launch(*words) == 0
    err = capfd.readouterr().err
    assert err.count(f"{config.name}:") == err.count("run.preemption: removed, and sets nothing: only signals") == 1
    assert err.count(said) == 1
    assert err.index(said) < err.index("step: ")
    assert "a save takes " in err
    assert launch(*words, "train.steps=8", "run.grace_s=60", "checkpoint.allow=[train.steps]") == 0
    assert "grace_s" not in capfd.readouterr().err.replace("run.grace_s=60", "")
