"""Heartbeats: each process of a run sends one every few seconds; when a process falls silent, all others end.

gloo and NCCL notice at once when a process is killed. They do not notice a stopped process or a cut link: a collective
then waits for the collective timeout, half an hour. So a thread of every process writes heartbeats to the store of the
rendezvous. Process 0 reads all heartbeats; other processes read that of process 0, which carries its verdict. A store
that does not answer counts as a lost process.

The threads count rounds, not clock time: a process that was itself suspended blames nobody.
"""

import contextlib
import json
import math
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import psutil
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from portable_fsdp.backends.contract import Partition
from portable_fsdp.runtime.command import to_stderr
from portable_fsdp.runtime.errors import EXIT_FAILED, PortableFSDPError, TrainingError, printable
from portable_fsdp.runtime.files import parse_json
from portable_fsdp.runtime.host import begin
from portable_fsdp.runtime.rendezvous import open_store

if TYPE_CHECKING:
    from portable_fsdp.runtime.watchdog import Watchdog

# torch's default. It ends processes that wait for one another before their run has a watchdog.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
WATCHED_TIMEOUT = timedelta(days=1)  # longer than a watchdog's usual limits
JOINING_ROUND_S = 0.1  # between two heartbeats until all processes have joined
LONGEST_ROUND_S = 5.0
ROUNDS = 6  # heartbeats that fit into the timeout, at least
STORE_ANSWER_S = 5.0
RESTART_NOTE = "  All processes end with exit code 1, so that their launcher restarts them from the last checkpoint."

_MAX_BYTES = 1 << 20
_MAX_TEXT_BYTES = 50_000


@dataclass(frozen=True)
class Heartbeat:
    """The state that a process reports. Anyone who reaches the store can write one, so `_parse` validates each."""

    id: str  # of this start of the process: a restart has another
    host: str
    pid: int
    local_rank: int
    addresses: list[str]
    number: int = 0
    steps: int = 0  # finished since the start of the process
    phase: int = 0  # of its watchdog: all processes count the same phases
    collectives: int = 0  # that it has begun, and parts of checkpoints that it has written
    doing: str = ""
    limit_s: int = 0  # of what it does
    waits_s: int = 0  # of process 0: the limit of the processes that all others wait for
    waits_for: list[str] = field(default_factory=lambda: [])  # of process 0: which these are; empty: nobody is behind
    left: bool = False  # in order
    error: str = ""  # that the process ended with
    verdict: str = ""  # of process 0: which process is lost, and why


@dataclass
class _Peer:
    """The heartbeats that this process has read from another one."""

    first: bytes | None = None  # perhaps left over from an earlier start
    last: bytes | None = None
    beat: Heartbeat | None = None  # the last that is newer than `first`
    silent_s: float = 0.0
    unreadable: bool = False  # `last` could not be parsed

    @property
    def has_joined(self) -> bool:
        """Whether it joined this start. The last heartbeat of an earlier start may be newer than `first`, but reports
        its end."""
        return self.beat is not None and not self.beat.left and not self.beat.error

    def read(self, line: bytes, elapsed_s: float) -> None:
        """Process the line that the store holds now, `elapsed_s` after the last read."""
        self.first = self.first or line
        if line == self.last:
            self.silent_s += elapsed_s
            return
        self.last, self.silent_s = line, 0.0
        if line != self.first:
            beat = _parse(line)
            self.beat, self.unreadable = beat or self.beat, beat is None


def join(
    backend: str, rank: Partition, timeout_s: float, environ: Mapping[str, str], device: torch.device | None = None
) -> "Peers":
    """Form torch's process group of all processes of the run, and watch them. *collective*

    `environ`: the launcher's variables. `device`: the GPU that NCCL connects at once.
    """
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # gloo's flight recorder, off by default in torch 2.9
    peers = Peers(rank, timeout_s, COLLECTIVE_TIMEOUT, environ)
    try:
        dist.init_process_group(
            backend,
            store=peers.meet(),
            rank=rank.index,
            world_size=rank.count,
            timeout=COLLECTIVE_TIMEOUT,
            device_id=device,
        )
    except Exception as error:
        peers.leave(error)
        raise
    peers.slow_down()
    return peers


