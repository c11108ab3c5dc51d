"""What retention deletes, and what it never touches; the best checkpoint by its evaluations."""

import errno
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from plain_backend import PlainBackend, checkpoints, flip_last_byte, load, names, save_once, small_model

from portable_fsdp.checkpoint import commit
from portable_fsdp.checkpoint.__main__ import main
from portable_fsdp.checkpoint.commit import outdated
from portable_fsdp.checkpoint.manager import Checkpoints
from portable_fsdp.checkpoint.manifests import Evaluated, read_manifest
from portable_fsdp.checkpoint.storage import store_of

Evaluations = Mapping[int, Evaluated | None]


def evaluated(step: int, loss: float, best_step: int, best_loss: float) -> Evaluated:
    best: Any = {"best_step": best_step, "best_loss": best_loss, "without_improvement": step - best_step}
    return Evaluated(rows="r", step=step, loss=loss, **best)


RESULTS = ((1, 3.0, 1, 3.0), (2, 2.0, 2, 2.0), (3, 2.5, 2, 2.0), (4, 2.25, 2, 2.0))
EVALUATIONS = {result[0]: evaluated(*result) for result in RESULTS}


def opened(run: Path, name: str = "a", **settings: Any) -> Checkpoints:
    return checkpoints(run / "checkpoints", PlainBackend(), settings, config={"run": {"name": name}})


def save(run: Path | Checkpoints, steps: Evaluations, name: str = "a", **settings: Any) -> None:
    ours = run if isinstance(run, Checkpoints) else opened(run, name, **settings)
    for step, evaluation in steps.items():
        ours.save(step, *small_model(seed=step), (0, step), evaluation)


def plain(*steps: int) -> Evaluations:
    return dict.fromkeys(steps)


def left(run: Path) -> list[int]:
    return [int(name.removeprefix("step-")) for name in store_of(run).names(run / "checkpoints")]


@pytest.mark.parametrize(
    ("arguments", "expected"),  # steps, keep, keep_every, best
    [
        (([10, 20, 30, 40], 2, None, None), [10, 20]),
        (([40, 10, 30, 20], 1, 20, None), [10, 30]),
        (([10, 20], 5, None, None), []),
        (([10], 1, None, None), []),
        (([10, 20], 0, None, None), [10]),  # never the newest
        (([], 1, None, None), []),
        (([10, 20, 30, 40], 1, None, 20), [10, 30]),  # never the best
        (([10, 20, 30, 40], 1, 30, 20), [10]),
        (([10, 20, 30, 40], 1, None, 40), [10, 20, 30]),
        (([10, 20, 30, 40], 1, None, 7), [10, 20, 30]),
    ],
)
def test_what_is_outdated(arguments: Any, expected: list[int]) -> None:
    assert outdated(*arguments) == expected


# ----------------------------------------------------------------------------------------------------------- of a run


def test_links_damaged_ones_and_those_of_others_stay(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    save(tmp_path, plain(1), "other")
    save(tmp_path, plain(2, 3, 4, 5, 6))
    archive = (folder / "step-00000002").rename(tmp_path / "archive")
    (folder / "step-00000002").symlink_to(archive)
    shard = folder / "step-00000005" / "model" / "shard-00000-00.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    flip_last_byte(folder / "step-00000006" / "manifest.json")
    again = opened(tmp_path, keep=2)
    point = again.find("auto")
    assert point is not None
    assert point.path.name == "step-00000004"
    save(again, plain(7))
    assert left(tmp_path) == [1, 2, 4, 5, 6, 7]
    assert names(archive) == ["manifest.json", "model", "optimizer"]
    assert [saved.removed for saved in again.finished()] == [(3,)]


def test_a_checkpoint_that_cannot_be_deleted_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = opened(tmp_path, keep=1)
    save(ours, plain(1))
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000001")
    save(ours, plain(2))
    with monkeypatch.context() as patched:
        patched.setattr(commit, "delete", Mock(side_effect=OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))))
        save(ours, plain(3))
    for step in (2, 3):
        assert f"step-0000000{step} is saved; an older checkpoint could not be deleted" in caplog.text
    save(ours, plain(4))
    assert [(saved.step, saved.removed) for saved in ours.finished()] == [(1, ()), (2, ()), (3, ()), (4, (3,))]


