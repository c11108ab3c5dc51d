"""What `checkpoint prune` deletes, and what it never touches."""

import json
import uuid
from pathlib import Path

import pytest
from plain_backend import PlainBackend, checkpoints, flip_last_byte, save_once, small_model

from portable_fsdp.checkpoint import commit, storage
from portable_fsdp.checkpoint.__main__ import main
from portable_fsdp.checkpoint.commit import outdated
from portable_fsdp.checkpoint.prune import prune
from portable_fsdp.runtime.errors import CheckpointError


@pytest.mark.parametrize(
    ("steps", "keep", "keep_every", "best", "expected"),
    [
        ([10, 20, 30, 40], 2, None, None, [10, 20]),
        ([40, 10, 30, 20], 1, 20, None, [10, 30]),
        ([10, 20], 5, None, None, []),
        ([10], 1, None, None, []),
        ([10, 20], 0, None, None, [10]),  # never the newest
        ([], 1, None, None, []),
        ([10, 20, 30, 40], 1, None, 20, [10, 30]),  # never the best
        ([10, 20, 30, 40], 1, 30, 20, [10]),
        ([10, 20, 30, 40], 1, None, 40, [10, 20, 30]),
        ([10, 20, 30, 40], 1, None, 7, [10, 20, 30]),
    ],
)
def test_what_is_deleted(
    steps: list[int], keep: int, keep_every: int | None, best: int | None, expected: list[int]
) -> None:
    assert outdated(steps, keep, keep_every, best) == expected


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (10, 20, 30, 40):
        save_once(tmp_path / "checkpoints", step=step, count=1, devices=1)
    return tmp_path


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_older_ones_go(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", str(run), "--keep", "1", "--keep_every", "20", "--dry_run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["would delete step-00000030", "would delete step-00000010"]
    assert "would delete 2 of 4 checkpoints" in lines[2]
    assert len(names(run)) == 4
    size = sum(path.stat().st_size for path in (run / "checkpoints" / "step-00000010").rglob("*.safetensors"))
    assert main(["prune", str(run), "--keep", "2", "--json"]) == 0
    pruned = json.loads(capsys.readouterr().out)
    assert pruned["bytes"] == 2 * size
    assert [Path(path).name for path in pruned["deleted"]] == ["step-00000020", "step-00000010"]
    assert names(run) == ["step-00000030", "step-00000040"]


def test_what_is_not_whole_or_not_ours_is_left_alone(run: Path, tmp_path: Path) -> None:
    folder = run / "checkpoints"
    (folder / "step-00000010" / "notes.txt").write_text("mine")
    (folder / "step-00000020" / "manifest.json").unlink()
    (folder / "step-00000050.tmp-0a1b2c3d").mkdir()
    (folder / "best").mkdir()
    elsewhere = save_once(tmp_path / "other", step=5, count=1, devices=1)
    (folder / "step-00000005").symlink_to(elsewhere)
    (folder / "step-00000060").mkdir()
    (folder / "step-00000030" / f"{commit.MARK}.part").touch()  # a deletion that was killed as it began
    pruned = prune(folder, 1)
    assert [path.name for path in pruned.kept] == ["step-00000040"]
    assert [path.name for path in pruned.deleted] == ["step-00000030"]
    assert sorted(path.name for path in pruned.left_alone) == [f"step-{n:08d}" for n in (5, 10, 20, 60)]
    assert len(names(run)) == 7
    assert (elsewhere / "manifest.json").exists()


def save_of(run: Path, name: str, step: int) -> None:
    model, optimizer = small_model(seed=step)
    opened = checkpoints(run / "checkpoints", PlainBackend(), config={"run": {"name": name}})
    opened.save(step, model, optimizer, (0, 0))


def test_each_run_in_a_folder_keeps_its_newest(tmp_path: Path) -> None:
    for name, steps in (("one", (10, 20)), ("two", (30, 40))):
        for step in steps:
            save_of(tmp_path, name, step)
    pruned = prune(tmp_path / "checkpoints", 1)
    assert [path.name for path in pruned.deleted] == ["step-00000030", "step-00000010"]
    assert names(tmp_path) == ["step-00000020", "step-00000040"]
    next((tmp_path / "checkpoints" / "step-00000020" / "model").iterdir()).write_bytes(b"")
    assert [path.name for path in prune(tmp_path / "checkpoints", 1).left_alone] == ["step-00000020"]


@pytest.mark.parametrize("place", ["folder", "store"])
def test_a_killed_prune_leaves_nothing_that_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    folder = tmp_path if place == "folder" else storage.locate(f"memory://{uuid.uuid4().hex}")

    def kill_a_prune() -> None:
        for step in (10, 20):
            save_of(folder, "one", step)

        def killed(_: Path) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(commit, "discard", killed)
            with pytest.raises(KeyboardInterrupt):
                prune(folder / "checkpoints", 1)
        assert len(storage.names(folder / "checkpoints")) == 2

    kill_a_prune()
    prune(folder / "checkpoints", 1)  # the next prune removes it
    assert storage.names(folder / "checkpoints") == ["step-00000020"]
    storage.remove(folder / "checkpoints" / "step-00000020")
    kill_a_prune()
    save_of(folder, "one", 10)  # and so does the run, which it doesn't block
    assert storage.names(folder / "checkpoints") == ["step-00000010", "step-00000020"]


def test_what_may_be_a_save_at_work_is_not_removed(tmp_path: Path) -> None:
    for step in (10, 20):
        save_of(tmp_path, "one", step)
    folder = tmp_path / "checkpoints"
    for step, run in ((5, "one"), (6, "two"), (30, "one"), (31, "")):
        commit.begin(folder / f"step-{step:08d}", run)
    prune(folder, 1)
    assert [name.partition(".")[0][-2:] for name in names(tmp_path)] == ["05", "06", "20", "30", "31"]


def test_nothing_is_deleted_for_a_newest_that_is_damaged(run: Path) -> None:
    flip_last_byte(next((run / "checkpoints" / "step-00000040" / "model").iterdir()))
    with pytest.raises(CheckpointError, match="xxh3_128"):
        prune(run / "checkpoints", 1)
    assert len(names(run)) == 4