class Peers:
    """Watches the processes of a run from one of them.

    peers = Peers(rank, timeout_s, limit, os.environ)
    store = peers.meet()        # for torch's process group
    peers.slow_down()           # once all processes have it
    peers.leave(None)
    """

    def __init__(self, rank: Partition, timeout_s: float, limit: timedelta, environ: Mapping[str, str]) -> None:
        """A process silent for `timeout_s` is lost; `limit`: how long to wait for one that has not joined. `environ`:
        the launcher's variables."""
        self._index, self._count = rank.index, rank.count
        self._timeout_s, self._limit = timeout_s, limit
        self._round_s = JOINING_ROUND_S
        self._store_name = f"the store at {environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
        self._group_store = open_store(environ, limit, serves=self._index == 0)
        self._store = open_store(environ, limit, serves=False)  # its own connection: the other may block
        self._holds_store = self._index == 0 and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._self, self._steps, self._sent, self._verdict = _heartbeat_of_this_process(), 0, 0, ""
        self._peers = {index: _Peer() for index in (range(1, self._count) if self._index == 0 else (0,))}
        self._joining_s, self._unanswered_s, self._problem, self._explanation = 0.0, 0.0, "", ""
        self._watchdog: Watchdog | None = None
        self._waits_s, self._waits_for = 0, list[str]()
        self._joined, self._over = threading.Event(), threading.Event()
        # Daemons: a process that ends by an error doesn't wait for a store that is gone.
        self._threads = [
            threading.Thread(target=work, name=f"portable_fsdp peers {work.__name__}", daemon=True)
            for work in (self._beat, self._guard_store)
        ]
        for thread in self._threads:
            thread.start()

    def meet(self) -> Any:
        """Wait for process 0, then return the store for torch's process group. Raises TrainingError on a timeout.

        A prefix makes it private to this start: torchrun keeps one store over its restarts.
        """
        start = self._self.id
        if self._index != 0:
            if not self._joined.wait(self._limit.total_seconds()):
                raise TrainingError(
                    f"process 0 did not join {self._store_name} within {self._limit.total_seconds():.0f} s"
                )
            start = cast(Heartbeat, self._peers[0].beat).id
        return dist.PrefixStore(f"portable_fsdp/{start}", self._group_store)  # pyright: ignore[reportPrivateImportUsage]

    def slow_down(self) -> None:
        """Send heartbeats only every few seconds, once all processes have joined."""
        self._round_s = min(LONGEST_ROUND_S, self._timeout_s / ROUNDS)

    def watch(self, watchdog: "Watchdog") -> None:
        """Send what `watchdog` knows, and tell it for whom this process waits. From now on it alone ends collectives
        that take too long."""
        self._watchdog, watchdog.record = watchdog, flight_record
        for backend in _group_backends() if watchdog.is_watching else ():
            with contextlib.suppress(RuntimeError):  # a backend without timeouts
                backend._set_default_timeout(WATCHED_TIMEOUT)

    def note_step(self) -> None:
        """This process finished a step."""
        self._steps += 1

    def leave(self, error: BaseException | None) -> None:
        """Stop watching. With `error`, the error that ends the run, the other processes give up on this one.

        Raises TrainingError, which names the lost process, in place of a network error.
        """
        message = None if error is None else self.explain(error)
        self._over.set()
        for thread in self._threads:
            thread.join(STORE_ANSWER_S)
        if not any(thread.is_alive() for thread in self._threads):  # else the store doesn't answer
            with contextlib.suppress(RuntimeError):  # the process that holds the store has left before
                self._announce_leaving(error)
        if message is not None:
            raise TrainingError(message) from error

    def explain(self, error: BaseException) -> str | None:
        """Return which process is lost, and why, for an error of the network; None for another error."""
        # NCCL's errors and the store's have classes; gloo's messages name it.
        is_of_network = isinstance(error, dist.DistError) or "gloo" in str(error).lower()
        if isinstance(error, RuntimeError) and is_of_network:
            self._explanation = self._explanation or self._explain(error)
            return self._explanation
        return None

    def _announce_leaving(self, error: BaseException | None) -> None:
        if error is not None:
            self._send(error=str(error)[:5000] if isinstance(error, PortableFSDPError) else _first_line(error))
            return
        self._send(left=True)
        until = time.monotonic() + STORE_ANSWER_S
        # If the store went first, torch would print a C++ stack for the others' last heartbeats.
        while self._holds_store and not all(peer.beat and peer.beat.left for peer in self._peers.values()):
            if time.monotonic() > until:
                return
            time.sleep(0.02)
            self._receive(0.0)

    def _explain(self, error: RuntimeError) -> str:
        beats = self._all_heartbeats()
        if 0 in beats and beats[0].verdict:
            return beats[0].verdict
        for index, beat in beats.items():  # the cause, where another process knows it
            if index != self._index and beat.error and not re.search("gloo|nccl", beat.error, re.IGNORECASE):
                return _verdict(index, beat, self._timeout_s)
        peer = "another process"
        if match := re.search(r"\[([0-9a-f.:]+)\]:\d+", _first_line(error)):
            lost = [index for index, beat in beats.items() if match[1] in beat.addresses and index != self._index]
            peer = " or ".join(f"process {index}" for index in lost) or f"a process at {match[1]}"
            peer += f" on {beats[lost[0]].host}" if lost else ""
        return (
            f"process {self._index} on {self._self.host} lost its connection to {peer}, after {self._steps} step(s) of "
            "this start.\n  If that process ended by itself, its last message says why. "
            f"torch reports: {_first_line(error)}\n{RESTART_NOTE}"
        )

    # ------------------------------------------------------------------------------------------------- the threads

    def _beat(self) -> None:
        while not self._over.wait(pause_s := self._round_s):
            try:
                self.beat_once(pause_s)
            except RuntimeError as error:  # perhaps the process that holds the store has just left
                self._problem = f" torch reports: {_first_line(error)}"
            except Exception as error:  # a fault here must not end the watch, nor pass for a lost process
                if not self._problem:
                    self._problem = f" {type(error).__name__}: {_first_line(error)}"
                    self._warn(f"process {self._index} can't check the other heartbeats:{self._problem}")

    def beat_once(self, elapsed_s: float) -> None:
        """Send a heartbeat and read the others', `elapsed_s` after the last time."""
        self._send()
        self._receive(elapsed_s)
        self._unanswered_s = 0.0
        self._judge()
        self._note_limits()
        if self._self.local_rank == 0:
            self._report_missing(elapsed_s)

    def _guard_store(self) -> None:
        """End this process if the store is silent: the other thread may block, as TCP doesn't notice a cut link."""
        while not self._over.wait(pause_s := self._round_s):
            self._unanswered_s += pause_s
            if self._unanswered_s >= self._timeout_s:
                self._end(
                    f"process {self._index} on {self._self.host} got no answer for {self._timeout_s:.0f} s, after "
                    f"{self._steps} step(s) of this start,\n  from {self._store_name}, where all processes meet: its "
                    "host is gone, or the link to it is cut."
                    f"{self._problem}\n{RESTART_NOTE}",
                    prints=self._self.local_rank == 0,
                )

    def _send(self, *, left: bool = False, error: str = "") -> None:
        self._sent += 1
        beat = replace(self._own(), number=self._sent, verdict=self._verdict, left=left, error=error)
        self._store.set(_key(self._index), json.dumps(asdict(beat)))

    def _note_limits(self) -> None:
        """Give this process the time that the one furthest behind has: process 0 may be in a callback for minutes."""
        if self._watchdog and self._index == 0:
            beats = {0: self._own()} | {index: peer.beat for index, peer in self._peers.items() if peer.beat}
            behind = _behind(beats)
            self._waits_s = max(beat.limit_s for beat in behind.values())
            self._waits_for = [str(index) for index in behind if len(behind) < len(beats)]
            self._watchdog.note(furthest_behind(beats), self._waits_s, waits=bool(self._waits_for) and 0 not in behind)
        elif self._watchdog and (beat := self._peers[0].beat):
            self._watchdog.note("", beat.waits_s, waits=str(self._index) not in beat.waits_for)

    def _own(self) -> Heartbeat:
        waits = {"waits_s": self._waits_s, "waits_for": self._waits_for}
        beat = replace(self._self, steps=self._steps, collectives=count_collectives(), **waits)
        if not (own := self._watchdog):
            return beat
        steps = max(self._steps, own.steps)  # engines that compile the step don't note it
        doing = replace(beat, phase=own.phase, doing=own.what, limit_s=math.ceil(own.limit_s))
        return replace(doing, steps=steps, collectives=beat.collectives + own.parts)

    def _receive(self, elapsed_s: float) -> None:
        known = [index for index, peer in self._peers.items() if peer.first or self._store.check([_key(index)])]
        lines = self._store.multi_get([_key(index) for index in known]) if known else []
        for index, line in zip(known, lines, strict=True):
            self._peers[index].read(line, elapsed_s)
        if all(peer.has_joined for peer in self._peers.values()):
            self._joined.set()

    def _judge(self) -> None:
        for index, peer in self._peers.items():
            beat = peer.beat
            if beat is None or beat.left:
                continue
            if beat.verdict:
                self._end(beat.verdict, prints=self._self.local_rank == 0)
            if peer.silent_s >= self._timeout_s:
                verdict = _verdict(index, beat, self._timeout_s)
                if self._index == 0:
                    self._verdict = verdict
                    self._send()
                    self._over.wait(2 * self._round_s)  # until the others have read it: this process may hold the store
                is_first_here = (beat.host, beat.local_rank) == (self._self.host, 0)
                self._end(verdict, prints=is_first_here or self._self.local_rank == 0)

    def _end(self, message: str, *, prints: bool) -> None:
        """End this process, whose main thread waits in a collective. One process of a host prints."""
        if self._over.is_set():
            return
        if prints:
            self._warn(message)
        if self._watchdog:
            self._watchdog.fail(f"Lost: {printable(message.splitlines()[0])}")
        os._exit(EXIT_FAILED)

    def _report_missing(self, elapsed_s: float) -> None:
        """Name the processes that haven't joined: once per timeout, as no watchdog runs yet."""
        missing = ", ".join(str(index) for index, peer in self._peers.items() if peer.beat is None)
        before, self._joining_s = self._joining_s, self._joining_s + elapsed_s
        if missing and self._joining_s // self._timeout_s > before // self._timeout_s:
            message = f"waiting for process {missing}, which did not join {self._store_name} in {self._joining_s:.0f} s"
            if unread := ", ".join(str(index) for index, peer in self._peers.items() if peer.unreadable):
                message += f" (can't read the heartbeat of process {unread}: another version of portable_fsdp?)"
            self._warn(message)

    def _warn(self, message: str) -> None:
        to_stderr(printable(message))  # it quotes text that others wrote to the store

    def _all_heartbeats(self) -> dict[int, Heartbeat]:
        """The heartbeats that the store returns within some seconds."""
        beats: dict[int, Heartbeat] = {}

        def read_all() -> None:
            for index in range(self._count):
                if beat := _parse(self._store.get(_key(index))):
                    beats[index] = beat

        with contextlib.suppress(RuntimeError, TimeoutError):
            begin(read_all).result(STORE_ANSWER_S)
        return dict(beats)


