import os
import subprocess
import sys
from pathlib import Path

import pytest

from portable_fsdp.runtime.files import write_text_atomically


def test_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text_atomically(path, "one\r\n")
    write_text_atomically(path, "zwölf\n")
    assert path.read_bytes() == "zwölf\n".encode()
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_text_atomically(path, "new \ud800")
    assert path.read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_reader_never_sees_a_part(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("0" * 100_000)
    code = (
        "import sys, pathlib\nfrom portable_fsdp.runtime.files import write_text_atomically\n"
        "for i in range(40): write_text_atomically(pathlib.Path(sys.argv[1]), str(i % 10) * 100_000)"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)])
    seen: set[str] = set()
    while writer.poll() is None:
        text = path.read_text()
        seen.add(text[0])
        assert text == text[0] * 100_000
    assert writer.returncode == 0
    assert len(seen) > 1


def test_the_mode_is_that_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    write_text_atomically(tmp_path / "atomic", "")
    assert os.stat(tmp_path / "atomic").st_mode == os.stat(tmp_path / "plain").st_mode
