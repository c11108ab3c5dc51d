"""A save that its folder has no room for, or that it may not write to: what the run says, and what lies there."""

import errno
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from plain_backend import PlainBackend, checkpoints, load, names, refused, save_once, small_model, snapshot

from portable_fsdp.checkpoint.storage import FolderStore

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