def furthest_behind(beats: Mapping[int, Heartbeat]) -> str:
    """Name the processes that `_behind` returns, and what they do, unless it returns all."""
    behind = _behind(beats)
    if len(behind) == len(beats):
        return "no process is behind: compare their stacks"
    names = [
        f"process {index} on {beat.host}" + (f" ({beat.doing})" if beat.doing else "")
        for index, beat in sorted(behind.items())
    ]
    return f"furthest behind with {min(beat.steps for beat in beats.values())} is {', '.join(names)}"


def _behind(beats: Mapping[int, Heartbeat]) -> dict[int, Heartbeat]:
    """Return the processes with the fewest steps, of these those with the fewest phases, and of these those with the
    fewest collectives; all, if none is behind."""
    done = {index: (beat.steps, beat.phase, beat.collectives) for index, beat in beats.items()}
    return {index: beat for index, beat in beats.items() if done[index] == min(done.values())}


def _group_backends() -> Iterator[Any]:
    """Yield the backends of all process groups, those of device meshes too."""
    groups: Any = distributed_c10d
    for group in [*groups._world.pg_map]:
        for device in group._device_types:
            yield group._get_backend(device)


def count_collectives() -> int:
    """Number of collectives that this process has begun, in all groups; processes in lockstep begin equally many."""
    total = 0
    for backend in _group_backends() if dist.is_initialized() else ():
        with contextlib.suppress(RuntimeError):  # a backend that doesn't count
            total += backend._get_sequence_number_for_group()
    return total


