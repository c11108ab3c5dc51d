"""Promise 6 on the real engines: whenever all processes of a save are killed, the last committed step is there.

The files of every instant are kept while one save goes through, and each copy is resumed on the other engine, on
another number of devices. tests/checkpoint/test_crashes.py kills at each of the same operations, with another backend.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from assemble import assemble
from cases import GLOBAL_BATCH, Case
from workers import Group, Workers

from portable_fsdp.checkpoint.format import committed_steps, read_manifest

CASE = Case(model="llama_tied", steps=3)


@pytest.mark.proof
@pytest.mark.xla
@pytest.mark.parametrize(
    ("writer", "reader", "operations"),
    [(Group("native", 2), Group("xla", 3), 85), (Group("xla", 4), Group("native", 3), 60)],
    ids=str,
)
def test_every_instant_of_a_save_resumes_elsewhere(
    writer: Group, reader: Group, operations: int, workers: Callable[[Group], Workers], tmp_path: Path
) -> None:
    (kept := tmp_path / "kept").mkdir()
    saved = workers(writer).run("save_by_instants", case=CASE, folder=str(tmp_path / "run"), kept=str(kept))
    assert sum(answer["operations"] for answer in saved) >= operations
    expected = {step: assemble([answer["states"][step] for answer in saved]) for step in (1, 2)}
    instants = sorted(path for path in kept.iterdir() if path.is_dir())
    committed = [2 if (path / "step-00000002" / "manifest.json").exists() else 1 for path in instants]
    assert len(instants) >= operations / 2
    assert 5 < committed.count(2) < len(instants) - 20, "instants before the commit, and of the retention after it"
    answers = workers(reader).run("resume_each", case=CASE, folders=[str(path) for path in instants], expected=expected)
    for answer in answers:
        assert [one["differ"] for one in answer] == [[]] * len(instants)
        assert [one["step"] for one in answer] == committed
        assert [one["position"] for one in answer] == [(0, step * GLOBAL_BATCH) for step in committed]
    for instant in instants:
        assert [path.name for path in instant.iterdir()] == ["step-00000003"], "debris"
        [path] = committed_steps(instant)
        files = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
        assert files == {"manifest.json", *(file.name for file in read_manifest(path).files)}
