"""What goes into files: one run a folder, files in place at once, and what a `with` block closes."""

import errno
import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from portable_fsdp.runtime.errors import Closing, ConfigError
from portable_fsdp.runtime.files import LOCK_NAME, sole_run, write_text_atomically

HOLDER = """
import subprocess, sys, time
from pathlib import Path
from portable_fsdp.runtime.files import sole_run
with sole_run(Path(sys.argv[1])):
    child = subprocess.Popen(["sleep", "1000"], close_fds=False)
    print(child.pid, flush=True)
    time.sleep(1000)
"""


def test_a_second_run_is_refused_and_told_whose_the_folder_is(tmp_path: Path) -> None:
    with sole_run(tmp_path):
        before = (tmp_path / LOCK_NAME).read_bytes()
        with pytest.raises(ConfigError) as refused, sole_run(tmp_path):
            pass
        assert (tmp_path / LOCK_NAME).read_bytes() == before
    message = str(refused.value)
    assert f"run.dir: another run writes to this folder: {tmp_path}\n" in message
    assert f"Locked by process {os.getpid()} on host {socket.gethostname()} since 20" in message
    assert "or set run.dir to another folder." in message


def test_nothing_is_left_and_the_next_may_enter(tmp_path: Path) -> None:
    for _ in range(2):
        with sole_run(tmp_path / "deep/run"):
            assert [path.name for path in (tmp_path / "deep/run").iterdir()] == [LOCK_NAME]
        assert list(tmp_path.iterdir()) == []
    with sole_run(tmp_path / "deep/run"):
        (tmp_path / "deep/run/metrics.jsonl").touch()  # what a run wrote to stays
    assert sorted(tmp_path.rglob("*")) == [tmp_path / name for name in ("deep", "deep/run", "deep/run/metrics.jsonl")]


def test_a_killed_owner_has_let_go_at_once_even_where_its_children_live(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        child = int(holder.stdout.readline())
        try:
            with pytest.raises(ConfigError, match=f"process {holder.pid} on host"), sole_run(tmp_path):
                pass
            holder.kill()
            holder.wait()
            assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == holder.pid
            with sole_run(tmp_path):
                assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == os.getpid()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_lock_whose_file_was_deleted_meanwhile_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner ended, and deleted it, after it was opened here: whoever comes next would make another file."""
    flock, calls = fcntl.flock, list[int]()

    def late(descriptor: int, operation: int) -> None:
        if not calls:
            (tmp_path / LOCK_NAME).unlink()
        calls.append(descriptor)
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with sole_run(tmp_path):
        assert len(calls) == 2
        assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == os.getpid()


def test_a_file_system_without_locks_gets_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for number in (errno.ENOTSUP, errno.ENOLCK):
        monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(number, os.strerror(number))))
        caplog.clear()
        with sole_run(tmp_path):
            pass
        assert f"run.dir: {tmp_path}: this file system has no locks" in caplog.text, number


def test_a_folder_that_can_not_be_made_and_something_else_under_the_locks_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / LOCK_NAME).mkdir()
    message = r"(?s)run\.dir: expected a writable or new folder.*can't write to .*file/run: Not a directory"
    is_folder = rf"can't write to .*{LOCK_NAME}: Is a directory"
    for folder, expected in ((tmp_path / "file/run", message), (tmp_path, is_folder)):
        with pytest.raises(ConfigError, match=expected), sole_run(folder):
            pass


def test_a_folder_that_another_run_takes_away_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That run had made it, wrote nothing, and ended between the folder's making and the lock's."""
    folder, real, calls = tmp_path / "run", os.open, list[int]()

    def late(path: Path, *rest: int) -> int:
        if not calls:
            folder.rmdir()
        calls.append(1)
        return real(path, *rest)

    monkeypatch.setattr(os, "open", late)
    with sole_run(folder):
        assert (folder / LOCK_NAME).exists()


def test_replaces_the_file_or_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text_atomically(path, "one\r\n")
    write_text_atomically(path, "zwölf\n")
    with pytest.raises(UnicodeEncodeError):
        write_text_atomically(path, "new \ud800")
    assert path.read_bytes() == "zwölf\n".encode()
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode


class BrokenClose(Closing):
    def close(self) -> None:
        raise RuntimeError("Check failed: tensor_data\n*** Begin stack trace ***")


def test_closing_never_hides_the_first_error(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "portable_fsdp"), pytest.raises(KeyError), BrokenClose():
        raise KeyError("first")
    assert caplog.messages == ["after the error below, closing failed too: Check failed: tensor_data"]
    with pytest.raises(RuntimeError, match="tensor_data"), BrokenClose():
        pass
