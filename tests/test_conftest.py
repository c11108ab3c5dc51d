"""The suite's own rules, tried on small suites in a process of their own."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LEAKS = {
    "process": (
        # It answers, so that it has a command line: a process that is about to run one has none.
        "from subprocess import PIPE, Popen\ndef test_it():\n    global child\n"
        "    child = Popen(['cat', '-u'], stdin=PIPE, stdout=PIPE, bufsize=0)\n    child.stdin.write(b'x')\n"
        "    assert child.stdout.read(1) == b'x'\ndef teardown_module():\n    child.kill()\n    child.communicate()\n",
        "cat -u",
    ),
    "thread": (
        "import threading\nstop = threading.Event()\ndef test_it():\n    threading.Thread(target=stop.wait).start()\n"
        "def teardown_module():\n    stop.set()\n",
        "thread <Thread(",
    ),
    "daemon": (
        "import threading\ndef test_it():\n    stop = threading.Event()\n"
        "    threading.Thread(target=stop.wait, name='portable_fsdp rows', daemon=True).start()\n",
        "thread <Thread(portable_fsdp rows",
    ),
    "variable": ("import os\ndef test_it():\n    os.environ['LEFT'] = '1'\n", "environment variable LEFT: None before"),
    "warning": ("import warnings\ndef test_it():\n    warnings.warn('old', DeprecationWarning)\n", "old"),
    "marker": ("import pytest\n@pytest.mark.misspelt\ndef test_it():\n    pass\n", "'misspelt' not found in `markers`"),
}

CLEAN = """
import os, subprocess, threading
def test_it(monkeypatch):
    monkeypatch.setenv("MINE", "1")
    subprocess.run(["true"], check=True)
    thread = threading.Thread(target=print)
    thread.start()
    thread.join()
"""

KILLED = """
import os, signal, subprocess, sys, tempfile
from portable_fsdp.runtime.files import cache_folder
def test_it(tmp_path):
    program = "import os, tempfile; print(tempfile.mkdtemp(), flush=True); os.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert done.returncode == -signal.SIGKILL
    assert os.path.dirname(done.stdout) == tempfile.gettempdir()
    assert os.path.isdir(done.stdout.strip())
    cache = cache_folder(os.environ)
    cache.mkdir(parents=True, exist_ok=True)
    assert cache.is_relative_to(tempfile.gettempdir())
    (tmp_path / "kept").touch()
"""


def run_suite(
    folder: Path, *options: str, sources: Mapping[str, str], **variables: str
) -> subprocess.CompletedProcess[str]:
    """pytest on a file for each source, with the project's settings and conftest."""
    for name, source in sources.items():
        (folder / f"test_{name}.py").write_text(source)
    (folder / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    command = [sys.executable, "-m", "pytest", "-q", f"--config-file={ROOT / 'pyproject.toml'}", f"--rootdir={folder}"]
    command += ["-p", "no:cacheprovider", *options, str(folder)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env={**os.environ, **variables})


@pytest.mark.slow
def test_what_is_left_behind_fails_the_test(tmp_path: Path) -> None:
    sources = {name: source for name, (source, _) in LEAKS.items()}
    done = run_suite(tmp_path, "--continue-on-collection-errors", sources=sources)
    assert done.returncode != 0
    failed = re.findall(r"^(?:FAILED|ERROR) test_(\w+)\.py", done.stdout, re.MULTILINE)
    assert sorted(failed) == sorted(LEAKS)
    assert [message for _, message in LEAKS.values() if message not in done.stdout + done.stderr] == []


def test_what_is_cleaned_up_passes(tmp_path: Path) -> None:
    done = run_suite(tmp_path, sources={"clean": CLEAN})
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["-n1"]], ids=["one process", "xdist"])
def test_files_of_a_killed_process_go_with_the_suite(options: list[str], tmp_path: Path) -> None:
    above = tmp_path / "above"
    above.mkdir()
    done = run_suite(
        tmp_path, *options, sources={"killed": KILLED}, TMPDIR=str(above), PYTEST_DEBUG_TEMPROOT=str(above)
    )
    assert done.returncode == 0, done.stdout
    assert [path.name.partition("-")[0] for path in above.iterdir()] == ["pytest"]
    assert list(above.rglob("kept")) != []
