"""SIGKILL of all processes of a real run at random moments, again and again: the curve is that of a run left alone.

The run saves after every step, in the background, so that most moments lie in a save.
"""

import json
import random
import time
from pathlib import Path

import psutil
import pytest
from cli import PYTHON, SAVES, STARTS, committed, events, finish, launch, require_curve, started

from portable_fsdp.observe.goodput import goodput
from portable_fsdp.observe.run_files import read_jsonl
from portable_fsdp.runtime.files import LOCK_NAME

STEPS = 60


def newest(run: Path) -> int:
    return max(committed(run), default=0)


@pytest.mark.proof
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("seed", "resume_by"),
    [
        *((seed, None) for seed in range(1, 39)),
        *(pytest.param(seed, STARTS["xla"], marks=pytest.mark.xla, id=f"{seed}-xla") for seed in (39, 40)),
    ],
)
def test_kills_and_resumes(folder: Path, seed: int, resume_by: list[str] | None) -> None:
    """Five times; then to the end, and compare with a run that nobody killed. Equal curves are promised for 50.

    Two processes are killed up to 0.2 s after the first step that they commit. Two steps follow from the newest commit,
    on one process in here or by `resume_by`.
    """
    arguments = ["--config=tiny.yaml", *SAVES, f"train.steps={STEPS}"]
    moment, last = random.Random(seed), 0
    for _ in range(5):
        with started([*STARTS["native"], *arguments], folder) as process:
            process.wait_until(lambda before=last: newest(folder / "run") > before)
            time.sleep(moment.uniform(0, 0.2))
            owner = json.loads((folder / "run" / LOCK_NAME).read_text())["pid"]
            process.kill()
        assert (folder / "run" / LOCK_NAME).exists()  # which stops nobody, now that its process is gone
        assert not psutil.pid_exists(owner)
        began, last = newest(folder / "run"), newest(folder / "run") + 2
        assert last < STEPS, "too few steps for so many kills"
        if resume_by is None:
            assert launch("--device=cpu", *arguments, f"train.stop_at={last}") == 0
        else:
            finish([*resume_by, *arguments, f"train.stop_at={last}"], folder)
        assert events(folder / "run", "start")[-1]["step"] == began
    assert launch("--device=cpu", *arguments) == 0
    require_curve(folder, "--device=cpu", *arguments)
    assert len(committed(folder / "run")) == 2
    assert [path.name for path in (folder / "run/checkpoints").iterdir() if not path.name.startswith("step-")] == []


@pytest.mark.proof
@pytest.mark.xla
def test_accounts_of_three_kills_and_another_engine(folder: Path) -> None:
    """They add up to the wall time of the run."""
    run, metrics = folder / "run", folder / "run/metrics.jsonl"
    words = ["--device=cpu", "--config=tiny.yaml", "train.steps=400", "checkpoint.every=40"]

    def has_reached(step: int) -> bool:
        return metrics.exists() and any(row["step"] >= step for row in read_jsonl(metrics))

    for step in (60, 140, 220):
        with started([*PYTHON, *words, "--backend=native"], folder) as job:
            job.wait_until(lambda step=step: has_reached(step))
            job.kill()
    job = finish([*STARTS["xla"], *words], folder)
    assert "goodput" in job.err
    happened = read_jsonl(run / "events.jsonl")
    accounts = goodput(happened, read_jsonl(metrics))
    assert accounts is not None
    lost = [event["lost"] for event in happened if event["event"] == "start" and "lost" in event]
    assert accounts.parts["lost"] == pytest.approx(sum(start["seconds"] for start in lost))
    assert sum(start["steps"] for start in lost) >= 3
    assert abs(accounts.parts["other"]) <= 0.01 * accounts.wall_seconds
    assert [part for part, seconds in accounts.parts.items() if seconds < 0 and part != "other"] == []
    assert {event["backend"] for event in happened if event["event"] == "start"} == {"native", "xla"}
