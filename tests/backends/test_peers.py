"""Processes that watch each other, as on hosts of their own: no process group, so that nothing else ends them."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from portable_fsdp.backends.contract import Partition
from portable_fsdp.backends.peers import Heartbeat, Peers, furthest_behind
from portable_fsdp.runtime.rendezvous import open_store

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 5.0
LIMIT_S = 90.0  # most of it for imports
PROCESS = f"""
import os, sys
from datetime import timedelta
from portable_fsdp.backends.contract import Partition
from portable_fsdp.backends.peers import Peers
index, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
peers = Peers(Partition(index, count), {TIMEOUT_S}, timedelta(seconds=60), os.environ)
store = peers.meet()
store.set(f"here{{index}}", "")
store.wait([f"here{{other}}" for other in range(count)])
peers.slow_down()
for step in range(index + 1):
    peers.note_step()
print("met", flush=True)
word = sys.stdin.readline().strip()
peers.leave(RuntimeError(word) if word else None)
"""


SEVERAL_ENGINES = f"""
import os, time
import portable_fsdp as pf
config = pf.load_config({str(ROOT / "configs/quickstart.yaml")!r})
for number in range(3):
    with pf.open_backend(config, device="cpu", backend="native") as engine:
        assert engine.agree(number) == number
    time.sleep(1.0 * (engine.process.index == LATE))
"""


XLA_HOST = f"""
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from portable_fsdp.backends.contract import Partition
from portable_fsdp.backends.peers import join
from portable_fsdp.runtime.watchdog import Watchdog
index, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
peers, device = join("gloo", Partition(index, count), {TIMEOUT_S}, os.environ), "cpu"
watchdog = Watchdog(Path("FOLDER"), index, {2 * TIMEOUT_S}, prints=True, began=time.time())
if index == 0:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    import portable_fsdp as pf
    config = pf.load_config({str(ROOT / "configs/quickstart.yaml")!r})
    engine = pf.open_backend(config, device="cpu", backend="xla")
    engine._peers, device = peers, "xla:0"
    engine.watch(watchdog)
else:
    peers.watch(watchdog)
print("met", flush=True)
for step in range(10**6):
    watchdog.begin_step(step, "computing")
    assert torch.ones(4, device=device).sum().item() == 4
    dist.barrier()
    if index == 2 and Path("FOLDER/hang").exists():
        time.sleep(100)
    time.sleep(0.1)
"""


def meeting_of(count: int) -> dict[str, str]:
    """What a launcher would set, save RANK: a port of this host that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": "0"}


@contextmanager
def watching(
    folder: Path, count: int, ranks: range | None = None, program: str = PROCESS
) -> Generator[list[subprocess.Popen[str]]]:
    """`ranks`: those that are started; each has a file stderr-RANK."""
    meeting = meeting_of(count)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC")} | meeting
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank in range(count) if ranks is None else ranks:
            with (folder / f"stderr-{rank}").open("w") as output:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-c", program],
                        env={**environment, "RANK": str(rank)},
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=output,
                        text=True,
                    )
                )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def meet(processes: list[subprocess.Popen[str]]) -> None:
    """All have met, and have said so a few times more."""
    for process in processes:
        assert process.stdout
        while (line := process.stdout.readline()) != "met\n":
            assert line.startswith("[Gloo]")  # its word on each group
    time.sleep(2.0)


def tell(process: subprocess.Popen[str], word: str) -> None:
    """The error that it leaves with; an empty one: in order."""
    assert process.stdin
    process.stdin.write(f"{word}\n")
    process.stdin.flush()


def stderr(folder: Path, rank: int) -> str:
    """Without torch's warning of a host that has no name, and gloo's word on each group."""
    lines = (folder / f"stderr-{rank}").read_text().splitlines()
    return "\n".join(line for line in lines if not re.search(r"hostname of the client socket|^\[Gloo\]", line))


def test_only_processes_with_fewer_steps_are_behind() -> None:
    beats = {rank: Heartbeat("id", f"host{rank}", 1, 0, [], steps=3) for rank in (1, 2, 0)}
    assert furthest_behind(beats) == "no process is behind: compare their stacks"
    beats[2] = replace(beats[2], steps=2)
    assert furthest_behind(beats) == "furthest behind with 2 is process 2 on host2"
    beats = {rank: replace(beat, steps=3, phase=5, collectives=40 - rank) for rank, beat in beats.items()}
    assert furthest_behind(beats) == "furthest behind with 3 is process 2 on host2"


def test_a_short_stop_ends_nobody_and_all_leave_in_order_without_a_word(tmp_path: Path) -> None:
    with watching(tmp_path, 3) as processes:
        meet(processes)
        for process in processes[:2]:  # one after the other
            process.send_signal(signal.SIGSTOP)
            time.sleep(TIMEOUT_S / 2)
            process.send_signal(signal.SIGCONT)
        time.sleep(TIMEOUT_S)
        for process in processes:
            tell(process, "")
        assert [process.wait(LIMIT_S) for process in processes] == [0, 0, 0]
        assert [stderr(tmp_path, rank) for rank in range(3)] == ["", "", ""]


@pytest.mark.proof
def test_a_process_that_is_stopped_ends_all_others(tmp_path: Path) -> None:
    with watching(tmp_path, 3) as processes:
        meet(processes)
        processes[2].send_signal(signal.SIGSTOP)
        assert [process.wait(LIMIT_S) for process in processes[:2]] == [1, 1]
        for rank in (0, 1):
            sentence = f"process 2 on {socket.gethostname()} (PID {processes[2].pid}) sent no heartbeat for 5 s"
            assert sentence in stderr(tmp_path, rank)
            assert "its last one came after 3 step(s)" in stderr(tmp_path, rank)


