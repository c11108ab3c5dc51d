"""Children that a plan waits for: how they end, and that none outlives it."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from portable_fsdp.runtime.child import Child, Ended, Worker, WorkerFailedError
from portable_fsdp.runtime.errors import ConfigError

HERE = str(Path(__file__).parent)
PARENT = f"""
import signal
import sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a suite that a shell started with &
from portable_fsdp.runtime.child import Child
with Child("misbehaving", sys.argv[1], environment={{"PYTHONPATH": {HERE!r} + ":" + sys.argv[2]}}) as child:
    child.wait(600)
"""


def run(folder: Path, mode: str, limit_s: float = 60, has_enough: Callable[[], bool] = lambda: False) -> Ended:
    (folder / "mode").write_text(mode)
    path = {"PYTHONPATH": os.pathsep.join([HERE, *filter(None, sys.path)])}
    with Child("misbehaving", str(folder), environment=path) as child:
        return child.wait(limit_s, has_enough)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize(
    ("mode", "how", "code", "said"),
    [
        ("speaks", "finished", 0, "    first\n    last"),
        ("fails", "failed", 3, "    what went wrong"),
        ("crashes", "failed", -signal.SIGABRT, "    about to crash"),
    ],
)
def test_how_it_ended_and_its_last_lines(tmp_path: Path, mode: str, how: str, code: int, said: str) -> None:
    ended = run(tmp_path, mode)
    assert (ended.how, ended.code) == (how, code)
    assert ended.last_lines.startswith(said)
    assert ended.output == "answer\n" * (mode == "speaks")
    assert 0 < ended.cpu_s < 30


def test_one_that_is_late_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    ended = run(tmp_path, "hangs", limit_s=0.0)
    assert ended.how == "late"
    ended = run(tmp_path, "hangs", has_enough=(tmp_path / "grandchild").exists)
    assert ended.how == "enough"
    assert wait_for(lambda: is_gone(int((tmp_path / "grandchild").read_text())))
    assert is_gone(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_it_goes_when_its_parent_goes(tmp_path: Path, number: int) -> None:
    """Ctrl-C ends all; a kill of the parent, which it can't see coming, ends the child at least."""
    (tmp_path / "mode").write_text("hangs")
    path = os.pathsep.join(filter(None, sys.path))
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), path], stderr=subprocess.DEVNULL)
    try:
        assert wait_for(lambda: (tmp_path / "grandchild").exists() and bool((tmp_path / "grandchild").read_text()))
        parent.send_signal(number)
        parent.wait(60)
        pids = [int((tmp_path / name).read_text()) for name in ("pid", "grandchild")]
        assert wait_for(lambda: is_gone(pids[0]))
        if number == signal.SIGINT:
            assert wait_for(lambda: is_gone(pids[1]))
        elif not is_gone(pids[1]):
            os.kill(pids[1], signal.SIGKILL)
    finally:
        if parent.poll() is None:
            parent.kill()
            parent.wait()


def _raise(error: Exception) -> None:
    raise error


def test_a_worker_calls_functions_in_one_process_which_an_error_of_ours_survives() -> None:
    with Worker() as worker:
        first = worker(os.getpid)
        with pytest.raises(ConfigError, match="a key"):
            worker(_raise, ConfigError("a key"))
        assert worker(sum, [1, 2]) == 3
        assert worker(os.getpid) == first != os.getpid()
        folder = Path(worker(tempfile.gettempdir))
        assert folder.is_dir()
    assert is_gone(first)
    assert not folder.exists()


def test_a_worker_that_crashes_or_hangs_says_how_and_the_next_call_starts_another() -> None:
    with Worker() as worker:
        with pytest.raises(WorkerFailedError, match="ValueError: no error of ours") as failure:
            worker(_raise, ValueError("no error of ours"))
        assert (failure.value.ended.how, failure.value.ended.code) == ("failed", 1)
        with pytest.raises(WorkerFailedError) as failure:
            worker(os.abort)
        assert failure.value.ended.code == -signal.SIGABRT
        assert worker(abs, -1) == 1
    with Worker(limit_s=0.5) as worker, pytest.raises(WorkerFailedError) as failure:
        worker(time.sleep, 60)
    assert failure.value.ended.how == "late"
