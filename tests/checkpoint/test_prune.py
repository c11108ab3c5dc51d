"""What `checkpoint prune` deletes, and what it never touches."""

import json
from pathlib import Path

import pytest
from plain_backend import save_once

from portable_fsdp.checkpoint.__main__ import main
from portable_fsdp.checkpoint.commit import outdated
from portable_fsdp.checkpoint.prune import prune
from portable_fsdp.runtime.errors import CheckpointError


@pytest.mark.parametrize(
    ("steps", "keep", "keep_every", "expected"),
    [
        ([10, 20, 30, 40], 2, None, [20, 10]),
        ([40, 10, 30, 20], 1, 20, [30, 10]),
        ([10, 20], 5, None, []),
        ([10], 1, None, []),
        ([10, 20], 0, None, [10]),  # never the newest
        ([], 1, None, []),
    ],
)
def test_what_is_deleted(steps: list[int], keep: int, keep_every: int | None, expected: list[int]) -> None:
    assert outdated(steps, keep, keep_every) == sorted(expected)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (10, 20, 30, 40):
        save_once(tmp_path / "checkpoints", step=step, count=1, devices=1)
    return tmp_path


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_a_dry_run_deletes_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", str(run), "--keep", "1", "--keep-every", "20", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["would delete step-00000030", "would delete step-00000010"]
    assert "would delete 2 of 4 checkpoints" in lines[2]
    assert len(names(run)) == 4


def test_older_ones_go(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = sum(path.stat().st_size for path in (run / "checkpoints" / "step-00000010").rglob("*.safetensors"))
    assert main(["prune", str(run), "--keep", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes"] == 2 * size
    assert [Path(path).name for path in found["deleted"]] == ["step-00000020", "step-00000010"]
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
    pruned = prune(folder, 1)
    assert [path.name for path in pruned.kept] == ["step-00000040"]
    assert [path.name for path in pruned.deleted] == ["step-00000030"]
    assert sorted(path.name for path in pruned.left_alone) == [f"step-{n:08d}" for n in (5, 10, 20, 60)]
    assert len(names(run)) == 7
    assert (elsewhere / "manifest.json").exists()


def test_nothing_is_deleted_for_a_newest_that_is_damaged(run: Path) -> None:
    shard = next((run / "checkpoints" / "step-00000040" / "model").iterdir())
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x55")
    with pytest.raises(CheckpointError, match="xxh3_128"):
        prune(run / "checkpoints", 1)
    assert len(names(run)) == 4


def test_a_save_that_is_under_way_is_not_disturbed(run: Path) -> None:
    (run / "checkpoints" / "step-00000030.tmp-0a1b2c3d").mkdir()
    with pytest.raises(CheckpointError, match="does a run write there"):
        prune(run / "checkpoints", 1)
    assert names(run) == ["step-00000030", "step-00000030.tmp-0a1b2c3d", "step-00000040"]
