"""What fails on a run of several hosts: each ends in a resumed run or a clear stop, within the bounds of
docs/failures.md.

`python tests/launch/test_host_faults.py` runs all of them and prints the table of benchmarks/results/host_faults.md.
"""

import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from cli import PROGRAMS, ROOT, SAVES, Started, committed_in, events, require_curve, started, tiny_config
from hosts import JOIN_S, Host, new_hosts
from in_stores import at
from servers import seaweedfs

STEPS = 40
PEER_TIMEOUT_S = 20
AT_ONCE_S = 10  # within it a process that was killed is missed by the others
SPARE_S = 60  # for rounds, messages and starts of a machine that does other work
TCP_RETRIES, TCP_GIVES_UP_S = 6, 26  # Linux's own default is 15: about 15 minutes
TORCHRUN_KILLS_AFTER_S = 30  # a process that doesn't take a SIGTERM
STORE_LINE = re.search(r'^python -c "(.*)"$', (ROOT / "docs/failures.md").read_text(), re.MULTILINE)
"""torchrun's store, on a host that trains nothing."""
SENTENCES = ("lost its connection", "no heartbeat", "no answer")


def arguments(folder: Path, steps: int = STEPS) -> list[str]:
    """Of a run that saves after every step."""
    batch = "train.global_batch=5"  # which neither 2 nor 3 processes divide
    keys = [f"train.steps={steps}", "optim.lr=0.0003", batch, *SAVES]  # a small rate: rounding doesn't grow
    return ["--device=cpu", f"--config={tiny_config(folder)}", *keys]


def wait_for_the_middle(process: Started, checkpoints: Path) -> None:
    process.wait_until(lambda: max(committed_in(checkpoints), default=0) >= 3)
    assert max(committed_in(checkpoints)) < STEPS - 5, "too few steps for a fault"


