"""One run a folder: a second start is refused, and no worker goes on after the process that started it."""

import json
import signal
import socket
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from cli import PYTHON, STARTS, Started, committed, launch, losses, started, tiny_config

from portable_fsdp.observe.run_files import read_jsonl
from portable_fsdp.runtime.files import LOCK_NAME

LONG = ["train.steps=100000", "checkpoint.every=1", "checkpoint.keep=2", "train.log_every=100"]


@contextmanager
def started_by(process: Started) -> Generator[list[psutil.Process]]:
    """Its children, of which none outlives the block."""
    children = psutil.Process(process.pid).children(recursive=True)
    try:
        yield children
    finally:
        for child in children:
            if child.is_running():
                child.kill()


@pytest.mark.parametrize("start", ["native", pytest.param("torchrun", marks=pytest.mark.proof)])
def test_workers_end_with_a_launcher_that_is_killed(start: str, tmp_path: Path) -> None:
    """`native`: the supervisor of a run is killed, which starts the launcher of its processes."""
    arguments = [f"--config={tiny_config(tmp_path)}", *LONG]
    run = tmp_path / "run"
    with started([*STARTS[start], *arguments], tmp_path) as process:
        process.wait_until(lambda: bool(committed(run)))
        with started_by(process) as workers:
            assert len(workers) >= 2
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert psutil.wait_procs(workers, timeout=10)[1] == []
    last = committed(run)[-1]
    assert launch("--device=cpu", *arguments, f"run.dir={run}", f"train.stop_at={last + 2}") == 0
    assert len(losses(run)) == last + 2
    assert not (run / LOCK_NAME).exists()


def test_a_plain_start_goes_on_without_the_shell_that_made_it(tmp_path: Path) -> None:
    """As with nohup, and under torchrun's variables too: `accelerate launch` and MPI wrappers set them as well."""
    tiny_config(tmp_path)
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}
    words = [*PYTHON, "--device=cpu", "--config=tiny.yaml", "train.steps=60"]
    with started(["bash", "-c", '"$@" & wait', "bash", *words], tmp_path, **variables) as shell:
        shell.wait_until(lambda: (tmp_path / "run/metrics.jsonl").exists())
        with started_by(shell) as children:
            [run] = [child for child in children if child.ppid() == shell.pid]  # beside it: what copies its stderr
            shell.send_signal(signal.SIGKILL)
            shell.wait()
            assert psutil.wait_procs([run], timeout=60)[1] == []
    assert committed(tmp_path / "run")[-1] == 60


def test_a_second_start_in_the_same_folder_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config=tiny.yaml", *LONG, "checkpoint.every=100000"]
    run = folder / "run"
    with started([*PYTHON, "--device=cpu", *arguments], folder) as first:
        first.wait_until(lambda: (run / "metrics.jsonl").exists())
        owner = json.loads((run / LOCK_NAME).read_text())
        assert owner == {**owner, "host": socket.gethostname(), "pid": psutil.Process(first.pid).children()[0].pid}
        before = {path: path.stat().st_ino for path in run.rglob("*")}
        assert launch("--device=cpu", *arguments) == 2
        message = capsys.readouterr().err
        assert "Traceback" not in message
        assert message.count("run.dir: another run writes to this folder: run\n") == 1
        assert f"process {owner['pid']} on host {owner['host']}" in message
        assert {path: path.stat().st_ino for path in run.rglob("*")} == before
        assert [row["event"] for row in read_jsonl(run / "events.jsonl")].count("start") == 1
        first.send_signal(signal.SIGTERM)  # what the message says: it saves
        assert first.wait() == 143, first.err
    assert not (run / LOCK_NAME).exists()
    assert launch("--device=cpu", *arguments, f"train.stop_at={committed(run)[-1]}") == 0
