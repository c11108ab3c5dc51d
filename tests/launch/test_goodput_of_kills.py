"""The accounts of a run that was killed three times and resumed on another engine add up to its wall time."""

from pathlib import Path

import pytest
from cli import PYTHON, started, tiny_config

from portable_fsdp.observe.goodput import goodput
from portable_fsdp.observe.run_files import read_jsonl


@pytest.mark.proof
@pytest.mark.xla
def test_accounts_of_three_kills_and_another_engine(folder: Path) -> None:
    run, metrics = folder / "run", folder / "run/metrics.jsonl"
    words = ["--device=cpu", f"--config={tiny_config(folder)}", "train.steps=400", "checkpoint.every=40"]

    def has_reached(step: int) -> bool:
        return metrics.exists() and any(row["step"] >= step for row in read_jsonl(metrics))

    for step in (60, 140, 220):
        with started([*PYTHON, *words, "--backend=native"], folder) as job:
            job.wait_until(lambda step=step: has_reached(step))
            job.kill()
    with started([*PYTHON, *words, "--backend=xla", "--num_devices=2"], folder) as job:
        assert job.wait() == 0, job.err
    assert "goodput" in job.err
    events = read_jsonl(run / "events.jsonl")
    accounts = goodput(events, read_jsonl(metrics))
    assert accounts is not None
    lost = [event["lost"] for event in events if event["event"] == "start" and "lost" in event]
    assert accounts.parts["lost"] == pytest.approx(sum(start["seconds"] for start in lost))
    assert sum(start["steps"] for start in lost) >= 3
    assert abs(accounts.parts["other"]) <= 0.01 * accounts.wall_seconds
    assert [part for part, seconds in accounts.parts.items() if seconds < 0 and part != "other"] == []
    assert {event["backend"] for event in events if event["event"] == "start"} == {"native", "xla"}
