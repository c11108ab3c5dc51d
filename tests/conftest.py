"""Rules for every test: no hub access; a test that leaves a process, a thread or an environment variable behind fails.

Temporary files and caches are in a folder of the suite, which it deletes at the end.

A test marked `xla` simply runs: without torch_xla it fails. `make test-latest`, whose environment has none,
leaves those tests out by the marker.
"""

import logging
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from rotation import Rotation
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

os.environ["USE_TORCH_XLA"] = "0"  # transformers imports torch_xla otherwise; the backends choose the engine
os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # else from_pretrained leaves the threads that it loads with behind
os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub, which reads it once


def pytest_configure(config: pytest.Config) -> None:
    """TMPDIR and the user's cache for the suite and all that it starts, removed at its end: a process that is killed
    can't clean up.

    (torch makes a folder when it is imported, torchrun one at each start.) What pytest makes for `tmp_path` stays for
    three runs, where it always lies. Corpora and plans are cached for the suite's other tests, and not in the cache of
    whoever runs it, where a test could pass by what an earlier suite left. (The hub's and torch's caches follow
    XDG_CACHE_HOME too; no test needs what lies there.)
    """
    if (commit := config.getoption("proofs_of")) is not None:
        if not re.fullmatch("[0-9a-f]{40}", commit):  # "HEAD" would choose the same ones each time
            raise pytest.UsageError(
                f"--proofs-of={commit}: expected a commit's 40 digits. make proofs-of takes HEAD's."
            )
        config.pluginmanager.register(Rotation(commit))
    if hasattr(config, "workerinput"):  # xdist's; it has inherited the folder
        return
    patch = pytest.MonkeyPatch()
    config.add_cleanup(patch.undo)
    if "PYTEST_DEBUG_TEMPROOT" not in os.environ:
        patch.setenv("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    folder = tempfile.mkdtemp(prefix="pf-")  # short: a socket's path has 107 bytes at most
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    patch.setenv("TMPDIR", folder)
    patch.setenv("XDG_CACHE_HOME", f"{folder}/cache")
    patch.setattr(tempfile, "tempdir", folder)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-goldens", action="store_true", help="write what tests got into their golden files")
    parser.addoption("--proofs-of", metavar="COMMIT", help="with -m proof: a few minutes of them, which it chooses")


@pytest.fixture
def assert_golden(request: pytest.FixtureRequest) -> Callable[[Path, str], None]:
    """Compare a text with a golden file, or rewrite the file where `--rewrite-goldens` is given; review the diff."""

    def compare(path: Path, text: str) -> None:
        if request.config.getoption("--rewrite-goldens"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.read_text(encoding="utf-8") == text, f"{path}: differs; if it should, pass --rewrite-goldens"

    return compare


@pytest.hookimpl(optionalhook=True)  # the hook doesn't exist where xdist is switched off
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling:
    """Assign tests to processes of the suite: each file to one, and all of tests/backends on torch_xla to the same,
    since what a worker has compiled for one test it has for the next. (TorchTPU: make test-torchtpu.)

    Not `--dist loadgroup`: xdist 3.8 writes the groups where pytest 9.2 doesn't read them, and spreads every test.
    """
    return ByFile(config, log)


class ByFile(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        if not file.startswith("tests/backends/") or "torchtpu" in file or "test_refusals" in file:  # which starts none
            return file
        return "tests/backends on torch_xla" if "xla" in nodeid else file  # by file, or by parameter


def _processes() -> dict[int, str]:
    """Child processes, without those that Python keeps until it ends (multiprocessing's tracker and fork server)."""
    found: dict[int, str] = {}
    for child in psutil.Process().children(recursive=True):
        try:
            command = " ".join(child.cmdline())
        except psutil.NoSuchProcess:
            continue
        if "multiprocessing.resource_tracker" not in command and "multiprocessing.forkserver" not in command:
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


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Check that a test leaves nothing behind. Wider fixtures (a session's workers) existed before, and may stay."""
    processes, threads, variables = _processes(), _threads(), dict(os.environ)
    yield
    left = [f"process {pid}: {command}" for pid, command in _processes().items() if pid not in processes]
    left += [f"thread {name}" for ident, name in _threads().items() if ident not in threads]
    for name in sorted((variables.keys() | os.environ.keys()) - NOT_OURS):
        if (before := variables.get(name)) != (after := os.environ.get(name)):
            left.append(f"environment variable {name}: {before!r} before the test, {after!r} after it")
    assert not left, "this test left behind:\n  " + "\n  ".join(left)


@pytest.fixture(autouse=True)
def plain_log() -> None:
    """A run in an earlier test, or in a wider fixture, set up the log, so pytest would hear each line twice."""
    logger = logging.getLogger("portable_fsdp")
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
