"""Every flaw at every instant of a save and of a load: processes that die, and what storage does wrong.

Enumerated: a first run counts the operations of every process, then one run goes wrong at each. Always: nothing that
was committed is lost; nothing is ever loaded that differs from what was saved; all processes end alike, with a
CheckpointError or the next step. A save here is all that changes files: the new checkpoint, and the deletion of the one
that `keep` gives up.
"""

import errno
import itertools
import json
import os
import shutil
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from fault_injection import EVERYWHERE, IN_FOLDERS, IN_STORES, Flaw, Injection, Killed, current_process, patched
from fsspec.implementations.memory import MemoryFileSystem
from plain_backend import PlainBackend, checkpoints, in_processes, load, save_once, small_model, snapshot
from s3_server import BUCKET, Fault, Faults, s3_server

from portable_fsdp.checkpoint import commit
from portable_fsdp.checkpoint.commit import MARK
from portable_fsdp.checkpoint.manifests import committed_steps, read_manifest
from portable_fsdp.checkpoint.storage import locate, store_of
from portable_fsdp.runtime.errors import CheckpointError, StoreError

pytestmark = pytest.mark.slow

OURS, ANOTHERS = {"run": {"name": "ours"}}, {"run": {"name": "another"}}
STATES = {step: snapshot(*small_model(seed=step)) for step in (0, 1, 2, 3)}

Fresh = Callable[[str], Path]
"""Makes a folder of checkpoints in a `folder` or a `store`, alike each time."""


