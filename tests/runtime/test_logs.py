"""RUN/logs: what a process writes arrives on the terminal and in its file, and a log that fails stops nothing."""

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from portable_fsdp.runtime.command import RunLog

PROGRAM = """
import ctypes, os, sys
from pathlib import Path
from portable_fsdp.runtime.command import KeptOutput

libc = ctypes.CDLL(None)
with KeptOutput() as output:
    output.hold_stdout()
    print("a print")
    libc.puts(b"[Gloo] Rank 0 is connected")
    libc.fflush(None)
    print("before the run", file=sys.stderr)
    output.begin(Path("."), 3)
    libc.puts(b"C, later")
    libc.fflush(None)
    print("a warning", file=sys.stderr)
    os.write(2, b"C on stderr\\n")
    {last}
print("a last print")
print("after the end", file=sys.stderr)
"""


def run(folder: Path, last: str) -> "subprocess.CompletedProcess[str]":
    program = PROGRAM.replace("{last}", last)
    return subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


def kept(folder: Path) -> str:
    return re.sub(r"(?m)^--- \S+$", "---", (folder / "logs/stderr-3.log").read_text())


def test_stderr_arrives_at_both_and_what_c_code_says_at_first_in_the_file(tmp_path: Path) -> None:
    for _ in range(2):
        done = run(tmp_path, "")
        assert sorted(done.stdout.splitlines()) == ["C, later", "a last print", "a print"]
        assert done.stderr == "before the run\na warning\nC on stderr\nafter the end\n"
    assert kept(tmp_path) == "---\n[Gloo] Rank 0 is connected\na warning\nC on stderr\n" * 2


@pytest.mark.parametrize(
    ("last", "code", "words"),
    [("1 / 0", 1, "ZeroDivisionError"), ("import faulthandler; faulthandler.enable(); os.abort()", -6, "Fatal Python")],
)
def test_the_last_words_of_a_crash_arrive_at_both(tmp_path: Path, last: str, code: int, words: str) -> None:
    done = run(tmp_path, last)
    assert done.returncode == code
    assert words in done.stderr
    assert words in kept(tmp_path)


def test_logs_that_cannot_be_written_stop_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").write_text("a file where they want a folder")
    done = run(tmp_path, "")
    assert done.returncode == 0
    assert "logs/stderr-3.log: File exists; the run continues without this log\na warning\n" in done.stderr
    log = logging.Logger("a run's")
    log.addHandler(handler := RunLog())
    handler.open(tmp_path)
    log.info("a line")
    log.info("another")
    assert capfd.readouterr().err == f"{tmp_path}/logs/run.log: File exists; the run continues without this log\n"


def test_lines_before_the_folder_is_there_are_held_and_all_have_their_time(tmp_path: Path) -> None:
    for start in range(2):  # the second is a resumed run
        log = logging.Logger("a run's")
        log.addHandler(handler := RunLog())
        log.info("early")
        assert (tmp_path / "logs").exists() == bool(start)
        handler.open(tmp_path)
        log.warning("later, %d", 1)
        log.warning("bad arguments: %d", "x")
    time = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}"
    assert re.fullmatch(
        rf"({time} INFO early\n{time} WARNING later, 1\n){{2}}", (tmp_path / "logs/run.log").read_text()
    )
