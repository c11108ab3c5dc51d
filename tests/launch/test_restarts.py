"""Runs that restart by themselves after a failure (failures.py)."""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import psutil
import pytest
from cli import SAVES, STARTS, TORCHRUN, committed, events, finish, require_curve, started, tiny_config

from portable_fsdp.convert.read import load_config
from portable_fsdp.launch import _check_elastic, _config_of_start
from portable_fsdp.observe.run_files import read_jsonl
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.launchers import Launch
from portable_fsdp.train.preflight import check_hosts

STEPS = 40

PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from portable_fsdp.runtime import failures

failures._PAUSES_S = (0,)
outcomes = Path("outcomes").read_text().split()


def work():
    began = time.time()
    time.sleep(0.01)
    number = len(list(Path(".").glob("start-*")))
    Path(f"start-{number}").write_text(os.environ[failures.RESTARTS])
    failures.announce(".", 2)
    step, end = outcomes[number].split(":")
    with open("metrics.jsonl", "w") as file:
        file.write('{"step": %s}\\n' % step)
    with open("events.jsonl", "a") as file:
        for event in ["start", *{"0": ["finish"], "143": ["stop"], "2": ["fail"]}.get(end, [])]:
            file.write('{"time": "%s", "event": "%s"}\\n' % (failures.utc_text(time.time()), event))
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if end.startswith("port"):
        failures.record_failure(Path("."), int(step), "closed by peer [127.0.0.1]:" + end[4:], began)
    if end.startswith("exit"):  # of a library, without an event
        os._exit(int(end[4:]))
    return 1 if end.startswith("port") else int(end)