def dies_in_the_middle(real: Callable[..., int], descriptor: int, data: memoryview) -> int:
    real(descriptor, data[: len(data) // 2])
    raise Killed


def fails(number: int) -> Callable[..., Any]:
    def instead(real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return instead


def writes_less(real: Callable[..., int], descriptor: int, data: memoryview) -> int:
    return real(descriptor, data[: max(len(data) // 3, 1)])


def does_nothing(real: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    return None


FLAWS = {
    "dies": EVERYWHERE,
    "dies in a write": Flaw(("write",), dies_in_the_middle),
    "ENOSPC": Flaw(("open", "write", "mkdir", "replace", "fsync"), fails(errno.ENOSPC)),
    "EIO": Flaw((*set(IN_FOLDERS) - {"remove"}, *IN_STORES), fails(errno.EIO)),
    "a short write": Flaw(("write",), writes_less),
    "a lost rename": Flaw(("replace", "rename"), does_nothing),
}


# ----------------------------------------------------------------------------------------------------------- in a save


def prepare(folder: Path) -> None:
    """Step 1 of this run; step 0 and an unfinished step 9 of another."""
    for step, config in ((0, ANOTHERS), (1, OURS)):
        checkpoints(folder, PlainBackend(devices=2), config=config).save(step, *small_model(step), (0, step))
    store = store_of(folder)
    unfinished = store.temporary_of(folder / "step-00000009", "0a1b2c3d")
    store.make_folder(unfinished / "model")
    store.write(unfinished / MARK, [json.dumps({"run": "another", "attempt": "x"}).encode()])
    store.write(unfinished / "model" / "shard.safetensors", [b"half"])


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Fresh]:
    def make(place: str) -> Path:
        if place == "store":
            folder = locate(f"memory://{uuid.uuid4().hex}/checkpoints")
            prepare(folder)
            return folder
        if not (tmp_path / "base").exists():
            prepare(tmp_path / "base")
        shutil.rmtree(tmp_path / "checkpoints", ignore_errors=True)
        return Path(shutil.copytree(tmp_path / "base", tmp_path / "checkpoints"))

    yield make
    MemoryFileSystem.store.clear()


def save_with(folder: Path, injection: Injection, count: int, is_async: bool, wait_s: float = 10.0) -> list[Any]:
    """Step 2 by `count` processes, after which step 1 is given up."""

    def work(backend: PlainBackend) -> None:
        settings = {"keep": 1, "async_save": is_async}
        opened = checkpoints(folder, backend, settings, config=OURS, wait_s=wait_s)
        injection.opened.append(opened)
        opened.save(2, *small_model(seed=2), (0, 2))
        opened.wait()

    with patched(injection):
        return in_processes(count, injection.joined(work))


def expect_one_verdict(results: list[Any], where: object) -> bool:
    """Whether the save was reported as done; all processes say the same."""
    if all(result is None for result in results):
        return True
    assert {type(result) for result in results} in ({CheckpointError}, {StoreError}), (where, results)
    assert len({str(result) for result in results}) == 1, (where, results)
    assert str(results[0]).strip()
    return False


def content(folder: Path) -> dict[str, bytes]:
    """Every file below it."""
    if store_of(folder).is_local:
        return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    client, root = cast(Any, folder).fs, cast(Any, folder).path
    return {name.removeprefix(f"{root}/"): client.cat_file(name) for name in client.find(root)}


def others(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in content(folder).items() if "step-00000000" in name or "step-00000009" in name}


def has_committed(injection: Injection, folder: Path) -> bool:
    """By an upload of the manifest, or a rename."""
    if store_of(folder).is_local:
        renamed = (str(done.arguments[1]) for done in injection.done if done.name == "rename")
        return any(name.endswith("step-00000002") for name in renamed)
    uploaded = (done.arguments[0].path for done in injection.done if done.name == "upload")
    return any(name.endswith("step-00000002/manifest.json") for name in uploaded)


def expect_loaded(folder: Path, allowed: Collection[int], where: object) -> int:
    """The newest that is whole is loaded bit for bit, and the run goes on from it."""
    opened = checkpoints(folder, PlainBackend(), {"keep": 2}, config=OURS)
    model, optimizer = small_model(seed=9)
    resumed = load(opened, model, optimizer)
    assert resumed.step in allowed, where
    assert snapshot(model, optimizer) == STATES[resumed.step], where
    opened.save(3, *small_model(seed=3), (0, 3))
    assert committed_steps(folder)[0].name == "step-00000003"
    return resumed.step


def expect_no_debris(folder: Path, steps: set[int], where: object) -> None:
    unfinished = store_of(folder).temporary_of(folder / "step-00000009", "0a1b2c3d").name
    assert set(store_of(folder).names(folder)) == {unfinished, *(f"step-{step:08d}" for step in steps)}, where
    for path in committed_steps(folder):
        assert content(path).keys() == {"manifest.json", *(file.name for file in read_manifest(path).files)}, where


def strike(fresh: Fresh, place: str, flaws: Collection[str], count: int, *, is_async: bool, lasts: bool) -> int:
    """Every flaw at every operation that it fits. `lasts`: errors go on from there, and only one process dies.

    Returns how often they struck.
    """
    whole, hits = Injection(), Counter[str]()
    assert save_with(fresh(place), whole, count, is_async) == [None] * count
    for point, operation in whole.numbered():
        for name in (name for name in flaws if operation.name in FLAWS[name].operations):
            folder, where = fresh(place), (name, operation)
            injection = Injection(FLAWS[name], operation.process, point, lasting=lasts, alone=lasts)
            before, kills = others(folder), name.startswith("dies")
            results = save_with(folder, injection, count, is_async, 10.0 if kills else 0.5)
            hits[name] += injection.hits > 0
            if kills:
                assert injection.has_killed, where
                newest = expect_loaded(folder, {2 if has_committed(injection, folder) else 1}, where)
                expect_no_debris(folder, {0, newest, 3}, where)
            else:
                expect_loaded(folder, {2} if expect_one_verdict(results, where) else {1, 2}, where)
            assert others(folder) == before, where
    assert set(hits) == set(flaws)
    return hits.total()


IN_PLACES: dict[str, Collection[str]] = {"folder": FLAWS, "store": ["dies", "EIO"]}


@pytest.mark.parametrize(
    ("place", "flaws", "count", "is_async", "lasts", "least"),
    [
        ("folder", FLAWS, 1, False, False, 180),
        pytest.param("folder", ["dies"], 2, True, False, 90, marks=pytest.mark.proof),
        ("store", IN_PLACES["store"], 1, False, False, 20),
        ("store", ["dies"], 2, True, False, 12),
        *(
            pytest.param(place, flaws, *case, 10 * case[0], marks=(pytest.mark.proof, pytest.mark.timeout(3600)))
            for place, flaws in IN_PLACES.items()
            for case in itertools.product((1, 2, 3), (False, True), (False, True))
        ),
    ],
)
def test_flaws_in_a_save(
    fresh: Fresh, place: str, flaws: Collection[str], count: int, is_async: bool, lasts: bool, least: int
) -> None:
    assert strike(fresh, place, flaws, count, is_async=is_async, lasts=lasts) >= least


class Ordered(Injection):
    """Nothing goes wrong: what is done to which name, in order. A rename has both names."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, str, str]] = []

    def call(self, name: str, real: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if name in ("write", "fsync"):
            self.events.append((name, os.readlink(f"/proc/self/fd/{arguments[0]}"), ""))
        else:
            self.events.append((name, str(arguments[0]), str(arguments[1]) if name in ("replace", "rename") else ""))
        return super().call(name, real, arguments, named)


def test_a_power_cut_finds_what_a_name_promises_on_disk(fresh: Fresh) -> None:
    """Content before its name, names before the commit, the commit before anything older is given up."""
    folder, ordered = fresh("folder"), Ordered()
    assert save_with(folder, ordered, 1, is_async=False) == [None]
    events = ordered.events
    committed = next(n for n, event in enumerate(events) if event[::2] == ("rename", str(folder / "step-00000002")))
    temporary = events[committed][1]
    named = [n for n, (name, _, new) in enumerate(events) if name == "replace" and new.startswith(temporary)]
    assert len(named) >= 5
    for n in named:
        last_write = max(k for k in range(n) if events[k][:2] == ("write", events[n][1]))
        assert ("fsync", events[n][1], "") in events[last_write:n]
        if "index-" not in events[n][2] and not events[n][2].endswith(MARK):
            assert ("fsync", str(Path(events[n][2]).parent), "") in events[n:committed]
    given_up = next(n for n in range(committed, len(events)) if "step-00000001" in events[n][1])
    assert ("fsync", str(folder), "") in events[committed:given_up]


def test_a_writer_that_hangs_ends_the_save_of_all(fresh: Fresh, monkeypatch: pytest.MonkeyPatch) -> None:
    given_up, collect = threading.Event(), commit.collect

    class Hanging(Injection):
        def call(self, name: str, real: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
            if current_process() == 1:
                assert given_up.wait(60), "process 0 waits for ever"
            return real(*arguments, **named)

    def collect_and_give_up(*arguments: Any) -> Any:
        try:
            return collect(*arguments)
        finally:
            given_up.set()

    folder = fresh("folder")
    monkeypatch.setattr(commit, "collect", collect_and_give_up)
    for is_async in (False, True):
        results = save_with(folder, Hanging(), 2, is_async, wait_s=0.5)
        assert not expect_one_verdict(results, "hung")
        assert "no index file from process 1 (of 2) after 0 s" in str(results[0])
        given_up.clear()
    expect_loaded(folder, {1}, "hung")


# ----------------------------------------------------------------------------------------------------------- in a load


def reads_less(real: Callable[..., int], descriptor: int, buffers: list[memoryview], start: int) -> int:
    return real(descriptor, [buffers[0][: max(len(buffers[0]) // 3, 1)]], start)


READ_FLAWS = {"EIO": fails(errno.EIO), "a short read": reads_less, "an early end": lambda real, *arguments: 0}


@contextmanager
def reads(instead: Callable[..., Any] | None, point: int, lasts: bool) -> Generator[Counter[str]]:
    """The `point`-th read of a file of tensors goes wrong, by whichever process, or (`lasts`) all from it on."""
    count, lock = Counter[str](), threading.Lock()

    def through(real: Callable[..., Any]) -> Callable[..., Any]:
        def read(*arguments: Any, **named: Any) -> Any:
            with lock:
                count["reads"] += 1
                is_here = count["reads"] == point or (lasts and count["reads"] > point)
            return instead(real, *arguments, **named) if instead and is_here else real(*arguments, **named)

        return read

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", through(os.preadv))
        patch.setattr(MemoryFileSystem, "cat_file", through(MemoryFileSystem.cat_file))
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


@pytest.mark.parametrize("place", ["folder", "store"])
@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.proof)])
def test_flaws_in_a_load(tmp_path: Path, place: str, count: int) -> None:
    folder, cases = (tmp_path if place == "folder" else locate(f"memory://{uuid.uuid4().hex}")), 0
    for step in (1, 2):
        save_once(folder, step=step, seed=step)
    with reads(None, 0, False) as whole:
        assert find_and_load(folder, count) == [(2, True)] * count
    for name in READ_FLAWS if place == "folder" else ("EIO",):
        for point in range(1, whole["reads"] + 1, 1 if count == 1 else 3):
            for lasts in (False, True):
                with reads(READ_FLAWS[name], point, lasts):
                    results = find_and_load(folder, count)
                expect_no_wrong_load(results, (name, point))
                if place == "store":  # what a store doesn't give isn't damaged: no older step is taken
                    assert all(isinstance(result, Exception) or result[0] == 2 for result in results), (name, point)
                cases += 1
    assert cases >= 30
    assert find_and_load(folder, count) == [(2, True)] * count


# -------------------------------------------------------------------------------------------------------------- in S3


@pytest.fixture(scope="module")
def server() -> Iterator[Faults]:
    with s3_server() as faults:
        yield faults


def save_faults() -> Iterator[Fault]:
    for what in (500, 503):
        for times in (1, 10**9):
            yield from (Fault("PUT", "", what, times, skip) for skip in range(8))
            yield Fault("HEAD", "step-00000002", what, times)
            yield from (Fault("GET", part, what, times) for part in ("list-type", "index-"))
            yield Fault("POST", "delete", what, times)


def load_faults() -> Iterator[Fault]:
    for times in (1, 10**9):
        for what in (500, 503, 403, "cut"):
            yield from (Fault("GET", "step-0000000", what, times, skip) for skip in range(16))
            yield Fault("HEAD", "step-0000000", what, times, 15)
            yield Fault("GET", "list-type", what, times)
        # While it is verified; a bit that flips on the way later, no hash sees (https does).
        yield from (Fault("GET", ".safetensors", "flip", times, skip) for skip in range(4))
    yield Fault("GET", "manifest.json", "flip")


@contextmanager
def struck_by(server: Faults, fault: Fault) -> Generator[None]:
    server.rules = [fault]
    try:
        yield
    finally:
        server.rules = []


@pytest.mark.proof
@pytest.mark.timeout(3600)
def test_every_fault_of_s3(server: Faults) -> None:
    struck = 0
    for number, fault in enumerate(save_faults()):
        folder, where = locate(f"s3://{BUCKET}/{uuid.uuid4().hex}"), vars(fault)
        checkpoints(folder, PlainBackend(), config=OURS).save(1, *small_model(1), (0, 1))
        with struck_by(server, fault):
            results = save_with(folder, Injection(), 1, is_async=number % 2 == 1)
        expect_loaded(folder, {2} if expect_one_verdict(results, where) else {1, 2}, where)
        struck += fault.hits > 0
    folder = locate(f"s3://{BUCKET}/{uuid.uuid4().hex}")
    for step in (1, 2):
        save_once(folder, step=step, seed=step, count=1)
    for fault in load_faults():
        with struck_by(server, fault):
            results = find_and_load(folder, 1)
        expect_no_wrong_load(results, vars(fault))
        if fault.what != "flip":  # what a store doesn't give isn't damaged: no older step is taken
            assert all(isinstance(result, Exception) or result[0] == 2 for result in results), vars(fault)
        struck += fault.hits > 0
    assert struck >= 150
    assert find_and_load(folder, 1) == [(2, True)]
