"""The log of a run on stderr, and what a host has, from a kernel's files that are written here."""

import logging
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from portable_fsdp.convert.read import load_config
from portable_fsdp.runtime.command import KeptOutput, LogLines, RunLog, wrapped
from portable_fsdp.runtime.errors import ConfigError, without_passwords
from portable_fsdp.runtime.host import host_identity, host_memory_bytes
from portable_fsdp.train.build import saved_config

LOG = """
import logging
from portable_fsdp.runtime.command import configure_log
logging.getLogger().addHandler(logging.StreamHandler())  # as absl does
configure_log(3)  # replaced by the next call
for index in (0, 2):
    configure_log(index)
    log = logging.getLogger("portable_fsdp")
    log.debug("detail")
    log.info("step: 1")
    log.getChild("train").warning("50 % slower")
"""


def test_process_0_logs_once_and_plainly_and_the_others_only_warn() -> None:
    done = subprocess.run([sys.executable, "-c", LOG], capture_output=True, text=True, check=True, timeout=60)
    assert (done.stdout, done.stderr) == ("", "step: 1\n50 % slower\n[process 2] 50 % slower\n")


def test_lines_break_between_words_at_the_width_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "  saved runs/a-long/path/checkpoints/step-00000012 in 0.2 s  loss: 4.7\nnext"
    expected = "  saved\n    runs/a-long/path/checkpoints/step-00000012\n    in 0.2 s\n    loss: 4.7\nnext"
    monkeypatch.setenv("COLUMNS", "20")
    assert wrapped(text) == text  # a file or a pipe
    kept, terminal = pty.openpty()
    monkeypatch.setattr(KeptOutput, "stderr", terminal)
    command = f"    python -m portable_fsdp.report '{'a  b' * 9}'"
    for columns, shown in (("20", expected), ("80", text), ("0", text)):
        monkeypatch.setenv("COLUMNS", columns)
        assert wrapped(text) == shown
        assert wrapped(command) == command  # as it is typed
    os.close(kept)
    os.close(terminal)


ADDRESSES = {
    "s3://user:secret@bucket/run": "s3://(hidden)@bucket/run",
    "got 'https://secret@host:5000/x', 502": "got 'https://(hidden)@host:5000/x', 502",
    "HTTPS_PROXY=http://user:se@cret@proxy:3128/": "HTTPS_PROXY=http://(hidden)@proxy:3128/",
    "https://host/x?X-Amz-Signature=secret&part=1": "https://host/x?X-Amz-Signature=(hidden)&part=1",
    's3://user:secret@b: invalid name "user:secret@b"': 's3://(hidden)@b: invalid name "(hidden)@b"',
    "org/name@main of https://hub.co/a@b, 12:30, me@here": "org/name@main of https://hub.co/a@b, 12:30, me@here",
    "no address: user:name@host": "no address: user:name@host",
}


def test_no_password_of_an_address_is_printed_or_saved() -> None:
    """Messages, log lines, and the config of a checkpoint, which travels."""
    for text, shown in ADDRESSES.items():
        assert without_passwords(text) == str(ConfigError(text)) == shown
        line = logging.LogRecord("portable_fsdp", logging.INFO, "", 1, "%s", (text,), None)
        assert LogLines().format(line) == shown
    address = "s3://user:secret@bucket/step-00000004"
    quickstart = Path(__file__).parents[2] / "configs/quickstart.yaml"
    saved = saved_config(load_config(quickstart, [f"checkpoint.resume={address}"]))
    assert saved["checkpoint"]["resume"] == without_passwords(address)


GIB = 2**30
V2, V1 = "0::/slice/job\n", "3:cpu,memory:/slice/job\n1:name=systemd:/slice\n"
CASES: dict[str, tuple[str | None, dict[str, str], int]] = {
    "no cgroup": (None, {}, 32),
    "no limit": (V2, {"slice/job/memory.max": "max\n"}, 32),
    "of this process": (V2, {"slice/job/memory.max": f"{4 * GIB}\n", "slice/memory.max": "max\n"}, 4),
    "of one above": (V2, {"slice/job/memory.max": "max\n", "slice/memory.max": f"{3 * GIB}\n"}, 3),
    "of a container, whose root is its own": ("0::/\n", {"memory.max": f"{5 * GIB}\n"}, 5),
    "seen from a container": ("0::/../job\n", {"memory.max": f"{5 * GIB}\n"}, 5),
    "more than the host has": (V2, {"slice/job/memory.max": f"{99 * GIB}\n"}, 32),
    "version 1": (V1, {"memory/slice/job/memory.limit_in_bytes": f"{6 * GIB}\n"}, 6),
    "version 1, no limit": (V1, {"memory/slice/job/memory.limit_in_bytes": "9223372036854771712\n"}, 32),
}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_host_has_what_its_cgroups_leave_and_without_a_kernels_files_what_psutil_says(tmp_path: Path) -> None:
    for name, (cgroup, limits, expected_gib) in CASES.items():
        if cgroup is not None:
            write(tmp_path / name / "proc/self/cgroup", cgroup)
        for file, text in limits.items():
            write(tmp_path / name / "sys/fs/cgroup" / file, text)
        for swap_gib in (0, 2):
            kib = {"MemTotal": 32 * 2**20, "MemFree": 2**20, "SwapTotal": swap_gib * 2**20}
            write(tmp_path / name / "proc/meminfo", "".join(f"{key}: {value} kB\n" for key, value in kib.items()))
            assert host_memory_bytes(tmp_path / name) == (expected_gib + swap_gib) * GIB, name
    assert host_memory_bytes(tmp_path) == psutil.virtual_memory().total
    assert host_identity() == host_identity()
    assert host_identity()[0]
    assert 2**28 < host_memory_bytes() < 2**50


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
    command = [sys.executable, "-c", PROGRAM.replace("{last}", last)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def kept(folder: Path) -> str:
    return re.sub(r"(?m)^--- \S+$", "---", (folder / "logs/stderr-3.log").read_text())


def test_stderr_and_a_crashs_last_words_arrive_at_both_and_what_c_code_says_at_first_in_the_file(
    tmp_path: Path,
) -> None:
    for _ in range(2):
        done = run(tmp_path, "")
        assert sorted(done.stdout.splitlines()) == ["C, later", "a last print", "a print"]
        assert done.stderr == "before the run\na warning\nC on stderr\nafter the end\n"
    assert kept(tmp_path) == "---\n[Gloo] Rank 0 is connected\na warning\nC on stderr\n" * 2
    abort = "import faulthandler; faulthandler.enable(); os.abort()"
    for last, code, words in (("1 / 0", 1, "ZeroDivisionError"), (abort, -6, "Fatal Python")):
        done = run(tmp_path, last)
        assert (done.returncode, words in done.stderr, words in kept(tmp_path)) == (code, True, True), last


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
    time, text = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}", (tmp_path / "logs/run.log").read_text()
    assert re.fullmatch(rf"({time} INFO early\n{time} WARNING later, 1\n){{2}}", text)