def flight_record() -> bytes:
    """Return torch's record of the last collectives, JSON: what was begun, by whose code, and what has ended."""
    torch_distributed: Any = cast(Any, torch)._C._distributed_c10d
    record = b""
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):  # with times of the GPU, where NCCL is used
        record = record if b'"entries"' in record else getattr(torch_distributed, name, lambda *_: b"")(True, False)
    return record


def _parse(line: bytes) -> Heartbeat | None:
    """Return None for a line that no process of this version wrote: anyone can write to the store, and must not be able
    to end a run."""
    try:
        beat = Heartbeat(**parse_json(line)) if len(line) <= _MAX_BYTES else None
        example = Heartbeat("", "", 0, 0, [])
        return beat if beat and all(map(_is_legal, astuple(beat), astuple(example))) else None
    except (ValueError, TypeError, RecursionError):
        return None


def _is_legal(value: object, example: object) -> bool:
    """Whether `value` has the type of `example`, and a legal size. Raises ValueError if a str can't be encoded."""
    if type(value) is not type(example):
        return False
    if isinstance(value, list):
        return len(value) <= 1000 and all(_is_legal(item, "") for item in cast(list[object], value))
    return len(value.encode()) <= _MAX_TEXT_BYTES if isinstance(value, str) else 0 <= cast(int, value) < 2**63


def _heartbeat_of_this_process() -> Heartbeat:
    interfaces = [address for addresses in psutil.net_if_addrs().values() for address in addresses]
    addresses = [address.address for address in interfaces if address.family in (socket.AF_INET, socket.AF_INET6)]
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return Heartbeat(uuid.uuid4().hex, socket.gethostname(), os.getpid(), local_rank, addresses)


def _verdict(index: int, beat: Heartbeat, timeout_s: float) -> str:
    process = f"process {index} on {beat.host} (PID {beat.pid})"
    if beat.error:
        return f"{process} ended by an error after {beat.steps} step(s) of this start: {beat.error}\n{RESTART_NOTE}"
    return (
        f"{process} sent no heartbeat for {timeout_s:.0f} s; its last one came after {beat.steps} step(s) of this "
        f"start.\n  It was stopped or killed, its host is gone, or the link to it is cut: look there.\n{RESTART_NOTE}"
    )


def _key(index: int) -> str:
    return f"portable_fsdp/life/{index}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