def test_a_killed_deletion_does_not_block_the_run(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(place, plain(10, 20))
    with monkeypatch.context() as patched:
        patched.setattr(commit, "discard", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            commit.delete(place / "checkpoints" / "step-00000010", "a")
    assert len(store_of(place).names(place / "checkpoints")) == 2
    save(place, plain(10))
    assert left(place) == [10, 20]


def test_the_best_stays_until_a_better_one_is_committed(tmp_path: Path) -> None:
    ours, kept = opened(tmp_path, keep=1), list[list[int]]()
    for step, evaluation in {**EVALUATIONS, 5: evaluated(5, 1.0, 5, 1.0)}.items():
        save(ours, {step: evaluation})
        kept.append(left(tmp_path))
    assert kept == [[1], [2], [2, 3], [2, 4], [5]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 1 to 4, of which the second is the best."""
    save(tmp_path, EVALUATIONS)
    return tmp_path


def test_another_process_knows_the_best_too(run: Path, tmp_path: Path) -> None:
    """A run that was killed and started again deletes as it would have before. One that starts from its weights begins
    without evaluations."""
    source = str(run / "checkpoints" / "step-00000002")
    for number, settings in enumerate(({}, {"load": "weights_only"})):
        new = opened(tmp_path / f"new{number}", resume=source, **settings)
        assert load(new, *small_model(seed=9), source).evaluation is None
    again = opened(run, keep=1)
    assert load(again, *small_model(seed=9)).evaluation == EVALUATIONS[4]
    save(again, {5: evaluated(5, 2.75, 2, 2.0)})
    assert left(run) == [2, 5]


def test_list_and_show_print_evaluations(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", str(run)]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert "eval_loss" in header
    where = header.index("eval_loss")
    assert [row[where:].split("  ")[0] for row in rows] == ["2.2500", "2.5000", "2.0000 best", "3.0000"]
    for step, line in ((4, "2.2500; the best so far: 2.0000 at step 2"), (2, "2.0000, the best so far")):
        assert main(["show", str(run / "checkpoints" / f"step-0000000{step}")]) == 0
        assert f"evaluated   eval_loss {line}\n" in capsys.readouterr().out
    assert main(["list", str(run), "--json"]) == 0
    assert [row["evaluation"]["best_step"] for row in json.loads(capsys.readouterr().out)] == [2, 2, 2, 1]

    without = save_once(tmp_path / "other" / "checkpoints", step=5, count=1, devices=1)
    assert "evaluation" not in json.loads((without / "manifest.json").read_text())
    assert read_manifest(without).evaluation is None
    assert main(["list", str(tmp_path / "other")]) == 0
    assert "eval_loss" not in capsys.readouterr().out


def test_export_takes_the_best_of_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def exported(path: Path) -> tuple[str, bytes]:
        file = run / "model.safetensors"
        file.unlink(missing_ok=True)
        assert main(["export", str(path), str(file), "--format", "safetensors"]) == 0
        return capsys.readouterr().out, file.read_bytes()

    best, newest = (run / f"checkpoints/step-{step:08d}" for step in (2, 4))
    line, content = exported(run)
    assert line.startswith(f"{best} (the best by its evaluation: eval_loss 2.0000): exported to ")
    assert content == exported(best)[1]
    line, last = exported(newest)
    assert line.startswith(f"{newest}: exported to ")
    assert last != content
    shutil.rmtree(best)
    line, content = exported(run)
    assert line.startswith(f"{newest} (the newest: step-00000002, the best by its evaluation, is gone): exported to ")
    assert content == last