@pytest.mark.proof
def test_a_killed_process_is_started_again_on_one_host(tmp_path: Path) -> None:
    """What needs no network of its own, and so no root."""
    launcher = [PROGRAMS / "torchrun", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    with started([*launcher, "-m", "portable_fsdp.launch", *arguments(tmp_path)], tmp_path) as process:
        wait_for_the_middle(process, tmp_path / "run/checkpoints")
        psutil.Process(process.pid).children()[1].kill()
        assert process.wait() == 0, process.err
    assert re.search(r"process 0 on \S+ lost its connection to process 1 on ", process.err), process.err
    assert "Traceback" not in process.err
    assert len(events(tmp_path / "run", "start")) == 2
    require_curve(tmp_path, *arguments(tmp_path))


@dataclass
class Run:
    """A run on several hosts that share `folder` and save to `checkpoints`, and what became of it."""

    hosts: list[Host]
    folder: Path
    checkpoints: str
    running: ExitStack
    variables: dict[str, str]
    fault: "Fault"
    store: str = ""  # the address of torchrun's store, if it lies on no host of the run
    processes: dict[str, Started] = field(default_factory=dict)  # host -> its torchrun
    times: dict[str, float] = field(default_factory=dict)  # what was seen -> seconds after the fault

    def start(self, host: Host) -> None:
        saves = f"checkpoint.dir={self.checkpoints}"
        words = [*arguments(self.folder, self.fault.steps), saves, f"run.peer_timeout_s={PEER_TIMEOUT_S}"]
        process = host.start(self.hosts, words, self.folder, None, 3, self.fault.least, self.store, **self.variables)
        self.processes[host.name] = self.running.enter_context(process)

    def starts(self) -> list[int]:
        """The steps that it was started from."""
        return [event["step"] for event in events(self.folder / "run", "start")]

    def watch(self, since: float, bound_s: float, ends: Sequence[Host]) -> None:
        """Note when it goes on and when each torchrun of `ends` has ended; fail where one is there after `bound_s`."""
        while not all(f"{host.name} ends" in self.times for host in ends):
            after = time.monotonic() - since
            if len(self.starts()) > 1:
                self.times.setdefault("goes on", after)
            for host in ends:
                process = self.processes[host.name]
                if process.poll() is not None:
                    self.times.setdefault(f"{host.name} ends", after)
                elif any(words in process.err for words in SENTENCES):
                    self.times.setdefault(f"{host.name} says", after)
            assert after < bound_s, f"nothing for {bound_s:.0f} s\n{[run.err for run in self.processes.values()]}"
            time.sleep(0.1)


class Fault(NamedTuple):
    """What fails, and what follows: torchrun ends on `stops`, or else, within `bound_s`, all go on to the end.

    `restarts`: None for any number. `sentence` is part of the message on the hosts `on`.
    """

    strike: Callable[[Run], object]
    bound_s: float
    sentence: str = ""
    on: slice = slice(0, 0)
    stops: bool = False
    restarts: int | None = 1
    hosts: int = 2
    comes_back: bool = False
    in_store: bool = False  # of the first host
    least: int = 0  # `--nnodes=least:hosts`
    survivors: slice = slice(None)
    steps: int = STEPS
    store_apart: bool = False


def cut_for_a_moment(run: Run) -> None:
    run.hosts[1].set_link("down")
    time.sleep(4)
    run.hosts[1].set_link("up")


def cut_for_good(run: Run) -> None:
    run.hosts[1].give_up_connections(TCP_RETRIES)
    run.hosts[1].set_link("down")


def lose(run: Run, number: int = -1) -> None:
    """As by a power cut: no process of the host says goodbye."""
    run.hosts[number].set_link("down")
    for process in run.hosts[number].processes():
        process.kill()


def lose_the_first_host(run: Run) -> None:
    run.hosts[1].give_up_connections(TCP_RETRIES)
    lose(run, 0)


def lose_and_return(run: Run) -> None:
    lose(run)
    time.sleep(10)
    run.hosts[-1].set_link("up")
    run.start(run.hosts[-1])


def lose_and_join(run: Run) -> None:
    """The host returns once the others have gone on without it."""
    lose(run)
    run.processes[run.hosts[0].name].wait_until(lambda: len(run.starts()) == 2)
    run.hosts[-1].set_link("up")
    run.start(run.hosts[-1])


def pause(number: int) -> Callable[[Run], object]:
    return lambda run: run.hosts[number].worker().send_signal(signal.SIGSTOP)


def kill_all_and_return(run: Run) -> None:
    for process in run.processes.values():
        process.kill()
    for host in run.hosts:
        run.start(host)


KILL = Fault(lambda run: run.hosts[-1].worker().kill(), AT_ONCE_S)
SILENCE, NO_ANSWER = f"sent no heartbeat for {PEER_TIMEOUT_S} s", f"no answer for {PEER_TIMEOUT_S} s"
JOIN_TOO_S, TCP_TOO_S = PEER_TIMEOUT_S + JOIN_S, PEER_TIMEOUT_S + TCP_GIVES_UP_S
STOP_S = PEER_TIMEOUT_S + TORCHRUN_KILLS_AFTER_S
RETURN = Fault(lose_and_return, PEER_TIMEOUT_S, restarts=None, comes_back=True)
FAULTS = {
    "kill a process": KILL,
    "kill a process of three": KILL._replace(hosts=3),
    "stop a process": Fault(pause(1), STOP_S, SILENCE, slice(0, 1)),
    "stop process 0": Fault(pause(0), STOP_S, SILENCE, slice(1, 2)),
    "cut for a moment": Fault(cut_for_a_moment, PEER_TIMEOUT_S, restarts=0),
    "cut for good": Fault(cut_for_good, JOIN_TOO_S, f"for {PEER_TIMEOUT_S} s", slice(0, 2), stops=True),
    "lose a host": Fault(lose, JOIN_TOO_S, "sent no heartbeat", slice(0, 1), stops=True),
    "lose the first host": Fault(lose_the_first_host, TCP_TOO_S, NO_ANSWER, slice(1, 2), stops=True),
    "lose a host that comes back": RETURN,
    "lose a host of three that comes back": RETURN._replace(hosts=3),
    "lose a host of three for good": Fault(lose, PEER_TIMEOUT_S, hosts=3, least=2, survivors=slice(0, 2)),
    "lose a host of three that comes back late": Fault(
        lose_and_join, PEER_TIMEOUT_S, restarts=None, hosts=3, least=2, comes_back=True, steps=3 * STEPS
    ),
    "lose the first host of three, and the store is elsewhere": Fault(
        lose_the_first_host, PEER_TIMEOUT_S, hosts=3, least=2, store_apart=True, survivors=slice(1, 3)
    ),
    "kill all and start again": Fault(kill_all_and_return, 2 * AT_ONCE_S),
    "kill all that save to a store": Fault(kill_all_and_return, 2 * AT_ONCE_S, in_store=True),
}


def inject(fault: Fault, folder: Path) -> Run:
    """Into the middle of a run, which then does what the fault says."""
    with new_hosts(fault.hosts) as hosts, ExitStack() as running:
        # Without it a torchrun that comes later finds no MASTER_ADDR.
        variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if fault.comes_back or fault.least else {}
        place = str(folder / "run/checkpoints")
        if fault.in_store:
            (folder / "store").mkdir()
            store = seaweedfs(folder / "store", hosts[0].address, hosts[0].inside())
            place = f"{running.enter_context(store)}/run"
        run = Run(hosts, folder, place, running, variables, fault)
        if fault.store_apart:
            run.store = hosts[0].outside
            assert STORE_LINE
            running.enter_context(started([sys.executable, "-c", STORE_LINE[1]], folder))
        for host in hosts:
            run.start(host)
        wait_for_the_middle(run.processes[hosts[0].name], at(place))
        since, saved = time.monotonic(), max(committed_in(at(place)))
        fault.strike(run)
        ends = hosts[fault.on if fault.stops else fault.survivors]
        run.watch(since, fault.bound_s + SPARE_S + (0 if fault.stops else fault.steps), ends)
        for host in ends:
            process = run.processes[host.name]
            assert process.wait() == (1 if fault.stops else 0), process.err
            # torchrun's own traceback is not ours.
            assert not fault.stops or "portable_fsdp/launch.py" not in process.err, process.err
        assert all(fault.sentence in run.processes[host.name].err for host in hosts[fault.on])
        assert fault.stops or committed_in(at(place)) == [fault.steps - 1, fault.steps]
    if not fault.stops:
        assert fault.restarts is None or len(run.starts()) == fault.restarts + 1
        assert fault.restarts == 0 or run.starts()[-1] >= saved, "a committed save was lost"
        assert run.times.get("goes on", 0.0) < fault.bound_s + SPARE_S, run.times
        require_curve(folder, *arguments(folder, fault.steps))
    return run


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", FAULTS)
def test_fault(fault: str, tmp_path: Path) -> None:
    inject(FAULTS[fault], tmp_path)


@pytest.mark.proof
def test_a_folder_that_each_host_has_to_itself_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    with new_hosts(2) as hosts, ExitStack() as running:
        for host in hosts:
            host.content_of(own).mkdir()
        words = [*arguments(tmp_path), f"run.dir={own / 'run'}"]
        for process in [running.enter_context(host.start(hosts, words, tmp_path, own)) for host in hosts]:
            assert process.wait() != 0
            assert "process 1 can't see\n  a file that process 0 created there" in process.err
        assert [list(host.content_of(own).iterdir()) for host in hosts] == [[], []]


if __name__ == "__main__":
    print("| fault | hosts | seen |\n|---|---|---|")
    for name in sys.argv[1:] or FAULTS:
        with tempfile.TemporaryDirectory() as folder:
            run = inject(FAULTS[name], Path(folder))
        seen = "; ".join(f"{what} +{seconds:.0f} s" for what, seconds in run.times.items())
        print(f"| {name} | {len(run.hosts)} | {seen} |", flush=True)
