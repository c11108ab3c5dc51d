"""A process that hangs is ended within twice its limit. The run says which one, keeps its stacks, and restarts."""

import itertools
import json
import re
import time
from datetime import datetime
from pathlib import Path

import psutil
import pytest
from cli import STARTS, committed, events, finish, losses, started
from test_user_exits import CONFIG, MODULE

from portable_fsdp.observe.run_files import read_jsonl

HANGS = """
import ctypes, os, time
from pathlib import Path
import user_exits
from user_exits import Model, data, task

WHERE, PROCESS = os.environ["HANG"], os.environ["HANG_PROCESS"]

def hang(where):
    begun = Path("run/events.jsonl").exists() and os.environ.get("RANK", "0") == PROCESS
    if where != WHERE or not begun or Path("hung").exists():
        return
    Path("hung").write_text(str(time.time()))
    if where == "gil":
        ctypes.PyDLL(None).sleep(100)  # in C code, with Python's lock
    time.sleep(100)

def slow(file, fsync=os.fsync):
    hang("save")
    fsync(file)

user_exits.exits, user_exits.BEGUN, os.fsync = hang, 0, slow
"""
MORE = [
    *("run.step_timeout_s=10", "run.peer_timeout_s=18"),  # heartbeats every 3 s
    *("model.factory=hangs:Model", "train.task=hangs:task", "optim={lr: 0.01}"),
    *("data={factory: 'hangs:data', eval_split: test}", "train.steps=16", "train.eval_every=8", "train.log_every=1"),
    *("train.micro_batch=1", "checkpoint.every=4"),
]
SAYS = {
    "row": "step [0-9]+: waiting for its rows",
    "forward": "step [0-9]+: computing",
    "gil": "step [0-9]+: computing",
    "save": "the save of step [0-9]+",
    "evaluation": "the evaluation after step [0-9]+",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in (("user_exits.py", MODULE), ("hangs.py", HANGS), ("user.yaml", CONFIG)):
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "where", "process"),
    [
        pytest.param(*case, marks=[pytest.mark.proof] * (case != ("xla", "save", 0)))
        for case in itertools.product(("native", "xla", "xla_fsdp1"), SAYS, (0, 1))
        if case[0] == "native" or case[2] == 0
    ],
)
def test_a_hung_process_is_ended_and_named_and_the_run_goes_on(
    engine: str, where: str, process: int, folder: Path
) -> None:
    variables = {"HANG": where, "HANG_PROCESS": str(process)}
    run = finish([*STARTS[engine], "--config=user.yaml", *MORE], folder, 0, **variables)
    assert "Restart 1 of 3" in run.err
    failed = events(folder / "run", "fail")[0]
    assert f"process {process} on " in failed["reason"], failed
    assert events(folder / "run", "start")[1]["began"] > failed["time"]
    seconds = datetime.fromisoformat(failed["time"]).timestamp() - float((folder / "hung").read_text())
    assert 9 < seconds < 20, seconds
    stacks = (folder / "run" / "logs" / f"stacks-{process}.txt").read_text()
    assert "in hang" in stacks
    assert re.search(SAYS[where], stacks.partition("\n")[0])  # a heartbeat may be some seconds old at the hang
    record = folder / f"run/logs/collectives-{process}.json"
    if where != "gil":  # a stuck interpreter may write none
        assert record.exists() == (engine == "native")
    assert not record.exists() or json.loads(record.read_text())["entries"]
    assert len(losses(folder / "run")) == 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "process"),
    [("xla", 0), *(pytest.param("native", process, marks=pytest.mark.proof) for process in (0, 1))],
)
def test_a_stopped_process_is_ended_and_takes_no_further_step(engine: str, process: int, folder: Path) -> None:
    """Though SIGCONT wakes it for seconds, to write its stacks."""
    more = ["train.steps=600", "train.eval_every=300", "checkpoint.every=2", "run.step_timeout_s=10"]
    with started([*STARTS[engine], "--config=user.yaml", *MORE, *more], folder, HANG="", HANG_PROCESS="0") as run:
        run.wait_until(lambda: bool(committed(folder / "run") and events(folder / "run", "save")))
        began = time.monotonic()
        trains = psutil.Process(run.pid).children(recursive=True) if engine == "native" else []
        trains = [each for each in trains if each.environ().get("RANK") == str(process)]
        worker = next((each for each in trains if "watchdog" not in " ".join(each.cmdline())), None)
        (worker or psutil.Process(run.pid).children()[0]).suspend()
        run.wait_until(lambda: "Restart 1 of 3" in run.err)
        assert time.monotonic() - began < 22
        [failed], saves = events(folder / "run", "fail"), events(folder / "run", "save")
        assert failed["reason"].startswith("Hung: process ")
        assert not failed.get("is_early")
        assert f": {failed['reason']}\n  Restart 1 of 3" in run.err
        assert max(row["time"] for row in [*read_jsonl(folder / "run/metrics.jsonl"), *saves]) < failed["time"]
        saved, last = saves[-1]["step"], committed(folder / "run")[-1]
        assert last in (saved, saved + 2)  # it may be stopped between a commit and the line of it
        [manifest] = (folder / "run" / "checkpoints").glob(f"*{last}/manifest.json")
        assert manifest.stat().st_mtime < datetime.fromisoformat(failed["time"]).timestamp()
