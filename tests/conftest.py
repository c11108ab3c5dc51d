"""For every test: no hub is asked, and a test that leaves a process, a thread or an environment variable behind fails.

A test marked `xla` simply runs: where torch_xla is missing it fails. `make test-latest`, whose environment has none,
leaves those tests out by the marker.
"""

import os
import threading
from collections.abc import Iterator

import psutil
import pytest

os.environ["USE_TORCH_XLA"] = "0"  # transformers imports torch_xla otherwise; the backends choose the engine
os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # else from_pretrained leaves the threads that it loads with behind
os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub, which reads it once


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What `--dist loadgroup` keeps in one process: a file; and all of tests/backends, whose files share workers."""
    for item in items:
        shared = item.path.parent.name == "backends"
        item.add_marker(
            pytest.mark.xdist_group("backends" if shared else str(item.path.relative_to(item.config.rootpath)))
        )


def _processes() -> dict[int, str]:
    """Child processes, without those that Python keeps until it ends (multiprocessing's resource tracker)."""
    found: dict[int, str] = {}
    for child in psutil.Process().children(recursive=True):
        try:
            command = " ".join(child.cmdline())
        except psutil.NoSuchProcess:
            continue
        if "multiprocessing.resource_tracker" not in command:
            found[child.pid] = command
    return found


def _threads() -> dict[int, str]:
    """Threads that would keep Python from ending, and the daemon threads of our own, told by their name."""
    return {
        thread.ident or 0: repr(thread)
        for thread in threading.enumerate()
        if not thread.daemon or thread.name.startswith("portable_fsdp")
    }


NOT_OURS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}  # pytest's; torch sets the other when it imports inductor


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in NOT_OURS}


def _changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    names = sorted(before.keys() | after.keys())
    return [
        f"environment variable {name}: {before.get(name)!r} before the test, {after.get(name)!r} after it"
        for name in names
        if before.get(name) != after.get(name)
    ]


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """What a wider fixture holds (a worker of the session) was there before, and may stay."""
    processes, threads, variables = _processes(), _threads(), _variables()
    yield
    left = [f"process {pid}: {command}" for pid, command in _processes().items() if pid not in processes]
    left += [f"thread {name}" for ident, name in _threads().items() if ident not in threads]
    left += _changes(variables, _variables())
    assert not left, "this test left behind:\n  " + "\n  ".join(left)
