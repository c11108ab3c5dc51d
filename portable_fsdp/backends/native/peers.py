"""Who is alive: each process of a run says so every few seconds, and all end when one of them falls silent.

gloo and NCCL learn at once of a process that was killed. Of one that is stopped, or behind a cut link, they learn
nothing, and a collective waits for it as long as collectives may take: half an hour. So every process writes a line
about itself to the store where all of them met, again and again, in a thread. Process 0 reads all lines; the others
read that of process 0, in which its verdict stands. A store that doesn't answer is lost as a process is.

Time is counted in rounds of these threads, not by a clock: a process that was itself suspended blames nobody.
"""

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Annotated, Any, cast

import psutil
import torch.distributed as dist
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic import dataclasses as checked

from portable_fsdp.backends.base import Rank
from portable_fsdp.runtime.errors import EXIT_FAILED, TrainingError, printable
from portable_fsdp.runtime.store import open_store

MEETING_ROUND_S = 0.1  # between two lines, until all are there
LONGEST_ROUND_S = 5.0
ROUNDS = 6  # at least, in the time after which a process counts as lost
ASKING_S = 5.0
GOING_ON = (
    "  All processes end with exit code 1, for their launcher to start them again: they go on from the last checkpoint."
)


Count = Annotated[int, Field(ge=0, lt=2**63)]
Name = Annotated[str, Field(max_length=255)]
Sentence = Annotated[str, Field(max_length=10_000)]


@checked.dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Life:
    """What a process says of itself. Anyone who reaches the store can write one: each is checked when it is read."""

    id: Name  # of this very process: a restart has another
    host: Name
    pid: Count
    local_rank: Count
    addresses: Annotated[list[Name], Field(max_length=1000)]
    line: Count = 0
    steps: Count = 0  # that it has finished since it was started
    left: bool = False  # in order
    last_words: Sentence = ""  # as it left by an error
    verdict: Sentence = ""  # of process 0: whom it has given up, and why


_LIFE = TypeAdapter(Life)
_MAX_LINE = 1 << 20  # bytes


@dataclass
class _Heard:
    """What was read of another process."""

    first: bytes | None = None  # it may be what one of an earlier start left
    last: bytes | None = None
    life: Life | None = None  # once something newer than `first` was read
    silent_s: float = 0.0
    unreadable: bool = False  # the last line

    @property
    def has_come(self) -> bool:
        """To this very opening: the last line of an earlier one may be newer than `first`, and says that it ended."""
        return self.life is not None and not self.life.left and not self.life.last_words

    def hear(self, line: bytes, after_s: float) -> None:
        """`line`: what stands in the store, `after_s` after it was read before."""
        self.first = self.first or line
        if line == self.last:
            self.silent_s += after_s
            return
        self.last, self.silent_s = line, 0.0
        if line != self.first:
            life = _read(line)
            self.life, self.unreadable = life or self.life, life is None


@dataclass
class _Waiting:
    """For how long something has not come; worth a word once in so often."""

    every_s: float
    waited_s: float = 0.0
    told: int = 0

    def is_due(self, after_s: float) -> bool:
        self.waited_s += after_s
        if self.waited_s < self.every_s * (self.told + 1):
            return False
        self.told += 1
        return True


