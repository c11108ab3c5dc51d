"""A checkpoint holds the results of evaluations, and retention never deletes the best one."""

import json
import shutil
from pathlib import Path

import pytest
from plain_backend import PlainBackend, checkpoints, load, save_once, small_model

from portable_fsdp.checkpoint.__main__ import main
from portable_fsdp.checkpoint.format import Evaluated, read_manifest
from portable_fsdp.checkpoint.prune import prune

CONFIG = {"run": {"name": "a"}}


def evaluated(step: int, loss: float, best_step: int, best_loss: float) -> Evaluated:
    since = step - best_step
    return Evaluated(
        rows="r", step=step, loss=loss, best_step=best_step, best_loss=best_loss, without_improvement=since
    )


RESULTS = ((1, 3.0, 1, 3.0), (2, 2.0, 2, 2.0), (3, 2.5, 2, 2.0), (4, 2.25, 2, 2.0))
EVALUATIONS = {result[0]: evaluated(*result) for result in RESULTS}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 1 to 4, of which the second is the best."""
    folder = tmp_path / "checkpoints"
    opened = checkpoints(folder, PlainBackend(), config=CONFIG)
    for step, evaluation in EVALUATIONS.items():
        opened.save(step, *small_model(seed=step), (0, step), evaluation)
    return tmp_path


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").iterdir())


def test_retention_keeps_the_best_until_a_better_one_is_committed(tmp_path: Path) -> None:
    opened = checkpoints(tmp_path / "checkpoints", PlainBackend(), {"keep": 1}, config=CONFIG)
    kept: list[list[int]] = []
    for step, evaluation in {**EVALUATIONS, 5: evaluated(5, 1.0, 5, 1.0)}.items():
        opened.save(step, *small_model(seed=step), (0, step), evaluation)
        kept.append(steps(tmp_path))
    assert kept == [[1], [2], [2, 3], [2, 4], [5]]


def test_another_process_knows_the_best_too(run: Path) -> None:
    """A run that was killed and started again deletes as it would have before; so does prune."""
    opened = checkpoints(run / "checkpoints", PlainBackend(), {"keep": 1}, config=CONFIG)
    resumed = load(opened, *small_model(seed=9))
    assert resumed.evaluation == EVALUATIONS[4]
    opened.save(5, *small_model(seed=5), (0, 5), evaluated(5, 2.75, 2, 2.0))
    assert steps(run) == [2, 5]
    opened = checkpoints(run / "checkpoints", PlainBackend(), config=CONFIG)
    opened.save(6, *small_model(seed=6), (0, 6), evaluated(6, 2.75, 2, 2.0))
    assert len(prune(run / "checkpoints", 1).deleted) == 1
    assert steps(run) == [2, 6]


def test_a_run_of_other_weights_begins_without_evaluations(run: Path, tmp_path: Path) -> None:
    source = str(run / "checkpoints" / "step-00000002")
    for number, settings in enumerate(({}, {"load": "weights_only"})):
        opened = checkpoints(tmp_path / f"new{number}", PlainBackend(), {"resume": source, **settings}, config=CONFIG)
        assert load(opened, *small_model(seed=9), source).evaluation is None


def test_a_checkpoint_without_evaluations_is_as_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_once(tmp_path / "checkpoints", step=5, count=1, devices=1)
    assert "evaluation" not in json.loads((path / "manifest.json").read_text())
    assert read_manifest(path).evaluation is None
    assert main(["list", str(tmp_path)]) == 0
    assert "eval_loss" not in capsys.readouterr().out


def test_list_and_show_tell(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", str(run)]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert "eval_loss" in header
    where = header.index("eval_loss")
    assert [row[where:].split("  ")[0] for row in rows] == ["2.2500", "2.5000", "2.0000 best", "3.0000"]
    assert main(["show", str(run / "checkpoints" / "step-00000004")]) == 0
    assert "evaluated   eval_loss 2.2500; the best so far: 2.0000 at step 2\n" in capsys.readouterr().out
    assert main(["show", str(run / "checkpoints" / "step-00000002")]) == 0
    assert "evaluated   eval_loss 2.0000, the best so far\n" in capsys.readouterr().out
    assert main(["list", str(run), "--json"]) == 0
    assert [row["evaluation"]["best_step"] for row in json.loads(capsys.readouterr().out)] == [2, 2, 2, 1]


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
