"""What fails on a run of several hosts: each ends in a resumed run or a clear stop, within the bounds of
docs/failures.md.

`python tests/launch/test_host_faults.py` runs all of them and prints the table of benchmarks/results/host_faults.md.
"""

import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from cli import PROGRAMS, Started, committed, launch, losses, started, tiny_config
from hosts import Host, new_hosts

from portable_fsdp.metrics.sinks import read_jsonl

STEPS = 40
PEER_TIMEOUT_S = 20
JOIN_S = 60  # torchrun's own default is 600
AT_ONCE_S = 10  # within it a process that was killed is missed by the others
SPARE_S = 60  # for rounds, messages and starts of a machine that does other work
TCP_RETRIES, TCP_GIVES_UP_S = 6, 26  # Linux's own default is 15: about 15 minutes
TORCHRUN_KILLS_AFTER_S = 30  # a process that doesn't take a SIGTERM
SENTENCES = ("lost its connection", "no heartbeat", "had no answer")
FRESH_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # or a torchrun that comes later finds no MASTER_ADDR


def arguments(folder: Path) -> list[str]:
    """Of a run that saves after every step."""
    every = ["checkpoint.every=1", "checkpoint.async_save=true", "checkpoint.keep=2", "train.log_every=1"]
    batch = "train.global_batch=6"  # which 2 and 3 processes divide
    return ["--device=cpu", f"--config={tiny_config(folder)}", f"train.steps={STEPS}", batch, *every]


def starts(folder: Path) -> list[int]:
    """The steps that it was started from."""
    path = folder / "run/events.jsonl"
    return [row["step"] for row in read_jsonl(path) if row["event"] == "start"] if path.exists() else []


def require_curve(folder: Path) -> None:
    """Losses equal to those of a run that nothing befell."""
    assert launch(*arguments(folder), "checkpoint.every=1000", f"run.dir={folder / 'alone'}") == 0
    assert losses(folder / "run") == pytest.approx(losses(folder / "alone"), rel=5e-5)