class Peers:
    """The processes of a run, watched from one of them.

    peers = Peers(process, timeout_s, limit)
    store = peers.meet()        # for torch's process group
    peers.slow_down()              # when all have it
    peers.leave(None)
    """

    def __init__(self, process: Rank, timeout_s: float, limit: timedelta) -> None:
        """`timeout_s`: after which a silent process is lost. `limit`: for those that have not come yet.

        The launcher's variables are read from the environment.
        """
        self._index, self._count = process.index, process.count
        self._timeout_s, self._limit = timeout_s, limit
        self._round_s = MEETING_ROUND_S
        self._group_store = open_store(os.environ, limit, serves=process.index == 0)
        self._store = open_store(os.environ, limit, serves=False)  # whoever waits for the other one doesn't block this
        self._holds_store = self._index == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._self, self._steps, self._lines, self._verdict = _ourselves(), 0, 0, ""
        self._heard = {rank: _Heard() for rank in (range(1, self._count) if self._index == 0 else (0,))}
        self._coming, self._step, self._most_steps = _Waiting(timeout_s), _Waiting(timeout_s), 0
        self._unanswered_s, self._problem = 0.0, ""
        self._met, self._over = threading.Event(), threading.Event()
        # Daemons: a process that ends by an error doesn't wait for a store that is gone.
        self._threads = [
            threading.Thread(target=work, name=f"portable_fsdp peers {work.__name__}", daemon=True)
            for work in (self._talk, self._guard)
        ]
        for thread in self._threads:
            thread.start()

    def meet(self) -> Any:
        """The store for torch's process group: of this start alone, since torchrun keeps one over its restarts.

        Returns once process 0 is there. Raises RuntimeError if it doesn't come.
        """
        meeting = self._self.id
        if self._index != 0:
            if not self._met.wait(self._limit.total_seconds()):
                raise RuntimeError(f"process 0 has not come within {self._limit.total_seconds():.0f} s")
            meeting = cast(Life, self._heard[0].life).id
        return dist.PrefixStore(f"portable_fsdp/{meeting}", self._group_store)  # pyright: ignore[reportPrivateImportUsage]

    def slow_down(self) -> None:
        """All are there: from now on a line every few seconds is enough."""
        self._round_s = min(LONGEST_ROUND_S, self._timeout_s / ROUNDS)

    def note_step(self) -> None:
        """This process has finished another step."""
        self._steps += 1

    def leave(self, error: BaseException | None) -> None:
        """Stop watching; `error`: what the run ends with, None in order. The others give up one that left by an error.

        Raises TrainingError, which says whom this process has lost, in place of an error of the network.
        """
        sentence = self._explained(error) if isinstance(error, RuntimeError) and _is_of_the_network(error) else None
        self._over.set()
        for thread in self._threads:
            thread.join(ASKING_S)
        if not any(thread.is_alive() for thread in self._threads):  # else the store doesn't answer
            with contextlib.suppress(RuntimeError):  # whoever holds the store has left before
                self._say_goodbye(error)
        if sentence is not None:
            raise TrainingError(sentence) from error

    def _say_goodbye(self, error: BaseException | None) -> None:
        if error is not None:
            self._say(last_words=_first_line(error))
            return
        self._say(left=True)
        until = time.monotonic() + ASKING_S
        # Without a store the others' last lines would be told by torch with a stack of C++.
        while self._holds_store and not all(heard.life and heard.life.left for heard in self._heard.values()):
            if time.monotonic() > until:
                return
            time.sleep(0.02)
            self._listen(0.0)

    def _explained(self, error: RuntimeError) -> str:
        lives = self._lives()
        if 0 in lives and lives[0].verdict:
            return lives[0].verdict
        found = re.search(r"\[([0-9a-f.:]+)\]:\d+", _first_line(error))
        address = found[1] if found else ""
        there = [rank for rank, life in lives.items() if address in life.addresses and rank != self._index]
        named = " or ".join(f"process {rank}" for rank in there)
        whom = f"{named} on {lives[there[0]].host}" if there else f"a process at {address}" if found else "another one"
        return (
            f"process {self._index} on {self._self.host} lost its connection to {whom}, after {self._steps} step(s) of "
            "this start.\n"
            "  What that process said last says why, if it ended by itself. "
            f"torch says: {_first_line(error)}\n{GOING_ON}"
        )

    # ------------------------------------------------------------------------------------------------- the threads

    def _talk(self) -> None:
        while not self._over.wait(pause_s := self._round_s):
            try:
                self._say()
                self._listen(pause_s)
                self._unanswered_s = 0.0
                self._judge()
                if self._self.local_rank == 0:
                    self._tell_of_waiting(pause_s)
            except RuntimeError as error:  # perhaps whoever holds the store has left just before this process
                self._problem = f" torch says: {_first_line(error)}"
            except Exception as error:  # a fault here must not end the watch, nor pass for a lost process
                if not self._problem:
                    self._problem = f" {type(error).__name__}: {_first_line(error)}"
                    self._warn(f"process {self._index} can't judge the heartbeats of the others:{self._problem}")

    def _guard(self) -> None:
        """The other thread may wait for the store for ever: TCP doesn't notice a link that is cut."""
        while not self._over.wait(pause_s := self._round_s):
            self._unanswered_s += pause_s
            if self._unanswered_s >= self._timeout_s:
                where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
                self._end(
                    f"process {self._index} on {self._self.host} has had no answer for {self._timeout_s:.0f} s, after "
                    f"{self._steps} step(s) of this start,\n"
                    f"  from the store at {where}, where all processes met: its host is gone, or the link to it is "
                    f"cut.{self._problem}\n{GOING_ON}",
                    self._self.local_rank == 0,
                )

    def _say(self, *, left: bool = False, last_words: str = "") -> None:
        self._lines += 1
        life = replace(self._self, line=self._lines, steps=self._steps, verdict=self._verdict)
        self._store.set(_key(self._index), json.dumps(asdict(replace(life, left=left, last_words=last_words))))

    def _listen(self, after_s: float) -> None:
        there = [rank for rank, heard in self._heard.items() if heard.first or self._store.check([_key(rank)])]
        lines = self._store.multi_get([_key(rank) for rank in there]) if there else []
        for rank, line in zip(there, lines, strict=True):
            self._heard[rank].hear(line, after_s)
        if all(heard.has_come for heard in self._heard.values()):
            self._met.set()

    def _judge(self) -> None:
        for rank, heard in self._heard.items():
            life = heard.life
            if life is None or life.left:
                continue
            if life.verdict:
                self._end(life.verdict, self._self.local_rank == 0)
            if heard.silent_s >= self._timeout_s:
                is_first_here = (life.host, life.local_rank) == (self._self.host, 0)
                self._give_up(_verdict(rank, life, self._timeout_s), is_first_here or self._self.local_rank == 0)

    def _give_up(self, verdict: str, is_said: bool) -> None:
        if self._index == 0:
            self._verdict = verdict
            self._say()
            self._over.wait(2 * self._round_s)  # the others read it, and this process may hold the store
        self._end(verdict, is_said)

    def _end(self, sentence: str, is_said: bool) -> None:
        """End this process, whose main thread waits in a collective. `is_said`: by one process of a host."""
        if self._over.is_set():
            return
        if is_said:
            self._warn(sentence)
        os._exit(EXIT_FAILED)

    def _tell_of_waiting(self, after_s: float) -> None:
        """A run that waits, though nobody is lost, says so."""
        missing = ", ".join(str(rank) for rank, heard in self._heard.items() if heard.life is None)
        if missing and self._coming.is_due(after_s):
            unread = ", ".join(str(rank) for rank, heard in self._heard.items() if heard.unreadable)
            why = f" (what process {unread} says can't be read: another version of portable_fsdp?)" if unread else ""
            self._warn(f"waiting for process {missing}, not come after {self._coming.waited_s:.0f} s{why}")
        if missing or self._index != 0:
            return
        lives = {rank: heard.life for rank, heard in self._heard.items() if heard.life}
        lives[0] = replace(self._self, steps=self._steps)
        most = max(life.steps for life in lives.values())
        if most != self._most_steps:
            self._most_steps, self._step = most, _Waiting(self._timeout_s)
        elif self._step.is_due(after_s):
            if not most:
                self._warn(
                    f"the first step has not ended after {self._step.waited_s:.0f} s, though every process lives: "
                    "data is tokenized, weights are loaded and programs compiled before it"
                )
                return
            self._warn(
                f"no step finished for {self._step.waited_s:.0f} s although all processes are alive: {most} step(s) "
                f"are done since the start, and {furthest_behind(lives)}"
            )

    def _warn(self, sentence: str) -> None:
        print(printable(sentence), file=sys.stderr, flush=True)  # it quotes what others wrote to the store

    def _lives(self) -> dict[int, Life]:
        """Of all processes, as far as the store answers within some seconds."""
        found: dict[int, Life] = {}

        def ask() -> None:
            with contextlib.suppress(RuntimeError):
                for rank in range(self._count):
                    if life := _read(self._store.get(_key(rank))):
                        found[rank] = life

        asking = threading.Thread(target=ask, name="portable_fsdp peers ask", daemon=True)
        asking.start()
        asking.join(ASKING_S)
        return dict(found)


