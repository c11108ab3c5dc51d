"""Runs on two hosts: checkpoints in a folder that they share, in a store on one of them, in a folder that is local."""

import signal
import subprocess
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from cli import Started, events, launch, losses, started, tiny_config
from hosts import Host, new_hosts
from in_stores import at
from servers import seaweedfs

from portable_fsdp.checkpoint.format import committed_steps, step_of

pytestmark = [pytest.mark.proof, pytest.mark.slow]

STEPS = 40
SAVES = ["checkpoint.every=1", "checkpoint.async_save=true", "checkpoint.keep=2"]


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    with new_hosts(2) as hosts:
        yield hosts


@contextmanager
def on_all(hosts: list[Host], arguments: list[str], folder: Path, own: Path | None = None) -> Generator[list[Started]]:
    """The same run started on every host, a process each; `own`: a folder that each has to itself."""
    with ExitStack() as running:
        yield [
            running.enter_context(
                started(
                    [*host.inside(own), *host.torchrun(hosts), "-m", "portable_fsdp.launch", *arguments],
                    folder,
                    GLOO_SOCKET_IFNAME="eth0",
                )
            )
            for host in hosts
        ]


def settings(folder: Path) -> list[str]:
    return ["--device=cpu", f"--config={tiny_config(folder)}", f"train.steps={STEPS}", "train.log_every=1"]


def kill_and_go_on(hosts: list[Host], arguments: list[str], folder: Path, steps: Callable[[], list[int]]) -> None:
    """SIGKILL of all on both after the first commit; both are started again, and end with the curve of one process."""
    with on_all(hosts, arguments, folder) as processes:
        processes[0].wait_until(lambda: bool(steps()))
        time.sleep(0.1)  # into a later save
        for process in processes:
            process.kill()
    last = max(steps())
    assert last < STEPS - 1, "too few steps for a kill"
    with on_all(hosts, arguments, folder) as processes:
        for process in processes:
            assert process.wait() == 0, process.err
    starts = events(folder / "run", "start")
    assert [(row["step"], row["processes"]) for row in starts] == [(0, 2), (last, 2)]
    assert steps() == [STEPS - 1, STEPS]
    alone = [*settings(folder), "checkpoint.every=null", f"run.dir={folder / 'alone'}"]
    assert launch(*alone) == 0
    assert losses(folder / "run") == pytest.approx(losses(folder / "alone"), rel=5e-5)


def committed(folder: Path) -> list[int]:
    return sorted(step_of(path) or 0 for path in committed_steps(folder))


def test_a_killed_run_goes_on_from_a_shared_folder(hosts: list[Host], tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    arguments = [*settings(tmp_path), *SAVES, f"checkpoint.dir={shared}"]
    kill_and_go_on(hosts, arguments, tmp_path, lambda: committed(shared))


def test_a_killed_run_goes_on_from_a_store_on_the_first_host(hosts: list[Host], tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    with seaweedfs(tmp_path / "store", hosts[0].address, hosts[0].inside()) as bucket:
        arguments = [*settings(tmp_path), *SAVES, f"checkpoint.dir={bucket}/run"]
        kill_and_go_on(hosts, arguments, tmp_path, lambda: committed(at(f"{bucket}/run")))


def test_a_folder_that_each_host_has_to_itself_is_refused(hosts: list[Host], tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    for host in hosts:
        host.content_of(own).mkdir()
    with on_all(hosts, [*settings(tmp_path), f"run.dir={own / 'run'}"], tmp_path, own) as processes:
        for process in processes:
            assert process.wait() != 0
            assert "expected a folder that all processes share, found that process\n  1 doesn't see" in process.err
    for host in hosts:
        assert list(host.content_of(own).iterdir()) == []


def test_nothing_of_the_hosts_is_left_after_a_failure() -> None:
    sleepers: list[subprocess.Popen[bytes]] = []
    networks: list[str] = []

    def made() -> list[str]:
        listings = [subprocess.check_output(["ip", *what], text=True) for what in (["-o", "link"], ["netns", "list"])]
        return [line for line in "".join(listings).splitlines() if networks[0][:-2] in line]

    def fail() -> None:
        with new_hosts(2) as hosts:
            networks.extend(host.network for host in hosts)
            sleepers.extend(subprocess.Popen([*host.inside(), "sleep", "1000"]) for host in hosts)
            assert len(made()) == 5  # the bridge, two wires, two namespaces
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [sleeper.wait() for sleeper in sleepers] == [-signal.SIGKILL] * 2
    assert made() == []