def test_process_0_that_is_stopped_ends_all_others(tmp_path: Path) -> None:
    """It holds the store, as it does under srun and mpirun."""
    with watching(tmp_path, 2) as processes:
        meet(processes)
        processes[0].send_signal(signal.SIGSTOP)
        assert processes[1].wait(LIMIT_S) == 1
        assert "got no answer for 5 s, after 2 step(s) of this start" in stderr(tmp_path, 1)


def test_an_error_is_told_by_the_others_and_one_of_the_network_becomes_a_sentence(tmp_path: Path) -> None:
    with watching(tmp_path, 3) as processes:
        meet(processes)
        tell(processes[2], "[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:4711")
        assert [process.wait(LIMIT_S) for process in processes] == [1, 1, 1]
        assert f"process 2 on {socket.gethostname()} lost its connection to process 0 or process 1" in stderr(
            tmp_path, 2
        )
        assert "process 2 on" in stderr(tmp_path, 0)
        assert "ended by an error after 3 step(s) of this start: [gloo/transport" in stderr(tmp_path, 0)


def test_a_run_that_waits_for_a_process_says_so(tmp_path: Path) -> None:
    with watching(tmp_path, 3, ranks=range(2)) as processes:
        deadline = time.monotonic() + LIMIT_S
        while "waiting for process 2, which did not join" not in stderr(tmp_path, 0):
            assert time.monotonic() < deadline, stderr(tmp_path, 0)
            assert processes[0].poll() is None
            time.sleep(0.1)


@pytest.mark.parametrize("late", [pytest.param(0, marks=pytest.mark.proof), 1])
def test_engines_opened_one_after_the_other(tmp_path: Path, late: int) -> None:
    """Process 0 holds the store, and the others may be there before it, or after it."""
    with watching(tmp_path, 2, program=SEVERAL_ENGINES.replace("LATE", str(late))) as processes:
        codes = [process.wait(LIMIT_S) for process in processes]
        assert (codes, [stderr(tmp_path, rank) for rank in range(2)]) == ([0, 0], ["", ""])


@pytest.mark.proof
@pytest.mark.xla
@pytest.mark.parametrize("fault", ["stop", "hang"])
def test_an_xla_host_watches_the_others(fault: str, tmp_path: Path) -> None:
    """One XLA process and two stand-ins for other hosts: PJRT's CPU devices can't communicate across processes."""
    with watching(tmp_path, 3, program=XLA_HOST.replace("FOLDER", str(tmp_path))) as processes:
        meet(processes)
        if fault == "stop":
            processes[2].send_signal(signal.SIGSTOP)
            assert processes[0].wait(LIMIT_S) == 1
            assert f"process 2 on {socket.gethostname()} (PID {processes[2].pid}) sent no heartbeat" in stderr(
                tmp_path, 0
            )
        else:
            (tmp_path / "hang").touch()
            assert processes[0].wait(LIMIT_S) == -signal.SIGKILL
            assert re.search(
                "process 0 on .* hangs: step .*; furthest behind with .* is process 2", stderr(tmp_path, 0)
            )
            assert '"entries"' in (tmp_path / "logs/collectives-2.json").read_text()


# --------------------------------------------------------------------------- process 1 of two, and what it reads of 0

ZERO = Heartbeat("the run before", "host", 1, 0, [])


class Zero:
    """Process 0, whose lines a test writes by hand."""

    def __init__(self, peers: Peers, store: Any) -> None:
        self.peers, self._store, self._line = peers, store, 0

    def says(self, life: Heartbeat) -> None:
        self._line += 1
        self.writes(json.dumps(asdict(replace(life, number=self._line))))

    def writes(self, line: str) -> None:
        self._store.set("portable_fsdp/life/0", line)
        time.sleep(1.0)  # ten rounds: it was read

    def is_met(self) -> bool:
        return self.peers._joined.is_set()


@pytest.fixture
def zero(monkeypatch: pytest.MonkeyPatch) -> Generator[Zero]:
    for name, value in meeting_of(2).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    limit = timedelta(seconds=60)
    store = open_store(os.environ, limit, serves=True)
    peers = Peers(Partition(1, 2), TIMEOUT_S, limit, os.environ)
    try:
        yield Zero(peers, store)
    finally:
        peers.leave(None)


def test_the_end_of_an_earlier_engine_is_no_start_of_this_one(zero: Zero) -> None:
    zero.says(ZERO)
    zero.says(replace(ZERO, left=True))
    assert not zero.is_met()
    zero.says(replace(ZERO, id="this run"))
    assert zero.is_met()
    zero.peers.meet().set("key", "value")
    assert zero._store.get("portable_fsdp/this run/key") == b"value"


@pytest.mark.proof
def test_a_line_that_cannot_be_read_ends_nobody(zero: Zero, capfd: pytest.CaptureFixture[str]) -> None:
    zero.says(ZERO)
    for line in ("{", "[]", "\x00", "[" * 100_000, json.dumps({**asdict(ZERO), "of_a_newer_version": 1})):
        zero.writes(line)
    zero.writes(json.dumps({"id": "of an older version"}))
    time.sleep(TIMEOUT_S)
    assert "can't read the heartbeat of process 0: another version of portable_fsdp?" in capfd.readouterr().err
    assert not zero.is_met()
    zero.says(replace(ZERO, steps=2))
    assert zero.is_met()
