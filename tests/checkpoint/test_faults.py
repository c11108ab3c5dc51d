"""What the operating system or an object store does wrong, below the store, at each stage of a save and of a load.

A run ends with a CheckpointError, the same on all processes, or goes on; what was committed before stays; nothing is
ever loaded that differs from what was saved.
"""

import errno
import os
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
from fault_injection import Death, current_process, patched, points
from plain_backend import PlainBackend, checkpoints, in_processes, load, save_once, small_model, snapshot
from s3_server import BUCKET, Fault, Faults, s3_server

from portable_fsdp.checkpoint import commit, storage
from portable_fsdp.checkpoint.format import committed_steps
from portable_fsdp.runtime.errors import CheckpointError, StoreError

pytestmark = pytest.mark.slow

STATES = {step: snapshot(*small_model(seed=step)) for step in (1, 2, 3)}


class Flaw(NamedTuple):
    """What an operation does instead of its work, once or from then on."""

    operations: tuple[str, ...]
    instead: Callable[..., Any]


def fails(number: int) -> Callable[..., Any]:
    def instead(real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return instead


def writes_less(real: Callable[..., int], descriptor: int, data: memoryview, **named: Any) -> int:
    return real(descriptor, data[: max(len(data) // 3, 1)])


def does_nothing(real: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    return None


def reads_less(real: Callable[..., int], descriptor: int, buffers: list[memoryview], start: int) -> int:
    return real(descriptor, [buffers[0][: max(len(buffers[0]) // 3, 1)]], start)


SAVE_FLAWS = {
    "ENOSPC": Flaw(("open", "write", "mkdir", "replace", "fsync"), fails(errno.ENOSPC)),
    "EIO": Flaw(("open", "write", "mkdir", "replace", "rename", "unlink", "rmdir", "fsync"), fails(errno.EIO)),
    "a short write": Flaw(("write",), writes_less),
    "a lost rename": Flaw(("replace", "rename"), does_nothing),
}


class Flawed(Death):
    """Nobody dies: one operation of one process goes wrong, or all from it on (`lasting`)."""

    def __init__(self, flaw: Flaw, process: int, point: int, *, lasting: bool) -> None:
        super().__init__(process, point)
        self._flaw, self._lasting = flaw, lasting
        self.hits = 0

    def call(self, name: str, real: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        process = current_process()
        if process is None:
            return real(*arguments, **named)
        self.counts[process] += 1
        here = process == self.process and (
            self.counts[process] == self.point or (self._lasting and self.counts[process] > self.point)
        )
        if here and name in self._flaw.operations:
            self.hits += 1
            return self._flaw.instead(real, *arguments, **named)
        return real(*arguments, **named)


def save_with(folder: Path, flawed: Death, count: int, is_async: bool) -> list[Any]:
    """Step 2 of `count` processes."""

    def work(backend: PlainBackend) -> None:
        opened = checkpoints(folder, backend, {"keep": 1, "async_save": is_async}, wait_s=0.5)
        flawed.join(backend, opened)
        opened.save(2, *small_model(seed=2), (0, 2))
        opened.wait()

    with patched(flawed):
        return in_processes(count, work)


def expect_one_verdict(results: list[Any], where: object) -> bool:
    """Whether the save was reported as done; all processes say the same."""
    if all(result is None for result in results):
        return True
    assert {type(result) for result in results} in ({CheckpointError}, {StoreError}), (where, results)
    assert len({str(result) for result in results}) == 1, (where, results)
    assert str(results[0]).strip()
    return False


def expect_loaded(folder: Path, allowed: set[int], where: object) -> None:
    """The newest that is whole, bit for bit, and the run goes on from it."""
    opened = checkpoints(folder, PlainBackend(), {"keep": 1})
    model, optimizer = small_model(seed=9)
    resumed = load(opened, model, optimizer)
    assert resumed.step in allowed, where
    assert snapshot(model, optimizer) == STATES[resumed.step], where
    opened.save(3, *small_model(seed=3), (0, 3))
    assert committed_steps(folder)[0].name == "step-00000003"


def save_faults(tmp_path: Path, count: int, *, is_async: bool, lasting: bool) -> Counter[str]:
    """Every flaw at every operation that it fits; returns how often each struck."""
    whole, struck = Death(), Counter[str]()
    save_once(tmp_path / "0", step=1, seed=1)
    assert save_with(tmp_path / "0", whole, count, is_async) == [None] * count
    for number, ((process, point), operation) in enumerate(zip(list(points(whole)), whole.tried, strict=True), start=1):
        for name, flaw in SAVE_FLAWS.items():
            if operation.name not in flaw.operations:
                continue
            folder, flawed = tmp_path / f"{number}-{name}", Flawed(flaw, process, point, lasting=lasting)
            save_once(folder, step=1, seed=1)
            is_done = expect_one_verdict(save_with(folder, flawed, count, is_async), (name, operation))
            expect_loaded(folder, {2} if is_done else {1, 2}, (name, operation))
            struck[name] += flawed.hits > 0
    return struck


@pytest.mark.parametrize("lasting", [False, pytest.param(True, marks=pytest.mark.proof)])
def test_faults_of_a_file_system_in_a_save(tmp_path: Path, lasting: bool) -> None:
    struck = save_faults(tmp_path, 1, is_async=False, lasting=lasting)
    assert set(struck) == set(SAVE_FLAWS)
    assert struck.total() >= 90


@pytest.mark.proof
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("lasting", [False, True])
def test_faults_of_a_file_system_in_a_save_of_two_processes(tmp_path: Path, is_async: bool, lasting: bool) -> None:
    assert save_faults(tmp_path, 2, is_async=is_async, lasting=lasting).total() >= 150


READ_FLAWS = {
    "EIO": (fails(errno.EIO), False),
    "EIO from then on": (fails(errno.EIO), True),
    "a short read": (reads_less, False),
    "short reads from then on": (reads_less, True),
    "an early end": (lambda real, *arguments: 0, True),
}


@contextmanager
def reads(instead: Callable[..., Any] | None, point: int, lasting: bool) -> Generator[Counter[str]]:
    """The `point`-th read of a file of tensors goes wrong, by whichever process."""
    count, lock, real = Counter[str](), threading.Lock(), os.preadv

    def preadv(*arguments: Any) -> int:
        with lock:
            count["reads"] += 1
            here = count["reads"] == point or (lasting and count["reads"] > point)
        return cast(int, instead(real, *arguments)) if instead and here else real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        yield count


def find_and_load(folder: Path, count: int) -> list[Any]:
    def work(backend: PlainBackend) -> tuple[int, bool]:
        model, optimizer = small_model(seed=9)
        resumed = load(checkpoints(folder, backend), model, optimizer)
        return resumed.step, snapshot(model, optimizer) == STATES[resumed.step]

    return in_processes(count, work)


def expect_no_wrong_load(results: list[Any], where: object) -> None:
    if any(isinstance(result, Exception) for result in results):
        expect_one_verdict(results, where)
    else:
        assert len(set(results)) == 1, (where, results)
        assert all(is_right for _, is_right in results), where


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.proof)])
def test_faults_of_a_file_system_in_a_load(tmp_path: Path, count: int) -> None:
    cases = 0
    for step in (1, 2):
        save_once(tmp_path, step=step, seed=step)
    with reads(None, 0, False) as whole:
        assert find_and_load(tmp_path, count) == [(2, True)] * count
    for name, (instead, lasting) in READ_FLAWS.items():
        for point in range(1, whole["reads"] + 1, 1 if count == 1 else 3):
            with reads(instead, point, lasting):
                expect_no_wrong_load(find_and_load(tmp_path, count), (name, point))
            cases += 1
    assert cases >= 60
    assert find_and_load(tmp_path, count) == [(2, True)] * count


def test_a_writer_that_hangs_ends_the_save_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_once(tmp_path, step=1, seed=1)
    given_up = threading.Event()
    collect = commit.collect

    class Hanging(Death):
        def call(self, name: str, real: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
            if current_process() == 1:
                assert given_up.wait(60), "process 0 waits for ever"
            return real(*arguments, **named)

    def collect_and_give_up(*arguments: Any) -> Any:
        try:
            return collect(*arguments)
        finally:
            given_up.set()

    monkeypatch.setattr(commit, "collect", collect_and_give_up)

    for is_async in (False, True):
        results = save_with(tmp_path, Hanging(), 2, is_async)
        assert not expect_one_verdict(results, "hung")
        assert "found none of process 1 after 0 s" in str(results[0])
        given_up.clear()
    expect_loaded(tmp_path, {1}, "hung")


# ------------------------------------------------------------------------------------------------- object stores


@pytest.fixture(scope="module")
def server() -> Iterator[Faults]:
    with s3_server() as faults:
        yield faults


class Case(NamedTuple):
    """The `skip + 1`-th request that fits, or all from it on."""

    method: str
    part: str
    what: int | str
    skip: int
    times: int


def save_cases(skips: range) -> Iterator[Case]:
    for what in (500, 503):
        for times in (1, 10**9):
            yield from (Case("PUT", "", what, skip, times) for skip in skips)
            yield Case("HEAD", "step-00000002", what, 0, times)
            yield Case("GET", "list-type", what, 0, times)
            yield Case("GET", "index-", what, 0, times)
            yield Case("POST", "delete", what, 0, times)


def load_cases(skips: range) -> Iterator[Case]:
    for what in (500, 503, 403, "cut"):
        for times in (1, 10**9):
            yield from (Case("GET", "step-0000000", what, skip, times) for skip in skips)
            yield Case("HEAD", "step-0000000", what, skips[-1], times)
            yield Case("GET", "list-type", what, 0, times)
    for skip in skips[:4]:  # while it is verified; a bit that flips on the way later, no hash sees (https does)
        yield from (Case("GET", ".safetensors", "flip", skip, times) for times in (1, 10**9))
        yield Case("GET", "manifest.json", "flip", 0, 10**9)


def run_save_case(server: Faults, case: Case) -> bool:
    """Whether it struck."""
    folder = storage.locate(f"s3://{BUCKET}/{uuid.uuid4().hex}")
    save_once(folder, step=1, seed=1, count=1)
    fault = Fault(case.method, case.part, case.what, case.times, case.skip)
    server.rules = [fault]
    try:
        results = save_with(folder, Death(), 1, is_async=case.skip % 2 == 1)
    finally:
        server.rules = []
    is_done = expect_one_verdict(results, case)
    expect_loaded(folder, {2} if is_done else {1, 2}, case)
    return fault.hits > 0


def run_load_case(server: Faults, folder: Path, case: Case) -> bool:
    fault = Fault(case.method, case.part, case.what, case.times, case.skip)
    server.rules = [fault]
    try:
        results = find_and_load(folder, 1)
        expect_no_wrong_load(results, case)
        if case.what != "flip":  # what a store doesn't give isn't damaged: no older step is taken
            assert all(isinstance(result, Exception) or result[0] == 2 for result in results), case
    finally:
        server.rules = []
    return fault.hits > 0


def with_two_steps() -> Path:
    folder = storage.locate(f"s3://{BUCKET}/{uuid.uuid4().hex}")
    for step in (1, 2):
        save_once(folder, step=step, seed=step, count=1)
    return folder


def test_faults_of_an_object_store(server: Faults) -> None:
    folder = with_two_steps()
    assert sum(run_save_case(server, case) for case in list(save_cases(range(0, 6, 3)))[::5]) >= 3
    assert sum(run_load_case(server, folder, case) for case in list(load_cases(range(0, 6, 3)))[::5]) >= 5
    assert find_and_load(folder, 1) == [(2, True)]


@pytest.mark.proof
@pytest.mark.timeout(3600)
def test_every_fault_of_an_object_store(server: Faults) -> None:
    folder = with_two_steps()
    struck = sum(run_save_case(server, case) for case in save_cases(range(8)))
    struck += sum(run_load_case(server, folder, case) for case in load_cases(range(16)))
    assert struck >= 150
    assert find_and_load(folder, 1) == [(2, True)]