def furthest_behind(lives: Mapping[int, Life]) -> str:
    """Which processes have done the fewest steps; none where all have done the same."""
    fewest, most = (of(life.steps for life in lives.values()) for of in (min, max))
    if fewest == most:
        return "no process is behind"
    behind = [f"process {rank} on {life.host}" for rank, life in sorted(lives.items()) if life.steps == fewest]
    return f"furthest behind with {fewest} is {', '.join(behind)}"


def _read(line: bytes) -> Life | None:
    """None for what no process of this version has written: the store takes lines from anyone, no run ends by one."""
    try:
        return _LIFE.validate_json(line) if len(line) <= _MAX_LINE else None
    except ValidationError:
        return None


def _ourselves() -> Life:
    found = [one for interface in psutil.net_if_addrs().values() for one in interface]
    addresses = [one.address for one in found if one.family in (socket.AF_INET, socket.AF_INET6)]
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    return Life(uuid.uuid4().hex, socket.gethostname(), os.getpid(), local_rank, addresses)


def _verdict(rank: int, life: Life, timeout_s: float) -> str:
    where = f"process {rank} on {life.host} (PID {life.pid})"
    if life.last_words:
        return f"{where} ended by an error after {life.steps} step(s) of this start: {life.last_words}\n{GOING_ON}"
    return (
        f"{where} has given no sign of life for {timeout_s:.0f} s; its last one came after {life.steps} step(s) of "
        "this start.\n"
        f"  It was stopped or killed, its host is gone, or the link to it is cut: look there.\n{GOING_ON}"
    )


def _key(rank: int) -> str:
    return f"portable_fsdp/life/{rank}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _is_of_the_network(error: RuntimeError) -> bool:
    """torch has classes for those of NCCL and of its store; gloo's are told by its name."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()
