"""A process dies before each operation that a save makes, and in the middle of each write: nothing committed is lost.

Enumerated: a first run counts the operations of every process, then one run dies at each. A save here is all that
changes files: the new checkpoint, and the deletion of the one that `keep` gives up.
"""

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from fault_injection import Death, patched, points
from fsspec.implementations.memory import MemoryFileSystem
from plain_backend import PlainBackend, checkpoints, in_processes, load, small_model, snapshot

from portable_fsdp.checkpoint import storage
from portable_fsdp.checkpoint.commit import MARK
from portable_fsdp.checkpoint.format import committed_steps, read_manifest
from portable_fsdp.checkpoint.manager import Checkpoints

pytestmark = pytest.mark.slow

Fresh = Callable[[], Path]
"""Makes a folder of checkpoints, alike each time."""

OURS, ANOTHERS = {"run": {"name": "ours"}}, {"run": {"name": "another"}}
STATES = {step: snapshot(*small_model(seed=step)) for step in (0, 1, 2, 3)}


def open_ours(folder: Path, backend: PlainBackend, **settings: Any) -> Checkpoints:
    return checkpoints(folder, backend, settings, config=OURS)


def save(folder: Path, step: int, config: dict[str, Any]) -> None:
    checkpoints(folder, PlainBackend(devices=2), config=config).save(step, *small_model(step), (0, step))


def prepare(folder: Path) -> None:
    """Step 1 of this run; step 0 and an unfinished step 9 of another."""
    save(folder, 0, ANOTHERS)
    save(folder, 1, OURS)
    unfinished = folder / ("step-00000009" if storage.is_object_store(folder) else "step-00000009.tmp-0a1b2c3d")
    storage.make_folder(unfinished / "model")
    storage.write(unfinished / MARK, [json.dumps({"run": "another", "attempt": "x"}).encode()])
    storage.write(unfinished / "model" / "shard.safetensors", [b"half"])


def save_and_die(folder: Path, death: Death, count: int, is_async: bool) -> list[Any]:
    """Step 2 by `count` processes, after which step 1 is given up."""

    def work(backend: PlainBackend) -> None:
        opened = open_ours(folder, backend, keep=1, async_save=is_async)
        death.join(backend, opened)
        opened.save(2, *small_model(seed=2), (0, 2))
        opened.wait()

    with patched(death):
        return in_processes(count, work, devices=1)


def content(folder: Path) -> dict[str, bytes]:
    """Every file below it."""
    if storage.is_object_store(folder):
        store = cast(MemoryFileSystem, cast(Any, folder).fs)
        root = cast(Any, folder).path
        return {name.removeprefix(root): store.cat_file(name) for name in store.find(root)}
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def others(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in content(folder).items() if "step-00000000" in name or "step-00000009" in name}


def has_committed(death: Death, folder: Path) -> bool:
    if storage.is_object_store(folder):
        return any(
            operation.name == "upload" and operation.arguments[0].path.endswith("step-00000002/manifest.json")
            for operation in death.done
        )
    return any(
        operation.name == "rename" and str(operation.arguments[1]).endswith("step-00000002") for operation in death.done
    )


def check_what_is_left(folder: Path, death: Death, before: dict[str, bytes]) -> None:
    newest = 2 if has_committed(death, folder) else 1
    opened = open_ours(folder, PlainBackend(), keep=2)
    model, optimizer = small_model(seed=9)
    resumed = load(opened, model, optimizer)
    assert (resumed.step, resumed.position, resumed.passed_over) == (newest, (0, newest), ()), death.struck
    assert snapshot(model, optimizer) == STATES[newest], death.struck
    opened.save(3, *small_model(seed=3), (0, 3))
    assert others(folder) == before, death.struck
    check_there_is_no_debris(folder, {0, newest, 3}, death)


def check_there_is_no_debris(folder: Path, steps: set[int], death: Death) -> None:
    unfinished = set() if storage.is_object_store(folder) else {"step-00000009.tmp-0a1b2c3d"}
    expected = {f"step-{step:08d}" for step in steps | ({9} if storage.is_object_store(folder) else set())}
    assert set(storage.names(folder)) == expected | unfinished, death.struck
    for path in committed_steps(folder):
        files = {"manifest.json", *(file.name for file in read_manifest(path).files)}
        assert {name.lstrip("/") for name in content(path)} == files, death.struck


def copy_of(base: Path, folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(base, folder)
    return folder


def die_everywhere(fresh: Fresh, count: int, *, is_async: bool, alone: bool = False, torn: bool = False) -> int:
    """Returns the number of deaths."""
    whole = Death()
    assert save_and_die(fresh(), whole, count, is_async) == [None] * count
    deaths = 0
    for process, point in points(whole, torn):
        death, folder = Death(process, point, torn=torn, alone=alone), fresh()
        before = others(folder)
        save_and_die(folder, death, count, is_async)
        assert death.struck is not None, (process, point)
        check_what_is_left(folder, death, before)
        deaths += 1
    check_what_is_left(folder := fresh(), Death(), others(folder))
    return deaths


@pytest.fixture
def folders(tmp_path: Path) -> Fresh:
    prepare(tmp_path / "base")
    return lambda: copy_of(tmp_path / "base", tmp_path / "checkpoints")


@pytest.fixture
def stores() -> Iterator[Fresh]:
    made: list[Path] = []

    def fresh() -> Path:
        made.append(storage.locate(f"memory://{uuid.uuid4().hex}/checkpoints"))
        prepare(made[-1])
        return made[-1]

    yield fresh
    for path in made:
        storage.remove(path.parent)


class Ordered(Death):
    """Nobody dies: what is done to which name, in order. A rename bears both."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, str, str]] = []

    def call(self, name: str, real: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if name in ("write", "fsync"):
            self.events.append((name, os.readlink(f"/proc/self/fd/{arguments[0]}"), ""))
        else:
            self.events.append((name, str(arguments[0]), str(arguments[1]) if name in ("replace", "rename") else ""))
        return super().call(name, real, arguments, named)


def test_a_power_cut_finds_what_a_name_promises_on_disk(folders: Fresh) -> None:
    """Content before its name, names before the commit, the commit before anything older is given up."""
    folder, ordered = folders(), Ordered()
    assert save_and_die(folder, ordered, 1, is_async=False) == [None]
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


@pytest.mark.parametrize(("count", "torn", "deaths"), [(1, False, 60), (1, True, 20), (2, False, 90)])
def test_processes_die_at_every_operation(folders: Fresh, count: int, torn: bool, deaths: int) -> None:
    assert die_everywhere(folders, count, is_async=torn or count > 1, torn=torn) >= deaths


@pytest.mark.parametrize(("count", "deaths"), [(1, 10), (2, 12)])
def test_processes_die_at_every_operation_in_an_object_store(stores: Fresh, count: int, deaths: int) -> None:
    assert die_everywhere(stores, count, is_async=count > 1) >= deaths


@pytest.mark.proof
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("count", [2, 3])
def test_every_death(folders: Fresh, count: int, is_async: bool, alone: bool, torn: bool) -> None:
    assert die_everywhere(folders, count, is_async=is_async, alone=alone, torn=torn) >= 15 * count


@pytest.mark.proof
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("alone", [False, True])
def test_every_death_in_an_object_store(stores: Fresh, is_async: bool, alone: bool) -> None:
    assert die_everywhere(stores, 3, is_async=is_async, alone=alone) >= 15
