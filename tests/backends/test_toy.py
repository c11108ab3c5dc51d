"""A new engine is a folder and one line in the table: tests/backends/toy is explained, and trains and resumes a run.

The contract runs on it as on the others, by its row in workers.py.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import toy
import yaml
from cases import TINY

from portable_fsdp import explain, launch
from portable_fsdp.backends.open import ENGINES, spec_of
from portable_fsdp.backends.refusals import lines_of, rules_of
from portable_fsdp.observe.run_files import read_jsonl


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A file for an engine that is known as long as the test runs."""
    monkeypatch.setitem(ENGINES, "toy", toy.SPEC)
    monkeypatch.chdir(tmp_path)
    Path("toy.yaml").write_text(yaml.safe_dump(TINY))
    yield "--config=toy.yaml"
    for cached in (spec_of, lines_of, rules_of):
        cached.cache_clear()


def test_explain_shows_it_beside_the_others(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain.main([config, "--device=cpu", "--json", "memory.cpu_offload=true"]) == 0
    of_option = json.loads(capsys.readouterr().out)["options"]["memory.cpu_offload"]["engines"]
    assert list(of_option) == list(ENGINES)
    assert of_option["toy"] == {
        "verdict": "refused",
        "text": "on toy: one process runs it eagerly. Set memory.cpu_offload=false.",
    }


def test_a_run_trains_on_it_and_goes_on_on_native(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    start = ["--device=cpu", config]
    assert launch.main([*start, "--backend=toy", "train.stop_at=2"]) == 0
    assert launch.main([*start, "--backend=native", "train.stop_at=3"]) == 0
    assert launch.main([*start, "--backend=toy"]) == 0
    assert launch.main([*start, "--backend=native", "run.dir=whole"]) == 0
    losses = [[row["loss"] for row in read_jsonl(Path(folder) / "metrics.jsonl")] for folder in ("run", "whole")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert {row["backend"] for row in read_jsonl(Path("run/events.jsonl")) if "backend" in row} == {"toy", "native"}


def test_its_refusals_are_those_of_a_launch(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["--device=cpu", config, "--backend=toy", "memory.cpu_offload=true"]) == 2
    assert "backend toy on cpu (1 device(s) of 1 host(s)): memory.cpu_offload=true on toy" in capsys.readouterr().err