sys.exit(failures.supervise(work))
"""


@pytest.mark.parametrize(
    ("outcomes", "code", "restarts"),
    [
        ("3:0", 0, "0"),
        ("3:2", 2, "0"),  # a config mistake
        ("3:143", 143, "0"),  # stopped on request
        ("3:1 4:kill 5:1 6:1 7:0", 0, "01111"),  # each gets further
        ("3:1 3:1", 1, "01"),  # the same failure
        ("3:1 3:kill 2:1", 1, "012"),  # twice without progress, and run.max_restarts is 2
        ("3:1 3:kill 4:1 4:kill 4:0", 0, "01212"),  # counted anew
        *((f"3:exit{code} 3:exit{code}", 1, "01") for code in (0, 2, 143)),  # a library ended the process
        ("3:exit0 4:0", 0, "01"),
        ("3:port11 3:port22", 1, "01"),  # one cause
    ],
)
def test_failures_without_progress_are_counted(outcomes: str, code: int, restarts: str, tmp_path: Path) -> None:
    (tmp_path / "outcomes").write_text(f"{outcomes} 9:0")
    run = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert run.returncode == code, run.stderr
    assert "".join(path.read_text() for path in sorted(tmp_path.glob("start-*"))) == restarts
    if code == 1:
        assert "the run ends: it failed" in run.stderr
        assert all(f"after step {outcome.partition(':')[0]}: " in run.stderr for outcome in outcomes.split())
        causes = [event["reason"] for event in read_jsonl(tmp_path / "events.jsonl") if event["event"] == "fail"]
        assert run.stderr.splitlines()[-1].endswith(causes[-1])
        assert len(causes) == len(restarts)


def test_a_stop_in_the_pause_before_a_restart_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "outcomes").write_text("3:1 3:0")
    program = PROGRAM.replace("_PAUSES_S = (0,)", "_PAUSES_S = (60,)")
    with started([sys.executable, "-c", program], tmp_path) as run:
        run.wait_until(lambda: "Restart 1 of 2" in run.err)
        run.send_signal(signal.SIGTERM)
        assert run.wait() == 1
    assert run.err.splitlines()[-1] == "SIGTERM before restart 1: the run ends. Rerun the same command to resume."


def workers(run: psutil.Process) -> list[psutil.Process]:
    """The processes that train, whoever started them."""
    trains = [each for each in run.children(recursive=True) if "portable_fsdp.launch" in " ".join(each.cmdline())]
    return trains[1:] or trains  # without the launcher of several


FAULTS: dict[str, tuple[str, Callable[[psutil.Process], None]]] = {
    "a worker of native is killed": ("native", lambda run: workers(run)[0].kill()),
    "native's launcher is killed": ("native", lambda run: run.children()[0].kill()),
    "a worker of native is stopped": ("native", lambda run: workers(run)[-1].suspend()),
    "the process of xla is killed": ("xla", lambda run: run.children()[0].kill()),
}
"""(engine, fault)."""
IN_SUITE = ("a worker of native is killed", 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "seed"),
    [pytest.param(*case, marks=[pytest.mark.proof] * (case != IN_SUITE)) for case in product(FAULTS, range(6))],
)
def test_a_run_finishes_by_itself_with_the_curve_of_a_run_left_alone(fault: str, seed: int, tmp_path: Path) -> None:
    engine, cause = FAULTS[fault]
    moment = random.Random(seed)
    arguments = [f"--config={tiny_config(tmp_path)}", *SAVES, f"train.steps={STEPS}", "run.peer_timeout_s=6"]
    after = moment.randrange(1, STEPS // 2)
    with started([*STARTS[engine], *arguments], tmp_path) as run:
        run.wait_until(lambda: max(committed(tmp_path / "run"), default=0) >= after)
        time.sleep(moment.uniform(0, 0.2))
        cause(psutil.Process(run.pid))
        assert run.wait(240) == 0, run.err
        assert "Restart 1 of 3" in run.err
    assert len(events(tmp_path / "run", "start")) == 2
    require_curve(tmp_path, "--device=cpu", *arguments)


def test_a_number_of_hosts_that_may_change_needs_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = ["--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-conf=last_call_timeout=1"]
    path = tiny_config(tmp_path)
    run = finish([TORCHRUN[0], *more, "-m", "portable_fsdp.launch", "--device=cpu", f"--config={path}"], tmp_path, 1)
    assert "torchrun --nnodes=1:2: restarted processes" in run.err
    assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in run.err
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    anew = load_config(path, ["checkpoint.resume=none"])
    with pytest.raises(ConfigError, match=r"resume=none: torchrun --nnodes=1:2 [^*]*Set checkpoint.resume=auto"):
        _check_elastic(anew, Launch("torchrun"), "cpu", "native", (1, 2))
    config = load_config(path, ["train.global_batch=16", "train.micro_batch=2"])
    assert check_hosts(config, "native", "cpu", (1, 2), 2) == ""
    assert check_hosts(config, "native", "cpu", (7, 8), 2) == (
        "torchrun --nnodes=7:8, 2 device(s) per host: the run would end on these numbers of hosts:\n"
        "  8: train.micro_batch: expected at most 1, the rows of each of 16 devices (train.global_batch=16), found 2."
    )
    none = r"^torchrun --nnodes=8:9, 2 device\(s\) per host: no number of hosts in it can train\.(?s:.*)"
    with pytest.raises(ConfigError, match=none + r"numbers of hosts that can: 1, 2, 3, 4, 5, 6, 7\.$"):
        check_hosts(config, "native", "cpu", (8, 9), 2)
    # A launcher restarts itself, and no supervisor honours run.max_restarts. resume=none is for the first start alone.
    for restarts, resume in ((0, "none"), (1, "auto")):
        config = _config_of_start(load_config(path, ["checkpoint.resume=none"]), Launch("plain", restarts=restarts))
        assert config.checkpoint.resume == resume
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "theirs")
    with pytest.raises(ConfigError, match=r"max_restarts=5: only a run that is started by hand[^*]*--max-restarts"):
        _config_of_start(load_config(path, ["run.max_restarts=5"]), Launch("torchrun"))
