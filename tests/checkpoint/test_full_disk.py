"""A save that its folder has no room for, or that it may not write to: what the run says, and what lies there."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from plain_backend import PlainBackend, checkpoints, load, refused, save_once, small_model, snapshot

from portable_fsdp.checkpoint.storage import FolderStore

FILL = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[3], sys.argv[3] + "/../backends"]
import torch
from plain_backend import PlainBackend, checkpoints, in_processes
folder = Path(sys.argv[1]) / "run"

def work(backend):
    model = torch.nn.Linear(100, 100)
    opened = checkpoints(folder, backend, {"async_save": sys.argv[2] == "True"})
    for step in range(1, 9):
        opened.save(step, model, torch.optim.SGD(model.parameters()), (0, step))
    opened.wait()

for error in in_processes(2, work):
    print(type(error).__name__, error)
print(*sorted(path.name for path in folder.iterdir()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, pytest.param(True, marks=pytest.mark.proof)])
def test_a_full_disk_names_the_folder_and_the_way_out_on_all_processes(tmp_path: Path, is_async: bool) -> None:
    """A file system of 192 KiB, in a namespace of its own; a checkpoint takes 40 KiB and more."""
    mounted = ["unshare", "--mount", "--propagation=private", "sh", "-c"]
    mounted += ['mount -t tmpfs -o size=192k tmpfs "$0" && exec "$@"', str(tmp_path)]
    script = [sys.executable, "-c", FILL, str(tmp_path), str(is_async), str(Path(__file__).parent)]
    ended = subprocess.run([*mounted, *script], capture_output=True, text=True, check=False)
    *printed, left = ended.stdout.splitlines()
    steps, run = left.split(), tmp_path / "run"
    assert len(steps) > 1, ended.stderr
    assert all(len(name) == len("step-00000001") for name in steps), "debris"
    assert len(printed) % 2 == 0
    assert printed[: len(printed) // 2] == printed[len(printed) // 2 :], "both processes say the same"
    assert printed[0].startswith(f"CheckpointError checkpoint step-{len(steps) + 1:08d}: ")
    assert "OSError: [Errno 28] No space left on device: " in printed[0]
    assert printed[1].startswith(f"  No space left in {run}: 40 KiB are needed.")
    assert printed[2] == f"  The last saved checkpoint is {run / steps[-1]}."
    assert printed[3] == (
        "  Free room there (delete older checkpoints; checkpoint.keep=N does so after each save) and rerun the same "
        f"command: it resumes from {steps[-1]}."
    )
    assert printed[4] == f"  Or save elsewhere: checkpoint.dir=ANOTHER checkpoint.resume={run / steps[-1]}."


CAUSES = {
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
    saved, (file, *lines) = save_once(tmp_path, step=5, seed=1), CAUSES[number]
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
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith("step")] == [saved.name]