@pytest.mark.proof
def test_a_killed_process_is_started_again_on_one_host(tmp_path: Path) -> None:
    """What needs no network of its own, and so no root."""
    launcher = [PROGRAMS / "torchrun", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command = [*launcher, "-m", "portable_fsdp.launch", *arguments(tmp_path)]
    with started(command, tmp_path) as process:
        process.wait_until(lambda: max(committed(tmp_path / "run"), default=0) >= 3)
        psutil.Process(process.pid).children()[1].kill()
        assert process.wait() == 0, process.err
        assert re.search(r"process 0 on \S+ lost its connection to process 1 on ", process.err), process.err
        assert "Traceback" not in process.err
    assert len(starts(tmp_path)) == 2
    require_curve(tmp_path)


@dataclass
class Run:
    """A run on several hosts that share `folder`, and what became of it."""

    hosts: list[Host]
    folder: Path
    variables: dict[str, str] = field(default_factory=dict)
    processes: dict[str, Started] = field(default_factory=dict)  # host -> its torchrun
    times: dict[str, float] = field(default_factory=dict)  # what was seen -> seconds after the fault

    def start(self, host: Host, running: ExitStack) -> None:
        command = [
            *(*host.inside(), *host.torchrun(self.hosts, "--max-restarts=3", join_s=JOIN_S)),
            *("-m", "portable_fsdp.launch", *self.arguments(), f"run.peer_timeout_s={PEER_TIMEOUT_S}"),
        ]
        process = running.enter_context(started(command, self.folder, GLOO_SOCKET_IFNAME="eth0", **self.variables))
        self.processes[host.name] = process

    def arguments(self) -> list[str]:
        return arguments(self.folder)

    @property
    def starts(self) -> list[int]:
        return starts(self.folder)

    @property
    def messages(self) -> dict[str, str]:
        return {host: process.err for host, process in self.processes.items()}


@contextmanager
def run_on(count: int, folder: Path, **variables: str) -> Generator[tuple[Run, ExitStack]]:
    """In the middle of a run: it has committed some steps."""
    with new_hosts(count) as hosts, ExitStack() as running:
        run = Run(hosts, folder, variables)
        for host in hosts:
            run.start(host, running)
        first = run.processes[hosts[0].name]
        first.wait_until(lambda: max(committed(folder / "run"), default=0) >= 3)
        assert max(committed(folder / "run")) < STEPS - 5, "too few steps for a fault"
        yield run, running


def watch(run: Run, since: float, bound_s: float, ends: list[str]) -> None:
    """Note when it goes on and when each torchrun of `ends` has ended; fail where one is there after `bound_s`."""
    while True:
        after = time.monotonic() - since
        if len(run.starts) > 1:
            run.times.setdefault("goes on", after)
        for host in ends:
            if run.processes[host].poll() is not None:
                run.times.setdefault(f"{host} ends", after)
            elif any(word in run.processes[host].err for word in ("lost its connection", "no heartbeat", "no answer")):
                run.times.setdefault(f"{host} says", after)
        if all(f"{host} ends" in run.times for host in ends):
            return
        assert after < bound_s, f"nothing for {bound_s:.0f} s\n{run.messages}"
        time.sleep(0.1)


def goes_on(run: Run, since: float, bound_s: float, restarts: int | None = 1) -> None:
    """Started again within `bound_s`, and on to the end, on all hosts. `restarts`: None for any number."""
    hosts = [host.name for host in run.hosts]
    watch(run, since, bound_s + SPARE_S + STEPS, hosts)
    assert [run.processes[host].wait() for host in hosts] == [0] * len(hosts), run.messages
    assert restarts is None or len(run.starts) == restarts + 1, run.starts
    assert "goes on" not in run.times or run.times["goes on"] < bound_s + SPARE_S, run.times
    require_curve(run.folder)


def stops(run: Run, since: float, bound_s: float, hosts: list[Host], word: str) -> None:
    """torchrun ends on `hosts`, with a sentence and without a traceback of ours."""
    watch(run, since, bound_s + SPARE_S, [host.name for host in hosts])
    for host in hosts:
        process = run.processes[host.name]
        assert process.wait() == 1, process.err
        assert word in process.err
        assert "portable_fsdp/launch.py" not in process.err, process.err


# ------------------------------------------------------------------------------------------------------- the faults


def kill_a_process(folder: Path, count: int = 2) -> Run:
    with run_on(count, folder) as (run, _):
        since = time.monotonic()
        run.hosts[-1].worker().kill()
        goes_on(run, since, AT_ONCE_S)
        return run


def stop_a_process(folder: Path, of: int = -1) -> Run:
    with run_on(2, folder) as (run, _):
        since = time.monotonic()
        run.hosts[of].worker().send_signal(signal.SIGSTOP)
        goes_on(run, since, PEER_TIMEOUT_S + TORCHRUN_KILLS_AFTER_S)
        assert f"sent no heartbeat for {PEER_TIMEOUT_S} s" in run.messages[run.hosts[1 + of].name]
        return run


def cut_for_a_moment(folder: Path) -> Run:
    with run_on(2, folder) as (run, _):
        since = time.monotonic()
        run.hosts[1].cut_link()
        time.sleep(4)
        run.hosts[1].mend_link()
        goes_on(run, since, PEER_TIMEOUT_S, restarts=0)
        return run


def cut_for_good(folder: Path) -> Run:
    with run_on(2, folder) as (run, _):
        run.hosts[1].give_up_connections(TCP_RETRIES)
        since = time.monotonic()
        run.hosts[1].cut_link()
        stops(run, since, PEER_TIMEOUT_S + max(JOIN_S, TCP_GIVES_UP_S), run.hosts, f"for {PEER_TIMEOUT_S} s")
        return run


def lose(host: Host) -> None:
    """As by a power cut: no process of it says goodbye."""
    host.cut_link()
    for process in host.processes():
        process.kill()


def lose_a_host(folder: Path) -> Run:
    with run_on(2, folder) as (run, _):
        since = time.monotonic()
        lose(run.hosts[1])
        stops(run, since, PEER_TIMEOUT_S + JOIN_S, run.hosts[:1], "sent no heartbeat")
        return run


def lose_the_first_host(folder: Path) -> Run:
    with run_on(2, folder) as (run, _):
        run.hosts[1].give_up_connections(TCP_RETRIES)
        since = time.monotonic()
        lose(run.hosts[0])
        stops(run, since, PEER_TIMEOUT_S + TCP_GIVES_UP_S, run.hosts[1:], f"no answer for {PEER_TIMEOUT_S} s")
        return run


def lose_a_host_that_comes_back(folder: Path, count: int = 2) -> Run:
    with run_on(count, folder, **FRESH_STORES) as (run, running):
        since = time.monotonic()
        lose(run.hosts[-1])
        time.sleep(10)
        run.hosts[-1].mend_link()
        run.start(run.hosts[-1], running)
        goes_on(run, since, PEER_TIMEOUT_S, restarts=None)
        return run


FAULTS: dict[str, Callable[[Path], Run]] = {
    "kill a process": kill_a_process,
    "kill a process of three": lambda folder: kill_a_process(folder, 3),
    "stop a process": stop_a_process,
    "stop process 0": lambda folder: stop_a_process(folder, 0),
    "cut for a moment": cut_for_a_moment,
    "cut for good": cut_for_good,
    "lose a host": lose_a_host,
    "lose the first host": lose_the_first_host,
    "lose a host that comes back": lose_a_host_that_comes_back,
    "lose a host of three that comes back": lambda folder: lose_a_host_that_comes_back(folder, 3),
}


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", FAULTS)
def test_fault(fault: str, tmp_path: Path) -> None:
    FAULTS[fault](tmp_path)


if __name__ == "__main__":
    print("| fault | hosts | seen |\n|---|---|---|")
    for name in sys.argv[1:] or FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            run = FAULTS[name](Path(folder))
        seen = "; ".join(f"{what} +{seconds:.0f} s" for what, seconds in run.times.items())
        print(f"| {name} | {len(run.hosts)} | {seen} |", flush=True)
