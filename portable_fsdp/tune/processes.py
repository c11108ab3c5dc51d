"""The processes of `tune`: process 0 decides what to try, and each process that a launcher started runs its part."""

import json
import os
import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

from pydantic import BaseModel

from portable_fsdp.parity.__main__ import run_place
from portable_fsdp.parity.record import PlaceRecord, PlaceTask
from portable_fsdp.runtime.errors import PortableFSDPError, TrainingError
from portable_fsdp.runtime.launchers import detect_launch

_SLACK_S = 60.0  # for the answers of other processes, after a candidate's limit


class _Order(BaseModel):
    task: PlaceTask | None  # None: the end
    limit_s: float = 0.0
    port: int = 0  # of the candidate's own store, on process 0's host


class Runner:
    """Runs candidates in child processes: those of this host, or one for each process that a launcher started."""

    def __init__(self, limit: timedelta) -> None:
        """`limit`: the longest that a process waits for another."""
        self.launch, self._number = detect_launch(os.environ), 0
        self._store: Any = None
        if not self.launch.is_alone:
            from portable_fsdp.runtime.rendezvous import open_store

            os.environ.update(self.launch.variables)
            self._store = open_store(os.environ, limit, serves=self.launch.rank == 0)

    def run(self, task: PlaceTask, limit_s: float) -> PlaceRecord:
        """Run a task; process 0 calls it. Raises as `run_place`: the error of the process that failed first."""
        if self._store is None:
            (record,) = run_place(task, limit_s)
            return record
        with socket.socket() as free:
            free.bind(("", 0))
            order = _Order(task=task, limit_s=limit_s, port=free.getsockname()[1])
        self._publish(order)
        record = self._part(task, order)
        keys = [self._key(f"failed/{n}") for n in range(self.launch.world_size)]
        with suppress(RuntimeError):  # torch's error of a timeout
            self._store.wait(keys, timedelta(seconds=limit_s + _SLACK_S))
        if missing := [n for n, key in enumerate(keys) if not self._store.check([key])]:
            raise TrainingError(f"process {missing[0]} doesn't answer")
        answers = [json.loads(self._store.get(key)) for key in keys]
        failures = [answer for answer in answers if answer]
        if failures or record is None:
            raise TrainingError(min(failures)[1])
        return record

    def follow(self) -> None:
        """Run the parts of this process until process 0 ends. Raises TrainingError if it can't be reached."""
        from torch.distributed import DistError

        try:
            while True:
                self._number += 1
                order = _Order.model_validate_json(self._store.get(self._key("order")))
                if order.task is None:
                    self._store.set(self._key(f"failed/{self.launch.rank}"), "[]")
                    return
                self._part(order.task, order)
        except DistError:
            raise TrainingError("tune: process 0, which decides what to try, has ended.") from None

    def end(self) -> None:
        """End the other processes; this one may host their store, so it waits a little for their answers."""
        if self._store is not None:
            self._publish(_Order(task=None))
            others = [self._key(f"failed/{n}") for n in range(1, self.launch.world_size)]
            with suppress(RuntimeError):
                self._store.wait(others, timedelta(seconds=20))

    def _publish(self, order: _Order) -> None:
        self._number += 1
        self._store.set(self._key("order"), order.model_dump_json())

    def _part(self, task: PlaceTask, order: _Order) -> PlaceRecord | None:
        environment = {"MASTER_PORT": str(order.port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
        record, failure, checked_at = None, [], time.monotonic()

        def others_failed() -> bool:
            """Ask the store once a second: without it this part would wait for the one that failed."""
            nonlocal checked_at
            if time.monotonic() < checked_at + 1:
                return False
            checked_at = time.monotonic()
            return self._store.check([self._key("failed")])

        try:
            (record,) = run_place(task, order.limit_s, environment, others_failed)
        except (PortableFSDPError, KeyboardInterrupt) as error:
            failure = [self._store.add(self._key("failures"), 1), str(error)]
            self._store.set(self._key("failed"), "")
            if isinstance(error, KeyboardInterrupt):
                raise
        self._store.set(self._key(f"failed/{self.launch.rank}"), json.dumps(failure))
        return record

    def _key(self, name: str) -> str:
        return f"portable_fsdp_tune/{self._number}/{name}"
