"""Hosts on one machine: each with a network, a host name and mounts of its own, joined by a bridge that this process
is on too. For tests. Needs root and iproute2.
"""

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
from cli import PROGRAMS, Started, started

LIMIT_S = 30.0
JOIN_S = 60  # for the others; torchrun's own default is 600
LAST_CALL_S = 10  # for more hosts, once there are enough; torchrun's own default is 30


@dataclass(frozen=True)
class Host:
    """One of them. A command that begins with `inside()` runs there, as a child of whoever starts it."""

    name: str
    network: str  # of its network namespace
    address: str
    wire: str  # the bridge's end of its link

    def inside(self, own: Path | None = None) -> list[str]:
        """`own`: a folder that is another one on each host; what this one has in it lies in `content_of(own)`."""
        steps = [f"hostname {self.name}"]
        if own is not None:
            steps.append(f"mount --bind {shlex.quote(str(self.content_of(own)))} {shlex.quote(str(own))}")
        steps.append('exec "$@"')
        enter = ["ip", "netns", "exec", self.network, "unshare", "--uts", "--mount"]
        return [*enter, "sh", "-c", " && ".join(steps), "sh"]

    def content_of(self, own: Path) -> Path:
        return own.with_name(f"{own.name}-of-{self.name}")

    def start(
        self,
        hosts: "list[Host]",
        run: list[str],
        folder: Path,
        own: Path | None = None,
        restarts: int = 0,
        least: int = 0,
        store: str = "",
        /,
        **more: str,
    ) -> AbstractContextManager[Started]:
        """One process of a run on all hosts, which meet at the first, or at the address of a `store`; `least`: on so
        many of them, if others are lost. `own` as of `inside`; `more`: variables."""
        is_first = int(self == hosts[0] and not store)
        nodes = f"{least}:{len(hosts)}" if least else str(len(hosts))
        command = [*self.inside(own), str(PROGRAMS / "torchrun"), f"--nnodes={nodes}", "--nproc-per-node=1"]
        command += [f"--rdzv-endpoint={store or hosts[0].address}:29500", f"--max-restarts={restarts}"]
        # Without is_host and the address no host knows that the endpoint is itself: its address isn't that of its name.
        settings = f"is_host={is_first},join_timeout={JOIN_S},last_call_timeout={LAST_CALL_S}"
        command += ["--rdzv-backend=c10d", f"--rdzv-conf={settings}", f"--local-addr={self.address}"]
        return started([*command, "-m", "portable_fsdp.launch", *run], folder, GLOO_SOCKET_IFNAME="eth0", **more)

    @property
    def outside(self) -> str:
        """The address of this machine on the bridge."""
        return f"{self.address.rpartition('.')[0]}.254"

    def give_up_connections(self, retries: int) -> None:
        """After how many tries of the kernel's, 15 by default: 6 take about 25 s, 8 take 100 s."""
        setting = f"echo {retries} > /proc/sys/net/ipv4/tcp_retries2"
        subprocess.run([*self.inside(), "sh", "-c", setting], check=True)

    def set_link(self, state: str) -> None:
        """Set the link `up` or `down`."""
        _ip("link", "set", self.wire, state)

    def processes(self) -> list[psutil.Process]:
        """List all processes on the host."""
        return [psutil.Process(int(pid)) for pid in _ip("netns", "pids", self.network).split()]

    def worker(self) -> psutil.Process:
        """The process of the run that its torchrun started."""
        parents = {process: process.parent() for process in self.processes()}
        [worker] = [each for each, parent in parents.items() if parent and "torchrun" in " ".join(parent.cmdline())]
        return worker


@contextmanager
def new_hosts(count: int) -> Generator[list[Host]]:
    """host1, host2, ...; when the block ends, all that runs there is killed and nothing of them is left."""
    assert shutil.which("ip"), "hosts need `ip` of iproute2 (on Debian: apt-get install iproute2) and root"
    ours, subnet = f"pf{os.getpid()}", f"198.18.{os.getpid() % 256}"  # of the block that RFC 2544 keeps for tests
    numbers = range(1, count + 1)
    hosts = [Host(f"host{n}", f"{ours}h{n}", f"{subnet}.{n}", f"{ours}v{n}") for n in numbers]
    with ExitStack() as made:
        bridge = f"{ours}b"
        _ip("link", "add", bridge, "type", "bridge")
        made.callback(_ip, "link", "del", bridge)
        _ip("addr", "add", f"{subnet}.254/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        for host in hosts:
            _ip("netns", "add", host.network)
            made.callback(_remove, host)
            _ip("link", "add", host.wire, "type", "veth", "peer", "name", "eth0", "netns", host.network)
            made.callback(_ip, "link", "del", host.wire)
            _ip("link", "set", host.wire, "master", bridge, "up")
            _ip("-n", host.network, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", host.network, "link", "set", device, "up")
        yield hosts


def _remove(host: Host) -> None:
    deadline = time.monotonic() + LIMIT_S
    while pids := _ip("netns", "pids", host.network).split():
        assert time.monotonic() < deadline, f"processes of {host.name} don't end: {pids}"
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)
    _ip("netns", "del", host.network)


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {shlex.join(arguments)}: {done.stderr}"
    return done.stdout
