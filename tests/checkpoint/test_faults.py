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
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_injection import IN_FOLDERS, IN_STORES, READS, Flaw, Injection, Killed, current_process, strikes
from fsspec.implementations.memory import MemoryFileSystem
from plain_backend import (
    PlainBackend,
    checkpoints,
    load,
    names,
    refused,
    save_once,
    small_model,
    snapshot,
    with_random_state,
)
from s3_server import BUCKET, Fault, Faults
from torch import nn

from portable_fsdp.checkpoint import commit
from portable_fsdp.checkpoint.commit import MARK
from portable_fsdp.checkpoint.manifests import committed_steps, read_manifest
from portable_fsdp.checkpoint.resume import ResumePoint
from portable_fsdp.checkpoint.storage import FolderStore, locate, store_of
from portable_fsdp.runtime.errors import CheckpointError, StoreError

pytestmark = pytest.mark.slow

OURS, ANOTHERS = {"run": {"name": "ours"}}, {"run": {"name": "another"}}


def tiny_model(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """One weight with its state: each kind of file, and of operation on it, but few of them."""
    return with_random_state(nn.Linear(3, 5, bias=False), seed)


STATES = {step: snapshot(*tiny_model(step)) for step in (1, 2)}

Fresh = Callable[[str], Path]
"""Makes a folder of checkpoints in a `folder` or a `store`, alike each time."""


def dies(*_: Any, **__: Any) -> Any:
    raise Killed


def dies_in_the_middle(real: Callable[..., int], descriptor: int, data: memoryview) -> int:
    real(descriptor, data[: len(data) // 2])
    raise Killed


def fails(number: int) -> Callable[..., Any]:
    def instead(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return instead


def does_nothing(*_: Any, **__: Any) -> int:
    return 0


def third(data: memoryview) -> memoryview:
    return data[: max(len(data) // 3, 1)]


DEATH = Flaw((*IN_FOLDERS, *IN_STORES), dies)
DEATHS = (DEATH, Flaw(("write",), dies_in_the_middle))
EIO = Flaw((*set(IN_FOLDERS) - {"remove"}, *IN_STORES), fails(errno.EIO))
A_FULL_DISK = Flaw(("open", "write", "mkdir", "replace", "fsync"), fails(errno.ENOSPC))
A_SHORT_WRITE = Flaw(("write",), lambda real, file, data: real(file, third(data)))
A_LOST_RENAME = Flaw(("replace", "rename"), does_nothing)
OF_SAVES = {"folder": (*DEATHS, A_FULL_DISK, EIO, A_SHORT_WRITE, A_LOST_RENAME), "store": (DEATH, EIO)}
EIO_OF_READS = Flaw(READS, fails(errno.EIO))
A_SHORT_READ = Flaw(("preadv",), lambda real, file, buffers, start: real(file, [third(buffers[0])], start))
AN_EARLY_END = Flaw(("preadv",), does_nothing)
OF_LOADS = {"folder": (EIO_OF_READS, A_SHORT_READ, AN_EARLY_END), "store": (EIO_OF_READS,)}


# ----------------------------------------------------------------------------------------------------------- in a save


def save(folder: Path, *steps: int, config: dict[str, Any] = OURS) -> None:
    opened = checkpoints(folder, PlainBackend(), config=config)
    for step in steps:
        opened.save(step, *tiny_model(step), (0, step))


def prepare(folder: Path) -> None:
    """Step 1 of this run; step 0 and an unfinished step 9 of another."""
    save(folder, 0, config=ANOTHERS)
    save(folder, 1)
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
    """Step 2 by `count` processes, after which step 1 is given up; what each returns or raises."""

    def work(backend: PlainBackend) -> None:
        settings = {"keep": 1, "async_save": is_async}
        opened = checkpoints(folder, backend, settings, config=OURS, wait_s=wait_s)
        injection.at_death.append(opened._background.cancelled.set)
        opened.save(2, *tiny_model(2), (0, 2))
        opened.wait()

    return injection.in_processes(count, work)


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
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def others(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in content(folder).items() if "step-00000000" in name or "step-00000009" in name}


def has_committed(injection: Injection, folder: Path) -> bool:
    """By an upload of the manifest, or a rename."""
    name, end = ("rename", "step-00000002") if store_of(folder).is_local else ("upload", "step-00000002/manifest.json")
    targets = (done.arguments[-1] for done in injection.done if done.name == name)
    return any(str(getattr(target, "path", target)).endswith(end) for target in targets)


def expect_loaded(folder: Path, allowed: Collection[int], where: object) -> int:
    """The newest that is whole is loaded bit for bit, and the run goes on from it."""
    opened = checkpoints(folder, PlainBackend(), {"keep": 2}, config=OURS)
    model, optimizer = tiny_model(9)
    resumed = load(opened, model, optimizer)
    assert resumed.step in allowed, where
    assert snapshot(model, optimizer) == STATES[resumed.step], where
    opened.save(3, model, optimizer, (0, 3))
    assert committed_steps(folder)[0].name == "step-00000003"
    return resumed.step


def expect_no_debris(folder: Path, steps: set[int], where: object) -> None:
    unfinished = store_of(folder).temporary_of(folder / "step-00000009", "0a1b2c3d").name
    assert set(store_of(folder).names(folder)) == {unfinished, *(f"step-{step:08d}" for step in steps)}, where
    for path in committed_steps(folder):
        assert content(path).keys() == {"manifest.json", *(file.name for file in read_manifest(path).files)}, where


@pytest.mark.parametrize(
    ("place", "flaws", "count", "is_async", "lasts", "least"),
    [
        ("folder", OF_SAVES["folder"], 1, False, False, 160),
        pytest.param("folder", DEATHS[:1], 2, True, False, 70, marks=pytest.mark.proof),
        ("store", OF_SAVES["store"], 1, False, False, 20),
        ("store", DEATHS[:1], 2, True, False, 12),
        *(
            pytest.param(place, flaws, *case, 10 * case[0], marks=(pytest.mark.proof, pytest.mark.timeout(3600)))
            for place, flaws in OF_SAVES.items()
            for case in itertools.product((1, 2, 3), (False, True), (False, True))
        ),
    ],
)
def test_flaws_in_a_save(
    fresh: Fresh, place: str, flaws: Collection[Flaw], count: int, is_async: bool, lasts: bool, least: int
) -> None:
    """`lasts`: errors go on from there, and only one process dies."""

    def save_whole(injection: Injection) -> None:
        assert save_with(fresh(place), injection, count, is_async) == [None] * count

    hit: list[Flaw] = []
    for where, injection in strikes(flaws, save_whole, lasting=lasts, alone=lasts):
        folder, kills = fresh(place), injection.flaw in DEATHS
        before = others(folder)
        results = save_with(folder, injection, count, is_async, 10.0 if kills else 0.5)
        hit += injection.hits * [where[0]]
        if kills:
            assert injection.has_killed, where
            newest = expect_loaded(folder, {2 if has_committed(injection, folder) else 1}, where)
            expect_no_debris(folder, {0, newest, 3}, where)
        else:
            expect_loaded(folder, {2} if expect_one_verdict(results, where) else {1, 2}, where)
        assert others(folder) == before, where
    assert {*hit} == {*flaws}
    assert len(hit) >= least


def test_a_power_cut_finds_what_a_name_promises_on_disk(fresh: Fresh) -> None:
    """Content before its name, names before the commit, the commit before anything older is given up."""
    folder, injection = fresh("folder"), Injection()
    assert save_with(folder, injection, 1, is_async=False) == [None]
    events = [  # a rename has both names
        (name, str(files[0]), str(files[1]) if name in ("replace", "rename") else "")
        for _, _, name, files in injection.done
    ]
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


CAUSES = {
    errno.ENOSPC: (
        "shard-00001",
        "process 1 could not write: OSError: [Errno 28] No space left on device: ",
        "\n  No space left in FOLDER: 1 KiB are needed.\n",
        "\n  Free room there (delete older checkpoints; checkpoint.keep=N does so after each save) and rerun the same "
        "command: ",
    ),
    errno.EDQUOT: ("shard-00001", "process 1 could not write: OSError", "Your quota in FOLDER is used up: "),
    errno.EFBIG: ("shard-00000", "process 0 could not write: OSError", "FOLDER may not become that large: raise"),
    errno.EACCES: ("attempt", "step-00000006: PermissionError: ", "Permission denied"),
    errno.EROFS: ("manifest", "step-00000006: OSError: ", "Read-only file system"),
}
"""The file that can't be written, the error, and its cause."""


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("number", CAUSES, ids=errno.errorcode.get)
def test_each_error_of_a_write_says_what_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_async: bool
) -> None:
    older, saved = save_once(tmp_path, step=4), save_once(tmp_path, step=5, seed=1)
    file, *lines = CAUSES[number]
    real = FolderStore.write

    def write(store: FolderStore, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        if path.name.startswith(file):
            raise OSError(number, os.strerror(number), str(path))
        real(store, path, chunks)

    def work(backend: PlainBackend) -> None:
        opened = checkpoints(tmp_path, backend, {"async_save": is_async})
        opened.save(6, *small_model(seed=2), (0, 0))
        opened.wait()

    with monkeypatch.context() as patched:
        patched.setattr(FolderStore, "write", write)
        message = refused(2, work)
    for line in (*lines, "\n  The last saved checkpoint is FOLDER/step-00000005.\n"):
        assert line.replace("FOLDER", str(tmp_path)) in message, message
    assert "rerun the same command: it resumes from step-00000005.\n" in message
    assert message.endswith(f"checkpoint.dir=ANOTHER checkpoint.resume={saved}.")
    model, optimizer = small_model(seed=3)
    elsewhere = checkpoints(tmp_path / "another", PlainBackend())  # as the message says
    assert load(elsewhere, model, optimizer, str(saved)).step == 5
    assert snapshot(model, optimizer) == snapshot(*small_model(seed=1))
    elsewhere.save(6, model, optimizer, (0, 0))
    if file != "attempt":  # else it is begun without a mark, which the next save removes
        assert [name for name in names(tmp_path) if name.startswith("step")] == [older.name, saved.name]


# ----------------------------------------------------------------------------------------------------------- in a load


def find_and_load(folder: Path, count: int, injection: Injection) -> list[Any]:
    def work(backend: PlainBackend) -> tuple[int, bool]:
        model, optimizer = tiny_model(9)
        resumed = load(checkpoints(folder, backend, config=OURS), model, optimizer)
        return resumed.step, snapshot(model, optimizer) == STATES[resumed.step]

    return injection.in_processes(count, work)


def expect_no_wrong_load(results: list[Any], where: object, may_be_older: bool) -> None:
    """What a store doesn't give isn't damaged: no older step is taken."""
    if any(isinstance(result, Exception) for result in results):
        expect_one_verdict(results, where)
    else:
        assert {*results} in ({(2, True)}, {(1, True)} if may_be_older else ()), (where, results)


@pytest.mark.parametrize("place", ["folder", "store"])
@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.proof)])
@pytest.mark.parametrize("lasts", [False, True])
def test_flaws_in_a_load(tmp_path: Path, place: str, count: int, lasts: bool) -> None:
    folder, hits = (tmp_path if place == "folder" else locate(f"memory://{uuid.uuid4().hex}")), 0

    def load_whole(injection: Injection) -> None:
        assert find_and_load(folder, count, injection) == [(2, True)] * count

    save(folder, 1, 2)
    for where, injection in strikes(OF_LOADS[place], load_whole, lasting=lasts):
        expect_no_wrong_load(find_and_load(folder, count, injection), where, may_be_older=place == "folder")
        hits += injection.hits > 0
    assert hits >= 15
    load_whole(Injection())


NO_ANSWER = [
    *(("open", number) for number in (errno.EMFILE, errno.ESTALE, errno.EACCES)),
    *(("preadv", errno.EIO), *((method, errno.EACCES) for method in ("ls", "info", "cat_file"))),
]


@pytest.mark.parametrize(("operation", "number"), NO_ANSWER)
def test_what_says_nothing_of_the_content_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, number: int
) -> None:
    """Else a run would begin anew, go on from an older step, or overwrite what it can't see. EIO is damage."""
    target: Any = os if hasattr(os, operation) else MemoryFileSystem
    folder = tmp_path if target is os else locate(f"memory://{uuid.uuid4().hex}")
    save(folder, 1, 2)
    newest, older = committed_steps(folder)
    real, ours = getattr(target, operation), checkpoints(folder, PlainBackend(), config=OURS)

    def fails(file: Any, *arguments: Any, **named: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{file}") if operation == "preadv" else str(file)
        if target is not os or path.startswith(str(newest)):
            raise OSError(number, os.strerror(number))
        return real(file, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(target, operation, fails)
        if number == errno.EIO:
            point = ours.find("auto")
            assert point is not None
            assert point.path == older
            assert "Input/output error" in point.passed_over[0]
            return
        with pytest.raises(CheckpointError, match=os.strerror(number)) as error:
            ours.find("auto")
        assert operation in ("ls", "info") or "\n  The file may be intact: start again" in str(error.value)
        if target is not os:
            with pytest.raises(CheckpointError):
                ours.save(2, *tiny_model(6), (0, 6))
            with pytest.raises(CheckpointError):
                checkpoints(folder / "another", PlainBackend())._search._named(newest, [])
    assert ours.find("auto") == ResumePoint(newest, (), is_own=True)
    assert find_and_load(folder, 1, Injection()) == [(2, True)]


# -------------------------------------------------------------------------------------------------------------- in S3


ERRORS = (500, 503)
READ_ERRORS = (*ERRORS, 403, "cut")
S3_FAULTS: list[tuple[bool, str, str, Iterable[int | str], Iterable[int]]] = [
    (False, "PUT", "", ERRORS, range(8)),
    *((False, *request, ERRORS, [0]) for request in (("HEAD", "step-00000002"), ("GET", "list-type"))),
    *((False, *request, ERRORS, [0]) for request in (("GET", "index-"), ("POST", "delete"))),
    (True, "GET", "step-0000000", READ_ERRORS, range(16)),
    (True, "HEAD", "step-0000000", READ_ERRORS, [15]),
    (True, "GET", "list-type", READ_ERRORS, [0]),
    # While it is verified; a bit that flips on the way later, no hash sees (https does).
    (True, "GET", ".safetensors", ["flip"], range(4)),
    (True, "GET", "manifest.json", ["flip"], [0]),
]
"""Whether it is in a load (else in a save), the request, what the server does, and after how many such requests."""


@pytest.mark.proof
@pytest.mark.timeout(3600)
def test_every_fault_of_s3(server: Faults) -> None:
    whole, hits = locate(f"s3://{BUCKET}/{uuid.uuid4().hex}"), 0
    save(whole, 1, 2)
    for (in_load, method, part, whats, skips), times in itertools.product(S3_FAULTS, (1, 10**9)):
        for number, (what, skip) in enumerate(itertools.product(whats, skips)):
            folder = whole if in_load else locate(f"s3://{BUCKET}/{uuid.uuid4().hex}")
            if not in_load:
                save(folder, 1)
            server.rules = [fault := Fault(method, part, what, times, skip)]
            no_flaw = Injection()
            results = find_and_load(folder, 1, no_flaw) if in_load else save_with(folder, no_flaw, 1, number % 2 == 1)
            server.rules = []
            if in_load:
                expect_no_wrong_load(results, vars(fault), may_be_older=what == "flip")
            else:
                expect_loaded(folder, {2} if expect_one_verdict(results, vars(fault)) else {1, 2}, vars(fault))
            hits += fault.hits > 0
    assert hits >= 150
    assert find_and_load(whole, 1, Injection()) == [(2, True)]
