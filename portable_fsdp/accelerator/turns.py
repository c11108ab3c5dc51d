"""What process 0 does alone, and how the others join it.

Half of all scripts save under `if accelerator.is_main_process:`. With sharded weights that needs all processes. So each
process passes turn points: before a batch, in `wait_for_everyone`, at each collective action. Process 0 writes what it
does there to the store, numbered. Another process reads the message of the same number: it continues if it does the
same; it joins an action that it doesn't call itself, and reads the next; for anything else it raises an error.

A forward by process 0 alone can't be joined: the others lack its rows. Nor can another collective. Process 0 ends then,
with a sentence.
"""

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from portable_fsdp.backends.contract import Backend
from portable_fsdp.backends.peers import count_collectives
from portable_fsdp.runtime.command import to_stderr
from portable_fsdp.runtime.errors import EXIT_FAILED, PortableFSDPError, TrainingError

_KEPT = 1000  # messages; at each multiple all processes meet, so that older ones may go

Action = Callable[..., Any]
"""`action(is_own, *arguments)`: *collective*; `is_own`: this process called it, else it joins process 0's call."""


class _Message(NamedTuple):
    name: str
    arguments: list[Any]

    @property
    def text(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.arguments[1:]))})" if self.arguments else self.name


class Turns:
    """The turn points of this process. With one process they do nothing."""

    def __init__(self, engine: Backend, timeout_s: float) -> None:
        """`timeout_s`: how long process 0 may be in a collective that the others don't run."""
        self._engine, self._timeout_s = engine, timeout_s
        self._index, self._count = engine.process.index, engine.process.count
        self._store: Any = None
        if self._count > 1:
            store = cast(Any, distributed_c10d)._get_default_store()
            name = engine.agree(uuid.uuid4().hex)  # a caller's group may see several engines
            # A connection of its own: a wait would block what else uses the other one, as NCCL's threads do.
            self._store = cast(Any, dist).PrefixStore(f"portable_fsdp/turns/{name}", store.clone())
            atexit.register(self._finish)
        self._number, self._begun_before = 0, count_collectives()
        self._is_quiet = False
        self._actions: list[dict[str, Action]] = []
        self._forward: str | None = None  # the model that process 0 runs now
        self._over = threading.Event()
        self._guard: threading.Thread | None = None

    def register(self, actions: dict[str, Action]) -> int:
        """Add the actions of an Accelerator; returns its number, which is the first argument of its messages."""
        self._actions.append(actions)
        return len(self._actions) - 1

    def point(self, name: str) -> None:
        """Pass a turn point at which nothing is joined: "its next batch". *collective*"""
        if self._store is not None and not self._is_quiet:
            self._pass(_Message(name, []))

    def meet(self) -> None:
        """Wait until all processes are here. *collective*"""
        if self._store is not None and not self._is_quiet:
            self.point("wait_for_everyone")
            self._engine.gather(None)

    def act(self, owner: int, name: str, *arguments: Any, by_name: bool = False) -> Any:
        """Run an action of the Accelerator `owner` with all processes, those that don't call it included.

        `arguments`: JSON. `by_name`: another process calls the same action whatever its arguments are; those of
        process 0 count.
        """
        message = _Message(name, [owner, *arguments])
        if self._store is not None:
            message = self._pass(message, by_name)
        return self._actions[owner][name](True, *message.arguments[1:])

    @contextmanager
    def quiet(self) -> Generator[None]:
        """Context on process 0 of code that the others don't run, and whose points they don't pass."""
        before, self._is_quiet = self._is_quiet, True
        try:
            yield
        finally:
            self._is_quiet = before

    def _finish(self) -> None:
        """At the end of a script that doesn't call end_training: process 0 may save there, and needs the others."""
        if not hasattr(sys, "last_value"):  # else an error ends this process
            try:
                self.point("the end of the script")
            except TrainingError as error:
                to_stderr(str(error))
            except RuntimeError:  # process 0 may have held the store, and be gone
                pass
        self._over.set()

    def close(self) -> None:
        """Stop, when the engine closes."""
        self._over.set()
        _of_engine.pop(self._engine, None)
        atexit.unregister(self._finish)
        if self._guard is not None:
            self._guard.join()

    # ------------------------------------------------------------------------------------------------ the messages

    def _pass(self, own: _Message, by_name: bool = False) -> _Message:
        """Post the message, or read messages until this one comes; returns it as process 0 posted it."""
        if self._index == 0:
            self._store.set(self._key(), json.dumps(own))
            self._advance()
            return own
        while True:
            message = self._read(own)
            if message == own or (by_name and (message.name, message.arguments[:1]) == (own.name, own.arguments[:1])):
                return message
            if not message.arguments:
                raise TrainingError(
                    f"process {self._index} is at {own.text}, and process 0 at {message.text}.\n  All processes make "
                    "the same calls in the same order. Process 0 may alone call save_state, save_model, "
                    "get_state_dict and a model's state_dict or save_pretrained."
                )
            self._join(message)

    def _join(self, message: _Message) -> None:
        owner, *arguments = message.arguments
        # An action fails on all processes. Process 0 raises the error, and its script may handle it.
        with contextlib.suppress(PortableFSDPError):
            self._actions[owner][message.name](False, *arguments)

    def _read(self, own: _Message) -> _Message:
        """Wait for the next message as long as process 0 lives: the engine ends this process otherwise."""
        self._store.set(f"waiting/{self._index}", json.dumps([self._number, own.text, self._begun()]))
        while True:
            with contextlib.suppress(cast(Any, dist).DistStoreError):  # the store's timeout, half an hour
                message = _Message(*json.loads(self._store.get(self._key())))
                self._advance()
                return message

    def _key(self) -> str:
        return f"turn/{self._number}"

    def _advance(self) -> None:
        self._number += 1
        if self._number % _KEPT == 0:
            self._engine.gather(None)
        self._begun_before = count_collectives()
        if self._index == 0 and self._number > 2 * _KEPT:
            self._store.delete_key(f"turn/{self._number - 2 * _KEPT - 1}")

    # --------------------------------------------------------------------------------------- alone in a collective

    def watch(self, model: nn.Module) -> None:
        """Find forwards of a sharded model, and collectives, that process 0 runs alone."""
        if self._store is None or self._index != 0 or not any(isinstance(p, DTensor) for p in model.parameters()):
            return
        name = type(model).__name__

        def enter(*_: Any) -> None:
            self._forward = name

        def leave(*_: Any) -> None:
            self._forward = None

        model.register_forward_pre_hook(enter, prepend=True)  # before FSDP's, which gathers weights
        model.register_forward_hook(leave, always_call=True)
        if self._guard is None:
            self._guard = threading.Thread(target=self._run_guard, name="portable_fsdp turns", daemon=True)
            self._guard.start()

    def _run_guard(self) -> None:
        """End this process once it has waited too long in a collective that a process at a turn point can't begin."""
        since: float | None = None
        while not self._over.wait(min(1.0, self._timeout_s / 5)):
            with contextlib.suppress(RuntimeError):  # a store that is gone: the engine ends this process
                number, own = self._number, self._begun()
                waiting = [text for n, text, count in self._waiting() if n == number and count < own]
                since = (since or time.monotonic()) if waiting and number == self._number else None
                if since is not None and time.monotonic() - since > self._timeout_s:
                    self._end(waiting)

    def _begun(self) -> int:
        """The collectives that this process has begun since its last turn point."""
        return count_collectives() - self._begun_before

    def _waiting(self) -> list[tuple[int, str, int]]:
        """For each other process that has waited: for which message, where, and how many collectives it had begun."""
        keys = [f"waiting/{index}" for index in range(1, self._count)]
        return [json.loads(self._store.get(key)) for key in keys if self._store.check([key])]

    def _end(self, waiting: Sequence[str]) -> None:
        """End this process, whose main thread waits for what nobody sends."""
        what = f"a forward of {self._forward}" if self._forward else "a collective"
        message = (
            f"process 0 has run {what} alone for {self._timeout_s:.0f} s: {len(waiting)} other process(es) wait at "
            f"{waiting[0]}.\n  The model is sharded over all processes, so that each must run it: take it out of `if "
            "accelerator.is_main_process:`, and keep only what is done with the result (images, logs) inside."
        )
        to_stderr(message)
        if (peers := cast(Any, self._engine)._peers) is not None:
            with contextlib.suppress(Exception):
                peers.leave(TrainingError(message))  # the others report it
        os._exit(EXIT_FAILED)


_of_engine: dict[Backend, Turns] = {}  # until it closes


def turns_of(engine: Backend, timeout_s: float) -> Turns:
    """The turns of this process, which all Accelerators of an engine share."""
    if engine not in _of_engine:
        _of_engine[engine] = Turns(engine, timeout_s)
    return _of_engine[engine]
